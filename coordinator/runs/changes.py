"""Waiting until something has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ChangeCounter:
    """Tells those who listen that something has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next = 0

    def notify(self) -> None:
        """Call all listeners, on this thread."""
        with self._lock:
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener()

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call a function at every change inside the block; it must be quick."""
        with self._lock:
            number = self._next
            self._next += 1
            self._listeners[number] = listener
        try:
            yield
        finally:
            with self._lock:
                del self._listeners[number]
