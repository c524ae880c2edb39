"""Keeps a session with the coordinator: opens it, recycles it, and reconnects after every interruption."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fl_core.errors import FederationError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import Address
from service_core.tls.causes import Diagnosis
from service_core.version import PROTOCOL
from silo.cancellation import CancelToken
from silo.connection.channel import Connection, ConnectionManager
from silo.connection.retry import Backoff
from silo.connection.session import PULSE_FLOOR_S, Handler, Session
from silo.connection.transfer import RetryPolicy
from silo.events import EmitEvent, error_event, event
from silo.storage.store import SiloStore

RECONNECT_CAP_S = 15.0
"""Longest wait before the next session. Federations have some dozens of silos, so longer waits need not spread them."""


@dataclass(slots=True)
class ControlClient:
    """The silo's side of the control plane; its thread calls `run`.

    make_hello: called for each session, so that the hello lists all rounds staged so far   diagnose: finds out why an
    address cannot be reached   pulse_floor: see `Session`.
    """

    connections: ConnectionManager
    store: SiloStore
    make_hello: Callable[[], pb.Hello]
    on_welcome: Callable[[pb.Welcome], None]
    diagnose: Callable[[Address], Diagnosis]
    emit: EmitEvent
    retry_policy: RetryPolicy
    session_opened: threading.Event
    clock: Callable[[], float] = time.monotonic
    pulse_floor: float = PULSE_FLOOR_S
    _session: Session | None = None
    _opening: Session | None = None
    _used: Connection | None = None
    _wake: threading.Event = field(default_factory=threading.Event)
    _recycle: bool = False
    _renewed: bool = False
    _was_connected: bool = False

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        session = self._session
        return session is not None and not session.ended.is_set()

    def send(self, message: pb.SiloMessage) -> None:
        """Send over the current session. Without one, drop the message: the next hello has the same information."""
        opening = self._opening
        # Messages that follow a welcome at once are answered over the same session before it is the current one.
        session = self._session if opening is None or opening.welcome is None else opening
        if session is not None:
            session.send(message)
            session.send_pulse()

    def recycle(self) -> None:
        """Open a new session soon; its hello reports all staged work again.

        The present session is kept for at least the longest back-off.
        """
        self._recycle = True
        self._wake.set()

    def renewed(self) -> None:
        """Replace session and connection at once, after a renewal: the old certificate is about to be rejected."""
        self._renewed = True
        self._wake.set()

    def run(self, handler: Handler, stop: CancelToken) -> None:
        """Keep a session open until `stop`.

        Raises errors that retrying cannot repair: final refusals, an invalid welcome and, before the first session, TLS
        failures.
        """
        backoff = Backoff(self.retry_policy.backoff_s, min(self.retry_policy.backoff_cap_s, RECONNECT_CAP_S))
        try:
            with stop.on_cancel(self._wake.set):
                while not stop.is_cancelled:
                    if self._connect(handler, backoff):
                        self._run_session(stop)
                        if self._session is not None:
                            continue  # due for recycling: open the next one before this one ends
                    stop.wait(backoff.next())
        finally:
            self._close(stop.reason)

    def _connect(self, handler: Handler, backoff: Backoff) -> bool:
        self._recycle = self._renewed = False  # before the connection is made: a renewal in between sets it again
        connection = self.connections.for_session()
        session = Session(
            connection.control,
            handler,
            self._wake.set,
            lambda e: self.emit(error_event(e)),
            self.clock,
            self.pulse_floor,
        )
        self._opening = session
        try:
            welcome = session.open(self.make_hello(), self.retry_policy.idle_s)
            if welcome.protocol != PROTOCOL:
                raise UnavailableError(
                    "E-WIRE-01",
                    f"this silo speaks protocol {PROTOCOL}, the coordinator {welcome.protocol}: upgrade the older side",
                )
            self.on_welcome(welcome)
        except FederationError as refused:
            self._opening = None
            session.drop()
            if connection is not self.connections.current():
                connection.channel.close()
            error = connection.explained(refused)
            if not isinstance(error, UnavailableError):
                raise
            self._on_failure(connection.address, error)
            return False
        old, self._session = self._session, session
        self._opening = None
        if old is not None:
            old.drop()
        self._used = connection
        self.connections.use(connection)
        backoff.reset()
        if old is None:
            text = f"connected to {connection.address} ({welcome.software or 'no version given'})"
            self.emit(
                event("connected", text, facts={"address": str(connection.address), "software": welcome.software})
            )
        self._was_connected = True
        self.store.record_contact(str(connection.address), welcome.software)
        self.session_opened.set()
        return True

    def _on_failure(self, address: Address, error: UnavailableError) -> None:
        """Report why there is no session; before the first one, raise a diagnosis that waiting cannot repair."""
        problem: FederationError = error
        if self._session is None or self._session.ended.is_set():
            if error.code == "E-NET-01" and not (finding := self.diagnose(address)).ok:
                problem = finding.error()
            if not self._was_connected and not isinstance(problem, UnavailableError):
                raise problem from error
            self.connections.replace(next_address=True)
            self.connections.close_replaced()
            self.store.record_departure(str(problem))
        self.emit(error_event(problem))

    def _run_session(self, stop: CancelToken) -> None:
        """Wait until the session ends or is due for recycling; raises a final refusal."""
        session = self._session
        assert session is not None
        assert session.welcome is not None
        assert self._used is not None
        opened, recycle_seconds = self.clock(), session.welcome.recycle_seconds
        period = max(recycle_seconds, self.pulse_floor) if recycle_seconds > 0 else float("inf")  # 0 and NaN: never
        while not stop.is_cancelled:
            if session.ended.is_set():
                self._session = None
                if session.was_silent:
                    self.connections.replace()  # gRPC itself notices a lost connection only after 40 s
                error = session.error or UnavailableError("E-NET-12", "the session ended")
                error = self._used.explained(error)
                self.store.record_departure(str(error))
                if not isinstance(error, UnavailableError):
                    raise error
                self.emit(event("disconnected", str(error), facts={"code": error.code}))
                return
            age = self.clock() - opened
            due = min(period, self.retry_policy.backoff_cap_s) if self._recycle else period
            due = 0.0 if self._renewed else due
            if age >= due:
                return
            self._wake.wait(min(due - age, 3600.0))
            self._wake.clear()

    def _close(self, why: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.leave()
            self.store.record_departure(why or "left")
        self.connections.close()
