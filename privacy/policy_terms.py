"""The sections of a hospital's policy file, with their defaults, and what they say of a profile's options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fl_core import validate
from fl_core.errors import ConfigError, RefusedError
from fl_core.types.clinical import CLINICAL
from fl_core.types.secagg import CLASS_SUMS, COMPLETE, EACH, MAX_MASKED
from fl_core.types.survey import MIN_PATIENTS, QUESTIONS
from fl_core.validate import Count, NonNegative, Positive, at_most, between, bounded, one_of
from privacy.accounting.record_config import COUPLED, Delta, DpConfig, RecordDpConfig, Rng

if TYPE_CHECKING:
    from fl_core.rounds.manifest import RunManifest
    from privacy.accounting.release_plan import ReleasePlan

PRIVATE_PROFILES = ("dp_record", "dp_silo_small")
"""Of `profiles.PROFILES` those that promise something; named here, since a policy is read without torch."""
AUTOMATIC, BY_HAND = "automatic", "by hand"
ACCURACY, NOTHING = "accuracy", "nothing"
SHARE_OF_UNITS = 0.1
"""delta is the chance of a breach of everything: it must stay below this share of one unit in all."""


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """[runs] methods, leads: what is accepted (empty: any)   approve: "automatic", or "by hand" for each run.

    train: False takes part in evaluations alone (rounds=0), whatever the coordinator asks

    extensions: distributions whose methods and models may run here, "name" or "name==version" (empty: none)

    hide_size: only private runs with uniform weights; a size is declared only where the operator typed one.
    """

    methods: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    approve: Annotated[str, bounded(one_of, (AUTOMATIC, BY_HAND))] = AUTOMATIC
    hide_size: bool = False
    extensions: tuple[str, ...] = ()
    train: bool = True

    def __post_init__(self) -> None:
        for entry in self.extensions:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]* *(== *[\w.+!-]+)?", entry, re.ASCII):
                raise ConfigError(
                    "E-POLICY-01", f"runs.extensions: expected 'name' or 'name==version', found {entry!r}: correct it"
                )
        validate.declared("E-POLICY-01", "runs", self)


@dataclass(frozen=True, slots=True)
class Floors:
    """[privacy] require: a profile that every run must have ("": also runs without one are accepted).

    epsilon, delta: the most that one run may ask   min_noise: least noise multiplier   min_noise_alone: least of this
    hospital's own noise where it is shared out under masks, all that is left if they fail (inf: no such run)
    max_rate: largest sampling rate of record-level training   central: also noise added by the coordinator
    coupled: treatments of losses that mix examples   unit: "group" accepts no data without groups
    rng: "test" accepts repeatable noise too, which protects nobody   public_test: also evaluations without noise
    labels: the classes that this hospital's records may have, as private runs are answered (empty: what the publisher
    of the data names, or `silo serve --holds`).
    """

    require: Annotated[str, bounded(one_of, ("", *PRIVATE_PROFILES))] = ""
    epsilon: Positive = 8.0
    delta: Delta = 1e-5
    min_noise: NonNegative = 0.0
    min_noise_alone: Annotated[float, bounded(between, 0, math.inf)] = math.inf
    max_rate: Annotated[Positive, bounded(at_most, 1)] = 1.0
    coupled: tuple[str, ...] = COUPLED
    unit: Annotated[str, bounded(one_of, ("record", "group"))] = "record"
    rng: Rng = "secure"
    public_test: bool = False
    central: bool = False
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "privacy", self)
        for treatment in self.coupled:
            validate.one_of("E-POLICY-01", "privacy", COUPLED, coupled=treatment)

    def check_terms(self, terms: DpConfig) -> None:
        """Raise RefusedError (E-POLICY-05) on options of a profile that are not allowed."""
        if not (terms.epsilon <= self.epsilon and terms.delta <= self.delta):
            raise RefusedError(
                "E-POLICY-05",
                f"expected epsilon <= {self.epsilon:g} and delta <= {self.delta:g}, found {terms.epsilon:g} and "
                f"{terms.delta:g}",
            )
        if terms.rng != "secure" and self.rng == "secure":
            raise RefusedError("E-POLICY-05", "expected noise that nobody can repeat, found privacy.rng=test")
        if terms.test_data == "public" and not self.public_test:
            raise RefusedError("E-POLICY-05", "expected noise on evaluations, found privacy.test_data=public")
        if terms.central and not self.central:
            raise RefusedError("E-POLICY-05", "expected noise before anything leaves, found privacy.placement=central")
        if isinstance(terms, RecordDpConfig) and terms.coupled not in self.coupled:
            raise RefusedError("E-POLICY-05", f"expected a treatment of {self.coupled}, found {terms.coupled!r}")

    def check_update(self, noise: float) -> None:
        """Raise RefusedError (E-POLICY-05) when the noise on a hospital's update is not allowed."""
        if not noise >= self.min_noise:
            raise RefusedError("E-POLICY-05", f"expected noise >= {self.min_noise:g}, found {noise:.4g}")

    def check_alone(self, noise: float) -> None:
        """Raise RefusedError (E-POLICY-05) when less of shared noise is a hospital's own than is allowed."""
        if not noise >= self.min_noise_alone:
            allowed = "noise of this hospital's alone" if self.min_noise_alone == math.inf else "more noise of its own"
            raise RefusedError(
                "E-POLICY-05",
                f"expected {allowed}, found noise {noise:.4g} that is enough only together with others' "
                f"(privacy.placement=distributed): privacy.min_noise_alone of the policy is {self.min_noise_alone:g}",
            )

    def check_plan(self, plan: ReleasePlan, unit: str, declared: float = 0.0) -> None:
        """Raise RefusedError (E-POLICY-05) when the noise, rate, delta or unit of a planned part is not allowed.

        declared: the hospital's own size; the manifest may name a smaller one.
        """
        most = SHARE_OF_UNITS / max(plan.units, declared)
        if plan.steps_per_call or plan.moment_round >= 0 or plan.survey_round >= 0:
            self.check_update(plan.noise)
        if not plan.rate <= self.max_rate:
            raise RefusedError("E-POLICY-05", f"expected a rate <= {self.max_rate:g}, found {plan.rate:.4g}")
        if not plan.terms.delta <= most:
            raise RefusedError("E-POLICY-05", f"expected delta <= {most:.2g}, found {plan.terms.delta:g}")
        if self.unit == "group" and unit != "group":
            raise RefusedError("E-POLICY-05", "expected data that names groups, found single records")


@dataclass(frozen=True, slots=True)
class PrototypePolicy:
    """[prototypes] submit: False submits none   hidden: classes that none are submitted of   min_count: least units.

    min_examples: least examples of a class of which exact sums leave, in a run without privacy whose method sums
    products of features (analytic): a sum over one example is that example (0: any number).
    """

    submit: bool = True
    hidden: tuple[str, ...] = ()
    min_count: NonNegative = 0.0
    min_examples: Count = 5

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "prototypes", self)


@dataclass(frozen=True, slots=True)
class EvaluationPolicy:
    """[evaluation] send: what of a run's evaluation on this hospital's test examples leaves.

    "clinical": all that the run measures   "accuracy": correct answers and examples of each class alone   "nothing".
    by_hospital: what is sent may be kept and shown under this hospital's name, in runs that ask for it; else the
    coordinator shows sums over hospitals alone.
    min_examples: least test examples of a class of which exact counts leave (0: any number)
    runs_a_day: runs that may measure models here within a day, as far as what they measure leaves exact.
    """

    send: Annotated[str, bounded(one_of, (CLINICAL, ACCURACY, NOTHING))] = ACCURACY
    by_hospital: bool = False
    min_examples: Count = 0
    runs_a_day: Annotated[int, bounded(between, 1, 1_000_000)] = 100

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "evaluation", self)


@dataclass(frozen=True, slots=True)
class SecureAggregationPolicy:
    """[secagg] require: no run whose updates leave without masks, and nothing told that was counted here.

    min_sum: least hospitals in a sum that this hospital helps to open (0: what the protocol asks, two thirds and three)
    min_contributors: least k of a run: hospitals that rows of a class are sums over
    class_sums: "complete" accepts only runs that open sums per class where every hospital sent, "each" also others
    confirmed_peers: least other members of a run whose fingerprint was confirmed here (`silo peers accept`)
    collusion: least c of a run: hospitals whose missing noise is covered where it is shared out.
    """

    require: bool = False
    min_sum: Annotated[int, bounded(between, 0, MAX_MASKED)] = 0
    min_contributors: Annotated[int, bounded(between, 1, MAX_MASKED)] = 1
    class_sums: Annotated[str, bounded(one_of, CLASS_SUMS)] = EACH
    confirmed_peers: Annotated[int, bounded(between, 0, MAX_MASKED)] = 0
    collusion: Annotated[int, bounded(between, 0, MAX_MASKED)] = 0

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "secagg", self)

    def check(self, manifest: RunManifest) -> None:
        """Raise RefusedError (E-POLICY-17, E-POLICY-20) on a run that is allowed to see more than this."""
        terms, cohort = manifest.secagg, manifest.cohort_size
        if terms is None:
            if self.require:
                raise _open_run("updates under masks (secagg=auto)", "a run without secure aggregation")
            return
        if cohort < self.min_sum:
            raise _open_run(f"sums of at least {self.min_sum} hospitals", f"rounds of {cohort}")
        if terms.min_contributors < self.min_contributors:
            k = self.min_contributors
            raise RefusedError(
                "E-POLICY-20",
                f"expected secagg.min_contributors of at least {k}, found {terms.min_contributors}: start the run with "
                f"secagg.min_contributors={k}, or ask the hospital to accept less",
            )
        if self.class_sums == COMPLETE and terms.class_sums != COMPLETE:
            raise _open_run("secagg.class_sums=complete", terms.class_sums)
        if terms.collusion < self.collusion:
            raise _open_run(f"secagg.collusion of at least {self.collusion}", str(terms.collusion))

    def check_peers(self, confirmed: int, others: int) -> None:
        """Raise RefusedError (E-POLICY-17) where too few of a run's other members were confirmed by fingerprint."""
        if confirmed < self.confirmed_peers:
            raise _open_run(
                f"at least {self.confirmed_peers} other members whose fingerprint was confirmed here",
                f"{confirmed} of {others}: ask them for `silo fingerprint` by telephone, then silo peers accept NAME "
                "FINGERPRINT",
            )


@dataclass(frozen=True, slots=True)
class SurveyPolicy:
    """[survey] allow: questions about the records that are answered; all others are held back (empty: every one).

    min_patients: of the smallest number that leaves without noise; fewer than 10 are never told
    by_hospital: also answers that the coordinator keeps apart, and not in a sum alone
    records_are_patients: where the data name no patients, each record is another one's: numbers are called patients.
    """

    allow: tuple[str, ...] = ()
    min_patients: Annotated[int, bounded(between, MIN_PATIENTS, 1_000_000)] = MIN_PATIENTS
    by_hospital: bool = False
    records_are_patients: bool = False

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "survey", self)
        for name in self.allow:
            validate.one_of("E-POLICY-01", "survey", tuple(QUESTIONS), allow=name)

    def answered(self, by_hospital: bool) -> frozenset[str]:
        """Name the questions that are answered. by_hospital: the run keeps answers apart."""
        return frozenset(self.allow) if self.by_hospital or not by_hospital else frozenset()


def _open_run(expected: str, actual: str) -> RefusedError:
    return RefusedError("E-POLICY-17", f"[secagg]: expected {expected}, found {actual}")


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """[peers] accept: "automatic", or "by hand": a new member of the roster counts only once it was consented to."""

    accept: Annotated[str, bounded(one_of, (AUTOMATIC, BY_HAND))] = AUTOMATIC

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "peers", self)


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """[budget.COLLECTION] the most that all runs together may spend of a collection."""

    epsilon: Positive
    delta: Delta


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """The sections of a policy file, with their defaults."""

    runs: RunPolicy = field(default_factory=RunPolicy)
    privacy: Floors = field(default_factory=Floors)
    prototypes: PrototypePolicy = field(default_factory=PrototypePolicy)
    evaluation: EvaluationPolicy = field(default_factory=EvaluationPolicy)
    secagg: SecureAggregationPolicy = field(default_factory=SecureAggregationPolicy)
    peers: PeerPolicy = field(default_factory=PeerPolicy)
    budget: Mapping[str, BudgetPolicy] = field(default_factory=dict)
    survey: SurveyPolicy = field(default_factory=SurveyPolicy)
