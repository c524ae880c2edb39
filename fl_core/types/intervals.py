"""Confidence intervals for the sampling of test images, from counts that can be added.

| of                  | interval                                                                                      |
|---------------------|-----------------------------------------------------------------------------------------------|
| a share k / n       | exact: all p under which k or more, and k or fewer, have at least a chance of 2.5 % [1]        |
| a mean of shares    | the shares' own intervals, combined by squares and add ("MOVER") [2]                           |
| a difference        | likewise, for two test sets that share no image [2]                                            |
| an AUC              | all areas t with (AUC - t)^2 <= z^2 V(t) [3]; if bins leave a range, from its low to its high  |
|                     | end                                                                                            |
| a mean of AUCs      | the mean of the lower and of the upper ends, valid for any dependence of the areas, which use  |
|                     | the same images; so it is conservative                                                         |

With m examples of the class and n others, V(t) = t (1 - t) (1 + N (1 - t) / (2 - t) + N t / (1 + t)) / (m n), N = (m +
n) / 2 - 1, which needs no scores and is valid for small sets and for an area of 1.

All intervals assume independently drawn images. Several images of one patient give less information, so the intervals
are then too narrow.

[1] Clopper and Pearson, Biometrika 26, 1934.
[2] Newcombe, Statistics in Medicine 17, 1998; Zou and Donner, Statistics in Medicine 27, 2008.
[3] Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic. Part 2", Statistics
in Medicine 25, 2006, method 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

from fl_core.types.clinical import BinnedRange, ClinicalMetrics

LEVEL = 0.95
_STEPS = 60
"""Bisection steps: enough for the precision of a float64."""


class Interval(NamedTuple):
    """The interval of a number at a level: `low` to `high`, both ends included."""

    low: float
    high: float

    def text(self) -> str:
        return f"{100 * self.low:.1f} to {100 * self.high:.1f} %"


def share(right: float, of: float, level: float = LEVEL) -> Interval | None:
    """Return the interval of the probability behind `right` of `of`; None for an empty sample.

    Guarantees: for any probability, the interval contains it in at least a share `level` of all samples.
    """
    if not 0 <= right <= of or of <= 0:
        return None
    from scipy.special import betaincinv  # on demand: most commands that import this module compute no interval

    tail = (1 - level) / 2
    low = 0.0 if right == 0 else float(betaincinv(right, of - right + 1, tail))
    high = 1.0 if right == of else float(betaincinv(right + 1, of - right, 1 - tail))
    return Interval(low, high)


def mean_of_shares(right: Sequence[float], of: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the interval of the mean of the shares that have examples, with equal weights: of a balanced accuracy."""
    rows = [(r / n, share(r, n, level)) for r, n in zip(right, of, strict=True) if n > 0]
    measured = [(point, interval) for point, interval in rows if interval is not None]
    if not measured:
        return None
    mean = math.fsum(point for point, _ in measured) / len(measured)
    down = math.hypot(*(point - interval.low for point, interval in measured)) / len(measured)
    up = math.hypot(*(interval.high - point for point, interval in measured)) / len(measured)
    return Interval(max(0.0, mean - down), min(1.0, mean + up))


def difference(first: float, of_first: Interval, second: float, of_second: Interval) -> Interval:
    """Return the interval of first - second, measured on different images."""
    down = math.hypot(first - of_first.low, of_second.high - second)
    up = math.hypot(of_first.high - first, second - of_second.low)
    return Interval(max(-1.0, first - second - down), min(1.0, first - second + up))


def auc(measured: BinnedRange | None, positives: int, negatives: int, level: float = LEVEL) -> Interval | None:
    """Return the interval of an area measured on `positives` and `negatives` examples; None if either is 0."""
    if measured is None or positives < 1 or negatives < 1:
        return None
    z = NormalDist().inv_cdf((1 + level) / 2)

    def outside(area: float, end: float) -> bool:
        return (end - area) ** 2 > z * z * auc_variance(area, positives, negatives)

    low = _end(measured.low, 0.0, lambda area: outside(area, measured.low))
    return Interval(low, _end(measured.high, 1.0, lambda area: outside(area, measured.high)))


def auc_variance(area: float, positives: int, negatives: int) -> float:
    """Return V(t) of the table above."""
    pairs, half = positives * negatives, (positives + negatives) / 2 - 1
    return area * (1 - area) * (1 + half * (1 - area) / (2 - area) + half * area / (1 + area)) / pairs


def _end(inside: float, bound: float, outside: Callable[[float], bool]) -> float:
    """Return the end of an interval between a point inside it and a bound, by bisection."""
    if not outside(bound):
        return bound
    beyond = bound
    for _ in range(_STEPS):
        middle = (inside + beyond) / 2
        if outside(middle):
            beyond = middle
        else:
            inside = middle
    return inside


# ---- of an evaluation ------------------------------------------------------------------------------------------------


def by_class(metrics: ClinicalMetrics, level: float = LEVEL) -> list[Interval | None]:
    """Return the interval of each class's sensitivity."""
    return [share(t.tp, t.present, level) for t in metrics.tables]


def specificities(metrics: ClinicalMetrics, level: float = LEVEL) -> list[Interval | None]:
    return [share(t.tn, t.absent, level) for t in metrics.tables]


def areas(metrics: ClinicalMetrics, level: float = LEVEL) -> list[Interval | None]:
    """Return the interval of each class's AUC."""
    return [auc(area, t.present, t.absent, level) for area, t in zip(metrics.auc, metrics.tables, strict=True)]


def macro_auc(metrics: ClinicalMetrics, level: float = LEVEL) -> Interval | None:
    present = [interval for interval in areas(metrics, level) if interval is not None]
    if not present:
        return None
    return Interval(*(math.fsum(ends) / len(present) for ends in zip(*present, strict=True)))


def facts(metrics: ClinicalMetrics) -> dict[str, object]:
    """Return an evaluation as JSON values, with the intervals of its numbers; None for missing ones."""
    return {
        **metrics.facts(),
        "balanced_accuracy_interval": mean_of_shares(*metrics.balanced_counts),
        "sensitivity_interval": by_class(metrics),
        "specificity_interval": specificities(metrics),
        "macro_auc_interval": macro_auc(metrics),
        "auc_interval": areas(metrics),
    }
