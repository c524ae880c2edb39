"""Intervals hold what they are of: against the definition, another library's numbers, and draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, binom

from coordinator.lead import intervals
from fl_core import rng


@pytest.mark.parametrize(("right", "of"), [(0, 1), (0, 40), (1, 1), (7, 9), (30, 60), (999, 1000), (1000, 1000)])
def test_the_exact_interval_is_that_of_its_definition(right: int, of: int) -> None:
    low, high = intervals.proportion(right, of)
    assert low == pytest.approx(beta.ppf(0.025, right, of - right + 1) if right else 0.0, abs=1e-9)
    assert high == pytest.approx(beta.ppf(0.975, right + 1, of - right) if right < of else 1.0, abs=1e-9)
    if 0 < right < of:  # at its ends the result is as rare as the level says
        assert binom.sf(right - 1, of, low) == pytest.approx(0.025, abs=1e-6)
        assert binom.cdf(right, of, high) == pytest.approx(0.025, abs=1e-6)


@pytest.mark.parametrize("truth", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("of", [5, 40])
def test_it_holds_the_truth_often_enough_over_all_results(truth: float, of: int) -> None:
    """Summed over every result with its probability: no draw decides."""
    ends = [intervals.proportion(k, of) for k in range(of + 1)]
    held = sum(binom.pmf(k, of, truth) for k, (low, high) in enumerate(ends) if low <= truth <= high)
    assert held >= 0.95


def test_an_interval_of_a_mean_holds_it_in_draws() -> None:
    draws, truth, sizes = rng.numpy_stream(0, "test", "intervals"), np.array([0.9, 0.5, 0.2]), np.array([8, 30, 12])
    held = 0
    for _ in range(300):
        counts = list(zip(draws.binomial(sizes, truth).tolist(), sizes.tolist(), strict=True))
        low, high = intervals.mean_of_proportions(counts)
        held += low <= truth.mean() <= high
    assert held >= 285


def test_one_proportion_is_its_own_mean() -> None:
    assert intervals.mean_of_proportions([(7, 9)]) == pytest.approx(intervals.proportion(7, 9))
