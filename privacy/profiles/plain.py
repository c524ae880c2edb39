"""A run without privacy. Bundles are sent as float32 and rounded to the fixed-point grid when they are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import DataFactory
from privacy.accounting.accountant import Bound, PrivacyFilter
from privacy.accounting.release_plan import Release
from privacy.profiles.base import PrivacyProfile, Projection
from privacy.profiles.prototype_filter import NO_LIMITS, DisclosureLimits, with_prototype_filter
from privacy.release_log import ReleaseLog


class PlainProfile(PrivacyProfile):
    """Profile "none", and any other profile at epsilon = inf."""

    def data_factory(self, index: int, log: ReleaseLog, withheld: DisclosureLimits = NO_LIMITS) -> DataFactory:
        filtered = withheld if self.run.method.exact else replace(withheld, min_examples=0)
        return with_prototype_filter(PlainLocalData, filtered)

    def releases(self, index: int, prototypes: bool = True, counts: bool = True) -> list[Release]:
        return []

    def project(self) -> list[Projection]:
        return []

    def report(self, logs: Sequence[Sequence[Release]]) -> None:
        return None

    def bounds(self, policy: PrivacyFilter | None = None) -> Mapping[str, tuple[Bound, ...]]:
        return {}
