"""An interval for the ratio of two noisy sums.

With A and D the noisy sums over R rows of right answers and of examples, s the standard deviation of each row's noise
and p the true ratio, A - p D has mean 0 and variance R s^2 (1 + p^2); the interval holds every p in [0, 1] for which
A - p D is within q standard deviations of 0 (Fieller, "Some problems in interval estimation", JRSS B 16, 1954). It
exists where D is significantly above 0.

Where a row whose noisy count is below 1 arrives as zeros, a row of n examples, m of them answered right, has with
u = (1 - n) / s and P = Phi(-u), the probability that it is kept,

    E[row of A] = m P,   E[row of D] = n P + s phi(u)

so A - p D is off by between -((1 - p) n (1 - P) + p s phi(u)) and p (n (1 - P) - s phi(u)) per row: the interval admits
the worst of both, and of the variance, over all n and m <= n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist

_SHARES = 100
_NORMAL = NormalDist()


def interval(
    right: float, of: float, std: float, rows: int, suppressed: bool, level: float
) -> tuple[float, float, float] | None:
    """Return a point of [0, 1] and its interval for the ratio of `rows` rows; None where noise leaves none.

    std: of the noise on one row, on either side   suppressed: rows with a noisy count below 1 are zeros
    Guarantees: with probability `level` the ratio without noise is in the interval, or there is none.
    """
    row, wide = _rows_of(std, suppressed), _NORMAL.inv_cdf((1 + level) / 2) * math.sqrt(rows)
    if not of - rows * row.gained - wide * math.sqrt(row.spread) > 0:
        return None

    def top(cut: float, p: float) -> float:
        return cut - p * of + rows * _at(row.below, p) + wide * math.sqrt(_at(row.variance, p))

    def bottom(cut: float, p: float) -> float:
        return cut - p * of - rows * _at(row.above, p) - wide * math.sqrt(_at(row.variance, p))

    if bottom(right, 1.0) > 0 or top(right, 0.0) < 0:  # no share explains these sums: less can be said than it seems
        return None
    # p D is in [0, D], so that moving A there moves it nearer to every p D: what the interval held, it holds.
    cut = min(max(right, 0.0), of)
    # Both fall in p, since D is larger than all that is added to its slope.
    point = cut / of  # within both, but for the last bits of a root
    return point, min(point, _root(partial(bottom, cut))), max(point, _root(partial(top, cut)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The worst one row can do, at shares p = 0, 1 / _SHARES, ..., 1; convex in p, so that chords are above it.

    below, above: how far the mean of (row of A) - p (row of D) can be off   variance: of it   gained, spread: how far
    the mean of D's row can be above n, and its variance.
    """

    below: tuple[float, ...]
    above: tuple[float, ...]
    variance: tuple[float, ...]
    gained: float
    spread: float


def _at(values: Sequence[float], share: float) -> float:
    k = min(int(share * _SHARES), _SHARES - 1)
    return values[k] + (share * _SHARES - k) * (values[k + 1] - values[k])


@lru_cache(maxsize=64)
def _rows_of(std: float, suppressed: bool) -> _Rows:
    shares = [k / _SHARES for k in range(_SHARES + 1)]
    square = std * std
    if not suppressed:
        none = tuple(0.0 for _ in shares)
        return _Rows(none, none, tuple(square * (1 + p * p) for p in shares), 0.0, square)
    # From rows without an example to rows that are never dropped, finely where a count may be near 1.
    sizes = sorted({*(8 * std * k / 200 for k in range(201)), *(k / 20 for k in range(61))})
    rows = [(n, *_moments(n, std)) for n in sizes]
    lost = [(n * (1 - kept), std * density) for n, kept, density, _, _ in rows]
    variance = [
        max(_variance(m, p, std, kept, mean, second) for n, kept, _, mean, second in rows for m in (0.0, n))
        for p in shares
    ]
    return _Rows(
        tuple(max((1 - p) * gone + p * more for gone, more in lost) for p in shares),
        tuple(max(0.0, *(p * (gone - more) for gone, more in lost)) for p in shares),
        tuple(variance),
        max(0.0, *(more - gone for gone, more in lost)),
        max(second - mean * mean for _, _, _, mean, second in rows),
    )


def _moments(n: float, std: float) -> tuple[float, float, float, float]:
    """Return P(Y >= 1), phi((1 - n) / std), E[Y; Y >= 1] and E[Y^2; Y >= 1] of Y normal with mean n."""
    u = (1 - n) / std
    kept, density = _NORMAL.cdf(-u), _NORMAL.pdf(u)
    mean = n * kept + std * density
    return kept, density, mean, (n * n + std * std) * kept + std * density * (n + 1)


def _variance(m: float, p: float, std: float, kept: float, mean: float, second: float) -> float:
    """Return the variance of (m + f - p Y) [Y >= 1], f of variance std^2 on its own."""
    first = m * kept - p * mean
    return std * std * kept + m * m * kept - 2 * m * p * mean + p * p * second - first * first


def _root(falling: Callable[[float], float]) -> float:
    if falling(0.0) <= 0:
        return 0.0
    if falling(1.0) >= 0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
