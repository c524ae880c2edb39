"""Waiting until something has changed."""

from __future__ import annotations

import threading


class ChangeCounter:
    """Counts changes and wakes the threads that wait for one; a count instead of a flag, so that none is missed."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def notify(self) -> None:
        """Count a change and wake all waiting threads."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def count(self) -> int:
        with self._changed:
            return self._count

    def wait(self, seen: int, seconds: float) -> int:
        """Wait until more than `seen` changes were counted, at most `seconds`; return the count."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > seen, seconds)
            return self._count
