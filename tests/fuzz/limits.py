"""What one target may take: processor time, and memory beyond what was there."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CPU_S = 5.0
MEMORY = 256 << 20


class HangError(BaseException):
    """More processor time than any decoder may take; no handler of ours catches it."""


@contextmanager
def limited(memory: int = MEMORY) -> Iterator[None]:
    """Raise HangError after CPU_S of this process's time, MemoryError above so much more than it had. Main thread only.

    By processor time, so that a busy machine changes nothing; whoever waits for ever is ended by the test's time-out.
    """

    def expired(*_: object) -> None:
        raise HangError(f"more than {CPU_S:g} s of processor time")

    before, (soft, hard) = signal.signal(signal.SIGVTALRM, expired), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
