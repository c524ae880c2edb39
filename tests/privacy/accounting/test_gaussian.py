"""The Gaussian filter, against privacy losses that are computed here from probabilities, without the filter's code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from fl_core.errors import ConfigError
from privacy.accounting.accountant import (
    AUTO,
    GAUSSIAN,
    RENYI,
    Mechanism,
    PrivacyFilter,
    epsilon_of,
    epsilon_rdp,
    epsilon_spent,
    gaussian_cost,
    solve_noise,
)
from privacy.accounting.gaussian import delta_of, mu_of
from privacy.accounting.gaussian import epsilon_of as exact_epsilon
from privacy.mechanisms.noise.discrete_gaussian import WIDENING

Probabilities = NDArray[np.float64]
STEP, HALF = 1e-3, 1 << 16
"""Grid of the oracle's privacy losses: from -65.5 to 65.5."""
CLOSE = 3e-3
"""How far rounding to this grid may move an epsilon."""


def continuous(z: float) -> tuple[Probabilities, Probabilities]:
    edges = np.linspace(-9 * z - 1, 9 * z + 2, 20_001)
    cells = [np.diff(norm.cdf(edges, shift, z)) for shift in (1.0, 0.0)]
    return cells[0], cells[1]


def on_a_grid(z: float, shift: int) -> tuple[Probabilities, Probabilities]:
    """Integers as they are drawn for a sum that moves by `shift` steps of the grid."""
    sigma = math.hypot(z * shift, WIDENING)
    k = np.arange(-math.ceil(12 * sigma), math.ceil(12 * sigma) + shift + 1)
    first, second = (np.exp(-((k - s) ** 2) / (2 * sigma**2)) for s in (shift, 0))
    return first / first.sum(), second / second.sum()


def sampled(z: float, rate: float) -> tuple[Probabilities, Probabilities]:
    first, second = continuous(z)
    return (1 - rate) * second + rate * first, second


class Oracle:
    """The privacy loss of releases together: their loss distributions, multiplied in Fourier space."""

    def __init__(self) -> None:
        self._spectrum = np.ones(HALF + 1, dtype=complex)

    def add(self, first: Probabilities, second: Probabilities, times: int = 1) -> None:
        kept = (first > 1e-300) & (second > 1e-300)
        losses = np.log(first[kept]) - np.log(second[kept])
        places = np.rint(losses / STEP).astype(int) % (2 * HALF)
        self._spectrum *= np.fft.rfft(np.bincount(places, first[kept], 2 * HALF)) ** times

    def epsilon(self, delta: float) -> float:
        mass = np.fft.fftshift(np.fft.irfft(self._spectrum))
        losses = (np.arange(2 * HALF) - HALF) * STEP
        low, high = 0.0, 60.0
        for _ in range(40):
            middle = (low + high) / 2
            over = losses > middle
            above = float((mass[over] * -np.expm1(middle - losses[over])).sum())
            low, high = (middle, high) if above > delta else (low, middle)
        return high


def test_the_oracle_finds_known_epsilons() -> None:
    oracle = Oracle()
    oracle.add(*continuous(1.0))
    assert oracle.epsilon(1e-5) == pytest.approx(4.3772, abs=CLOSE)
    oracle = Oracle()
    oracle.add(*sampled(1.0, 0.01), times=1000)
    assert oracle.epsilon(1e-5) == pytest.approx(1.828, abs=0.01)  # PRV's upper bound is 1.8384


@pytest.mark.parametrize(("epsilon", "z"), [(8.0, 0.6002), (1.0, 3.7306), (0.5, 7.0318)])
def test_one_release_draws_the_noise_of_the_exact_gaussian(epsilon: float, z: float) -> None:
    drawn = solve_noise(epsilon, 1e-5, lambda noise: [Mechanism(noise)])
    assert z == pytest.approx(1 / mu_of(epsilon, 1e-5), rel=1e-4)
    assert 1.0 <= drawn * mu_of(epsilon, 1e-5) <= 1.001
    assert epsilon_spent([Mechanism(drawn)], 1e-5) == epsilon_of([Mechanism(drawn)], 1e-5) <= epsilon


@pytest.mark.integration
def test_all_releases_of_random_plans_never_spend_more_than_was_promised() -> None:
    """Two hundred budgets, filled in random order: on grids and not, with steps over samples where RDP keeps it."""
    random = np.random.default_rng(7)
    for plan in range(200):
        epsilon, delta = float(np.exp(random.uniform(-1.5, 2.2))), 10.0 ** -int(random.integers(4, 8))
        budget = PrivacyFilter.of(epsilon, delta, (AUTO, GAUSSIAN, RENYI)[plan % 3])
        spent: list[Mechanism] = []
        oracle = Oracle()
        for _ in range(int(random.integers(2, 9))):
            z = float(np.exp(random.uniform(-0.3, 2.5))) / budget.mu
            rate, steps = (float(random.uniform(0.01, 0.3)), 20) if random.random() < 0.3 else (1.0, 1)
            if not budget.admits(spent, [Mechanism(z, rate, steps)]):
                continue
            spent.append(Mechanism(z, rate, steps))
            discrete = rate == 1 and random.random() < 0.5
            shift = math.ceil(random.uniform(50, 300) / z)
            oracle.add(*(on_a_grid(z, shift) if discrete else sampled(z, rate)), times=steps)
        full = False
        left = 1 - budget.used(spent)
        if budget.decided(spent) != RENYI and left > 1e-6:  # the last release takes all that is left
            spent.append(Mechanism(1.0000001 / (budget.mu * math.sqrt(left))))
            assert budget.admits(spent[:-1], spent[-1:])
            oracle.add(*continuous(spent[-1].noise))
            full = True
        truly = oracle.epsilon(delta)
        assert truly <= min(epsilon, epsilon_spent(spent, delta)) + CLOSE, (plan, spent)
        assert not full or truly >= 0.98 * epsilon - CLOSE, (plan, spent)  # so 2 % less noise would be noticed


def test_an_analyst_who_chooses_noise_by_earlier_answers_learns_no_more_than_one_release() -> None:
    """At delta 0.1, by sampling: noise is chosen small where the loss so far is large, or the other way round."""
    random, n, mu, epsilon = np.random.default_rng(3), 400_000, 1.2, 0.8
    for greedy in (1, -1):
        loss, left = np.zeros(n), np.full(n, mu**2)
        for share in (0.3, 0.4, 0.5, 1.0):
            costs = left * np.where(greedy * loss > 0.1, share, min(1.0, share * share + 0.05))
            costs = left if share == 1.0 else costs
            loss += costs / 2 + np.sqrt(costs) * random.standard_normal(n)
            left -= costs
        gain = np.maximum(0.0, -np.expm1(epsilon - loss))
        assert gain.mean() == pytest.approx(delta_of(mu, epsilon), abs=4 * gain.std() / math.sqrt(n))


def _worst(sigma: float, drawn: float, shift: int) -> float:
    """Return the largest ratio of delta: of the discrete Gaussian drawn so, over that of the Gaussian of sigma."""
    k = np.arange(-math.ceil(14 * drawn), math.ceil(14 * drawn) + shift + 1)
    first, second = (np.exp(-((k - s) ** 2) / (2 * drawn**2)) for s in (shift, 0))
    first, second = first / first.sum(), second / second.sum()
    epsilons = [e for e in np.linspace(0, 6, 601) if delta_of(shift / sigma, e) > 1e-12]
    deltas = [float(np.maximum(first - math.exp(e) * second, 0).sum()) for e in epsilons]
    return max(d / delta_of(shift / sigma, e) for d, e in zip(deltas, epsilons, strict=True))


@pytest.mark.parametrize("sigma", [4.0, 9.5, 60.0])
@pytest.mark.parametrize("shift", [1, 3, 13])
def test_integers_as_drawn_are_as_private_as_the_gaussian_at_every_epsilon(sigma: float, shift: int) -> None:
    assert _worst(sigma, math.hypot(sigma, WIDENING), shift) <= 1 + 1e-9


def test_the_discrete_gaussian_of_the_same_deviation_is_less_private_than_the_gaussian_in_places() -> None:
    assert _worst(4.0, 4.0, 13) > 1.005  # so the widening is not for nothing


def test_rounding_at_random_makes_the_discrete_gaussian_of_a_gaussian() -> None:
    """The step of the proof: the widened Gaussian, from the narrower one, to the last digits of float64."""
    sigma, k = 4.0, np.arange(-60, 61)
    x = np.linspace(-45, 45, 90_001)
    rounding = np.exp(-((k[:, None] - x) ** 2) / (2 * WIDENING**2))
    rounding /= rounding.sum(0)
    made = (rounding * norm.pdf(x, 0, sigma)).sum(1) * (x[1] - x[0])
    wide = np.exp(-(k**2) / (2 * (sigma**2 + WIDENING**2)))
    assert np.allclose(made, wide / wide.sum(), rtol=1e-9, atol=1e-16)


def test_the_curve_and_its_inverses_agree_and_round_to_the_safe_side() -> None:
    for epsilon in (1e-9, 0.01, 1.0, 8.0, 300.0, 1e4):
        for delta in (1e-15, 1e-9, 1e-5, 1e-3):
            mu = mu_of(epsilon, delta)
            assert delta_of(mu, epsilon) <= delta
            assert delta_of(mu * (1 + 1e-6) + 1e-9, epsilon) > delta * (1 - 1e-3) - 1e-15
            assert exact_epsilon(mu, delta) <= epsilon * (1 + 1e-6) + 1e-9
    assert exact_epsilon(math.inf, 1e-5) == math.inf
    assert exact_epsilon(0.0, 1e-5) == 0.0


def test_the_first_charge_decides_which_filter_keeps_a_budget() -> None:
    budget, over_all, step = PrivacyFilter.of(8.0, 1e-5), Mechanism(5.0), Mechanism(9.0, 0.05, 10)
    assert budget.decided(()) == AUTO
    assert budget.admits((), [over_all, step])  # one request with both is counted by RDP
    assert budget.decided([over_all]) == GAUSSIAN
    assert not budget.admits([over_all], [step])
    assert "silo ledger budget set --filter renyi" in budget.remedy([over_all], [step])
    assert budget.decided([step]) == RENYI
    assert budget.admits([step], [over_all])
    for filter in (AUTO, GAUSSIAN):  # a step that costs nearly nothing does not get in either
        assert not PrivacyFilter.of(8.0, 1e-5, filter).admits([over_all], [Mechanism(1e6, 1e-9, 1)])


def test_both_filters_agree_on_what_they_count() -> None:
    history = [Mechanism(4.0, 1.0, 2), Mechanism(7.0)]
    assert gaussian_cost(history) == pytest.approx(2 / 16 + 1 / 49)
    assert epsilon_of(history, 1e-5) < epsilon_rdp(history, 1e-5)
    assert gaussian_cost([Mechanism(4.0, 0.5)]) == math.inf


@pytest.mark.parametrize("z", [0.0, 5e-324, 1e-320, 1e-160, 1e-9])
def test_noise_too_small_to_square_is_no_noise(z: float) -> None:
    for filter in (AUTO, GAUSSIAN, RENYI):
        assert not PrivacyFilter.of(1e5, 1e-3, filter).admits((), [Mechanism(z)])
    assert epsilon_of([Mechanism(z)], 1e-5) == epsilon_spent([Mechanism(z)], 1e-5) == math.inf


@pytest.mark.parametrize("z", [-1.0, -0.0 - 1e-300, math.nan, math.inf, -math.inf])
def test_noise_that_is_no_noise_is_refused(z: float) -> None:
    with pytest.raises(ConfigError, match="E-PRIV-20"):
        Mechanism(z)


def test_no_release_is_free_however_large_its_noise_and_sums_do_not_round_below_the_budget() -> None:
    budget = PrivacyFilter.of(1.0, 1e-5, GAUSSIAN)
    for z in (1e6, 1e200, 1e308):
        assert not budget.admits((), [Mechanism(z, 1.0, 2**53)])
        assert budget.used([Mechanism(z)]) > 0
    large = Mechanism(1 / (budget.mu * math.sqrt(1 - 1e-9)))
    many = [Mechanism(1e5 + k) for k in range(2000)]  # each below the last digit that a running float sum would keep
    assert budget.admits((), [large])
    assert not budget.admits([large, *many], ())
