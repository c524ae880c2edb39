"""One control session: hello and welcome, messages in both directions, and pulses from a separate thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc

from fl_core.errors import FederationError, ProtocolError, RefusedError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from silo.connection.retry import Pace, passing, to_federation_error

PULSE_FLOOR_S, PULSE_CEILING_S = 1.0, 300.0
"""Shortest and longest interval between pulses in seconds, whatever the coordinator asks for."""
_MIN_S, _MAX_S = 0.5, 3600.0
"""Valid range of the pulse and recycle intervals that a coordinator may ask for, in seconds."""
MISSED_PULSES = 3
"""Number of pulse intervals without any message after which the coordinator counts as dead."""
_PER_S, _BURST = 50.0, 5000.0
"""Most messages read per second, and in a burst. Further ones stay unread, so that they fill no memory or log here."""
_MAX_UNREAD = 10_000
"""Answers that may queue up when the coordinator does not read."""

ReportError = Callable[[FederationError], None]


class Handler(Protocol):
    """Acts on the coordinator's messages, in the session's thread: return quickly, never wait for the network."""

    def offer(self, offer: pb.Offer) -> None: ...

    def preflight(self, request: pb.Preflight) -> None: ...

    def round_closed(self, closed: pb.RoundClosed) -> None: ...

    def run_ended(self, ended: pb.RunEnded) -> None: ...

    def secagg_seal(self, seal: pb.SecaggSeal) -> None: ...

    def secagg_open(self, opening: pb.SecaggOpen) -> None: ...

    def pulse(self) -> pb.Pulse: ...


class _Stream(Protocol):
    """The methods of a gRPC stream that `Session` uses."""

    def __iter__(self) -> Iterator[pb.CoordinatorMessage]: ...

    def cancel(self) -> object: ...


class Session:
    """A stream to the coordinator, from `open` until `ended` is set; `error` is then the reason.

    pulse_floor: minimum interval between pulses in seconds, even if the coordinator asks for a shorter one.
    """

    def __init__(
        self,
        stub: rpc.ControlStub,
        handler: Handler,
        on_end: Callable[[], None],
        report: ReportError,
        clock: Callable[[], float] = time.monotonic,
        pulse_floor: float = PULSE_FLOOR_S,
    ) -> None:
        self._stub = stub
        self._handler = handler
        self._on_end = on_end
        self._report = report
        self._clock = clock
        self._pulse_floor = pulse_floor
        self._outgoing: queue.SimpleQueue[pb.SiloMessage | None] = queue.SimpleQueue()
        self._pulse_due = threading.Event()
        self._answered = threading.Event()
        self._leaving = False
        self._last_received = clock()
        self._call: _Stream | None = None
        self.welcome: pb.Welcome | None = None
        self.ended = threading.Event()
        self.error: FederationError | None = None
        self.was_silent = False
        """Whether the session ended because no message came; its connection may be dead as well."""

    def open(self, hello: pb.Hello, timeout_s: float) -> pb.Welcome:
        """Send the hello and wait for the welcome.

        Raises UnavailableError if the coordinator is away or silent for `timeout_s` seconds, ProtocolError (E-WIRE-06)
        on a welcome with invalid intervals, and any final refusal.
        """
        self.send(pb.SiloMessage(hello=hello))
        self._call = self._stub.Session(self._messages())
        threading.Thread(target=self._read, name="session-read", daemon=True).start()
        if not self._answered.wait(timeout_s):
            self._fail(UnavailableError("E-NET-12", f"the coordinator sent no welcome within {timeout_s:g} s"))
        if self.welcome is None:
            raise self.error or UnavailableError("E-NET-12", "the coordinator ended the session before its welcome")
        try:
            _check_times(self.welcome, min(_MIN_S, self._pulse_floor))
        except ProtocolError as error:
            self._fail(error)
            raise
        threading.Thread(target=self._keep_alive, name="session-pulse", daemon=True).start()
        return self.welcome

    def send(self, message: pb.SiloMessage) -> None:
        """Queue a message for the stream; dropped if the stream has ended, since the next hello repeats its content.

        Ends the session if the coordinator has left too many messages unread.
        """
        self._outgoing.put(message)
        if self._outgoing.qsize() > _MAX_UNREAD:
            self._fail(UnavailableError("E-NET-12", "the coordinator does not read this session"))

    def send_pulse(self) -> None:
        """Send the next pulse as soon as the minimum interval allows."""
        self._pulse_due.set()

    def leave(self, timeout_s: float = 5.0) -> None:
        self._leaving = True
        self._outgoing.put(pb.SiloMessage(pulse=self._handler.pulse()))
        self._outgoing.put(None)
        if not self.ended.wait(timeout_s) and self._call is not None:
            self._call.cancel()

    def drop(self) -> None:
        self._leaving = True
        if self._call is not None:
            self._call.cancel()

    def _messages(self) -> Iterator[pb.SiloMessage]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def _read(self) -> None:
        assert self._call is not None
        try:
            pace = Pace(_PER_S, _BURST, self._clock)
            for message in self._call:
                self._last_received = self._clock()
                self._take(message)
                if wait := pace.wait():
                    self.ended.wait(wait)
            ended: FederationError = UnavailableError("E-NET-12", "the coordinator ended the session")
        except grpc.RpcError as error:
            ended = to_federation_error(error)
        self.error = self.error or ended
        self.ended.set()
        self._answered.set()
        self._pulse_due.set()
        self._outgoing.put(None)  # ends gRPC's thread, which waits for the next message
        self._on_end()

    def _take(self, message: pb.CoordinatorMessage) -> None:
        """Pass a message to the handler; an invalid one is reported and dropped."""
        try:
            match message.WhichOneof("body"):
                case "welcome":
                    self.welcome = message.welcome
                    self._answered.set()
                case "offer":
                    self._handler.offer(message.offer)
                case "preflight":
                    self._handler.preflight(message.preflight)
                case "round_closed":
                    self._handler.round_closed(message.round_closed)
                case "run_ended":
                    self._handler.run_ended(message.run_ended)
                case "secagg_seal":
                    self._handler.secagg_seal(message.secagg_seal)
                case "secagg_open":
                    self._handler.secagg_open(message.secagg_open)
                case "refusal":
                    self.error = _refusal(message.refusal)
                case _:
                    pass  # a pulse, or a message of a later minor version: it only shows that the other side is alive
        except FederationError as error:
            self._report(error)

    def _keep_alive(self) -> None:
        assert self.welcome is not None
        period = pulse_period(self.welcome.pulse_seconds, self._pulse_floor)
        while not self.ended.is_set() and not self._leaving:
            silent = self._clock() - self._last_received
            if silent > MISSED_PULSES * period:
                self.was_silent = True
                self._fail(UnavailableError("E-NET-12", f"the coordinator has been silent for {silent:.0f} s"))
                return
            self.send(pb.SiloMessage(pulse=self._handler.pulse()))
            sent = self._clock()
            if self._pulse_due.wait(period):  # several requests give one pulse, after the minimum interval
                self._pulse_due.clear()
                self.ended.wait(max(0.0, sent + self._pulse_floor - self._clock()))

    def _fail(self, error: FederationError) -> None:
        self.error = self.error or error
        if self._call is not None:
            self._call.cancel()


def _check_times(welcome: pb.Welcome, least: float) -> None:
    """Raise ProtocolError (E-WIRE-06) if an interval is out of range. recycle_seconds may be 0: never recycle."""
    for name, seconds in (
        ("pulse_seconds", welcome.pulse_seconds),
        ("recycle_seconds", welcome.recycle_seconds or 1.0),
    ):
        if not least <= seconds <= _MAX_S:
            raise ProtocolError(
                "E-WIRE-06",
                f"expected {name} from {least:g} to {_MAX_S:g} in a welcome, found {seconds:g}: ask the lead; is this "
                "the right coordinator?",
            )


def pulse_period(requested: float, floor: float) -> float:
    """Return the seconds between pulses; `requested` may be any number, or NaN."""
    return min(requested, max(floor, PULSE_CEILING_S)) if requested > floor else floor


def _refusal(refusal: pb.Refusal) -> FederationError:
    """Convert a refusal: network errors are temporary; protocol and identity errors are final."""
    code = refusal.code or "E-WIRE-10"
    if code.startswith("E-NET"):
        return UnavailableError(code, refusal.reason)
    return passing((ProtocolError if code.startswith("E-WIRE") else RefusedError)(code, refusal.reason))
