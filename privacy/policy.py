"""The hospital's policy file: what it takes part in, whatever a job says. It wins, and it fails closed.

A file that cannot be read, that others can change, or that has an unknown key, allows nothing. No message carries one;
only its SHA-256 leaves, with each session and each update. Without a file the defaults below hold, as with an empty
one: any method of any lead, with or without privacy; private runs of at most epsilon 8 at delta 1e-5, with secret local
noise and noisy evaluations; of other evaluations correct answers alone.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fl_core import validate
from fl_core.converter import structure
from fl_core.errors import ConfigError, RefusedError
from fl_core.suggest import suggest
from fl_core.types.clinical import CLINICAL
from privacy import policy_file
from privacy.accounting.accountant import Filter
from privacy.accounting.record_config import COUPLED, MOST_DELTA, RNG
from privacy.policy_file import closed

if TYPE_CHECKING:
    from fl_core.rounds.manifest import RunManifest
    from privacy.accounting.release_plan import ReleasePlan
    from privacy.compiled_run import CompiledRun
    from privacy.profiles.base import Config

PRIVATE_PROFILES = ("dp_record", "dp_silo_small")
"""Of `profiles.PROFILES` those that promise something; named here, since a policy is read without torch."""
AUTOMATIC, BY_HAND = "automatic", "by hand"
ACCURACY, NOTHING = "accuracy", "nothing"
SHARE_OF_UNITS = 0.1
"""delta is the chance of a breach of everything: it must stay below this share of one unit in all."""


@dataclass(frozen=True, slots=True)
class Runs:
    """[runs] methods, leads: what is accepted (empty: any)   approve: "automatic", or "by hand" for each run.

    extensions: distributions whose methods and models may run here, "name" or "name==version" (empty: none)

    hide_size: only private runs with uniform weights; a size is declared only where the operator typed one.
    """

    methods: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    approve: str = AUTOMATIC
    hide_size: bool = False
    extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for entry in self.extensions:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]* *(== *[\w.+!-]+)?", entry, re.ASCII):
                raise ConfigError(
                    "E-POLICY-01", f"runs.extensions: expected 'name' or 'name==version', found {entry!r}: correct it"
                )
        validate.one_of("E-POLICY-01", "runs", approve=(self.approve, (AUTOMATIC, BY_HAND)))


@dataclass(frozen=True, slots=True)
class Floors:
    """[privacy] require: a profile that every run must have ("": also runs without one are accepted).

    epsilon, delta: the most that one run may ask   min_noise: least noise multiplier
    max_rate: largest sampling rate of record-level training   central: also noise added by the coordinator
    coupled: treatments of losses that mix examples   unit: "group" accepts no data without groups
    rng: "test" accepts repeatable noise too, which protects nobody   public_test: also evaluations without noise
    labels: the classes that this hospital's records may have, as private runs are answered (empty: what the publisher
    of the data names, or `silo serve --holds`).
    """

    require: str = ""
    epsilon: float = 8.0
    delta: float = 1e-5
    min_noise: float = 0.0
    max_rate: float = 1.0
    coupled: tuple[str, ...] = COUPLED
    unit: str = "record"
    rng: str = "secure"
    public_test: bool = False
    central: bool = False
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_budget("privacy", self.epsilon, self.delta)
        validate.at_least("E-POLICY-01", "privacy", 0, min_noise=self.min_noise)
        validate.positive("E-POLICY-01", "privacy", max_rate=self.max_rate)
        validate.at_most("E-POLICY-01", "privacy", 1, max_rate=self.max_rate)
        validate.one_of(
            "E-POLICY-01",
            "privacy",
            require=(self.require, ("", *PRIVATE_PROFILES)),
            unit=(self.unit, ("record", "group")),
            rng=(self.rng, RNG),
        )
        for treatment in self.coupled:
            validate.one_of("E-POLICY-01", "privacy", coupled=(treatment, COUPLED))


@dataclass(frozen=True, slots=True)
class Prototypes:
    """[prototypes] submit: False submits none   hidden: classes that none are submitted of   min_count: least units."""

    submit: bool = True
    hidden: tuple[str, ...] = ()
    min_count: float = 0.0

    def __post_init__(self) -> None:
        validate.at_least("E-POLICY-01", "prototypes", 0, min_count=self.min_count)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """[evaluation] send: what of a run's evaluation on this hospital's test examples leaves.

    "clinical": all that the run measures   "accuracy": correct answers and examples of each class alone   "nothing".
    """

    send: str = ACCURACY

    def __post_init__(self) -> None:
        validate.one_of("E-POLICY-01", "evaluation", send=(self.send, (CLINICAL, ACCURACY, NOTHING)))


@dataclass(frozen=True, slots=True)
class Budget:
    """[budget.COLLECTION] the most that all runs together may spend of a collection."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """The sections of a policy file, with their defaults."""

    runs: Runs = field(default_factory=Runs)
    privacy: Floors = field(default_factory=Floors)
    prototypes: Prototypes = field(default_factory=Prototypes)
    evaluation: Evaluation = field(default_factory=Evaluation)
    budget: Mapping[str, Budget] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """A hospital's policy. budgets: (epsilon, delta) by collection, which hold beside those of the ledger.

    digest: SHA-256 of the file, empty without one. Raises ConfigError (E-POLICY-01) on a number out of its range.
    """

    runs: Runs = field(default_factory=Runs)
    privacy: Floors = field(default_factory=Floors)
    prototypes: Prototypes = field(default_factory=Prototypes)
    budgets: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    digest: str = ""
    evaluation: Evaluation = field(default_factory=Evaluation)

    def __post_init__(self) -> None:
        for name, (epsilon, delta) in self.budgets.items():
            _check_budget(f"budget.{name!r}", epsilon, delta)

    @classmethod
    def read(cls, file: Path) -> Policy:
        """Read a policy file; without one the defaults hold.

        Raises RefusedError: E-POLICY-01 on a file that cannot be read or has an unknown key, E-POLICY-10 on one that
        others can change.
        """
        raw = policy_file.read(file)
        if raw is None:
            return cls()
        try:
            return cls.parse(raw)
        except (ConfigError, ValueError, ArithmeticError, RecursionError) as error:
            reason = error.message if isinstance(error, ConfigError) else str(error)
            raise closed(f"{file.name}: {reason}") from error

    @classmethod
    def parse(cls, raw: bytes) -> Policy:
        """Read the text of a policy; raises ConfigError, ValueError and their like on what it must not say."""
        found = structure(PolicyFile, tomllib.loads(raw.decode()), "")
        budgets = {name: (budget.epsilon, budget.delta) for name, budget in found.budget.items()}
        digest = hashlib.sha256(raw).hexdigest()
        return cls(found.runs, found.privacy, found.prototypes, budgets, digest, found.evaluation)

    def caps(self) -> dict[str, Filter]:
        return {name: Filter.of(*budget) for name, budget in self.budgets.items()}

    def require_collections(self, known: Iterable[str]) -> None:
        """Raise RefusedError (E-POLICY-09) on a budget for no collection of the ledger: it would bound nothing."""
        known = list(known)
        for name in self.budgets:
            if name not in known:
                raise RefusedError(
                    "E-POLICY-09",
                    f"[budget.{name!r}]: expected one of the ledger's collections {known}, found another name: "
                    f"{suggest(name, known)}, or run `silo ledger register` first",
                )

    # ---- what it says about a run -------------------------------------------------------------------------------

    def check_request(self, manifest: RunManifest) -> None:
        """Raise RefusedError (E-POLICY-02, E-POLICY-03) on a method or a lead that it does not allow."""
        runs = self.runs
        if runs.methods and manifest.method.name not in runs.methods:
            raise RefusedError("E-POLICY-02", f"expected a method of {runs.methods}, found {manifest.method.name!r}")
        if runs.leads and manifest.lead not in runs.leads:
            raise RefusedError("E-POLICY-03", f"expected a lead of {runs.leads}, found {manifest.lead or 'no name'!r}")

    def check(self, run: CompiledRun) -> None:
        """Raise RefusedError (E-POLICY-02 to -06, -09) on a run that it does not allow; no data is near."""
        manifest, terms, runs, floors = run.manifest, run.profile.terms, self.runs, self.privacy
        self.check_request(manifest)
        if runs.hide_size and (terms is None or terms.weights != "uniform"):
            raise RefusedError(
                "E-POLICY-06",
                "expected a private run in which hospitals count once, since this one declares no size, found weights "
                f"{terms.weights if terms else 'and evaluation sums in the clear'!r}: set privacy.weights=uniform",
            )
        if strangers := sorted(set(self.prototypes.hidden) - set(manifest.schema.classes)):
            raise RefusedError(
                "E-POLICY-09",
                f"expected the hidden classes in the label space {manifest.schema.classes}, found none called "
                f"{strangers}: a misspelt name would hide nothing",
            )
        found = manifest.privacy.name if run.private else "none"
        if floors.require not in ("", found):
            raise RefusedError(
                "E-POLICY-05", f"expected the profile {floors.require!r} with a finite epsilon, found {found!r}"
            )
        if terms is not None:
            self._check_terms(terms)
            run.profile.check_terms(floors)

    def _check_terms(self, terms: Config) -> None:
        floors = self.privacy
        if not (terms.epsilon <= floors.epsilon and terms.delta <= floors.delta):
            raise RefusedError(
                "E-POLICY-05",
                f"expected epsilon <= {floors.epsilon:g} and delta <= {floors.delta:g}, found {terms.epsilon:g} and "
                f"{terms.delta:g}",
            )
        if terms.rng != "secure" and floors.rng == "secure":
            raise RefusedError("E-POLICY-05", "expected noise that nobody can repeat, found privacy.rng=test")
        if terms.test_data == "public" and not floors.public_test:
            raise RefusedError("E-POLICY-05", "expected noise on evaluations, found privacy.test_data=public")

    def check_hidden_size(self, size: float) -> None:
        """Raise RefusedError (E-POLICY-05) when its delta is too large for a size that is counted and told to nobody.

        The run's own delta is not looked at: which one is refused would tell the size.
        """
        if self.privacy.delta > SHARE_OF_UNITS / size:
            raise RefusedError(
                "E-POLICY-05",
                f"expected [privacy] delta <= {SHARE_OF_UNITS / size:.2g} in the policy of a hospital of this size, "
                f"which hides it, found {self.privacy.delta:g}: lower it, or type a size (silo serve --nominal-size)",
            )

    def check_update(self, noise: float) -> None:
        """Raise RefusedError (E-POLICY-05) when the noise on a hospital's update is not allowed."""
        if not noise >= self.privacy.min_noise:
            raise RefusedError("E-POLICY-05", f"expected noise >= {self.privacy.min_noise:g}, found {noise:.4g}")

    def check_plan(self, plan: ReleasePlan, unit: str, declared: float = 0.0) -> None:
        """Raise RefusedError (E-POLICY-05) when the noise, rate, delta or unit of a planned part is not allowed.

        declared: the hospital's own size; the manifest may name a smaller one.
        """
        floors, most = self.privacy, SHARE_OF_UNITS / max(plan.units, declared)
        if plan.steps_per_call and not plan.noise >= floors.min_noise:
            raise RefusedError("E-POLICY-05", f"expected noise >= {floors.min_noise:g}, found {plan.noise:.4g}")
        if not plan.rate <= floors.max_rate:
            raise RefusedError("E-POLICY-05", f"expected a rate <= {floors.max_rate:g}, found {plan.rate:.4g}")
        if not plan.terms.delta <= most:
            raise RefusedError("E-POLICY-05", f"expected delta <= {most:.2g}, found {plan.terms.delta:g}")
        if floors.unit == "group" and unit != "group":
            raise RefusedError("E-POLICY-05", "expected data that names groups, found single records")


def check_labels(declared: Iterable[str], run: Iterable[str]) -> None:
    """Raise RefusedError (E-POLICY-16) unless a run's label space has every class that the hospital declares."""
    declared, space = list(declared), list(run)
    if not declared:
        raise RefusedError(
            "E-POLICY-16",
            "expected the classes that the records here may have, found none declared: name them all in policy.toml, "
            f"[privacy] labels = [...]; this run has {space}",
        )
    if missing := sorted(set(declared) - set(space)):
        raise RefusedError(
            "E-POLICY-16",
            f"expected a run over all classes that this hospital declares, found one over {space}, which lacks "
            f"{missing}: ask the lead for a run with them, or declare others in policy.toml ([privacy] labels)",
        )


def _check_budget(owner: str, epsilon: float, delta: float) -> None:
    validate.positive("E-POLICY-01", owner, epsilon=epsilon, delta=delta)
    validate.below("E-POLICY-01", owner, MOST_DELTA, delta=delta)
