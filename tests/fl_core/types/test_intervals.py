"""Intervals cover the truth: of 1,000 test sets that are drawn, in at least 93 % of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binomtest, mannwhitneyu, norm

from fl_core.types import intervals
from fl_core.types.clinical import BinnedRange, ClinicalMetrics, ReliabilityBin, binned_auc
from fl_core.types.intervals import Interval

pytestmark = pytest.mark.integration

DRAWS, LEAST = 1000, 0.93


def coverage(draw: Callable[[np.random.Generator], Interval | None], truth: float) -> float:
    rng, held = np.random.default_rng(0), 0
    for _ in range(DRAWS):
        found = draw(rng)
        assert found is not None
        held += found.low <= truth <= found.high
    return held / DRAWS


@pytest.mark.parametrize(("right", "of"), [(0, 1), (1, 1), (0, 12), (12, 12), (11, 12), (3, 40), (250, 400)])
def test_a_share_has_the_exact_interval(right: int, of: int) -> None:
    found = intervals.share(right, of)
    assert found is not None
    low, high = binomtest(right, of).proportion_ci(0.95, "exact")
    assert found.low == pytest.approx(low, abs=1e-12)
    assert found.high == pytest.approx(high, abs=1e-12)


def test_of_nothing_there_is_no_interval() -> None:
    assert intervals.share(0, 0) is None
    assert intervals.mean_of_shares([0.0, 0.0], [0.0, 0.0]) is None
    assert intervals.auc(None, 3, 3) is None
    assert intervals.auc(BinnedRange(0.5, 0.5), 0, 3) is None


@pytest.mark.parametrize("nonsense", [(math.nan, 5.0), (6.0, 5.0), (-1.0, 5.0), (1.0, math.nan), (1.0, -1.0)])
def test_what_is_no_count_has_no_interval(nonsense: tuple[float, float]) -> None:
    assert intervals.share(*nonsense) is None


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_a_share_is_covered(p: float) -> None:
    assert coverage(lambda rng: intervals.share(int(rng.binomial(20, p)), 20), p) >= LEAST


@pytest.mark.parametrize(
    ("p", "of"),
    [
        ((0.9, 0.8, 0.6), (12, 40, 400)),
        ((0.5,) * 8, (3, 5, 8, 12, 20, 40, 100, 700)),
        ((0.98, 0.95), (8, 9)),
        ((0.7,), (15,)),
    ],
)
def test_a_balanced_accuracy_is_covered(p: tuple[float, ...], of: tuple[int, ...]) -> None:
    def draw(rng: np.random.Generator) -> Interval | None:
        return intervals.mean_of_shares([float(v) for v in rng.binomial(of, p)], [float(n) for n in of])

    assert coverage(draw, sum(p) / len(p)) >= LEAST


def test_a_balanced_accuracy_of_one_class_has_the_interval_of_its_share() -> None:
    assert intervals.mean_of_shares([7.0, 0.0], [9.0, 0.0]) == intervals.share(7, 9)


def test_a_difference_is_covered() -> None:
    def draw(rng: np.random.Generator) -> Interval:
        a, b = int(rng.binomial(30, 0.85)), int(rng.binomial(14, 0.6))
        first, second = intervals.share(a, 30), intervals.share(b, 14)
        assert first is not None
        assert second is not None
        return intervals.difference(a / 30, first, b / 14, second)

    assert coverage(draw, 0.25) >= LEAST


def measured_auc(rng: np.random.Generator, shift: float, m: int, n: int) -> float:
    better, worse = rng.normal(shift, 1, m), rng.normal(0, 1, n)
    return float(mannwhitneyu(better, worse).statistic) / (m * n)


@pytest.mark.parametrize(("shift", "m", "n"), [(0.3, 8, 64), (1.5, 12, 30), (1.5, 40, 400), (3.0, 10, 10), (0.0, 5, 5)])
def test_an_area_is_covered(shift: float, m: int, n: int) -> None:
    def draw(rng: np.random.Generator) -> Interval | None:
        area = measured_auc(rng, shift, m, n)
        return intervals.auc(BinnedRange(area, area), m, n)

    assert coverage(draw, float(norm.cdf(shift / math.sqrt(2)))) >= LEAST


def test_an_area_that_was_counted_in_bins_is_covered() -> None:
    edges = np.linspace(-3, 5, 12)

    def draw(rng: np.random.Generator) -> Interval | None:
        better, worse = rng.normal(1.2, 1, 15), rng.normal(0, 1, 60)
        counts = [np.bincount(np.digitize(v, edges), minlength=13).tolist() for v in (better, worse)]
        return intervals.auc(binned_auc(*counts), 15, 60)

    assert coverage(draw, float(norm.cdf(1.2 / math.sqrt(2)))) >= LEAST


def test_the_ends_of_an_area_solve_their_equation() -> None:
    z, found = norm.ppf(0.975), intervals.auc(BinnedRange(0.8, 0.8), 12, 30)
    assert found is not None
    for end in found:
        assert (0.8 - end) ** 2 == pytest.approx(z * z * intervals.auc_variance(end, 12, 30), rel=1e-6)


def test_a_perfect_area_of_few_images_is_no_certainty() -> None:
    found = intervals.auc(BinnedRange(1.0, 1.0), 5, 5)
    assert found is not None
    assert found.high == 1.0
    assert found.low < 0.8


def test_the_variance_is_that_of_exponential_scores() -> None:
    """Of scores with exponential densities, V(t) is exact where m = n: against a large draw."""
    rng, m, shift = np.random.default_rng(1), 20, 3.0  # P(a > b) of means 3 and 1 is 3 / 4
    found = []
    for _ in range(4000):
        a, b = rng.exponential(shift, m), rng.exponential(1, m)
        found.append(float((a[:, None] > b[None, :]).mean()))
    assert float(np.var(found)) == pytest.approx(intervals.auc_variance(0.75, m, m), rel=0.1)


def counted(rng: np.random.Generator, per_class: tuple[int, ...], strength: float) -> ClinicalMetrics:
    """Draw scores of each class and count as an evaluation does, with exact areas."""
    c = len(per_class)
    labels = np.repeat(np.arange(c), per_class)
    scores = rng.normal(0, 1, (len(labels), c))
    scores[np.arange(len(labels)), labels] += strength
    predicted, confusion = scores.argmax(1), np.zeros((c, c), dtype=int)
    np.add.at(confusion, (labels, predicted), 1)
    areas = []
    for k in range(c):
        mine, others = scores[labels == k, k], scores[labels != k, k]
        area = float(mannwhitneyu(mine, others).statistic) / (len(mine) * len(others))
        areas.append(BinnedRange(area, area))
    return ClinicalMetrics(tuple(tuple(map(int, row)) for row in confusion), tuple(areas), (ReliabilityBin(0, 0, 0.0),))


def test_the_numbers_of_an_evaluation_are_covered() -> None:
    sizes, strength = (8, 12, 30), 1.5
    truth = counted(np.random.default_rng(7), (30000, 30000, 30000), strength)
    sensitivity, area = truth.sensitivity[0], truth.macro_auc
    assert sensitivity is not None
    assert area is not None
    assert truth.balanced_accuracy is not None
    for expected, of in (
        (sensitivity, lambda found: intervals.by_class(found)[0]),
        (area.middle, intervals.macro_auc),
        (truth.balanced_accuracy, lambda f: intervals.mean_of_shares([r[c] for c, r in enumerate(f.confusion)], sizes)),
    ):
        assert coverage(lambda rng, of=of: of(counted(rng, sizes, strength)), expected) >= LEAST


def test_specificities_are_exact_intervals() -> None:
    found = ClinicalMetrics(((3, 1), (2, 8)), (None, None), ())
    assert intervals.specificities(found) == [intervals.share(8, 10), intervals.share(3, 4)]
