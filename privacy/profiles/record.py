"""Record-level differential privacy at each hospital: DP-SGD, noisy prototypes, noisy evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fl_core.aggregation.options import Mean, NormClipped, Options
from fl_core.aggregation.update_check import NoisyRows
from fl_core.errors import ConfigError, RefusedError
from fl_core.rounds import capabilities
from fl_core.rounds.memory_need import MadeUpExamples
from fl_core.rounds.run_setup import RunSetup
from fl_core.tensors import torch
from fl_core.training import schedule
from fl_core.types.enums import Capability
from fl_core.types.interfaces import DataFactory, LocalData, RoundData
from fl_core.types.metric_parts import METRIC_PARTS
from fl_core.types.values import RoundContext
from privacy.accounting.accountant import Bound, Mechanism, PrivacyFilter, RdpBound, epsilon_of
from privacy.accounting.dry_run import dry_run
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import (
    TEST,
    TRAIN,
    Release,
    ReleaseAllowance,
    ReleasePlan,
    SamplingSchedule,
)
from privacy.accounting.shared_noise import SharedNoise
from privacy.accounting.uncertainty import GRID_SLACK, EvaluationNoise, RunNoise
from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise, SeededNoise
from privacy.mechanisms.record.class_sums import ROWS
from privacy.mechanisms.record.moments import MOST_SENSITIVE, ReleaseGrid
from privacy.mechanisms.record.survey import release_name
from privacy.profiles.base import PLACEMENTS, MadeUpStep, PrivateProfile, Projection, mechanisms, one_step
from privacy.profiles.prototype_filter import NO_LIMITS, DisclosureLimits, with_prototype_filter
from privacy.release_log import ReleaseLog

if TYPE_CHECKING:
    from privacy.policy_terms import Floors

CLASSES_SHOW = (
    "Record-level privacy does not hide which classes a hospital treats: without secure aggregation, its update "
    "reveals them."
)


def release_plan(run: RunSetup, index: int) -> ReleasePlan:
    """Plan one member's releases in a private run; raises ConfigError (E-PRIV-17) if its size was not declared."""
    manifest, member = run.manifest, run.manifest.members[index]
    if member.units < 1:
        raise ConfigError(
            "E-PRIV-17",
            f"{member.name} has not declared its size, which private runs need: start it with "
            "`silo serve --nominal-size N`",
        )
    terms = RecordDpConfig.of(manifest.privacy.options)
    return ReleasePlan.of(
        terms,
        manifest.train,
        manifest.rounds,
        member.units,
        run.method,
        run.new_model(),
        run.schema,
        manifest.personal,
        SharedNoise.of(manifest) if terms.distributed else None,
    )


class RecordProfile(PrivateProfile):
    """Profile "dp_record": the epsilon of a run holds for each record, or each group if the data name groups."""

    config = RecordDpConfig
    private_form = True
    subject = "each record"
    terms: RecordDpConfig

    def __init__(self, run: RunSetup, terms: RecordDpConfig) -> None:
        super().__init__(run, terms)
        self._plans: dict[int, ReleasePlan] = {}

    def check(self) -> None:
        super().check()
        if differ := schedule.of_plain_training(self.run.manifest.train):
            raise ConfigError(
                "E-CFG-08",
                f"record-level privacy computes gradients per example in float32, so it needs {differ[0]}, found "
                f"{differ[1]}: leave it out",
            )
        capabilities.check_supported(self.run.method, {Capability.DIFFERENTIAL_PRIVACY})
        if self.terms.distributed:
            self._check_shared()

    def _check_shared(self) -> None:
        """Raise as `check` unless every silo adds its noise to every number before any other computation."""
        SharedNoise.of(self.run.manifest)
        if self.terms.min_count or not all(m.prototypes for m in self.run.manifest.members):
            option = "privacy.min_count" if self.terms.min_count else "prototype_share"
            raise ConfigError(
                "E-PRIV-16",
                f"with privacy.placement=distributed, each row needs noise from every hospital, but {option} leaves "
                "some hospitals out: remove it, or set privacy.placement=local",
            )
        for k in range(len(self.run.manifest.members)):
            plan = self.plan(k)
            for round in plan.moment_shares:
                self._sum_grid.room(MOST_SENSITIVE * plan.moments(round).alone.noise)

    @property
    def _sum_grid(self) -> ReleaseGrid:
        manifest = self.run.manifest
        return ReleaseGrid.of(manifest.grid, set(manifest.layout) - METRIC_PARTS - set(self.run.guard_parts))

    def plan(self, index: int) -> ReleasePlan:
        if index not in self._plans:
            self._plans[index] = release_plan(self.run, index)
        return self._plans[index]

    def aggregator(self, chosen: Options) -> Options:
        """Allow clipping of long updates, but no refusals: the noise alone makes a small hospital's update long.

        Clipping costs no epsilon. With shared noise, allow only sums: results from a single update, or its norm, would
        have too little noise.
        """
        if self.terms.distributed and isinstance(chosen, NormClipped):
            return Mean()
        return replace(chosen, refuse_above=math.inf, signs=False) if isinstance(chosen, NormClipped) else chosen

    def data_factory(self, index: int, log: ReleaseLog, withheld: DisclosureLimits = NO_LIMITS) -> DataFactory:
        plan, rounds = self.plan(index), self.run.manifest.rounds
        if plan.shared and withheld.min_count:
            raise RefusedError(
                "E-POLICY-05",
                "this hospital's policy leaves out small classes by noisy counts (prototypes.min_count), so it "
                "cannot share noise (privacy.placement=distributed): start a run with privacy.placement=local",
            )
        if withheld.min_count > plan.terms.min_count:
            plan = replace(plan, terms=replace(plan.terms, min_count=withheld.min_count))

        def open_private(data: RoundData) -> LocalData:
            from privacy.mechanisms.record.private_data import DpSgdLocalData

            context, first = data.context, log.cached("class counts") is None
            training, has_public = context.round < rounds, data.public is not None and len(data.public) > 0
            asks = self.survey_release(index, withheld)
            fresh = asks is None or log.cached(asks) is None
            planned = plan.releases(context.round, training, context.prototypes, first, has_public, fresh)
            log.reserve(context.round, training, planned)
            on = self._sum_grid if plan.shared else None
            return DpSgdLocalData(data, plan, ReleaseAllowance(planned), self._source(context), log, on)

        kept = replace(withheld, min_count=0.0, min_examples=0, noise_leaves=plan.shared is not None)
        return with_prototype_filter(open_private, kept)

    def survey_release(self, index: int, withheld: DisclosureLimits = NO_LIMITS) -> str | None:
        """Return the name of the survey's only release in the cache; None for other runs."""
        if (question := self.run.question) is None:
            return None
        query = withheld.of(question)
        return release_name(query, self.plan(index).survey[0].mechanism.noise)

    def _source(self, context: RoundContext) -> NoiseSource:
        if self.terms.rng == "secure":
            return SecureNoise()
        return SeededNoise(context.seed, "round", context.round, "silo", context.silo, "privacy")

    def releases(self, index: int, prototypes: bool = True, counts: bool = True) -> list[Release]:
        plan, member, releases = self.plan(index), self.run.manifest.members[index], list[Release]()
        for t in self.run.training_rounds[index]:
            releases += plan.releases(t, True, prototypes and member.prototypes, counts)
            counts = False
        return releases + plan.releases(self.run.manifest.rounds, False)

    def project(self) -> list[Projection]:
        projections = []
        for k in range(len(self.run.manifest.members)):
            main = ("training", "moments", "survey")
            steps = [r.mechanism for r in self.releases(k) if r.purpose in main and r.collection == TRAIN]
            rate, least = (steps[0].rate, min(m.noise for m in steps)) if steps else (0.0, 0.0)
            number = sum(m.steps for m in steps)
            plan = self.plan(k)
            projections.append(self.projection(k, plan.costliest, plan.reserve, rate, number, least))
        return projections

    def report(self, logs: Sequence[Sequence[Release]]) -> Mapping[str, object]:
        return self.spent(
            logs,
            "epsilon_prv",
            unit="record, or group if the data have groups",
            adjacency="add or remove one unit",
            accountant="RDP; PRV for information; exact Gaussian curve where every release is over all records",
            noise=PLACEMENTS[self.terms.placement],
            epsilon_test_data=max(epsilon_of(mechanisms(log, TEST), self.terms.delta) for log in logs),
            note=CLASSES_SHOW,
        )

    def bounds(self, policy: PrivacyFilter | None = None) -> Mapping[str, tuple[Bound, ...]]:
        """Bound training records by the run's epsilon, test records by its evaluations, both by the policy."""
        of_run, terms = PrivacyFilter.of(self.terms.epsilon, self.terms.delta), self.terms
        measured, manifest = self.run.method.has_global_model, self.run.manifest
        personal, again = manifest.personal, self.plan(0).reserve
        at_end = 1 + again if self.run.method.personal_at_end else manifest.rounds + again
        times = (manifest.rounds + again) * measured + at_end * personal + measured
        released = [Mechanism(terms.metric_noise, 1.0, times)] if times and terms.test_data == "private" else []
        if self.run.question is not None:
            released += [Mechanism(self.plan(0).survey[0].mechanism.noise, 1.0, 1 + again)]
        more = (policy,) if policy else ()
        return {TRAIN: (of_run, *more), TEST: (RdpBound.of(released, of_run.order), *more)}

    def noise(self) -> RunNoise:
        """Return the noise of the results; without a global model no evaluation is released.

        Rows of prototypes are at most as long as their bound, or of length 1 if the method normalises them.
        """
        terms, sent = self.terms, None
        if terms.test_data == "private" and self.run.method.has_global_model:
            sent = EvaluationNoise(terms.metric_noise * math.hypot(1.0, 1.0) * GRID_SLACK, suppressed=True)
        length = max(terms.prototype_bound, 1.0)
        std = terms.prototype_noise * math.hypot(1.0, terms.count_weight) * GRID_SLACK
        return self._noise(sent, NoisyRows(length, std / terms.count_weight, std * length))

    def made_up_step(self, index: int, context: RoundContext, device: torch.device) -> MadeUpStep:
        """Measure a step with the fixed batch rows; a coupled term needs a microbatch, at most about twice its mean."""
        run, plan = self.run, self.plan(index)
        schema = run.schema

        def opened(number: int) -> LocalData:
            from privacy.mechanisms.record.private_data import DpSgdLocalData

            rates = SamplingSchedule(one_step(run.manifest.train, number), number)
            needs = dry_run(run.method, run.new_model(), schema, rates.train, rates.steps, probe=False)
            terms = replace(plan.terms, physical_batch=number)
            small = replace(plan, terms=terms, rates=rates, steps_per_call=tuple(needs.steps), closing_steps=())
            examples, planned = MadeUpExamples(schema, number), ReleaseAllowance(small.releases(context.round, True))
            data = RoundData(examples, examples, rates.train, context, device)
            return DpSgdLocalData(data, small, planned, self._source(context))

        return MadeUpStep(max(plan.rows, 2 * plan.terms.microbatch if plan.coupled else 0), ROWS, opened)

    def require_submission(self, submits: bool) -> None:
        if self.terms.distributed and not submits:
            raise RefusedError(
                "E-POLICY-05",
                "this hospital sends no sums over classes, so it would not add its share of the noise "
                "(privacy.placement=distributed): start a run with privacy.placement=local",
            )

    def check_part(self, index: int, floors: Floors, unit: str, declared: float) -> None:
        plan = self.plan(index)
        floors.check_plan(plan, unit, declared)
        if plan.shared:
            floors.check_alone(min(plan.moments(round).alone.noise for round in plan.moment_shares))
