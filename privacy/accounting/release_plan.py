"""The release plan of a private run at one hospital: every release of every round, planned before data are read.

Rates and steps follow from the declared size of the hospital, never from a count: q = min(1, B / N), steps per call of
`sgd` = round(epochs / q). Each hospital solves for its own noise, so that all end at the same epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fl_core.errors import RefusedError
from fl_core.tensors import nn
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import Method
from fl_core.types.records import Schema, TrainConfig
from privacy.accounting.accountant import History, Mechanism, solve_noise
from privacy.accounting.dry_run import dry_run, treatment
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.shared_noise import SharedNoise
from privacy.mechanisms.noise import grid

TRAIN, TEST = "train", "test"
HOSPITAL = "hospital"
"""All data of a hospital: the unit of silo-level privacy."""


@dataclass(frozen=True, slots=True)
class Release:
    """One planned release: its purpose, its collection of records, and its mechanism, as it is charged.

    shared: the terms of shared noise; None if the silo adds all of the noise.
    """

    purpose: str
    collection: str
    mechanism: Mechanism
    shared: SharedNoise | None = None

    @property
    def alone(self) -> Mechanism:
        """The mechanism if masks fail: only the silo's own noise counts."""
        m = self.mechanism
        return m if self.shared is None else replace(m, noise=self.shared.alone(m.noise))

    @property
    def of_all(self) -> Mechanism:
        """The mechanism if all silos are present and honest."""
        m = self.mechanism
        return m if self.shared is None else replace(m, noise=self.shared.of_all(m.noise))


class ReleaseAllowance:
    """The releases that a round may make, taken one by one before examples are read.

    Guarantees: unplanned releases are never made.
    """

    def __init__(self, planned: Sequence[Release]) -> None:
        self.left = list(planned)
        self.made: list[Release] = []

    def take(self, release: Release) -> None:
        """Use up a planned release; raises RefusedError (E-PRIV-15) if it was not planned."""
        if release not in self.left:
            raise RefusedError(
                "E-PRIV-15", f"release {release} is not planned (planned: {self.left}): nothing was released"
            )
        self.left.remove(release)
        self.made.append(release)


@dataclass(frozen=True, slots=True)
class SamplingSchedule:
    """Sampling at a hospital: the rate q = min(1, B / N) and the steps per call. units: N, the declared number."""

    train: TrainConfig
    units: int

    @property
    def rate(self) -> float:
        return min(1.0, self.train.batch_size / self.units)

    def steps(self, epochs: float) -> int:
        """Return the steps of one call of `sgd`: round(epochs / q), at most the schedule's `max_steps`."""
        planned = max(1, round(epochs / self.rate))
        return min(planned, self.train.max_steps) if self.train.max_steps else planned


@dataclass(frozen=True)
class ReleasePlan:
    """One hospital's part in a private run.

    steps_per_call: of each call of `sgd` in a round   closing_steps: of each call in the closing evaluation
    evaluates_global_model: whether the received model is evaluated; False for a method without a global model
    personal: whether personal models are evaluated on the test records, and on a public test set with class counts
    personal_at_end: whether they are evaluated only in the closing evaluation   moment_shares: round -> share of
    1 / z^2, for rounds that release second moments, or a mean before them   shared: the terms of their shared noise
    survey_round: the round that answers a survey, about records of both splits; -1 for none.
    """

    terms: RecordDpConfig
    rates: SamplingSchedule
    rounds: int
    coupling: Coupling
    steps_per_call: tuple[int, ...]
    prototype_sums: int
    needs_class_counts: bool
    evaluates_global_model: bool = True
    personal: bool = False
    closing_steps: tuple[int, ...] = ()
    personal_at_end: bool = False
    moment_shares: Mapping[int, float] = field(default_factory=dict)
    shared: SharedNoise | None = None
    survey_round: int = -1

    @classmethod
    def of(
        cls,
        terms: RecordDpConfig,
        train: TrainConfig,
        rounds: int,
        units: int,
        method: Method,
        model: nn.Module,
        schema: Schema,
        personal: bool = False,
        shared: SharedNoise | None = None,
    ) -> ReleasePlan:
        """Plan a run from a dry run of its method. units: the hospital's declared number of records or groups.

        Raises RefusedError (E-PRIV-16) if a loss mixes examples without declaring it or in a way that is no longer
        supported, if the method requests a sum without a bound, or more than one linear release with shared noise.
        """
        rates = SamplingSchedule(train, max(units, 1))
        needs = dry_run(method, model, schema, train, rates.steps, personal=personal)
        if needs.example_sums:
            raise RefusedError(
                "E-PRIV-16",
                f"method {method.name} sends sums over examples without a bound: choose a method whose releases are "
                "deltas, class counts and prototypes",
            )
        if shared is not None and (not needs.moments or needs.steps or needs.closing or needs.class_sums):
            raise RefusedError(
                "E-PRIV-16",
                "expected a method whose private release is one sum (analytic) for privacy.placement=distributed, "
                f"found {method.name}, which trains by steps or sends prototypes: missing noise in a step cannot be "
                "added to the sum later. Set privacy.placement=local",
            )
        return cls(
            terms,
            rates,
            rounds,
            method.coupling,
            tuple(needs.steps),
            needs.class_sums,
            needs.counts,
            method.has_global_model,
            personal,
            tuple(needs.closing),
            method.personal_at_end,
            needs.moments,
            shared,
            needs.survey,
        )

    @property
    def units(self) -> int:
        return self.rates.units

    @property
    def rate(self) -> float:
        return self.rates.rate

    @property
    def batch(self) -> float:
        """Return B = q N, the constant that sums of gradients are divided by."""
        return self.rate * self.units

    @property
    def groups(self) -> int:
        """Return M, the number of microbatches of a step."""
        return max(1, round(self.batch / self.terms.microbatch))

    @property
    def coupled(self) -> bool:
        return treatment(self.coupling, self.terms.coupled)

    def is_coupled(self, step: int) -> bool:
        """Return whether a step has the coupled term: every `coupled_every`-th, starting with the first."""
        return self.coupled and step % self.terms.coupled_every == 0

    @cached_property
    def noise(self) -> float:
        """Return z of the training steps, the moments or the survey: the smallest with which the run is in budget."""
        return solve_noise(self.terms.epsilon, self.terms.delta, self._history)

    @property
    def std(self) -> float:
        """Return the standard deviation of the noise on a sum of gradients; the same on all steps."""
        return self.noise * self.terms.sensitivity(self.coupled) * (1 + grid.SLACK)

    @property
    def rows(self) -> int:
        """Return the fixed shape of the batches for per-unit gradients, a public constant.

        With it, a sample two standard deviations above the expected size needs as few equal batches as `physical_batch`
        allows.
        """
        most, sample = self.terms.physical_batch, self.batch + 2 * math.sqrt(self.batch * (1 - self.rate))
        return min(most, 8 * math.ceil(sample / math.ceil(sample / most) / 8))

    def training(self, steps: int, noise: float | None = None) -> list[Release]:
        """Plan one call of `sgd`. Steps with and without a coupled term have equal noise, different sensitivities."""
        z = self.noise if noise is None else noise
        with_term = sum(self.is_coupled(s) for s in range(steps))
        full = self.terms.sensitivity(self.coupled)
        entries = [(z, with_term), (z * full / self.terms.sensitivity(False), steps - with_term)]
        if not self.coupled:
            entries = [(z, steps)]
        return [Release("training", TRAIN, Mechanism(noise, self.rate, n)) for noise, n in entries if n]

    @property
    def prototypes(self) -> Release:
        return Release("prototypes", TRAIN, Mechanism(self.terms.prototype_noise))

    def moments(self, round: int, noise: float | None = None) -> Release:
        """Plan the release of a round in `moment_shares`. The rounds together cost 1 / z^2."""
        z = (self.noise if noise is None else noise) / math.sqrt(self.moment_shares[round])
        return Release("moments", TRAIN, Mechanism(z), self.shared)

    @property
    def survey(self) -> tuple[Release, ...]:
        """The single answer to a survey, charged to both splits, since a patient can be in either one."""
        return self._survey(None)

    def _survey(self, noise: float | None) -> tuple[Release, ...]:
        mechanism = Mechanism(self.noise if noise is None else noise)
        return Release("survey", TRAIN, mechanism), Release("survey", TEST, mechanism)

    @property
    def class_counts(self) -> Release:
        return Release("class counts", TRAIN, Mechanism(self.terms.count_noise))

    @property
    def metrics(self) -> Release:
        return Release("evaluation", TEST, Mechanism(self.terms.metric_noise))

    def sends_prototypes(self, round: int) -> bool:
        return round % self.terms.prototype_every == 0

    def releases(
        self,
        round: int,
        train: bool,
        prototypes: bool = True,
        counts: bool = True,
        public: bool = False,
        surveys: bool = True,
    ) -> list[Release]:
        """List the releases of one round.

        prototypes: the hospital submits them   counts, surveys: they were not released before   public: there is a
        public test set.
        """
        needed = (self.needs_class_counts and train) or (self._measures_personal(train) and public)
        return self._releases(round, train, prototypes, counts and needed, None, surveys)

    def _measures_personal(self, train: bool) -> bool:
        return self.personal and train != self.personal_at_end

    def _releases(
        self, round: int, train: bool, prototypes: bool, counts: bool, noise: float | None, surveys: bool = True
    ) -> list[Release]:
        models = self.evaluates_global_model + self._measures_personal(train)
        planned = [self.metrics] * models if self.terms.test_data == "private" else []
        for steps in self.steps_per_call if train else self.closing_steps:
            planned += self.training(steps, noise)
        if train and prototypes and self.sends_prototypes(round):
            planned += [self.prototypes] * self.prototype_sums
        if train and prototypes and round in self.moment_shares:
            planned.append(self.moments(round, noise))
        if train and surveys and round == self.survey_round:
            planned += self._survey(noise)
        if counts:
            planned.append(self.class_counts)
        return planned

    @property
    def costliest(self) -> list[Release]:
        """Return the releases of the costliest round that may be repeated, with the closing training if any."""
        releases = self._releases(self._costliest_round, True, True, self.needs_class_counts or self.personal, None)
        return releases + (self._releases(self.rounds, False, False, False, None) if self.closing_steps else [])

    @property
    def reserve(self) -> int:
        """Return the number of reserved repetitions. A run with only moments or a survey counts as one round."""
        trains = self.steps_per_call or self.prototype_sums or self.closing_steps
        return self.terms.reserved(self.rounds if trains else 1)

    @property
    def _costliest_round(self) -> int:
        return max(self.moment_shares, key=self.moment_shares.__getitem__, default=max(0, self.survey_round))

    def _history(self, noise: float) -> History:
        """List all mechanisms on the training records at noise z: of all rounds, the closing and the reserve."""
        counts, again = self.needs_class_counts or self.personal, self.reserve
        repeated = (*range(self.rounds), *[self._costliest_round] * again)
        rounds = [self._releases(t, True, True, t == 0 and counts, noise) for t in repeated]
        ends = [self._releases(self.rounds, False, False, False, noise)] * (1 + again)
        return [r.mechanism for released in (*rounds, *ends) for r in released if r.collection == TRAIN]
