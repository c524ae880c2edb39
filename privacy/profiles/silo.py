"""Silo-level differential privacy of small updates: it hides the effect of a hospital's whole data.

Examples are read as in a plain run; the guard of `privacy.mechanisms.silo.guard` bounds and noises the update. Its
release is charged twice. All data of a hospital move a clipped vector by at most C: a Gaussian release of noise z,
charged to the hospital. One record moves it within the ball of radius C, by at most 2 C: a release of noise z / 2,
charged to the records, whose RDP is at most four times the hospital's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.options import Mean, NormClipped, Options
from fl_core.errors import ConfigError, RefusedError
from fl_core.rounds.run_setup import Guards
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import DataFactory, LocalData, RoundData
from fl_core.types.values import Layout
from privacy.accounting.accountant import Bound, Mechanism, PrivacyFilter, RdpBound, epsilon_of
from privacy.accounting.release_plan import HOSPITAL, TEST, TRAIN, Release
from privacy.accounting.uncertainty import GRID_SLACK, EvaluationNoise, RunNoise
from privacy.mechanisms.silo import adaptive_clipping
from privacy.mechanisms.silo.config import SiloDpConfig
from privacy.mechanisms.silo.guard import SiloDpGuard, coordinates, silo_level
from privacy.profiles.base import PLACEMENTS, Config, PrivateProfile, Projection, mechanisms
from privacy.profiles.prototype_filter import NO_LIMITS, DisclosureLimits, with_prototype_filter
from privacy.release_log import ReleaseLog

if TYPE_CHECKING:
    from privacy.policy_terms import Floors

log = logging.getLogger(__name__)

RECORD_OF_A_SILO = 4.0
"""RDP of a record per RDP of its hospital, which is alpha mu^2 / 2: alpha / (2 (z/2)^2) over alpha / (2 z^2)."""
HOSPITAL_HIDDEN = (
    "Silo-level privacy hides, within epsilon, the influence of all data of a hospital, and so which classes it "
    "treats. It does not hide that the hospital takes part."
)


class _HospitalData(PlainLocalData):
    """Plain local data; training without a step is only logged here, since an error would reveal the data."""

    def _refuse(self, error: RefusedError) -> None:
        log.warning("no training in this round: %s", error)


def silo_releases(guard: SiloDpGuard, train: bool) -> list[Release]:
    terms, made = guard.terms, list[Release]()
    train = train and coordinates(guard.layout) > 0  # a method may send no update
    if train:
        made.append(Release("update", TRAIN, Mechanism(guard.noise), guard.shared))
    if train and terms.adaptive:
        made.append(Release("clip bit", TRAIN, terms.bit, guard.shared))
    if terms.test_data == "private":
        made.append(Release("evaluation", TEST, Mechanism(terms.metric_noise)))
    whole = [replace(r, collection=HOSPITAL) for r in made]
    return whole + [replace(r, mechanism=replace(r.mechanism, noise=r.mechanism.noise / 2)) for r in made]


class SiloProfile(PrivateProfile):
    """Profile "dp_silo_small": the epsilon of a run holds for each hospital as a whole."""

    config = SiloDpConfig
    subject = "the whole hospital"
    promised = HOSPITAL
    collections = (TRAIN, TEST, HOSPITAL)
    terms: SiloDpConfig

    @classmethod
    def extra_parts(cls, terms: Config) -> Layout:
        adaptive = isinstance(terms, SiloDpConfig) and terms.adaptive
        return {adaptive_clipping.PART: adaptive_clipping.SPEC} if adaptive else {}

    @cached_property
    def guard(self) -> SiloDpGuard:
        """The guard of the run, planned once; raises as `silo_level`."""
        return silo_level(self.run)

    def guards(self) -> Guards:
        return Guards((self.guard,), (FixedPoint(self.run.manifest.grid), self.guard))

    def aggregator(self, chosen: Options) -> Options:
        """Allow only sums: each silo clips its own update, and a bound from others would increase one silo's effect.

        A silo that does not clip is not detected.
        """
        if not isinstance(chosen, Mean | NormClipped):
            raise ConfigError(
                "E-CFG-08", f"expected aggregator=mean, because silo-level privacy protects sums, found {chosen.name}"
            )
        return Mean()

    def data_factory(self, index: int, log: ReleaseLog, withheld: DisclosureLimits = NO_LIMITS) -> DataFactory:
        """Open plain data; progress has no step numbers, since the number of steps reveals the number of records."""
        rounds = self.run.manifest.rounds

        def open_plain(data: RoundData) -> LocalData:
            progress, training = data.progress, data.context.round < rounds
            log.reserve(data.context.round, training, silo_releases(self.guard, training))
            return _HospitalData(replace(data, progress=progress and (lambda *_: progress(0, 0))))

        return with_prototype_filter(open_plain, replace(withheld, min_examples=0))

    def releases(self, index: int, prototypes: bool = True, counts: bool = True) -> list[Release]:
        rounds = len(self.run.training_rounds[index])
        return silo_releases(self.guard, True) * rounds + silo_releases(self.guard, False)

    def project(self) -> list[Projection]:
        costliest, reserve = (
            silo_releases(self.guard, True),
            self.terms.reserved(max(map(len, self.run.training_rounds))),
        )
        return [
            self.projection(k, costliest, reserve, 1.0, len(taken), self.guard.noise)
            for k, taken in enumerate(self.run.training_rounds)
        ]

    def report(self, logs: Sequence[Sequence[Release]]) -> Mapping[str, object]:
        """Report the cost. epsilon_record: of a single training record, for which the noise multiplier is halved."""
        terms, names = self.terms, [m.name for m in self.run.manifest.members]
        return self.spent(
            logs,
            "epsilon_analytic",
            unit="hospital: all its records",
            adjacency="add or remove one hospital's data; its place in the roster stays",
            accountant="exact Gaussian curve, q = 1 per round taken part in",
            noise=PLACEMENTS[terms.placement],
            noise_multiplier=self.guard.noise,
            coordinates=coordinates(self.run.manifest.layout),
            epsilon_record=max(epsilon_of(mechanisms(log, TRAIN), terms.delta) for log in logs),
            clipping=terms.clipping,
            rounds_by_silo=dict(zip(names, map(len, self.run.training_rounds), strict=True)),
            test_data=terms.test_data,
            note=HOSPITAL_HIDDEN,
        )

    def bounds(self, policy: PrivacyFilter | None = None) -> Mapping[str, tuple[Bound, ...]]:
        """Bound the hospital's charges by the run's and the policy's epsilon, its records' by four times that RDP."""
        of_run = PrivacyFilter.of(self.terms.epsilon, self.terms.delta)
        promised = (of_run, policy) if policy else (of_run,)
        record = tuple(RdpBound(f.order, RECORD_OF_A_SILO * f.order * f.mu**2 / 2) for f in promised)
        return {HOSPITAL: promised, TRAIN: record, TEST: record}

    def noise(self) -> RunNoise:
        """Return the noise of the results; without a global model there are no evaluations."""
        terms = self.terms
        if terms.test_data == "public":
            return self._noise(None)
        std = terms.metric_clip * terms.metric_noise * GRID_SLACK if self.run.method.has_global_model else math.inf
        return self._noise(EvaluationNoise(std, central=terms.central))

    @property
    def clipped(self) -> Mapping[str, float | None]:
        return self.guard.value_bounds()

    def check_part(self, index: int, floors: Floors, unit: str, declared: float) -> None:
        floors.check_update(self.guard.noise)
        if self.guard.shared:
            floors.check_alone(self.guard.shared.alone(self.guard.noise))
