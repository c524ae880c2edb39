"""Intervals for what was counted on a test set: how far luck may have carried it. Noise of privacy: `uncertainty`."""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import binomtest

LEVEL = 0.95


def proportion(right: int, of: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the exact interval of a share (Clopper and Pearson, Biometrika 26, 1934).

    *Guarantees*: over independent examples it holds the true share with probability `level` at least. Images of one
    patient are not independent: their interval is wider than this one.
    """
    found = binomtest(right, of).proportion_ci(level, method="exact")
    return float(found.low), float(found.high)


def mean_of_proportions(counts: Sequence[tuple[int, int]], level: float = LEVEL) -> tuple[float, float]:
    """Return an interval of the mean of shares: the mean of intervals that hold all at once (Bonferroni).

    *Guarantees*: as `proportion`; it is wider than it would have to be. counts: (right, of) with of > 0, at least one.
    """
    each = 1 - (1 - level) / len(counts)
    ends = [proportion(right, of, each) for right, of in counts]
    return sum(low for low, _ in ends) / len(ends), sum(high for _, high in ends) / len(ends)
