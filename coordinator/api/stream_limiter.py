"""How many messages of a transfer are in memory at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

AT_ONCE = 4
PATIENCE_S = 0.2
"""Above the time that a turn takes with many silos on few cores (at 0.05 a third of twelve silos' messages had none),
and 2 MiB in this time are 80 Mbit/s, faster than the silos that the others of a round would then be waiting for."""


class Turns:
    """At most so many streams have a message in hand; another one waits, but never long.

    Where links are fast, many silos send at the same moment and the machine is what limits them: taking turns costs no
    time and bounds the memory of messages, whatever the number of silos. Where links are slow, a stream holds its turn
    while it waits for its silo, so nobody waits longer than `patience_s` for one: a slow silo keeps no other back, and
    slow streams have little in memory.
    """

    def __init__(self, at_once: int = AT_ONCE, patience_s: float = PATIENCE_S) -> None:
        # Not a SimpleQueue, which is quicker: Python 3.11's may wait for ever where its patience ends as it is woken.
        self._free = threading.Semaphore(at_once)
        self._patience_s = patience_s

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, or until patience ends, and have it inside the block."""
        had = self._free.acquire(timeout=self._patience_s)
        try:
            yield
        finally:
            if had:
                self._free.release()
