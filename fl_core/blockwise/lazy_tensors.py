"""Tensors that are computed when they are read, so that one pass does what several steps describe.

A round ends in a sum, its decoding, a mean and a step, each of them number by number. One after the other they read and
write memory several times the size of the model; block by block, everything between the updates and the next model
stays in the processor's cache. A reader that goes on number by number asks for blocks (`filler`); everybody else reads
a mapping of tensors, as from any other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_core.blockwise.buffer_pool import MEMORY
from fl_core.blockwise.parallel import BLOCK, PIECE, side_by_side

Name = TypeVar("Name")
Shapes = Mapping[Name, tuple[int, ...]]
Numbers = NDArray[Any]
"""A flat array of the type of numbers that its reader asks for."""
Filler = Callable[[int, Numbers], object]
"""Writes the numbers of one tensor, from the one at a place on, as many as an array holds; to be called by any thread.

What is made on the way stays in the cache while these are no more than BLOCK.
"""


class Deferred(Mapping[str, Tensor], ABC):
    """A mapping of CPU tensors, each computed anew whenever it is read.

    Guarantees: a tensor that is read at once and one that is filled block by block have the same bits; several threads
    may read at the same time. What is the same for all blocks of a tensor is done once, when its filler is made.
    """

    def __init__(self, shapes: Shapes[str]) -> None:
        self.shapes = shapes

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype:
        """Name the type of a tensor's numbers."""

    @abstractmethod
    def filler(self, name: str) -> Filler:
        """Give what writes a tensor's numbers."""

    def quotients(self, name: str, divisor: float) -> Filler:
        """Give what writes the quotients of a tensor's numbers, which are float64, and a divisor."""
        fill = self.filler(name)

        def divide(start: int, out: Numbers) -> None:
            fill(start, out)
            np.divide(out, divisor, out=out)

        return divide

    def numbers(self, name: str) -> Numbers:
        """Compute a tensor whose type of numbers NumPy knows, as a flat array and in one step: one that is small."""
        found = np.empty(math.prod(self.shapes[name]), numpy_type(self.dtype_of(name)))
        self.filler(name)(0, found)
        return found

    def extremes(self, name: str) -> tuple[float, float] | None:  # noqa: ARG002
        """Give the smallest and the largest number of a tensor where they are known; NaN is possible."""
        return None

    def __getitem__(self, name: str) -> Tensor:
        """Compute a tensor."""
        made = MEMORY.empty(self.shapes[name], self.dtype_of(name))
        fill, flat = self.filler(name), made.view(-1).numpy()
        if len(flat) <= BLOCK:
            fill(0, flat)
        else:
            block_by_block({name: self.shapes[name]}, lambda _, at, end: fill(at, flat[at:end]))
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@cache
def numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's name of a type of numbers that it knows."""
    return torch.empty(0, dtype=dtype).numpy().dtype


class Mean(Deferred):
    """Sums in float64 divided by one weight, as float32."""

    def __init__(self, total: Deferred, weight: float) -> None:
        super().__init__(total.shapes)
        self._total, self._weight = total, weight

    def dtype_of(self, name: str) -> torch.dtype:  # noqa: ARG002
        """Name the type of all numbers."""
        return torch.float32

    def filler(self, name: str) -> Filler:
        """Divide in float64."""
        means = self._total.quotients(name, self._weight)

        def fill(start: int, out: Numbers) -> None:
            found = np.empty(len(out))
            means(start, found)
            with np.errstate(over="ignore"):  # infinite, as torch makes it
                out[:] = found

        return fill


def block_by_block(shapes: Shapes[Name], work: Callable[[Name, int, int], object], most: int = BLOCK) -> None:
    """Do the work (name, first number, end) for every block of every tensor, on a few threads.

    most: numbers in a block, at most PIECE; work that makes nothing on the way has no reason for small ones.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    pieces = [(name, at, min(at + PIECE, size)) for name, size in sizes.items() for at in range(0, size, PIECE)]

    def piece(place: tuple[Name, int, int]) -> None:
        name, begin, end = place
        for at in range(begin, end, most):
            work(name, at, min(at + most, end))

    side_by_side(piece, pieces)
