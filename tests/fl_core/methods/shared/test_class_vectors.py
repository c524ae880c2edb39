"""Fixed class vectors: GE-1, NH-1, and what a seed gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import pdist

from fl_core.errors import ConfigError
from fl_core.methods.shared import class_vectors
from fl_core.models import build_model
from tests.support.federations import SCHEMA


def angle(rows: torch.Tensor) -> float:
    """Return the largest angle between two rows, in degrees; all of them, for a frame."""
    gram = rows @ rows.T
    return math.degrees(math.acos(max(-1.0, float(gram[~torch.eye(len(rows), dtype=torch.bool)].min()))))


@pytest.mark.parametrize(
    ("d", "c", "cosine", "degrees", "distance"),
    [
        (84, 10, -0.111111, 96.379370, 1.490712),
        (512, 100, -0.010101, 90.578755, 1.421338),
        (84, 8, -0.142857, 98.213211, 1.511858),
    ],
)
def test_ge_1_gram_matrix_rank_and_distances(d: int, c: int, cosine: float, degrees: float, distance: float) -> None:
    frame = class_vectors.etf(c, d, seed=1)
    wanted = c / (c - 1) * (torch.eye(c, dtype=torch.float64) - 1 / c)
    assert frame.shape == (c, d)
    assert float((frame @ frame.T - wanted).abs().max()) < 1e-12
    assert float((frame.float() @ frame.float().T - wanted).abs().max()) < 1e-5
    assert int(torch.linalg.matrix_rank(frame)) == c - 1
    assert float(frame.sum(0).abs().max()) < 1e-12
    gram = frame @ frame.T
    off = gram[~torch.eye(c, dtype=torch.bool)]
    assert float((off - cosine).abs().max()) < 1e-6
    assert angle(frame) == pytest.approx(degrees, abs=1e-6)
    assert torch.allclose(pdist(frame), torch.full_like(pdist(frame), distance), atol=1e-6)


@pytest.mark.parametrize(("c", "degrees"), [(2, 180), (3, 120), (4, 109.471221), (26, 92.292443), (62, 90.939317)])
def test_ge_1_angles(c: int, degrees: float) -> None:
    assert angle(class_vectors.etf(c, 84, seed=0)) == pytest.approx(degrees, abs=2e-6)


@pytest.mark.parametrize("d", [3, 4, 5])
def test_a_frame_needs_one_dimension_less_than_it_has_classes(d: int) -> None:
    frame = class_vectors.etf(4, d, seed=0)
    wanted = 4 / 3 * (torch.eye(4, dtype=torch.float64) - 1 / 4)
    assert float((frame @ frame.T - wanted).abs().max()) < 1e-12
    with pytest.raises(ConfigError) as caught:
        class_vectors.etf(4, 2, seed=0)
    assert caught.value.code == "E-CFG-23"


def test_a_seed_gives_the_same_bytes_and_another_seed_another_frame() -> None:
    first, again, other = (class_vectors.etf(10, 84, seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_seed_of_initial_weights_fits_into_float32_and_follows_the_seed_of_the_run() -> None:
    seeds = [class_vectors.seed_of(build_model("digits_cnn", {}, SCHEMA, s)) for s in range(20)]
    assert len(set(seeds)) == 20
    assert all(int(torch.tensor(float(s), dtype=torch.float32)) == s for s in seeds)


@pytest.mark.parametrize(("c", "d", "cosine"), [(10, 192, -1 / 9), (200, 512, -0.00502513)])
def test_nh_1_simplex(c: int, d: int, cosine: float) -> None:
    w = class_vectors.uniform(c, d, seed=0).float()
    gram = w @ w.T
    assert float((gram[~torch.eye(c, dtype=torch.bool)] - cosine).abs().max()) < 1e-6
    assert torch.allclose(w.norm(dim=1), torch.ones(c), atol=1e-6)


@pytest.mark.parametrize(("c", "d", "distance"), [(6, 2, 1.0), (5, 3, math.sqrt(2)), (6, 3, math.sqrt(2))])
def test_nh_1_polygon_and_cross_polytope(c: int, d: int, distance: float) -> None:
    w = class_vectors.uniform(c, d, seed=0)
    assert float(pdist(w).min()) == pytest.approx(distance, abs=1e-9)
    assert torch.allclose(w.norm(dim=1), torch.ones(c, dtype=torch.float64))


@pytest.mark.slow
def test_repulsion_comes_close_to_the_best_known_seven_points_on_a_sphere() -> None:
    """Tammes' problem: 7 points in R^3 are at most 77.8695 degrees apart, a distance of 1.25687."""
    distance = float(pdist(class_vectors.uniform(7, 3, seed=0)).min())
    assert 1.25 < distance < 1.25688


def test_more_than_two_points_do_not_fit_on_a_line() -> None:
    assert sorted(class_vectors.uniform(2, 1, seed=0).flatten().tolist()) == pytest.approx([-1, 1])
    with pytest.raises(ConfigError) as caught:
        class_vectors.uniform(3, 1, seed=0)
    assert caught.value.code == "E-CFG-23"


def test_orthogonal_rows() -> None:
    w = class_vectors.orthogonal(4, 6, seed=0)
    assert torch.allclose(w @ w.T, torch.eye(4, dtype=torch.float64), atol=1e-12)
    with pytest.raises(ConfigError):
        class_vectors.orthogonal(4, 3, seed=0)
