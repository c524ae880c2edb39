"""How work at a silo is given up: a token that reaches every wait and every call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fl_core.errors import UnavailableError


class CancelledError(UnavailableError):
    """A task was cancelled on purpose; this is not a failure."""

    def __init__(self, reason: str) -> None:
        super().__init__("E-RUN-06", f"given up: {reason}")
        self.reason = reason


class CancelToken:
    """A request to stop that reaches every wait and every network call.

    cancel(gently=True) lets the current attempt finish and prevents the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._cancelled = False
        self._wakes = 0
        self._callbacks: list[Callable[[], object]] = []
        self._at_once = False
        self.reason = ""

    def cancel(self, reason: str, gently: bool = False) -> None:
        """Request a stop, with a reason that is shown; unless gently, cancel the current calls."""
        with self._lock:
            self.reason = self.reason or reason
            self._cancelled = True
            self._lock.notify_all()
            self._at_once = self._at_once or not gently
            callbacks = list(self._callbacks) if self._at_once else []
        for callback in callbacks:
            callback()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    def raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise CancelledError(self.reason)

    def wait(self, seconds: float) -> bool:
        """Sleep; return True at once after `cancel`, False after `wake` or when the time is over."""
        with self._lock:
            before = self._wakes
            self._lock.wait_for(lambda: self._cancelled or self._wakes != before, seconds)
            return self._cancelled

    def wake(self) -> None:
        with self._lock:
            self._wakes += 1
            self._lock.notify_all()

    @contextmanager
    def on_cancel(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call `cancel` when the token is cancelled inside the block, or at once if it was before."""
        with self._lock:
            self._callbacks.append(cancel)
            late = self._at_once
        try:
            if late:
                cancel()
            yield
        finally:
            with self._lock:
                self._callbacks.remove(cancel)
