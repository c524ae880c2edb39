"""Numbers of a tensor in blocks that stay in the processor's cache: what is computed on the way needs no new memory.

A tensor in a file is read block by block into one piece of memory. New memory costs several times what the arithmetic
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_core.aggregation.fixed_point import FixedPointFormat, as_numpy
from fl_core.types.values import StoredTensors, Tensors

BLOCK = 1 << 15
Blocks = Iterator[NDArray[np.generic]]
_ROUNDER = 1.5 * 2.0**52
"""Added to a number below 2^51, it leaves the nearest integer, of two the even one, in the low bits of the sum."""
_ROUNDER_BITS = int(np.float64(_ROUNDER).view(np.int64))
_ROUNDED = 2.0**50


def blocks(tensors: Tensors, name: str) -> Blocks:
    """Give the numbers of a tensor in order, `BLOCK` at a time; a block is valid until the next one is asked for.

    Raises ProtocolError (E-WIRE-06) where a file cannot be read.
    """
    if isinstance(tensors, StoredTensors):
        return (as_numpy(block) for block in tensors.blocks(name, BLOCK))
    return split(tensors[name])


def split(value: Tensor) -> Blocks:
    """Give the numbers of a tensor as `blocks` does."""
    flat = as_numpy(value).reshape(-1)
    return (flat[start : start + BLOCK] for start in range(0, len(flat), BLOCK))


def sum_of_squares(numbers: Blocks, unit: Callable[[], float]) -> float:
    """Sum squares in float64 block by block, in one order: equal bytes give equal sums on every machine.

    unit: returns what an integer counts.
    """
    room, sums = np.empty(BLOCK), list[float]()
    for block in numbers:
        exact = room[: len(block)]
        if block.dtype.kind == "f":
            np.square(block, out=exact, dtype=np.float64)
        else:
            np.multiply(block, unit(), out=exact, dtype=np.float64)
            np.square(exact, out=exact)
        sums.append(float(exact.sum()))
    return math.fsum(sums)


def add_units(grid: FixedPointFormat, segment: str, numbers: Blocks, into: Tensor, factor: float | None = None) -> int:
    """Add the units of numbers x factor, as `FixedPointFormat.encode` makes them, to int64 sums; count what it clipped.

    into: a tensor of as many numbers, in the memory of the processor. Raises as `FixedPointFormat.encode`.
    """
    sums, at, clipped, room = into.view(-1).numpy(), 0, 0, np.empty(BLOCK)
    bound, scale = grid.bound(segment), 2.0 ** grid.frac_bits(segment)
    most = min(bound, _ROUNDED / scale)
    for block in numbers:
        place, exact = sums[at : at + len(block)], room[: len(block)]
        at += len(block)
        if factor is not None:
            block = np.multiply(block, factor, out=exact, dtype=np.float64)
        if block.dtype.kind != "f" or not (float(block.min()) >= -most and float(block.max()) <= most):  # or NaN
            encoded, beyond = grid.encode(segment, torch.from_numpy(block))
            place += encoded.numpy()
            clipped += beyond
            continue
        np.multiply(block, scale, out=exact, dtype=np.float64)
        exact += _ROUNDER
        units = exact.view(np.int64)
        units -= _ROUNDER_BITS
        place += units
    return clipped
