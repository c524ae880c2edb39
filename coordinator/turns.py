"""How many messages of a transfer are in memory at once."""

from __future__ import annotations

from queue import Empty, SimpleQueue

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
        self._free: SimpleQueue[None] = SimpleQueue()  # one call into C, where a semaphore is ten of Python
        for _ in range(at_once):
            self._free.put(None)
        self._patience_s = patience_s

    def turn(self) -> _Turn:
        """Wait for a turn, or until patience ends, and have it inside the block."""
        return _Turn(self._free, self._patience_s)


class _Turn:
    __slots__ = ("_free", "_had", "_patience_s")

    def __init__(self, free: SimpleQueue[None], patience_s: float) -> None:
        self._free, self._patience_s = free, patience_s

    def __enter__(self) -> None:
        self._had = True
        try:
            self._free.get(timeout=self._patience_s)
        except Empty:
            self._had = False

    def __exit__(self, *_: object) -> None:
        if self._had:
            self._free.put(None)
