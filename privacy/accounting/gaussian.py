"""Gaussian releases over all records: their exact privacy curve, also when each is chosen after seeing the others.

Release i adds Gaussian noise of standard deviation z_i times its sensitivity. A coordinator may choose z_i, and the
sum that is released, from all earlier answers. Theorem: if sum 1 / z_i^2 <= mu^2 always holds, all answers together are
as private as one Gaussian release of noise 1 / mu (Smith and Thakurta, "Fully Adaptive Composition for Gaussian
Differential Privacy", arXiv 2210.17520). Its condition: every release is such a Gaussian mechanism given the answers
before it. Releases over samples of the records are not.

Proof. Let two neighbouring data sets be given, and let m_i <= 1 / z_i be the distance between their sums in release i
over its noise. Append one more Gaussian release of m^2 = mu^2 - sum m_i^2 >= 0: removing it again is post-processing.
Under the first data set the privacy loss of release i is, given the past, normal with mean m_i^2 / 2 and variance
m_i^2. So exp(i t L - (i t / 2 - t^2 / 2) sum m_i^2) is a martingale in the number of releases, for every t. At the end
the sum of squares is mu^2 whatever was chosen, so L has the characteristic function of a normal variable of mean
mu^2 / 2 and variance mu^2: it is the privacy loss of one Gaussian release, and equal losses have equal curves

delta(epsilon) = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)

(Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018). Noise is drawn on a grid:
`noise.sources` draws integers that are post-processing of such a Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

_MOST = 1e6
"""Upper limits of mu and epsilon; no useful budget has larger ones."""
_ROUNDING = 1e-12
_ERROR = 4e-16
"""Bound on the rounding error of delta, which is a difference of two probabilities."""


def delta_of(mu: float, epsilon: float) -> float:
    """Return the exact delta at epsilon >= 0 of Gaussian releases with sum 1 / z^2 = mu^2."""
    from scipy.special import log_ndtr, ndtr  # imported on demand: services only read budgets

    if not 0 < mu < _MOST:
        return 0.0 if mu == 0 else 1.0
    away = epsilon / mu
    return float(ndtr(mu / 2 - away) - math.exp(min(epsilon + log_ndtr(-mu / 2 - away), 0.0)))


@lru_cache(maxsize=1024)
def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu that (epsilon, delta) allows, rounded down."""
    least = max(delta - _ERROR, delta / 2)
    return _last(lambda mu: delta_of(mu, epsilon) <= least) * (1 - _ROUNDING)


@lru_cache(maxsize=1024)
def epsilon_of(mu: float, delta: float) -> float:
    """Return the exact epsilon at delta, rounded up; infinite beyond a million."""
    least = max(delta - _ERROR, delta / 2)
    if delta_of(mu, 0.0) <= least:
        return 0.0
    epsilon = _last(lambda e: delta_of(mu, e) > least) * (1 + _ROUNDING)
    return epsilon if epsilon < _MOST else math.inf


def _last(holds: Callable[[float], bool]) -> float:
    """Return the largest number for which `holds` is true; it must be true below some number and false above."""
    low, high = 0.0, _MOST
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
