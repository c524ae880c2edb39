"""The papers' measures, against their closed forms and printed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.paper.paper_metrics import (
    class_eigenvalue_variance,
    classifier_angles,
    correlation_eigenvalues,
    eigenvalue_variance,
    feature_angle,
    mean_angle,
    proxy_statistics,
    rounds_text,
    rounds_to_target,
    speed_up,
)
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([512.0] + [0.0] * 511, 2007.04),
        ([10.24] * 50, 0.0),
        ([256.0] * 2 + [0.0] * 48, 983.04),
        ([512 / 12] * 12 + [0.0] * 38, 129.7067),
    ],
)
def test_met_1_variance_of_the_top_eigenvalues(values: list[float], expected: float) -> None:
    """MET-1: (512, 0, ...) 2007.04; fifty equal 0; two of 256 983.04; twelve equal 129.7067; in any order."""
    assert eigenvalue_variance(torch.tensor(values).flip(0)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("n", "d"), [(4, 2), (40, 7), (5, 12)])
def test_eigenvalues_equal_those_of_the_correlation_matrix(n: int, d: int) -> None:
    z = torch.randn(n, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    expected = torch.linalg.eigvalsh(torch.corrcoef(z.T)).flip(0)
    assert torch.allclose(correlation_eigenvalues(z), expected, atol=1e-9)


def test_dead_dimensions_and_single_examples_contribute_nothing() -> None:
    z = torch.tensor([[1.0, 2.0, 5.0], [2.0, 1.0, 5.0], [3.0, 4.0, 5.0], [4.0, 3.0, 5.0]])
    assert correlation_eigenvalues(z).tolist() == pytest.approx([1.6, 0.4, 0.0])  # MR-1's matrix
    assert correlation_eigenvalues(z[:1]).tolist() == [0, 0, 0]
    assert math.isnan(class_eigenvalue_variance(z, torch.arange(4)))


def simplex(c: int, d: int) -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(d, c, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    return ((q - q.mean(1, keepdim=True)) * math.sqrt(c / (c - 1))).T


@pytest.mark.parametrize(("c", "d", "angle"), [(10, 84, 96.379370), (100, 512, 90.578755), (8, 84, 98.213211)])
def test_met_2_angles_of_a_simplex(c: int, d: int, angle: float) -> None:
    """MET-2: an equiangular frame of 10 classes gives 96.379370 for any set of two and more."""
    head = 3.7 * simplex(c, d)
    for members in ([0, 1], [1, 4, 7], list(range(c))):
        assert mean_angle(head, members) == pytest.approx(angle, abs=1e-6)
    present = torch.arange(c) < 3
    assert classifier_angles(head, present) == pytest.approx({"existing": angle, "missing": angle}, abs=1e-6)
    z = torch.cat([head + 0.1 * head.roll(1, 0), head - 0.1 * head.roll(1, 0)])
    assert feature_angle(z, torch.arange(c).repeat(2), c) == pytest.approx(angle, abs=1e-6)


def test_proxy_statistics_equal_double_sums() -> None:
    """C.4: |w_c| and mean distances with the zeros of i = j counted."""
    w = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    present = torch.tensor([True, True, False, True, False])
    o, m = [0, 1, 3], [2, 4]

    def mean(a: list[int], b: list[int]) -> float:
        return sum(math.dist(w[i].tolist(), w[j].tolist()) for i in a for j in b) / (len(a) * len(b))

    found = proxy_statistics(w, present)
    assert found["norms"] == pytest.approx([math.hypot(*row.tolist()) for row in w])
    assert (found["o_o"], found["o_m"], found["m_m"]) == pytest.approx((mean(o, o), mean(o, m), mean(m, m)))
    assert math.isnan(float(str(proxy_statistics(w, ~torch.zeros(5, dtype=torch.bool))["m_m"])))


@pytest.mark.parametrize(("reached", "gain"), [(149, 2.68), (293, 1.37), (368, 1.09), (178, 2.25)])
def test_met_3_speed_up(reached: int, gain: float) -> None:
    """MET-3: 400/149 = 2.68, 400/293 = 1.37, 400/368 = 1.09, 400/178 = 2.25; never reached is NaN, printed ">T"."""
    course = [0.99] + [0.5] * (reached - 1) + [0.7, 0.6]
    assert rounds_to_target(course, 0.7) == reached
    assert round(speed_up(400, rounds_to_target(course, 0.7)), 2) == gain
    assert rounds_text(rounds_to_target(course, 0.7), 400) == str(reached)
    assert rounds_text(rounds_to_target(course, 0.71), 400) == ">400"


def test_balanced_accuracy_is_the_mean_over_classes_that_are_tested() -> None:
    record = RoundRecord(0, TaskKind.TRAIN, (3.0, 0.0, 1.0), (4.0, 0.0, 8.0), ("a",))
    assert record.balanced_accuracy == pytest.approx((0.75 + 0.125) / 2)
    assert RoundRecord(0, TaskKind.TRAIN, (0.0,), (0.0,), ()).balanced_accuracy == -1
