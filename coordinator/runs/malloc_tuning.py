"""How much memory the service keeps: a bound that does not depend on how many threads have used some."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 4 << 20
_SMALL_KEPT = 32 << 20
_ARENAS = 2


def give_back_large_blocks() -> bool:
    """Let the C library return every block of 4 MiB or more to the system when it is freed; tell whether it does.

    By default glibc keeps up to 8 arenas per core, raises its bound for such blocks to 32 MiB with use, and a model's
    tensors then lie scattered over arenas that never shrink: the peak grew from round to round, and by hundreds of MiB
    from one start to the next. Smaller blocks, such as the messages of a transfer, are kept for the next ones, up to
    32 MiB per arena: once the bound above is set, glibc would return the end of an arena at 128 KiB, and every message
    would be made of new pages. Call it before threads are started. Elsewhere than on Linux with glibc it does nothing.
    """
    mallopt = _of_glibc("mallopt")
    wanted = {_M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: _SMALL_KEPT, _M_ARENA_MAX: _ARENAS}
    return mallopt is not None and all(mallopt(name, value) for name, value in wanted.items())


def give_back_what_is_free() -> None:
    """Return to the system what this process keeps for the next tensors and messages.

    Rehearsing a method leaves its small tensors' memory in pieces between others that are in use, which the C
    library returns only when asked. What comes next pays for new pages, so this is for the end
    of something, not for every round. Where the C library has no such call, only tensors' memory is returned.
    """
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function that glibc has and others may not."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def use_huge_pages() -> None:
    """Let torch ask the system for huge pages under large tensors, unless the environment decides otherwise.

    A fresh tensor of 45 MB is 11,000 ordinary pages, and making them takes longer than filling them. Call it before
    the first large tensor: torch reads THP_MEM_ALLOC_ENABLE once. Where the system has no such pages it does nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
