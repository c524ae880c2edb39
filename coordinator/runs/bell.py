"""What wakes those who wait for something to change."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class ChangeCounter:
    """Wakes whoever watches; a count instead of a flag, so that nobody misses a ring."""

    _count: int = 0
    _rung: threading.Condition = field(default_factory=threading.Condition)

    def notify(self) -> None:
        """Say that something has changed."""
        with self._rung:
            self._count += 1
            self._rung.notify_all()

    def count(self) -> int:
        """Return how often it rang."""
        with self._rung:
            return self._count

    def wait(self, seen: int, seconds: float) -> int:
        """Wait until it has rung more than `seen` times, at most so long; return how often it rang."""
        with self._rung:
            self._rung.wait_for(lambda: self._count > seen, seconds)
            return self._count
