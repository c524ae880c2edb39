"""How much memory the service keeps: a bound that does not depend on how many threads have used some."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE = 4 << 20
_ARENAS = 2


def give_back_large_blocks() -> bool:
    """Let the C library return every block of 4 MiB or more to the system when it is freed; tell whether it does.

    By default glibc keeps up to 8 arenas per core, raises its bound for such blocks to 32 MiB with use, and a model's
    tensors then lie scattered over arenas that never shrink: the peak grew from round to round, and by hundreds of MiB
    from one start to the next. Call it before threads are started. Elsewhere than on Linux with glibc it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_M_ARENA_MAX, _ARENAS))
