"""Noise is tested as a distribution, and its scale is told from 2/3 and 3/2 of it."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from scipy import stats

from privacy.entropy import Noise, SecureNoise, SeededNoise, labels, poisson_sample

N = 400_000
both = pytest.mark.parametrize("make", [SecureNoise, lambda: SeededNoise(3, "noise")], ids=["secure", "seeded"])


@both
def test_gaussians_have_the_right_distribution(make) -> None:  # type: ignore[no-untyped-def]
    drawn = make().gaussian((N,), 2.5).numpy()
    assert stats.kstest(drawn, "norm", args=(0, 2.5)).pvalue > 1e-5
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(drawn, "norm", args=(0, 2.5 * wrong)).pvalue < 1e-12
    assert abs(drawn.std() / 2.5 - 1) < 5e-3
    assert abs(drawn.mean()) < 5 * 2.5 / math.sqrt(N)
    assert abs(stats.kurtosis(drawn)) < 0.04


@both
def test_neighbours_and_halves_of_a_block_are_independent(make) -> None:  # type: ignore[no-untyped-def]
    drawn = make().gaussian((1 << 16,), 1.0)
    half = len(drawn) // 2
    for a, b in ((drawn[:-1], drawn[1:]), (drawn[:half], drawn[half:]), (drawn[:half].abs(), drawn[half:].abs())):
        assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 5 / math.sqrt(half)


@both
def test_uniforms_are_uniform_and_never_one(make) -> None:  # type: ignore[no-untyped-def]
    drawn = make().uniform(N)
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-5
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1


def test_secure_noise_never_repeats_and_cannot_be_copied() -> None:
    a, b = SecureNoise(), SecureNoise()
    assert not torch.equal(a.gaussian((64,), 1.0), b.gaussian((64,), 1.0))
    assert not torch.equal(a.gaussian((64,), 1.0), a.gaussian((64,), 1.0))
    with pytest.raises(TypeError):
        copy.deepcopy(a)
    with pytest.raises(TypeError):
        pickle.dumps(a)


def test_distinct_noise_per_part_round_and_silo() -> None:
    def draw(*path: str | int) -> torch.Tensor:
        return SeededNoise(0, *path).gaussian((32,), 1.0)

    paths = [("round", t, "silo", k, part) for t in range(3) for k in range(3) for part in ("delta", "prototypes")]
    drawn = [draw(*path) for path in paths]
    assert all(not torch.equal(drawn[i], drawn[j]) for i in range(len(paths)) for j in range(i))
    assert torch.equal(draw(*paths[0]), drawn[0])


@both
def test_t_21_each_record_is_drawn_at_the_rate_and_alone(make) -> None:  # type: ignore[no-untyped-def]
    noise: Noise = make()
    trials, n, rate = 4000, 40, 0.15
    drawn = torch.zeros(trials, n)
    for row in drawn:
        row[poisson_sample(noise, n, rate)] = 1
    error = math.sqrt(rate * (1 - rate) / trials)
    assert float((drawn.mean(0) - rate).abs().max()) < 4.5 * error
    together = float((drawn[:, 0] * drawn[:, 1]).mean())
    assert abs(together - rate**2) < 5 * math.sqrt(rate**2 / trials)
    sizes = drawn.sum(1)
    assert float(sizes.var()) == pytest.approx(n * rate * (1 - rate), rel=0.1)  # a binomial, no fixed batch size


def test_labels_are_uniform() -> None:
    counts = torch.bincount(labels(SecureNoise(), N, 7), minlength=7).double()
    assert stats.chisquare(counts.numpy()).pvalue > 1e-5
