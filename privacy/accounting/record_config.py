"""The terms of a private run in its manifest: bounds, noise, and budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fl_core import validate
from fl_core.converter import read_options
from fl_core.validate import (
    Count,
    NonNegative,
    Positive,
    PositiveCount,
    PositiveOrInfinite,
    below,
    between,
    bounded,
    one_of,
)

COUPLED = ("split", "micro", "off")
MAX_RESERVED = 1000
WRITTEN = {"reserve_rounds": 1}
"""Values of options that a manifest omits, if the present default differs from the one at that time."""
Delta = Annotated[Positive, bounded(below, 1e-3)]
Rng = Annotated[str, bounded(one_of, ("secure", "test"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DpConfig:
    """Terms of both kinds of differential privacy.

    Attributes:
        epsilon, delta: the budget of the whole run, for each hospital separately; epsilon = inf is the plain run
        clip: bound of a unit's gradient, or of a silo's update
        metric_noise: noise / sensitivity of evaluation
        test_data: "private" (evaluation is noisy and charged) or "public", if test examples are published anyway
        weights: "size" (hospitals count by declared size) or "uniform" (each counts once, whatever its size)
        reserve_rounds: repetitions of the costliest round, after a crash, that the budget covers in addition to the
            run; -1: one in a run of several rounds, none in a run of one round, which is submitted again instead
        rng: "secure", or "test", which is reproducible and gives no privacy
        placement: "local" (each silo's noise is enough alone) or "distributed" (each adds a part, under masks)
    """

    epsilon: PositiveOrInfinite = 8.0
    delta: Delta = 1e-5
    clip: Positive = 1.0
    metric_noise: Positive = 20.0
    test_data: Annotated[str, bounded(one_of, ("private", "public"))] = "private"
    weights: Annotated[str, bounded(one_of, ("size", "uniform"))] = "size"
    reserve_rounds: Annotated[int, bounded(between, -1, MAX_RESERVED)] = -1
    rng: Rng = "secure"
    placement: Annotated[str, bounded(one_of, ("local", "distributed"))] = "local"

    def __post_init__(self) -> None:
        validate.declared("E-PRIV-20", "privacy", self)

    @property
    def central(self) -> bool:
        """Whether the coordinator adds the noise, and so must be trusted."""
        return False

    @property
    def distributed(self) -> bool:
        """Whether noise is shared, so that only sums over hospitals have enough noise (`shared_noise`)."""
        return self.placement == "distributed"

    def reserved(self, rounds: int) -> int:
        """Return the number of reserved repetitions. rounds: number of rounds with a release."""
        return int(rounds > 1) if self.reserve_rounds < 0 else self.reserve_rounds

    def derived(self, rounds: int) -> Mapping[str, float]:  # noqa: ARG002
        """Return values derived from options that have ranges of their own, by name."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordDpConfig(DpConfig):
    """Record-level differential privacy of one run; the noise of training is solved from the budget.

    clip: C1, bound of one unit's gradient   physical_batch: examples whose gradients are computed at once
    coupled: treatment of losses that mix examples: "split" (clip C1 per unit, C2 = coupled_clip_ratio * C1 per
    microbatch; sensitivity C1 + 2 C2), "micro" (everything per microbatch; 2 C1) or "off" (such terms are left out)
    statistics_bound, statistics_noise: no effect, but manifests contain them
    microbatch: expected examples of a microbatch   coupled_every: steps from one coupled term to the next
    prototype_bound: R, bound of one unit's feature offset   count_weight: lambda / R, the weight of counts in the
    joint query   prototype_noise: noise / sensitivity of a prototype release   prototype_every: rounds between
    releases
    min_count: classes of fewer units (by the noisy count, plus two standard deviations) are suppressed; 0: none
    count_noise: noise / sensitivity of the class counts   max_per_unit: examples of one unit in a step (0: all)
    placement: "distributed" is only for the single release of a method without training steps (analytic); noise on
    class counts and evaluations stays each silo's own.
    """

    omitted_at_default: ClassVar[frozenset[str]] = frozenset({"placement"})
    coupled: Annotated[str, bounded(one_of, COUPLED)] = "split"
    coupled_clip_ratio: Positive = 0.25
    coupled_every: PositiveCount = 1
    microbatch: PositiveCount = 16
    physical_batch: PositiveCount = 64
    prototype_bound: Positive = 1.0
    count_weight: Positive = 0.5
    prototype_noise: Positive = 8.0
    prototype_every: PositiveCount = 5
    min_count: NonNegative = 0.0
    count_noise: Positive = 20.0
    statistics_bound: Positive = 1.0
    statistics_noise: Positive = 8.0
    max_per_unit: Count = 0

    @classmethod
    def of(cls, options: Mapping[str, object]) -> RecordDpConfig:
        """Read the options of the profile; raises ConfigError (E-CFG-01, E-CFG-02, E-PRIV-20)."""
        return read_options(cls, "privacy profile dp_record", {**WRITTEN, **options})

    @property
    def coupled_clip(self) -> float:
        """Return C2, the bound of one microbatch's coupled gradient."""
        return self.coupled_clip_ratio * self.clip

    def derived(self, rounds: int) -> Mapping[str, float]:  # noqa: ARG002
        return {
            "privacy.clip x privacy.coupled_clip_ratio": self.coupled_clip,
            "privacy.prototype_bound x privacy.count_weight": self.prototype_bound * self.count_weight,
        }

    def sensitivity(self, coupled: bool) -> float:
        """Return the most that one unit can move the sum of a training step. coupled: with a coupled term."""
        if coupled and self.coupled == "micro":
            return 2 * self.clip
        return self.clip + (2 * self.coupled_clip if coupled and self.coupled == "split" else 0.0)


MIN_NOMINAL = 100
"""Smallest declared size, also of smaller hospitals."""


def round_to_two_digits(n: int) -> int:
    """Round a number of units up to two significant digits, at least 100: the declared size of a hospital.

    A size above the true one is safe: it is the divisor of sums and determines the sampling rate.
    """
    step = int(10 ** max(1, len(str(n)) - 2))
    return max(MIN_NOMINAL, -(-n // step) * step)
