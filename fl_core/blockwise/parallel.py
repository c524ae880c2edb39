"""Large tensors in pieces, and pieces side by side on a few threads.

What a coordinator computes when a round closes is element by element, so the result does not depend on who treats which
piece. torch's own threads are a team for each thread that calls it, more than there are cores where several runs and
calls are under way; these come and go with one call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

PIECE = 1 << 18
"""Numbers in a piece."""
BLOCK = 1 << 17
"""Numbers that are treated at a time, so that what is computed on the way stays in the processor's cache."""
THREADS = min(4, os.cpu_count() or 1)
"""Threads at most: memory is what is busy, and a few keep all of it so."""

Item = TypeVar("Item")


def cut(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one size into flat pieces at the same places; views, of a contiguous tensor."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    for at in range(0, flat[0].numel(), PIECE):
        yield tuple(tensor[at : at + PIECE] for tensor in flat)


def side_by_side(work: Callable[[Item], object], pieces: Sequence[Item]) -> None:
    """Do the work for every piece, in no order; a few pieces are done here, without a thread.

    Raises what the work raised, once all threads have ended.
    """
    left = iter(pieces)

    def several() -> None:
        for piece in left:  # a step of an iterator over a list is one step of Python
            work(piece)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="pieces") as pool:
        others = [pool.submit(several) for _ in range(min(THREADS, len(pieces) // 4) - 1)]
        several()
    for other in others:
        other.result()
