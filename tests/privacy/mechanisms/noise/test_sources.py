"""Noise is tested as a distribution, and its scale is told from 2/3 and 3/2 of it."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise, SeededNoise, poisson_sample, random_groups

N = 400_000


class Numbered:
    """Units whose keys are the hashes of their numbers."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def keys(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, 2**64, self._n, dtype=np.uint64)


both = pytest.mark.parametrize("make", [SecureNoise, lambda: SeededNoise(3, "noise")], ids=["secure", "seeded"])


@both
def test_neighbours_and_halves_of_a_block_are_independent(make) -> None:  # type: ignore[no-untyped-def]
    drawn = make().discrete_gaussian((1 << 16,), 1e5).double()
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
    assert not torch.equal(a.discrete_gaussian((64,), 1e5), b.discrete_gaussian((64,), 1e5))
    assert not torch.equal(a.discrete_gaussian((64,), 1e5), a.discrete_gaussian((64,), 1e5))
    with pytest.raises(TypeError):
        copy.deepcopy(a)
    with pytest.raises(TypeError):
        pickle.dumps(a)


def test_distinct_noise_per_part_round_and_silo() -> None:
    def draw(*path: str | int) -> torch.Tensor:
        return SeededNoise(0, *path).discrete_gaussian((32,), 1e5)

    paths = [("round", t, "silo", k, part) for t in range(3) for k in range(3) for part in ("delta", "prototypes")]
    drawn = [draw(*path) for path in paths]
    assert all(not torch.equal(drawn[i], drawn[j]) for i in range(len(paths)) for j in range(i))
    assert torch.equal(draw(*paths[0]), drawn[0])


@pytest.mark.integration
@both
def test_t_21_each_record_is_drawn_at_the_rate_and_alone(make) -> None:  # type: ignore[no-untyped-def]
    noise: NoiseSource = make()
    trials, n, rate = 4000, 40, 0.15
    drawn = torch.zeros(trials, n)
    for step, row in enumerate(drawn):
        row[poisson_sample(noise, Numbered(n), rate, "step", step)] = 1
    error = math.sqrt(rate * (1 - rate) / trials)
    assert float((drawn.mean(0) - rate).abs().max()) < 4.5 * error
    together = float((drawn[:, 0] * drawn[:, 1]).mean())
    assert abs(together - rate**2) < 5 * math.sqrt(rate**2 / trials)
    sizes = drawn.sum(1)
    assert float(sizes.var()) == pytest.approx(n * rate * (1 - rate), rel=0.1)  # a binomial, no fixed batch size


def test_labels_are_uniform() -> None:
    for noise in (SecureNoise(), SeededNoise(5, "labels")):
        counts = torch.bincount(random_groups(noise, Numbered(N), 7, "step", 0), minlength=7).double()
        assert stats.chisquare(counts.numpy()).pvalue > 1e-5


def test_a_seeded_draw_of_a_unit_follows_from_the_unit_alone() -> None:
    """Whoever else is there, and in whatever order; another step, purpose or seed gives another draw."""
    noise, few, many = SeededNoise(1, "units"), Numbered(5), Numbered(50)
    assert torch.equal(noise.uniform_of(few, "step", 3), noise.uniform_of(many, "step", 3)[:5])
    for of, about in ((noise, ("step", 4)), (noise, ("other", 3)), (SeededNoise(2), ("step", 3))):
        assert not torch.equal(noise.uniform_of(few, "step", 3), of.uniform_of(few, *about))
    assert noise.seed("a", 1) == SeededNoise(1, "units").seed("a", 1) != noise.seed("a", 2)
    assert SecureNoise().seed("a") != SecureNoise().seed("a")
    assert not torch.equal(SecureNoise().uniform_of(few, "a"), SecureNoise().uniform_of(few, "a"))
