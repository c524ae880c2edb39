"""The terms of a private run, as its manifest states them: what is bounded, how noisy it is, and to what budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_core import validate
from fl_core.converter import read_options

COUPLED = ("split", "micro", "off")
RNG = ("secure", "test")
TEST_DATA = ("private", "public")
WEIGHTS = ("size", "uniform")
MOST_RESERVED = 1000
MOST_DELTA = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class DpConfig:
    """What both kinds of differential privacy state.

    epsilon, delta: the budget of the whole run, for each hospital on its own; epsilon = inf is the plain run
    clip: bound of a unit's gradient, or of a silo's update   metric_noise: noise / sensitivity of evaluation
    test_data: "private" (evaluation is noisy and charged) or "public", where test examples are published anyway
    weights: "size" (hospitals count by declared size) or "uniform" (each counts once, whatever its size)
    reserve_rounds: repetitions of the costliest round that fit into the budget beside the run, after a crash
    rng: "secure", or "test", which is reproducible and private to nobody.
    """

    epsilon: float = 8.0
    delta: float = 1e-5
    clip: float = 1.0
    metric_noise: float = 20.0
    test_data: str = "private"
    weights: str = "size"
    reserve_rounds: int = 1
    rng: str = "secure"

    def __post_init__(self) -> None:
        validate.positive_or_infinite("E-PRIV-20", "privacy", epsilon=self.epsilon)
        validate.positive("E-PRIV-20", "privacy", delta=self.delta, clip=self.clip, metric_noise=self.metric_noise)
        validate.below("E-PRIV-20", "privacy", MOST_DELTA, delta=self.delta)
        validate.between("E-PRIV-20", "privacy", 0, MOST_RESERVED, reserve_rounds=self.reserve_rounds)
        validate.one_of(
            "E-PRIV-20",
            "privacy",
            weights=(self.weights, WEIGHTS),
            rng=(self.rng, RNG),
            test_data=(self.test_data, TEST_DATA),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordDpConfig(DpConfig):
    """Record-level differential privacy of one run; the noise of training is solved from the budget.

    clip: C1, bound of one unit's gradient   physical_batch: examples whose gradients are held at once
    coupled: treatment of losses that mix examples: "split" (clip C1 per unit, C2 = coupled_clip_ratio * C1 per
    microbatch; sensitivity C1 + 2 C2), "micro" (everything per microbatch; 2 C1) or "off" (such terms are left out)
    statistics_bound, statistics_noise: without effect; manifests carry them
    microbatch: expected examples of a microbatch   coupled_every: steps from one coupled term to the next
    prototype_bound: R, bound of one unit's feature offset   count_weight: lambda / R, the weight of counts in the joint
    query   prototype_noise: noise / sensitivity of a prototype release   prototype_every: rounds between releases
    min_count: classes of fewer units (by the noisy count, plus two standard deviations) are suppressed; 0: none
    count_noise: noise / sensitivity of the class counts   max_per_unit: examples of one unit in a step (0: all).
    """

    coupled: str = "split"
    coupled_clip_ratio: float = 0.25
    coupled_every: int = 1
    microbatch: int = 16
    physical_batch: int = 64
    prototype_bound: float = 1.0
    count_weight: float = 0.5
    prototype_noise: float = 8.0
    prototype_every: int = 5
    min_count: float = 0.0
    count_noise: float = 20.0
    statistics_bound: float = 1.0
    statistics_noise: float = 8.0
    max_per_unit: int = 0

    def __post_init__(self) -> None:
        DpConfig.__post_init__(self)
        validate.positive(
            "E-PRIV-20",
            "privacy",
            coupled_clip_ratio=self.coupled_clip_ratio,
            prototype_bound=self.prototype_bound,
            count_weight=self.count_weight,
            prototype_noise=self.prototype_noise,
            count_noise=self.count_noise,
            statistics_bound=self.statistics_bound,
            statistics_noise=self.statistics_noise,
        )
        validate.at_least(
            "E-PRIV-20",
            "privacy",
            1,
            microbatch=self.microbatch,
            physical_batch=self.physical_batch,
            prototype_every=self.prototype_every,
            coupled_every=self.coupled_every,
        )
        validate.at_least("E-PRIV-20", "privacy", 0, min_count=self.min_count, max_per_unit=self.max_per_unit)
        validate.one_of("E-PRIV-20", "privacy", coupled=(self.coupled, COUPLED))

    @classmethod
    def of(cls, options: Mapping[str, object]) -> RecordDpConfig:
        """Read the options of the profile; raises ConfigError (E-CFG-01, E-CFG-02, E-PRIV-20)."""
        return read_options(cls, "privacy profile dp_record", options)

    @property
    def coupled_clip(self) -> float:
        """Return C2, the bound of one microbatch's coupled gradient."""
        return self.coupled_clip_ratio * self.clip

    def sensitivity(self, coupled: bool) -> float:
        """Return how far one unit can move the sum of a training step; coupled: the step has a coupled term."""
        if coupled and self.coupled == "micro":
            return 2 * self.clip
        return self.clip + (2 * self.coupled_clip if coupled and self.coupled == "split" else 0.0)


LEAST_NOMINAL = 100
"""What every hospital of at most so many units declares of its size."""


def round_to_two_digits(n: int) -> int:
    """Round a number of units up to two significant digits, to at least 100: what a hospital declares of its size.

    A size above the true one is sound: it divides, and sets the sampling rate.
    """
    step = int(10 ** max(1, len(str(n)) - 2))
    return max(LEAST_NOMINAL, -(-n // step) * step)
