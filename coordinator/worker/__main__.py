"""The worker of a run. `coordinator serve` starts it; it computes until the service closes its pipe."""

from __future__ import annotations

import ctypes

from coordinator.runs.exchange import Place
from service_core.workers.lines import own_streams

_M_MMAP_THRESHOLD, _LARGE = -3, 1 << 20


def _return_large_blocks() -> None:
    """Have glibc return freed tensors of 1 MiB or more at once; otherwise its threshold grows to 32 MiB."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def main() -> None:
    """Read the worker's `Place`, then answer calls."""
    _return_large_blocks()
    line = own_streams()
    if (place := line.read()) is not None:
        from coordinator.worker import process  # loads torch

        process.serve(Place(**place), line)


if __name__ == "__main__":
    main()
