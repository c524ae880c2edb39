"""The discrete Gaussian: integers with probabilities proportional to exp(-x^2 / (2 sigma^2)), from random bytes alone.

Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020. Its zCDP is the Gaussian's,
its curve (epsilon, delta) is not: in places delta is larger. What holds for every curve, of one release, of a Poisson
sample and of any adaptive sequence: noise of parameter sqrt(sigma^2 + r^2), r = `WIDENING`, is post-processing of the
Gaussian of sigma, but for a factor within 1 +- 4e-34 for each number.

Proof. Round a real number x to the integer k with probability rho_r(k - x) / rho_r(Z - x), where rho_r(t) = exp(-t^2 /
(2 r^2)). Rounding commutes with integer shifts, so it is post-processing of x + N(0, sigma^2) for every integer sum x.
By Poisson summation rho_r(Z - x) is sqrt(2 pi) r up to a factor within 1 +- e_r, e_r = 2 sum_j exp(-2 pi^2 r^2 j^2).
So k has the probability (phi_sigma * rho_r)(k) / (sqrt(2 pi) r) up to that factor: a Gaussian density of variance
sigma^2 + r^2 at an integer, which is the discrete Gaussian's probability up to another one. r = 2: e_r < 1.1e-34. So
n numbers add at most 8e-34 n to epsilon.

Up to sigma = `MAX_TABLE` a number is one look into an alias table (Walker, ACM TOMS 1977) whose probabilities are
integers of 128 bits more than its index. Above, N = k N1 + N2 with sigma_2 = 2 k and sigma^2 = k^2 sigma_1^2 +
sigma_2^2, which differs from the discrete Gaussian by a factor within 1 +- 1e-32 (Micciancio and Walter, CRYPTO 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fl_core.errors import ConfigError
from fl_core.tensors import Tensor, torch

MIN_SIGMA, MAX_SIGMA = 4.0, 2.0**40
"""Allowed standard deviations of noise, in units of the grid; below, a sum of several is no discrete Gaussian."""
WIDENING = 2.0
"""r: the noise is drawn with the variance sigma^2 + r^2. At the usual 1,000 steps of the grid that is 1 + 4e-6."""
MAX_TABLE = 2400.0
STEP = 256
"""k of the two-level sum."""
TOTAL_VARIATION = 2.0**-120
"""Bound on the distance of one number's distribution from the discrete Gaussian: at most six levels, each with a
table's rounding to 2^-128 and its tails beyond 13.5 sigma (2^-134)."""
_TAIL = 13.5
_WORD, _FIXED = 64, 320
_BLOCK = 1 << 16

Bytes = Callable[[int], bytes]
"""Returns so many random bytes."""


@dataclass(frozen=True)
class _Alias:
    """Columns of equal weight: column i is i with a probability of 128 bits, otherwise other[i]; minus `radius`.

    threshold: the first 64 of these bits   rest: the others, which matter once in 2^64.
    """

    threshold: NDArray[np.uint64]
    rest: NDArray[np.uint64]
    other: NDArray[np.int64]
    radius: int

    def draw(self, source: Bytes, n: int) -> NDArray[np.int64]:
        column = np.frombuffer(source(2 * n), dtype="<u2").astype(np.int64) & (len(self.threshold) - 1)
        word = np.frombuffer(source(8 * n), dtype="<u8")
        threshold = self.threshold[column]
        keeps = word < threshold
        if (tied := np.flatnonzero(word == threshold)).size:
            more = np.frombuffer(source(8 * len(tied)), dtype="<u8")
            keeps[tied] = more < self.rest[column[tied]]
        drawn: NDArray[np.int64] = np.where(keeps, column, self.other[column]) - self.radius
        return drawn


def discrete_gaussian(source: Bytes, n: int, sigma: float) -> Tensor:
    """Draw n integers (n,) int64, as private as the Gaussian of `sigma`, and by r^2 wider.

    Raises ConfigError (E-PRIV-20) on a sigma outside [MIN_SIGMA, MAX_SIGMA].
    """
    if not MIN_SIGMA <= sigma <= MAX_SIGMA:
        raise ConfigError(
            "E-PRIV-20",
            f"expected noise between {MIN_SIGMA:g} and 2^40 grid steps, found {sigma:g}: choose another clip or scale",
        )
    drawn = np.empty(n, dtype=np.int64)
    for start in range(0, n, _BLOCK):
        part = drawn[start : start + _BLOCK]
        part[:] = _drawn(source, len(part), math.hypot(sigma, WIDENING))
    return torch.from_numpy(drawn)


def _drawn(source: Bytes, n: int, sigma: float) -> NDArray[np.int64]:
    if sigma <= MAX_TABLE:
        return _table(sigma).draw(source, n)
    inner = 2.0 * STEP
    outer = math.sqrt((sigma - inner) * (sigma + inner)) / STEP
    return STEP * _drawn(source, n, outer) + _table(inner).draw(source, n)


@lru_cache(maxsize=16)
def _table(sigma: float) -> _Alias:
    """Make the table of one sigma from integers only, so that its probabilities have no float rounding."""
    radius = math.ceil(_TAIL * sigma)
    half = _weights(sigma, radius)
    weights = half[:0:-1] + half
    columns = 1 << (len(weights) - 1).bit_length()
    whole, total = columns << 2 * _WORD, sum(weights)
    shares = [w * whole // total for w in weights] + [0] * (columns - len(weights))
    shares[radius] += whole - sum(shares)  # the remainder of rounding: less than one unit of each number
    threshold, other = _alias(shares)
    first, rest = ([t >> _WORD for t in threshold], [t & (1 << _WORD) - 1 for t in threshold])
    return _Alias(
        np.array(first, dtype=np.uint64), np.array(rest, dtype=np.uint64), np.array(other, dtype=np.int64), radius
    )


def _weights(sigma: float, radius: int) -> list[int]:
    """Return 2^320 exp(-x^2 / (2 sigma^2)) for x = 0 to radius, each from the previous one by two products."""
    with localcontext() as context:
        context.prec = 120
        rate = -1 / (2 * Decimal(sigma) ** 2)
        ratio, change = (int(rate.exp() * (1 << _FIXED)), int((2 * rate).exp() * (1 << _FIXED)))
    weights = [1 << _FIXED]
    for _ in range(radius):
        weights.append(weights[-1] * ratio >> _FIXED)
        ratio = ratio * change >> _FIXED
    return weights


def _alias(shares: list[int]) -> tuple[list[int], list[int]]:
    """Fill each column of weight 2^128 with a number's own share and, above that, one other number's (Vose, 1991)."""
    full = 1 << 2 * _WORD
    threshold, other = [full - 1] * len(shares), list(range(len(shares)))
    small = [i for i, s in enumerate(shares) if s < full]
    large = [i for i, s in enumerate(shares) if s >= full]
    while small:
        low, high = small.pop(), large[-1]
        threshold[low], other[low] = shares[low], high
        shares[high] -= full - shares[low]
        if shares[high] < full:
            small.append(large.pop())
    return threshold, other
