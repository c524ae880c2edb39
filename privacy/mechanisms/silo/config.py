"""The terms of a run with silo-level differential privacy, and the resulting noise.

All releases are Gaussian with sampling rate 1: cohorts are public, so partial participation gives no amplification.
Gaussian releases of noise z_i together are one with 1/z^2 = sum 1/z_i^2, whose exact curve is (Balle and Wang, ICML
2018, theorem 8)

delta(eps) = Phi(1/(2z) - eps z) - e^eps Phi(-1/(2z) - eps z)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from scipy.special import log_ndtr, ndtr  # the normal distribution; scipy.stats takes a second to import

from fl_core.converter import read_options
from fl_core.errors import ConfigError
from fl_core.validate import Positive, at_most, below, bounded, one_of
from privacy.accounting.accountant import Mechanism, solve_noise
from privacy.accounting.record_config import DpConfig

BIT = 0.5
"""How far a silo can move the sum of the bits, which are -1/2 and 1/2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloDpConfig(DpConfig):
    """Silo-level differential privacy of one run: it hides the effect of a hospital's whole data.

    clip: C, bound of the joint norm of a silo's update in round 0; clip_decay: C_t = C * clip_decay^t, public
    clipping: "fixed", or "adaptive": C follows the quantile `target_quantile` of the silos' norms at the rate
    `clip_rate` (adaptive_clipping.py), for which each silo releases a bit per round; bit_noise: std of the noise on it
    placement: "local" (each silo adds noise of std z C), "central" (the trusted coordinator adds it once) or
    "distributed" (each silo adds a part under masks; noise on evaluations stays its own)
    prototype_scale: public factor of parts with one weight per class, in units of the largest declared size, or of one
    example with uniform weights   metric_clip: examples that evaluation sums are clipped to
    allow_large: accept more coordinates than are useful under the noise.
    """

    clip_decay: Annotated[Positive, bounded(at_most, 1)] = 1.0
    clipping: Annotated[str, bounded(one_of, ("fixed", "adaptive"))] = "fixed"
    target_quantile: Annotated[Positive, bounded(below, 1)] = 0.5
    clip_rate: Positive = 0.2
    bit_noise: float = 0.0
    placement: Annotated[str, bounded(one_of, ("local", "central", "distributed"))] = "local"
    prototype_scale: Positive = 1.0
    metric_clip: Positive = 100.0
    allow_large: bool = False

    def __post_init__(self) -> None:
        DpConfig.__post_init__(self)
        if not self.adaptive:
            if self.bit_noise:
                raise ConfigError(
                    "E-PRIV-20", "privacy.bit_noise: expected 0 with clipping=fixed, which releases no bit"
                )
            return
        if not 0 < self.bit_noise < math.inf:
            raise ConfigError(
                "E-PRIV-20",
                f"privacy.bit_noise: expected a number > 0 with clipping=adaptive, found {self.bit_noise}: the bits "
                "that the clip follows are a release of their own, whose noise the plan must state",
            )
        if self.clip_decay != 1:
            raise ConfigError("E-PRIV-20", "privacy.clip_decay: expected 1 with clipping=adaptive, which sets the clip")

    @property
    def central(self) -> bool:
        return self.placement == "central"

    def derived(self, rounds: int) -> Mapping[str, float]:
        return {"privacy.clip x privacy.clip_decay^rounds": self.clip_at(rounds)}

    @property
    def adaptive(self) -> bool:
        return self.clipping == "adaptive"

    @classmethod
    def of(cls, options: Mapping[str, object]) -> SiloDpConfig:
        """Read the options of the profile; raises ConfigError (E-CFG-01, E-CFG-02, E-PRIV-20)."""
        return read_options(cls, "privacy profile dp_silo_small", options)

    def clip_at(self, round: int) -> float:
        return self.clip * self.clip_decay**round

    @property
    def bit(self) -> Mechanism:
        return Mechanism(self.bit_noise / BIT)

    def history(self, noise: float, trained: int, measured: int) -> list[Mechanism]:
        """List one silo's releases: `trained` rounds of updates at noise z, and `measured` evaluations if charged."""
        releases = [Mechanism(noise, 1.0, trained)] if trained else []
        if trained and self.adaptive:
            releases.append(Mechanism(self.bit.noise, 1.0, trained))
        return releases + ([Mechanism(self.metric_noise, 1.0, measured)] if self.test_data == "private" else [])

    def noise(self, trained: int, measured: int) -> float:
        """Return the smallest z of the update with which so many rounds and evaluations fit, including the reserve."""
        more = self.reserve_rounds
        return solve_noise(self.epsilon, self.delta, lambda z: self.history(z, trained + more, measured + more))


def analytic_delta(noise: float, epsilon: float) -> float:
    """Return the exact delta of one Gaussian release of noise / sensitivity `noise`."""
    first = ndtr(1 / (2 * noise) - epsilon * noise)
    return float(first - math.exp(epsilon + log_ndtr(-1 / (2 * noise) - epsilon * noise)))


def analytic_noise(epsilon: float, delta: float, releases: int = 1) -> float:
    """Return the z with which so many Gaussian releases are exactly (epsilon, delta)-private together."""
    return math.sqrt(releases) * _root(lambda z: analytic_delta(z, epsilon) > delta, 1e-3, 1e4)


def analytic_epsilon(history: list[Mechanism], delta: float) -> float:
    """Return the exact epsilon of releases of rate 1; raises ConfigError (E-PRIV-20) on a subsampled one."""
    if any(m.rate != 1 for m in history):
        raise ConfigError("E-PRIV-20", f"expected releases of rate 1, found {history}")
    if not history:
        return 0.0
    noise = sum(m.steps / m.noise**2 for m in history) ** -0.5
    return _root(lambda e: analytic_delta(noise, e) > delta, 0.0, 1e4)


def _root(low_side: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if low_side(middle) else (low, middle)
    return high
