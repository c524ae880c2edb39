"""Parts: weighted sums that wait for their denominator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_core.errors import ProtocolError
from fl_core.types.values import Losses, Part, PartSpec


@pytest.mark.parametrize(
    ("weight", "default", "expected"),
    [
        (2.0, None, [2.0, 3.0]),
        (2.0, [9.0, 9.0], [2.0, 3.0]),
        (0.0, None, [0.0, 0.0]),
        (0.0, [9.0, 8.0], [9.0, 8.0]),
        (-1.0, [9.0, 8.0], [9.0, 8.0]),  # noise can make a weight negative: no mean exists
    ],
)
def test_mean_of_one_weight(weight: float, default: list[float] | None, expected: list[float]) -> None:
    part = Part({"v": torch.tensor([4.0, 6.0])}, torch.tensor(weight))
    mean = part.mean(None if default is None else {"v": torch.tensor(default)})
    assert mean["v"].tolist() == expected


def test_mean_of_row_weights_keeps_the_default_of_rows_nobody_has() -> None:
    part = Part({"v": torch.tensor([[4.0, 6.0], [5.0, 5.0]])}, torch.tensor([2.0, 0.0]))
    assert part.mean()["v"].tolist() == [[2, 3], [0, 0]]
    assert part.mean({"v": torch.tensor([[7.0, 7.0], [8.0, 9.0]])})["v"].tolist() == [[2, 3], [8, 9]]


def test_a_mean_beyond_float32_is_infinite() -> None:
    mean = Part({"x": torch.tensor([1e300, -1e300, 3.0], dtype=torch.float64)}, torch.tensor(3.0)).mean()
    assert mean["x"].tolist() == [float("inf"), float("-inf"), 1.0]


def test_mean_is_float32_and_finite_for_weights_of_zero() -> None:
    part = Part({"v": torch.ones(2, 3, dtype=torch.float64)}, torch.zeros(2, dtype=torch.float64))
    assert part.mean()["v"].dtype is torch.float32
    assert not part.mean()["v"].any()


numbers = st.floats(-100, 100, width=32)


@given(st.lists(st.tuples(numbers, st.integers(1, 50)), min_size=1, max_size=6))
def test_mean_of_a_sum_is_the_weighted_mean(silos: list[tuple[float, int]]) -> None:
    total = None
    for value, n in silos:
        part = Part.of({"v": torch.tensor([value])}, float(n))
        total = part if total is None else total + part
    assert total is not None
    wanted = sum(v * n for v, n in silos) / sum(n for _, n in silos)
    assert float(total.mean()["v"]) == pytest.approx(wanted, rel=1e-4, abs=1e-3)


def test_of_weighs_leading_rows() -> None:
    part = Part.of({"v": torch.ones(2, 3, 2), "w": torch.ones(2)}, torch.tensor([2.0, 5.0]))
    assert part.total["v"][:, 0, 0].tolist() == part.total["w"].tolist() == [2, 5]


@pytest.mark.parametrize(
    "other",
    [
        Part({"w": torch.zeros(2)}, torch.tensor(1.0)),
        Part({"v": torch.zeros(3)}, torch.tensor(1.0)),
        Part({"v": torch.zeros(2)}, torch.zeros(2)),
        Part({"v": torch.zeros(2), "w": torch.zeros(2)}, torch.tensor(1.0)),
    ],
)
def test_adding_parts_of_two_layouts_is_refused(other: Part) -> None:
    part = Part({"v": torch.zeros(2)}, torch.tensor(1.0))
    for a, b in ((part, other), (other, part)):
        with pytest.raises(ProtocolError) as caught:
            _ = a + b
        assert caught.value.code == "E-WIRE-06"


def test_adding_makes_a_new_part() -> None:
    a = Part.of({"v": torch.ones(2)}, 1.0)
    b = a + a
    assert b.total["v"].tolist() == [2, 2]
    assert a.total["v"].tolist() == [1, 1]
    assert float(b.weight) == 2


def test_spec_does_not_depend_on_the_order_of_names() -> None:
    a = Part({"a": torch.zeros(1), "b": torch.zeros(2)}, torch.tensor(1.0))
    b = Part({"b": torch.zeros(2), "a": torch.zeros(1)}, torch.tensor(1.0))
    assert PartSpec.of(a) == PartSpec.of(b)
    assert list(PartSpec.of(b).shapes) == ["a", "b"]


def test_objective_is_mean_plus_coupled() -> None:
    per_example = torch.tensor([1.0, 3.0])
    assert float(Losses(per_example).objective()) == 2
    assert float(Losses(per_example, torch.tensor(0.5)).objective()) == 2.5
