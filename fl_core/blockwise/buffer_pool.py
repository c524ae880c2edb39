"""Memory of large tensors that is used again, instead of being given back to the system and asked for anew.

A round makes and drops several times the bytes of its model: the sum, the mean, the next state. New pages are cleared
by the system (on a virtual machine its host has to find them first), which took longer than the arithmetic in them.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 1 << 16
"""Bytes from which a tensor's memory is kept; below, the C library's own is as good."""
MOST = 1 << 30
"""Bytes of memory in no use that are kept at most."""


class Buffers:
    """Memory that tensors have left, by its size. Calls may come from several threads.

    Guarantees: memory is given out again only when no tensor, view or array refers to it any more.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        # No lock: the garbage collector may call `_keep` inside any other call. Each step below is one step of Python.
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor on the CPU whose content is arbitrary, as `torch.empty` does."""
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE:
            return torch.empty(tuple(shape), dtype=dtype)
        mapped = self._take(size)
        memory: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        weakref.finalize(memory, self._keep, mapped).atexit = False  # torch holds the array while a tensor needs it
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def kept(self) -> int:
        """Count the bytes that are kept for later."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def clear(self) -> None:
        """Give what is in no use back to the system."""
        self._free = {}

    def _take(self, size: int) -> mmap.mmap:
        with suppress(KeyError, IndexError):
            return self._free[size].pop()
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _keep(self, memory: mmap.mmap) -> None:
        if self.kept() + len(memory) <= self._most:
            self._free.setdefault(len(memory), []).append(memory)


MEMORY = Buffers()
"""What this process keeps: an allocator has no state that a computation can see."""
