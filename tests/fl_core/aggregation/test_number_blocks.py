"""Sums over blocks with kept memory are, to the bit, those that one tensor after the other gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_core.aggregation.fixed_point import FixedPointFormat, Ring
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.number_blocks import add_units, blocks, split, sum_of_squares
from fl_core.errors import ProtocolError
from fl_core.types.computed_tensors import BLOCK
from fl_core.types.values import Part, PartSpec

GRID = FixedPointFormat("ring64", 3)
UNIT = 2.0 ** -GRID.frac_bits("p")
SIZES = (0, 1, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 3)


def numbers(size: int, spread: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * spread).to(dtype)


def obvious(value: Tensor, factor: float | None = None) -> tuple[Tensor, int]:
    """Encode a whole tensor at once."""
    units, clipped = GRID.encode("p", value.reshape(-1) if factor is None else value.reshape(-1).double() * factor)
    return units, clipped


def added(value: Tensor, factor: float | None = None) -> tuple[Tensor, int]:
    sums = torch.full(value.shape, 5)
    clipped = add_units(GRID, "p", split(value), sums, factor)
    return (sums - 5).reshape(-1), clipped


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factor", [None, 0.3])
def test_units_are_those_of_the_obvious_code(size: int, dtype: torch.dtype, factor: float | None) -> None:
    for spread in (1e-12, 1e-3, 1.0, 2.0**13):
        value = numbers(size, spread, dtype)
        found, expected = added(value, factor), obvious(value, factor)
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1]


def test_halves_are_rounded_to_even_and_the_largest_numbers_fall_back() -> None:
    edges = [2.0**50, 2.0**51, 2.0**52, 2.0**53, 2.0**60]
    units = [k + half for k in (0.0, 1.0, 2.0, 1e9) for half in (0.5, 0.25, 0.75, 0.4999999999)]
    for edge in (*units, *edges, *(math.nextafter(e, s) for e in edges for s in (0.0, math.inf))):
        for sign in (1, -1):
            value = torch.tensor([sign * edge * UNIT, 0.0, -0.0], dtype=torch.float64)
            assert torch.equal(added(value)[0], obvious(value)[0]), edge


@pytest.mark.parametrize("value", [2.0**24, math.nextafter(2.0**24, math.inf), -(2.0**25), 1e300])
def test_numbers_beyond_the_bound_are_clipped_and_counted(value: float) -> None:
    tensor = torch.zeros(2 * BLOCK + 1, dtype=torch.float64)
    tensor[BLOCK + 1] = value
    found, expected = added(tensor), obvious(tensor)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1] == int(abs(value) > 2.0**24)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, BLOCK + 1])
def test_what_is_not_finite_is_refused(value: float, at: int) -> None:
    tensor = torch.zeros(2 * BLOCK)
    tensor[at] = value
    with pytest.raises(ProtocolError, match="E-WIRE-05"):
        added(tensor)
    assert not math.isfinite(sum_of_squares(split(tensor), lambda: 1.0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_are_units_already(dtype: torch.dtype) -> None:
    value = torch.arange(2 * BLOCK + 3, dtype=dtype) - BLOCK
    assert torch.equal(added(value)[0], value.long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", SIZES)
def test_sums_of_squares_are_those_of_the_obvious_code(size: int, dtype: torch.dtype) -> None:
    value = numbers(size, 1e3, dtype)
    unit = 1.0 if value.is_floating_point() else 2.0**-20
    exact = [np.square(block.double().numpy() * unit) for block in torch.split(value, BLOCK)]
    assert sum_of_squares(split(value), lambda: unit) == math.fsum(float(block.sum()) for block in exact)


def test_a_tensor_in_memory_is_given_in_order() -> None:
    value = numbers(2 * BLOCK + 3, 1.0).reshape(-1, 1)
    given = [block.copy() for block in blocks({"a": value}, "a")]
    assert [len(block) for block in given] == [BLOCK, BLOCK, 3]
    assert np.array_equal(np.concatenate(given), value.reshape(-1).numpy())


@pytest.mark.parametrize("ring", ["ring64", "ring32"])
@pytest.mark.parametrize("weight", [torch.tensor(7.0), torch.tensor([2.0, 0.0, 5.0])])
def test_decoded_sums_and_their_mean_are_those_of_the_obvious_code(ring: Ring, weight: Tensor) -> None:
    grid = FixedPointFormat(ring, 3, {"p": 2.0**5, "p.weight": 2.0**9})
    units = {name: torch.randint(-(2**31), 2**31, (3, size)) for name, size in (("a", 2 * BLOCK), ("b", 5), ("c", 0))}
    sums = Part(units, grid.encode("p.weight", weight)[0])
    decoded = FixedPoint(grid).incoming({"p": sums}, 3, 0)["p"]
    obvious = Part({name: grid.decode("p", value) for name, value in units.items()}, weight)
    assert PartSpec.of(decoded) == PartSpec.of(obvious)
    assert torch.equal(decoded.weight.float(), weight)
    before = {name: value.clone() for name, value in units.items()}
    for name, value in obvious.mean().items():
        assert torch.equal(decoded.total[name], obvious.total[name])
        assert torch.equal(
            torch.cat([b.clone() for b in decoded.total.blocks(name, 99)] or [value[:0].reshape(-1).double()]),
            obvious.total[name].reshape(-1),
        )  # type: ignore[attr-defined]
        assert torch.equal(decoded.mean()[name], value)
        assert torch.equal(units[name], before[name])
