"""Waiting well: back-off without end, a request to stop that reaches every wait, and a watch over idle streams."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from fl_core.errors import FederationError, ProtocolError, UnavailableError
from protos.wire import status

T = TypeVar("T")


class CancelledError(UnavailableError):
    """A task was given up on purpose: nothing is wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__("E-RUN-06", f"given up: {reason}")
        self.reason = reason


class CancelToken:
    """A request to leave what is being done, heard by whoever waits or calls over the network.

    set(gently=True) lets the attempt that is under way finish and prevents the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._asked = False
        self._nudges = 0
        self._cancels: list[Callable[[], object]] = []
        self._hard = False
        self.reason = ""

    def set(self, reason: str, gently: bool = False) -> None:
        """Ask to stop, for a reason that is shown; unless gently, cancel the calls under way."""
        with self._lock:
            self.reason = self.reason or reason
            self._asked = True
            self._lock.notify_all()
            self._hard = self._hard or not gently
            cancels = list(self._cancels) if self._hard else []
        for cancel in cancels:
            cancel()

    @property
    def is_set(self) -> bool:
        """Tell whether somebody asked."""
        return self._asked

    def check(self) -> None:
        """Raise CancelledError once somebody has asked."""
        if self._asked:
            raise CancelledError(self.reason)

    def wait(self, seconds: float) -> bool:
        """Sleep, and wake at once (True) when somebody asks, or (False) on a nudge."""
        with self._lock:
            before = self._nudges
            self._lock.wait_for(lambda: self._asked or self._nudges != before, seconds)
            return self._asked

    def wake(self) -> None:
        """End the present sleeps early: what was waited for is there again."""
        with self._lock:
            self._nudges += 1
            self._lock.notify_all()

    @contextmanager
    def cancels(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call `cancel` when a stop comes inside the block."""
        with self._lock:
            self._cancels.append(cancel)
            late = self._hard
        try:
            if late:
                cancel()
            yield
        finally:
            with self._lock:
                self._cancels.remove(cancel)


@dataclass(slots=True)
class Backoff:
    """Full jitter: the n-th wait is uniform in [0, min(cap, base 2^n)] seconds; it never gives up.

    Source: M. Brooker, "Exponential Backoff And Jitter", 2015.
    Guarantees: after `reset` the first wait is at most `base`; no wait is longer than `cap`.
    """

    base: float = 1.0
    cap: float = 60.0
    uniform: Callable[[], float] = field(default_factory=lambda: secrets.SystemRandom().random)
    _tries: int = 0

    def next(self) -> float:
        """Draw the next wait, in seconds."""
        ceiling = min(self.cap, self.base * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return ceiling * self.uniform()

    def reset(self) -> None:
        """Begin anew: there was progress."""
        self._tries = 0


def retry_until(
    attempt: Callable[[], T], backoff: Backoff, stop: CancelToken, tell: Callable[[FederationError], None]
) -> T:
    """Repeat an attempt while it ends in UnavailableError, telling each; raises any other error, and CancelledError."""
    while True:
        stop.check()
        try:
            return attempt()
        except CancelledError:
            raise
        except UnavailableError as error:
            stop.check()
            tell(error)
            stop.wait(backoff.next())


class Cancellable(Protocol):
    """A call that can be given up."""

    def cancel(self) -> object:
        """Give it up."""
        ...


class IdleWatch:
    """Cancel a call in which nothing has moved for `seconds`; how long the whole of it takes does not matter."""

    def __init__(self, call: Cancellable, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._seconds = seconds
        self._clock = clock
        self._last = clock()
        self._over = threading.Event()
        self.expired = False

    def touch(self) -> None:
        """Note that something moved."""
        self._last = self._clock()

    def __enter__(self) -> Self:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="idle-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End the watch."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(max(0.001, self._last + self._seconds - self._clock())):
            if self._clock() - self._last >= self._seconds:
                self.expired = True
                self._call.cancel()
                return


def translated(error: grpc.RpcError, watch: IdleWatch | None = None) -> FederationError:
    """Turn a failed call into the error that the other side raised, or that its silence means."""
    if watch is not None and watch.expired:
        return UnavailableError("E-NET-12", "no byte moved for too long; the connection is opened anew")
    if isinstance(error, grpc.Call):
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
            return ProtocolError("E-WIRE-06", f"expected messages of at most 4 MiB, found more: {error.details()}")
        return status.from_status(error.code().name, error.details())
    return UnavailableError("E-NET-01", f"the call failed: {error}")
