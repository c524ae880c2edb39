"""The accountant: the specification's numbers (T-1 to T-12), a second library, and the filter."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from fl_core.errors import ConfigError
from privacy.accounting.accountant import (
    ORDERS,
    Mechanism,
    PrivacyFilter,
    aggregated,
    epsilon_prv,
    epsilon_rdp,
    rdp,
    replace_one,
    solve_noise,
)

TABLE = [
    ("T-1", 1.0, 0.01, 1000, 1e-5, 2.101365, 1.8384),
    ("T-2", 0.5, 0.01, 1000, 1e-5, 15.464268, 13.3718),
    ("T-3", 2.0, 0.01, 1000, 1e-5, 0.686185, 0.6321),
    ("T-4", 1.1, 0.02, 2000, 1e-5, 5.134582, 4.7080),
    ("T-5", 4.0, 0.1, 1000, 1e-6, 4.148711, 3.8790),
    ("T-6", 3.0, 0.1, 512, 1e-6, 4.050970, 3.7799),
    ("T-7", 1.0, 0.005, 10000, 1e-5, 3.059777, 2.8111),
]


@pytest.mark.parametrize(
    ("label", "z", "q", "steps", "delta", "by_rdp", "by_prv"), TABLE, ids=[row[0] for row in TABLE]
)
def test_t_1_to_t_7_subsampled_steps(
    label: str, z: float, q: float, steps: int, delta: float, by_rdp: float, by_prv: float
) -> None:
    history = [Mechanism(z, q, steps)]
    assert epsilon_rdp(history, delta) == pytest.approx(by_rdp, abs=1e-6), label
    assert epsilon_prv(history, delta) == pytest.approx(by_prv, abs=0.02), label


@pytest.mark.parametrize(
    ("z", "by_rdp", "by_prv", "exact"),
    [
        (1, 4.7285, 4.3874, 4.3772),
        (2, 2.1657, 2.0032, 1.9931),
        (4, 1.0126, 0.9364, 0.9263),
        (10, 0.3753, 0.3507, 0.3407),
    ],
)
def test_t_8_one_release_over_all_records(z: float, by_rdp: float, by_prv: float, exact: float) -> None:
    assert epsilon_rdp([Mechanism(z)], 1e-5) == pytest.approx(by_rdp, abs=1e-4)
    assert epsilon_prv([Mechanism(z)], 1e-5) == pytest.approx(by_prv, abs=2e-3)
    assert _analytic(z, 1e-5) == pytest.approx(exact, abs=1e-4)
    assert exact <= epsilon_prv([Mechanism(z)], 1e-5) <= exact + 0.02


def _analytic(z: float, delta: float) -> float:
    """Balle and Wang (2018): the exact epsilon of one Gaussian release."""

    def excess(epsilon: float) -> float:
        return norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z) - delta

    return float(brentq(excess, 1e-6, 50))


def test_t_9_training_and_prototypes_in_one_history() -> None:
    history = [Mechanism(1.0, 0.02, 2500), Mechanism(8.0, 1.0, 50)]
    assert epsilon_rdp(history, 1e-5) == pytest.approx(8.388748, abs=1e-6)
    assert epsilon_prv(history, 1e-5) == pytest.approx(7.7479, abs=0.02)


def test_t_10_rdp_of_one_step() -> None:
    found = rdp([Mechanism(1.0, 0.01, 1)], [2, 8, 16])
    assert found == pytest.approx([1.71813e-4, 8.93644e-4, 3.08785], rel=1e-5)


def test_t_11_the_sensitivity_of_microbatches_reaches_the_accountant() -> None:
    clip = 0.7
    micro = Mechanism(2.0 * clip / (2 * clip), 0.01, 1000)
    split = Mechanism(1.5 / (1.0 + 2 * 0.25), 0.01, 1000)
    assert epsilon_rdp([micro], 1e-5) == epsilon_rdp([split], 1e-5) == pytest.approx(2.101365, abs=1e-6)


@pytest.mark.parametrize(
    ("z", "q", "remove", "add"), [(1, 0.01, 0.1995, 0.0091), (0.5, 0.05, 5.5169, 0.0510), (2, 0.1, 0.3690, 0.0807)]
)
def test_t_12a_one_step_by_numeric_integration(z: float, q: float, remove: float, add: float) -> None:
    normal = NormalDist(0, z).pdf

    def mixture(x: float) -> float:
        return (1 - q) * normal(x) + q * normal(x - 1)

    def epsilon(p, r) -> float:  # type: ignore[no-untyped-def]
        def excess(e: float) -> float:
            return quad(lambda x: max(p(x) - math.exp(e) * r(x), 0.0), -12 * z, 12 * z + 1, limit=800)[0] - 1e-5

        return float(brentq(excess, 0, 30, xtol=1e-5))

    found = epsilon(mixture, normal)
    assert found == pytest.approx(remove, abs=2e-3)
    assert epsilon(normal, mixture) == pytest.approx(add, abs=2e-3)
    assert found <= epsilon_prv([Mechanism(z, q)], 1e-5) <= found + 0.02


def test_t_12_orders_reach_far_enough_for_light_plans() -> None:
    assert epsilon_rdp([Mechanism(10, 0.01, 100)], 1e-5) == pytest.approx(0.031987, abs=1e-6)
    assert len(set(ORDERS)) == len(ORDERS)


@pytest.mark.parametrize("case", [TABLE[0], TABLE[3], TABLE[5]], ids=["T-1", "T-4", "T-6"])
def test_a_second_library_agrees(case: tuple[str, float, float, int, float, float, float]) -> None:
    """dp-accounting of Google: its RDP on our orders, and its PLD accountant against PRV."""
    import dp_accounting as dp

    _, z, q, steps, delta, by_rdp, _ = case
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)), steps)
    other = dp.rdp.RdpAccountant(list(ORDERS)).compose(event)
    assert other.get_epsilon(delta) == pytest.approx(by_rdp, rel=1e-3)
    pld = dp.pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(delta)
    assert epsilon_prv([Mechanism(z, q, steps)], delta) == pytest.approx(pld, abs=0.03)


def test_order_and_grouping_of_a_history_do_not_matter() -> None:
    mixed = [Mechanism(1, 0.02, 3), Mechanism(8), Mechanism(1, 0.02, 4), Mechanism(8)]
    assert aggregated(mixed) == [Mechanism(1, 0.02, 7), Mechanism(8, 1.0, 2)]
    assert epsilon_rdp(mixed, 1e-5) == epsilon_rdp(mixed[::-1], 1e-5)


def test_nothing_spent_is_zero_and_no_noise_is_infinite() -> None:
    assert epsilon_rdp([], 1e-5) == epsilon_prv([], 1e-5) == 0
    assert epsilon_rdp([Mechanism(0)], 1e-5) == epsilon_prv([Mechanism(0)], 1e-5) == math.inf


def test_t_41_the_filter_admits_exactly_forty_seven_rounds() -> None:
    budget, entry = PrivacyFilter.of(2.0, 1e-5), Mechanism(2.85, 0.032, 31)
    assert budget.order == 13
    spent: list[Mechanism] = []
    while budget.admits(spent, [entry]):
        spent.append(entry)
    assert len(spent) == 47
    by_order = float(rdp(spent, [13])[0]) + 2.0 - budget.bound
    assert by_order == pytest.approx(1.99903, abs=1e-5)
    assert epsilon_rdp(spent, 1e-5) <= 2.0


@pytest.mark.parametrize(("epsilon", "order"), [(8, 4.3), (2, 13), (1, 25)])
def test_order_of_the_filter(epsilon: float, order: float) -> None:
    assert PrivacyFilter.of(epsilon, 1e-5).order == pytest.approx(order)


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon", "z"),
    [(0.08, 600, 8, 1.47), (0.08, 600, 1, 8.05), (0.032, 1550, 2, 2.85), (0.0256, 3900, 4, 2.01)],
)
def test_noise_for_a_target_epsilon(rate: float, steps: int, epsilon: float, z: float) -> None:
    def history(noise: float) -> list[Mechanism]:
        return [Mechanism(noise, rate, steps)]

    kept = solve_noise(epsilon, 1e-5, history)
    assert PrivacyFilter.of(epsilon, 1e-5).admits([], [Mechanism(kept, rate, steps)])
    assert epsilon_rdp([Mechanism(kept, rate, steps)], 1e-5) <= epsilon
    assert epsilon_rdp([Mechanism(0.99 * z, rate, steps)], 1e-5) > epsilon  # printed to two digits, rounded up
    assert 0.99 * z <= kept <= 1.08 * z


def test_noise_leaves_room_for_what_stands_beside() -> None:
    def solved(epsilon: float, *beside: Mechanism) -> float:
        return solve_noise(epsilon, 1e-5, lambda z: [Mechanism(z, 0.02, 500), *beside])

    assert solved(8, Mechanism(8, 1.0, 10)) > solved(8)
    with pytest.raises(ConfigError, match="E-PRIV-12"):
        solved(1, Mechanism(1, 1.0, 10))


@pytest.mark.parametrize("wrong", [(-1, 0.1, 1), (1, 0, 1), (1, 1.1, 1), (1, 0.1, 0), (math.nan, 0.1, 1)])
def test_an_impossible_mechanism_is_refused(wrong: tuple[float, float, int]) -> None:
    with pytest.raises(ConfigError, match="E-PRIV-20"):
        Mechanism(*wrong)


def test_replacing_a_record_is_two_steps() -> None:
    assert replace_one(1.0, 1e-5) == pytest.approx((2.0, (1 + math.e) * 1e-5))
    assert replace_one(20.0, 1e-5) == (40.0, 1.0)  # no delta is larger
    assert replace_one(5000.0, 1e-5) == (10000.0, 1.0)  # whose exponential is no float
    assert replace_one(5000.0, 0.0) == (10000.0, 0.0)


def test_composition_is_the_sum_of_rdp() -> None:
    a, b = Mechanism(1.3, 0.05, 7), Mechanism(6.0, 1.0, 2)
    assert np.allclose(rdp([a, b]), rdp([a]) + rdp([b]))
