"""Retries with back-off and cancellation, and a watchdog for idle streams."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from fl_core.errors import FederationError, ProtocolError, UnavailableError
from protos.wire import status
from silo.cancellation import CancelledError, CancelToken

T = TypeVar("T")


@dataclass(slots=True)
class Backoff:
    """Full jitter (M. Brooker, 2015): the n-th wait is uniform in [0, min(cap, base 2^n)] seconds, without end.

    Guarantees: after `reset` the first wait is at most `base`; no wait is longer than `cap`.
    """

    base: float = 1.0
    cap: float = 60.0
    uniform: Callable[[], float] = field(default_factory=lambda: secrets.SystemRandom().random)
    _tries: int = 0

    def next(self) -> float:
        ceiling = min(self.cap, self.base * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return ceiling * self.uniform()

    def reset(self) -> None:
        self._tries = 0


class Pace:
    """A rate limit (token bucket): `per_s` events a second, with bursts of up to `burst`."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._left, self._at = burst, clock()

    def wait(self) -> float:
        """Count an event, and return the seconds to wait before the next one."""
        self._refill()
        self._left -= 1.0
        return max(0.0, -self._left / self._per_s)

    def allows(self) -> bool:
        """Count an event if the limit allows it now; otherwise it is not counted."""
        self._refill()
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now


def retry_until(
    attempt: Callable[[], T], backoff: Backoff, stop: CancelToken, report: Callable[[FederationError], None]
) -> T:
    """Repeat an attempt until it returns. UnavailableError is reported and retried; all other errors are raised."""
    while True:
        stop.raise_if_cancelled()
        try:
            return attempt()
        except CancelledError:
            raise
        except UnavailableError as error:
            stop.raise_if_cancelled()
            report(error)
            stop.wait(backoff.next())


class Cancellable(Protocol):
    """A call that can be cancelled."""

    def cancel(self) -> object: ...


class IdleWatch:
    """Cancels a call if `touch` was not called for `seconds`. The total duration of the call is not limited."""

    def __init__(self, call: Cancellable, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._seconds = seconds
        self._clock = clock
        self._last = clock()
        self._over = threading.Event()
        self.expired = False

    def touch(self) -> None:
        self._last = self._clock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="idle-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(max(0.001, self._last + self._seconds - self._clock())):
            if self._clock() - self._last >= self._seconds:
                self.expired = True
                self._call.cancel()
                return


PASSING = frozenset({"E-TLS-06", "E-TLS-08", "E-WIRE-01"})
"""Error codes that end when a clock is set or the other side is upgraded, without a change to this service."""


def passing(error: FederationError) -> FederationError:
    """Return UnavailableError for an error with a code in `PASSING`, and any other error unchanged."""
    if error.code not in PASSING or isinstance(error, UnavailableError):
        return error
    return UnavailableError(error.code, error.message)


def to_federation_error(error: grpc.RpcError, watch: IdleWatch | None = None) -> FederationError:
    if watch is not None and watch.expired:
        return UnavailableError("E-NET-12", "no byte moved for too long; opening a new connection")
    if isinstance(error, grpc.Call):
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
            return ProtocolError("E-WIRE-06", f"a message is larger than the limit of 4 MiB: {error.details()}")
        return passing(status.from_status(error.code().name, error.details()))
    return UnavailableError("E-NET-01", f"the call failed: {error}")
