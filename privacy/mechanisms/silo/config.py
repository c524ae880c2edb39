"""The terms of a run with silo-level differential privacy, and the resulting noise.

All releases are Gaussian with sampling rate 1: cohorts are public, so partial participation gives no amplification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fl_core.converter import read_options
from fl_core.errors import ConfigError
from fl_core.validate import Positive, at_most, below, bounded, one_of
from privacy.accounting.accountant import Mechanism, solve_noise
from privacy.accounting.record_config import WRITTEN, DpConfig

BIT = 0.5
"""Sensitivity of the sum of the bits, which are -1/2 and 1/2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloDpConfig(DpConfig):
    """Silo-level differential privacy of one run: it hides the effect of a hospital's whole data.

    clip: C, bound of the joint norm of a silo's update in round 0; clip_decay: C_t = C * clip_decay^t, public
    clipping: "fixed", or "adaptive": C follows the quantile `target_quantile` of the silos' norms at the rate
    `clip_rate` (adaptive_clipping.py); for this, each silo releases a bit per round   bit_noise: std of the bit's noise
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
                "that adapt the clip are a separate release, and the plan must state its noise",
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
        return read_options(cls, "privacy profile dp_silo_small", {**WRITTEN, **options})

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
        """Return the smallest z of updates with which all rounds, evaluations and the reserve fit the budget."""
        more = self.reserved(trained)
        return solve_noise(self.epsilon, self.delta, lambda z: self.history(z, trained + more, measured + more))
