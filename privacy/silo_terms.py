"""The terms of a run with silo-level differential privacy, and the noise that follows from them.

All releases are Gaussian with sampling rate 1: the coordinator picks the cohort, and roster and cohorts are public, so
partial participation amplifies nothing; a round that a silo does not take part in costs it nothing. Sums of Gaussian
releases of noise z_i are one with 1/z^2 = sum 1/z_i^2, whose exact curve is (Balle and Wang, ICML 2018, theorem 8)

    delta(eps) = Phi(1/(2z) - eps z) - e^eps Phi(-1/(2z) - eps z)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scipy.stats import norm

from fl_core import cohort
from fl_core.errors import ConfigError
from fl_core.manifest import RunManifest
from fl_core.options import from_mapping
from privacy.accounting import Mechanism, solve_noise

PLACES = ("local", "central")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloTerms:
    """Silo-level differential privacy of one run: what a hospital's whole data changes is hidden.

    epsilon, delta: the budget of the whole run for each hospital; epsilon = inf is the run without privacy
    clip: C, bound of the joint norm of all that a silo sends in round 0; clip_decay: C_t = C * clip_decay^t, public
    placement: "local" (each silo adds noise of std z C) or "central" (the coordinator, who is trusted, adds it once)
    prototype_scale: public factor of parts with one weight per class, in units of the largest declared size
    test_data: "private" (evaluation sums are clipped to metric_clip examples, noisy, charged) or "public"
    metric_noise: noise / sensitivity of evaluation   allow_large: accept more coordinates than the noise leaves useful
    rng: "secure", or "test", which is reproducible and private to nobody.
    """

    epsilon: float = 8.0
    delta: float = 1e-5
    clip: float = 1.0
    clip_decay: float = 1.0
    placement: str = "local"
    prototype_scale: float = 1.0
    metric_clip: float = 100.0
    metric_noise: float = 20.0
    test_data: str = "private"
    allow_large: bool = False
    rng: str = "secure"

    def __post_init__(self) -> None:
        for name in ("epsilon", "clip", "clip_decay", "prototype_scale", "metric_clip", "metric_noise"):
            most = math.inf
            if not 0 < (found := getattr(self, name)) < most and not (name == "epsilon" and found == most):
                raise ConfigError("E-PRIV-11", f"privacy.{name}: expected a number > 0, found {found}")
        if self.clip_decay > 1:
            raise ConfigError("E-PRIV-11", f"privacy.clip_decay: expected at most 1, found {self.clip_decay}")
        if not 0 < self.delta < 1e-3:
            raise ConfigError("E-PRIV-11", f"privacy.delta: expected 0 < delta < 0.001, found {self.delta}")
        valid: Mapping[str, tuple[str, ...]] = {
            "placement": PLACES, "rng": ("secure", "test"), "test_data": ("private", "public"),
        }  # fmt: skip
        for name, choices in valid.items():
            if (found := getattr(self, name)) not in choices:
                raise ConfigError("E-PRIV-11", f"privacy.{name}: expected one of {choices}, found {found!r}")

    @classmethod
    def of(cls, options: Mapping[str, object]) -> SiloTerms:
        """Read the options of the profile; raises ConfigError (E-CFG-21, E-CFG-22, E-PRIV-11)."""
        return from_mapping(cls, "privacy profile dp_silo_small", options)

    def clip_at(self, round: int) -> float:
        """Return C_t, a public schedule."""
        return self.clip * self.clip_decay**round

    def history(self, noise: float, trained: int, measured: int) -> list[Mechanism]:
        """List one silo's releases: `trained` rounds of updates at noise z, `measured` evaluations if charged."""
        found = [Mechanism(noise, 1.0, trained)] if trained else []
        return found + ([Mechanism(self.metric_noise, 1.0, measured)] if self.test_data == "private" else [])

    def noise(self, trained: int, measured: int) -> float:
        """Return the least z with which so many rounds and evaluations fit the budget."""
        return solve_noise(self.epsilon, self.delta, lambda z: self.history(z, trained, measured))


def participations(manifest: RunManifest) -> list[int]:
    """Count the training rounds of each member: cohorts follow from the seed."""
    counts = [0] * len(manifest.members)
    for t in range(manifest.rounds):
        for k in cohort.sample(manifest.seed, t, len(counts), manifest.cohort):
            counts[k] += 1
    return counts


def analytic_delta(noise: float, epsilon: float) -> float:
    """Return the exact delta of one Gaussian release of noise / sensitivity `noise`."""
    first = norm.cdf(1 / (2 * noise) - epsilon * noise)
    return float(first - math.exp(epsilon + norm.logcdf(-1 / (2 * noise) - epsilon * noise)))


def analytic_noise(epsilon: float, delta: float, releases: int = 1) -> float:
    """Return the z with which so many Gaussian releases are exactly (epsilon, delta)-private together."""
    return math.sqrt(releases) * _root(lambda z: analytic_delta(z, epsilon) > delta, 1e-3, 1e4)


def analytic_epsilon(history: list[Mechanism], delta: float) -> float:
    """Return the exact epsilon of releases of rate 1; raises ConfigError (E-PRIV-11) on a subsampled one."""
    if any(m.rate != 1 for m in history):
        raise ConfigError("E-PRIV-11", f"expected releases of rate 1, found {history}")
    if not history:
        return 0.0
    noise = sum(m.steps / m.noise**2 for m in history) ** -0.5
    return _root(lambda e: analytic_delta(noise, e) > delta, 0.0, 1e4)


def _root(low_side: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if low_side(middle) else (low, middle)
    return high
