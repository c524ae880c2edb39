"""The discrete Gaussian against its probabilities, exactly where it is made and as a distribution where it is drawn."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from fl_core.errors import ConfigError
from privacy.accounting.accountant import ORDERS, Mechanism, rdp
from privacy.mechanisms.noise import discrete_gaussian
from privacy.mechanisms.noise.discrete_gaussian import MAX_SIGMA, MAX_TABLE, MIN_SIGMA, STEP, TOTAL_VARIATION, WIDENING
from privacy.mechanisms.noise.sources import SecureNoise, SeededNoise


def made(sigma: float) -> dict[int, Fraction]:
    """The probabilities that a table draws with, to the last of their bits."""
    table = discrete_gaussian._table(sigma)
    columns = len(table.threshold)
    found: dict[int, Fraction] = {}
    whole = (t << 64 | r for t, r in zip(table.threshold.tolist(), table.rest.tolist(), strict=True))
    for i, (threshold, other) in enumerate(zip(whole, table.other.tolist(), strict=True)):
        own = 2**128 if other == i else threshold
        for number, share in ((i - table.radius, own), (other - table.radius, 2**128 - own)):
            found[number] = found.get(number, Fraction(0)) + Fraction(share, columns << 128)
    return found


@pytest.mark.integration
@pytest.mark.parametrize("sigma", [4.0, 17.3, 512.0])
def test_total_variation_of_a_table_is_a_sixth_of_what_is_stated_at_most(sigma: float) -> None:
    """Against exp(-x^2 / 2 sigma^2) by its series in fixed point of 500 bits, over a support half as wide again."""
    found, radius = made(sigma), math.ceil(16 * sigma)
    unit = Fraction(1, 2 * Fraction(sigma) ** 2)

    def power(x: int) -> int:
        """2^500 exp(-x^2 unit), by halving the exponent until its series converges at once."""
        exponent, halvings = x * x * unit, 0
        while exponent > Fraction(1, 16):
            exponent, halvings = exponent / 2, halvings + 1
        scaled, term, total = (exponent.numerator << 500) // exponent.denominator, 1 << 500, 1 << 500
        for k in range(1, 90):
            term = -(term * scaled >> 500) // k
            total += term
        for _ in range(halvings):
            total = total * total >> 500
        return total

    half = [power(x) for x in range(radius + 1)]
    weights = {x: half[abs(x)] for x in range(-radius, radius + 1)}
    total = sum(half) * 2 - half[0]
    apart = sum(abs(found.get(x, Fraction(0)) - Fraction(w, total)) for x, w in weights.items()) / 2
    assert sum(found.values()) == 1
    assert apart <= Fraction(TOTAL_VARIATION) / 6


@pytest.mark.parametrize("make", [SecureNoise, lambda: SeededNoise(3, "discrete")], ids=["secure", "seeded"])
@pytest.mark.parametrize("sigma", [4.0, 100.5, 2399.0, 2401.0, 2.5e5, 1e9, 1e12])
def test_draws_have_the_right_scale_and_shape_and_not_two_thirds_or_three_halves_of_it(make, sigma: float) -> None:  # type: ignore[no-untyped-def]
    drawn = make().discrete_gaussian((60_000,), sigma).double().numpy()
    smooth = drawn + np.random.default_rng(1).uniform(-0.5, 0.5, len(drawn))  # a staircase becomes a slope
    wide = math.sqrt(sigma**2 + WIDENING**2 + 1 / 12)
    assert stats.kstest(smooth / wide, "norm").pvalue > 1e-5
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(smooth / (wide * wrong), "norm").pvalue < 1e-12


def test_small_draws_have_their_probabilities() -> None:
    """Chi-square over every value, at a sigma whose staircase is steep."""
    drawn = SeededNoise(3, "chi").discrete_gaussian((200_000,), 4.0)
    values, twice = torch.arange(-13, 14), 2 * (4.0**2 + WIDENING**2)
    p = torch.exp(-(values.double() ** 2) / twice)
    p = p / torch.exp(-(torch.arange(-80, 81).double() ** 2) / twice).sum()
    found = torch.stack([(drawn == v).sum() for v in values]).double()
    assert float(((found - len(drawn) * p) ** 2 / (len(drawn) * p)).sum()) < 60  # 27 cells: p > 1e-3


def test_the_two_levels_leave_no_trace_of_their_step() -> None:
    """Residues modulo k of the sum are uniform: chi-square over 256 classes; the coarse level alone would be seen."""
    drawn = SeededNoise(4, "levels").discrete_gaussian((400_000,), 9000.0)
    counts = torch.bincount(torch.remainder(drawn, STEP), minlength=STEP).double()
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_renyi_divergence_of_a_sampled_discrete_gaussian_is_that_which_is_accounted() -> None:
    """Both directions, by sums over the integers in 1-D, at every order up to 64, for a shift of a whole number."""
    sigma, shift = 50.0, 25
    for rate in (0.01, 0.2, 1.0):
        x = np.arange(-2000, 2001)
        p = np.exp(-(x.astype(float) ** 2) / (2 * sigma**2))
        p /= p.sum()
        moved = np.exp(-((x - shift).astype(float) ** 2) / (2 * sigma**2))
        moved /= moved.sum()
        q = (1 - rate) * p + rate * moved
        orders = [a for a in ORDERS if a <= 64]
        accounted = rdp([Mechanism(sigma / shift, rate)], orders)
        with np.errstate(under="ignore", divide="ignore", invalid="ignore"):
            for a, bound in zip(orders, accounted, strict=True):
                for one, other in ((q, p), (p, q)):
                    kept = (one > 0) & (other > 0)
                    moment = np.sum(np.exp(a * np.log(one[kept]) - (a - 1) * np.log(other[kept])))
                    assert math.log(moment) / (a - 1) <= bound * (1 + 1e-9) + 1e-12, (rate, a)


def test_noise_outside_what_can_be_drawn_is_refused() -> None:
    for sigma in (MIN_SIGMA * 0.99, MAX_SIGMA * 1.01, math.nan, math.inf, -5.0, 0.0):
        with pytest.raises(ConfigError, match="E-PRIV-20"):
            SeededNoise(0).discrete_gaussian((3,), sigma)
    assert SeededNoise(0).discrete_gaussian((2, 3), MIN_SIGMA).shape == (2, 3)
    assert SeededNoise(0).discrete_gaussian((0, 3), MAX_TABLE).shape == (0, 3)
    assert SeededNoise(0).discrete_gaussian((2,), MAX_SIGMA).dtype == torch.int64


def test_bytes_that_meet_a_threshold_are_decided_by_more_of_them() -> None:
    """Once in 2^64: made to happen here, for every column, and the rest of the threshold decides."""
    table = discrete_gaussian._table(4.0)
    columns = np.flatnonzero((table.other != np.arange(len(table.other))) & (table.rest > 0) & (table.rest < 2**64 - 1))

    def drawn(rest: int) -> np.ndarray:
        parts = iter(
            [
                columns.astype("<u2").tobytes(),
                table.threshold[columns].astype("<u8").tobytes(),
                np.full(len(columns), rest, dtype="<u8").tobytes(),
            ]
        )
        return table.draw(lambda n: next(parts), len(columns))

    assert len(columns) > 50
    assert drawn(0).tolist() == (columns - table.radius).tolist()
    assert drawn(2**64 - 1).tolist() == (table.other[columns] - table.radius).tolist()
