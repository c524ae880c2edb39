"""A run without privacy: bundles travel as float32 and are put on the fixed-point grid when they are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_core.aggregation.fixed_point import FixedPoint
from fl_core.errors import ConfigError
from fl_core.rounds.run_setup import Guards
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import DataFactory
from privacy.accounting.accountant import Bound, Filter
from privacy.accounting.release_plan import Release
from privacy.accounting.uncertainty import EvaluationNoise
from privacy.profiles.base import Config, PrivacyProfile, Projection
from privacy.profiles.prototype_filter import with_prototype_filter
from privacy.release_log import ReleaseLog


class PlainProfile(PrivacyProfile):
    """Profile "none", and every other one at epsilon = inf."""

    @classmethod
    def read(cls, options: Mapping[str, object]) -> Config | None:
        if options:
            raise ConfigError("E-PRIV-20", f"profile 'none' has no options, found {dict(options)}")
        return None

    def guards(self) -> Guards:
        return Guards((), (FixedPoint(self.run.manifest.grid),))

    def data_factory(
        self, index: int, log: ReleaseLog, hidden: frozenset[int] = frozenset(), min_count: float = 0.0
    ) -> DataFactory:
        return with_prototype_filter(PlainLocalData, hidden, min_count)

    def releases(self, index: int, prototypes: bool = True, counts: bool = True) -> list[Release]:
        return []

    def project(self) -> list[Projection]:
        return []

    def report(self, logs: Sequence[Sequence[Release]]) -> None:
        return None

    def bounds(self, policy: Filter | None = None) -> Mapping[str, tuple[Bound, ...]]:
        return {}

    def evaluation_noise(self) -> EvaluationNoise | None:
        return None

    def check_terms(self, floors: object) -> None:
        """Without options there is nothing to forbid."""

    def check_part(self, index: int, policy: object, unit: str, declared: float) -> None:
        """Nothing is released of which a policy says how noisy it must be."""
