"""Memory that is used again: never while somebody can still see what is in it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from fl_core.aggregation.aggregator import Accumulator
from fl_core.aggregation.fixed_point import FixedPoint, Grid
from fl_core.blockwise.buffer_pool import LARGE, Buffers
from fl_core.types import tensor_maps as trees
from fl_core.types.values import Part, PartSpec

SHAPE = (LARGE // 4, 2)


def test_memory_is_given_out_again_only_when_no_tensor_view_or_array_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.empty(SHAPE, torch.float32).fill_(7.0)
    place = first.data_ptr()
    for holder in (first[3], first.view(-1)[5:], first.numpy(), first.view(torch.int32), np.asarray(first)[1:2]):
        del first
        gc.collect()
        assert buffers.kept() == 0
        other = buffers.empty(SHAPE, torch.float32).zero_()
        assert other.data_ptr() != place
        assert float(np.asarray(holder).view(np.float32).ravel()[0]) == 7.0
        del other
        assert buffers.kept() == 2 * LARGE
        buffers.clear()
        first = torch.from_numpy(holder) if isinstance(holder, np.ndarray) else holder
    del first, holder
    gc.collect()
    assert buffers.kept() == 2 * LARGE
    assert buffers.empty(SHAPE, torch.float32).data_ptr() == place


def test_memory_of_one_size_serves_every_type_and_shape_of_that_size() -> None:
    buffers = Buffers()
    place = buffers.empty(SHAPE, torch.float32).data_ptr()
    again = buffers.empty((LARGE // 4,), torch.int64)
    assert (again.data_ptr(), again.shape, again.dtype) == (place, (LARGE // 4,), torch.int64)
    assert buffers.empty((LARGE // 4 + 1,), torch.int64).data_ptr() != place


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (LARGE // 8 - 1,)])
def test_small_tensors_are_the_librarys_own(shape: tuple[int, ...]) -> None:
    buffers = Buffers()
    made = buffers.empty(shape, torch.float64)
    assert (tuple(made.shape), made.dtype) == (shape, torch.float64)
    del made
    assert buffers.kept() == 0


def test_what_is_kept_is_bounded() -> None:
    buffers = Buffers(most=3 * LARGE)
    held = [buffers.empty((LARGE,), torch.uint8) for _ in range(5)]
    held.clear()
    gc.collect()
    assert buffers.kept() == 3 * LARGE
    buffers.clear()
    assert buffers.kept() == 0


def test_sums_that_are_made_in_used_memory_are_those_of_fresh_memory() -> None:
    """Rounds one after the other: what an earlier one left in memory shows in no number of a later one."""
    layout = {"delta": PartSpec({"x": SHAPE}, ())}
    grid, server = Grid(n_max=2), {"x": torch.zeros(SHAPE)}
    expected = server["x"].clone()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        sent = [torch.randn(SHAPE, generator=generator) for _ in range(2)]
        sums = Accumulator(layout, grid)
        for x in sent:
            sums.fold({"delta": Part.of({"x": x}, 2.0)})
        total = FixedPoint(grid).incoming(sums.total(), 2, seed)
        server = trees.add(server, total["delta"].mean())
        units = sum((2.0 * x.double() * 2.0 ** grid.frac_bits("delta")).round() for x in sent)
        mean = (torch.as_tensor(units) * 2.0 ** -grid.frac_bits("delta") / 4.0).float()
        expected = expected + mean
        assert torch.equal(server["x"], expected)


def test_adding_keeps_gradients_and_mixed_types() -> None:
    a, b = torch.ones(LARGE, requires_grad=True), torch.ones(LARGE)
    trees.add({"x": a}, {"x": b})["x"].sum().backward()
    assert a.grad is not None
    assert trees.add({"x": b}, {"x": b.double()})["x"].dtype is torch.float64
    assert torch.equal(trees.add({"x": b}, {"x": torch.ones(())})["x"], b + 1)
