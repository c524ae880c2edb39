"""Numbers of a tensor in blocks that stay in the processor's cache, so that intermediate results need no new memory.

A tensor in a file is read block by block into the same memory. Allocating memory takes several times as long as the
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.tensors import Tensor, torch
from fl_core.types.computed_tensors import BLOCK, StoredTensors
from fl_core.types.tensor_maps import as_numpy
from fl_core.types.values import Tensors

Blocks = Iterator[NDArray[np.generic]]
_ROUNDER = 1.5 * 2.0**52
"""Added to numbers below 2^51: the low bits of the sum are then the nearest integer, and ties go to the even one."""
_ROUNDED = 2.0**50


def blocks(tensors: Tensors, name: str) -> Blocks:
    """Yield the numbers of a tensor in order, `BLOCK` at a time; a block is valid until the next one is requested.

    Raises ProtocolError (E-WIRE-06) if a file cannot be read.
    """
    if isinstance(tensors, StoredTensors):
        return (as_numpy(block) for block in tensors.blocks(name, BLOCK))
    return split(tensors[name])


def split(value: Tensor, size: int = BLOCK) -> Blocks:
    """Yield the numbers of a tensor in memory, as `blocks` does."""
    flat = as_numpy(value).reshape(-1)
    return (flat[start : start + size] for start in range(0, len(flat), size))


def sum_of_squares(numbers: Blocks, unit: Callable[[], float]) -> float:
    """Sum squares in float64, block by block in a fixed order: equal bytes give equal sums on every machine.

    unit: returns the value of an integer's unit.
    """
    exact, sums = np.empty(0), list[float]()
    for block in numbers:
        exact = _room(exact, len(block))
        np.copyto(exact, block)
        if block.dtype.kind != "f":
            exact *= unit()
        np.square(exact, out=exact)
        sums.append(float(exact.sum()))
    return math.fsum(sums)


def add_units(grid: FixedPointFormat, segment: str, numbers: Blocks, into: Tensor, factor: float | None = None) -> int:
    """Encode numbers x factor as `FixedPointFormat.encode`, add them to int64 sums, and return how many were clipped.

    into: the sums, a tensor of equal size in CPU memory. Raises as `FixedPointFormat.encode`.
    """
    sums, at, clipped, exact = into.view(-1).numpy(), 0, 0, np.empty(0)
    unit = 2.0 ** -grid.frac_bits(segment)
    rounder, most = np.float64(_ROUNDER * unit), min(grid.bound(segment), _ROUNDED * unit)
    bits = rounder.view(np.int64)
    for block in numbers:
        place, exact = sums[at : at + len(block)], _room(exact, len(block))
        at += len(block)
        if factor is not None:
            np.copyto(exact, block)
            exact *= factor
            block = exact
        if block.dtype.kind != "f" or not (float(block.min()) >= -most and float(block.max()) <= most):  # or NaN
            encoded, beyond = grid.encode(segment, torch.from_numpy(block))
            place += encoded.numpy()
            clipped += beyond
            continue
        if factor is None:
            np.copyto(exact, block)
        exact += rounder
        units = exact.view(np.int64)
        units -= bits
        place += units
    return clipped


class DecodedSums(StoredTensors):
    """Sums in units, decoded to float64 as by `FixedPointFormat.decode` on each access."""

    def __init__(self, grid: FixedPointFormat, part: str, sums: Tensors) -> None:
        self.shapes = {name: tuple(value.shape) for name, value in sums.items()}
        self._grid, self._part, self._sums = grid, part, sums

    def __getitem__(self, name: str) -> Tensor:
        return self._grid.decode(self._grid.segment(self._part, name), self._sums[name])

    def blocks(self, name: str, size: int) -> Iterator[Tensor]:
        segment = self._grid.segment(self._part, name)
        if self._grid.ring == "ring32":
            for units in split(self._sums[name], size):
                yield self._grid.decode(segment, torch.from_numpy(units))
            return
        exact, unit = np.empty(0), 2.0 ** -self._grid.frac_bits(segment)
        for units in split(self._sums[name], size):
            exact = _room(exact, len(units))
            np.copyto(exact, units)
            exact *= unit
            yield torch.from_numpy(exact)

    def dtype(self, name: str) -> torch.dtype:  # noqa: ARG002
        return torch.float64


def _room(memory: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return memory for `size` numbers: the given memory if it is large enough, otherwise new memory."""
    return memory[:size] if len(memory) >= size else np.empty(size)
