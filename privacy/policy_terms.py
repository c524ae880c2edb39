"""The sections of a hospital's policy file: their defaults, and their checks of a run's options."""

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
"""The private profiles of `profiles.PROFILES`; repeated here, since reading a policy must not import torch."""
AUTOMATIC, BY_HAND = "automatic", "by hand"
PREFERRED, REQUIRED = "preferred", "required"
ACCURACY, NOTHING = "accuracy", "nothing"
SHARE_OF_UNITS = 0.1
"""Upper bound on delta times the number of units, since delta bounds the probability of a full breach."""


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """[runs] methods, leads: what is accepted (empty: any)   approve: "automatic", or "by hand" for each run.

    train: False accepts only evaluations (rounds=0)

    extensions: distributions whose methods and models may run here, "name" or "name==version" (empty: none)

    hide_size: accept only private runs with uniform weights, and declare a size only if the operator typed one.
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
    """[privacy] require: the profile that every run must have ("": runs without a profile are accepted too).

    epsilon, delta: maximum for one run   min_noise: minimum noise multiplier   min_noise_alone: minimum of this
    hospital's own part of distributed noise, the only noise if the masks fail (inf: no run with distributed noise)
    max_rate: maximum sampling rate of record-level training   central: accept noise added by the coordinator
    coupled: accepted treatments of losses that mix examples   unit: "group" refuses data without groups
    rng: "test" also accepts reproducible noise, which gives no privacy   public_test: accept evaluations without noise
    labels: the classes of this hospital for private runs, so that folder contents are not revealed (empty: those in the
    published data set, or in `silo serve --holds`).
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
        """Raise RefusedError (E-POLICY-05) if a profile's options are not allowed."""
        if not (terms.epsilon <= self.epsilon and terms.delta <= self.delta):
            raise RefusedError(
                "E-POLICY-05",
                f"expected epsilon <= {self.epsilon:g} and delta <= {self.delta:g}, found {terms.epsilon:g} and "
                f"{terms.delta:g}",
            )
        if terms.rng != "secure" and self.rng == "secure":
            raise RefusedError(
                "E-POLICY-05", "privacy.rng=test makes the noise reproducible, which the policy does not allow"
            )
        if terms.test_data == "public" and not self.public_test:
            raise RefusedError(
                "E-POLICY-05", "the policy requires noise on evaluations, found privacy.test_data=public"
            )
        if terms.central and not self.central:
            raise RefusedError(
                "E-POLICY-05", "the policy requires noise to be added at the hospital, found privacy.placement=central"
            )
        if isinstance(terms, RecordDpConfig) and terms.coupled not in self.coupled:
            raise RefusedError(
                "E-POLICY-05", f"expected privacy.coupled to be one of {self.coupled}, found {terms.coupled!r}"
            )

    def check_update(self, noise: float) -> None:
        """Raise RefusedError (E-POLICY-05) if an update's noise is too small."""
        if not noise >= self.min_noise:
            raise RefusedError("E-POLICY-05", f"expected noise >= {self.min_noise:g}, found {noise:.4g}")

    def check_alone(self, noise: float) -> None:
        """Raise RefusedError (E-POLICY-05) if the hospital's own part of distributed noise is too small."""
        if not noise >= self.min_noise_alone:
            allowed = (
                "all noise added by this hospital" if self.min_noise_alone == math.inf else "more noise of its own"
            )
            raise RefusedError(
                "E-POLICY-05",
                f"expected {allowed}, found noise {noise:.4g}, which is enough only together with other hospitals' "
                "noise (privacy.placement=distributed): privacy.min_noise_alone of the policy is "
                f"{self.min_noise_alone:g}",
            )

    def check_plan(self, plan: ReleasePlan, unit: str, declared: float = 0.0) -> None:
        """Raise RefusedError (E-POLICY-05) if noise, rate, delta or unit of a plan are not allowed.

        declared: the size that the hospital declared; the manifest may have a smaller one
        """
        most = SHARE_OF_UNITS / max(plan.units, declared)
        if plan.steps_per_call or plan.moment_shares or plan.survey_round >= 0:
            self.check_update(plan.noise)
        if not plan.rate <= self.max_rate:
            raise RefusedError("E-POLICY-05", f"expected a rate <= {self.max_rate:g}, found {plan.rate:.4g}")
        if not plan.terms.delta <= most:
            raise RefusedError("E-POLICY-05", f"expected delta <= {most:.2g}, found {plan.terms.delta:g}")
        if self.unit == "group" and unit != "group":
            raise RefusedError("E-POLICY-05", "the policy protects groups, but the data have no group column")


@dataclass(frozen=True, slots=True)
class PrototypePolicy:
    """[prototypes] submit: False sends none   hidden: classes without prototypes   min_count: minimum units per class.

    min_examples: minimum examples of a class in exact sums of feature products, in runs without privacy (analytic),
    since a sum over one example reveals it (0: no minimum).
    """

    submit: bool = True
    hidden: tuple[str, ...] = ()
    min_count: NonNegative = 0.0
    min_examples: Count = 5

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "prototypes", self)


@dataclass(frozen=True, slots=True)
class EvaluationPolicy:
    """[evaluation] send: which results on this hospital's test examples are sent.

    "clinical": all that the run measures   "accuracy": only correct answers and examples per class   "nothing".
    by_hospital: results may be stored and shown under this hospital's name if the run asks for it; otherwise only sums
    over hospitals are shown.
    min_examples: minimum test examples of a class for exact counts (0: no minimum)
    runs_a_day: maximum number of runs a day that get exact results.
    """

    send: Annotated[str, bounded(one_of, (CLINICAL, ACCURACY, NOTHING))] = ACCURACY
    by_hospital: bool = False
    min_examples: Count = 0
    runs_a_day: Annotated[int, bounded(between, 1, 1_000_000)] = 100

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "evaluation", self)


@dataclass(frozen=True, slots=True)
class SecureAggregationPolicy:
    """[secagg] require: refuse runs without masks, and send no counts of records.

    min_sum: minimum hospitals in a sum that this hospital helps to open (0: the protocol's two thirds and three)
    min_contributors: minimum k of a run: the hospitals in a class's sum
    class_sums: "complete" accepts only runs that open class sums when every hospital sent an update; "each" also others
    confirmed_peers: minimum number of other members whose fingerprint was confirmed here (`silo peers accept`)
    collusion: minimum c of a run: the number of hospitals that may leave out their part of distributed noise.
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
        """Raise RefusedError (E-POLICY-17, E-POLICY-20) on a run with weaker secure aggregation."""
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
        """Raise RefusedError (E-POLICY-17) if too few other members were confirmed by fingerprint."""
        if confirmed < self.confirmed_peers:
            raise _open_run(
                f"at least {self.confirmed_peers} other members whose fingerprint was confirmed here",
                f"{confirmed} of {others}: ask them for `silo fingerprint` by telephone, then silo peers accept NAME "
                "FINGERPRINT",
            )


@dataclass(frozen=True, slots=True)
class SurveyPolicy:
    """[survey] allow: the questions that are answered (empty: none).

    min_patients: minimum for a number without noise, at least 10; smaller numbers are suppressed
    by_hospital: also answer if the coordinator stores the answers of each hospital
    records_are_patients: in data without patients, count each record as a patient.
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
        """Return the questions that are answered. by_hospital: whether the run stores each hospital's answers."""
        return frozenset(self.allow) if self.by_hospital or not by_hospital else frozenset()


def _open_run(expected: str, actual: str) -> RefusedError:
    return RefusedError("E-POLICY-17", f"[secagg]: expected {expected}, found {actual}")


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """[peers] accept: "automatic", or "by hand": new members of the roster must be accepted here first."""

    accept: Annotated[str, bounded(one_of, (AUTOMATIC, BY_HAND))] = AUTOMATIC

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "peers", self)


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """[budget.COLLECTION] maximum that all runs together may spend of a collection."""

    epsilon: Positive
    delta: Delta


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """[worker] isolation: "required" refuses every run where the worker that reads images could reach a network."""

    isolation: Annotated[str, bounded(one_of, (PREFERRED, REQUIRED))] = PREFERRED

    def __post_init__(self) -> None:
        validate.declared("E-POLICY-01", "worker", self)


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
    worker: WorkerPolicy = field(default_factory=WorkerPolicy)
