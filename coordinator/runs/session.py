"""One silo's control stream: a queue of messages to send, and the silo's newest pulse."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fl_core.errors import FederationError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import PeerCertificate

_RUN_CHARS = 128
"""As many as the id of a run has at most: what a pulse names is shown to every lead."""


@dataclass(slots=True)
class SiloActivity:
    """What a silo does now, from its newest pulse."""

    activity: pb.Activity.ValueType = pb.IDLE
    run_id: str = ""
    round: int = 0
    done: int = 0
    total: int = 0

    def update(self, pulse: pb.Pulse) -> bool:
        """Take over a pulse; return whether anything has changed."""
        before = (self.activity, self.run_id, self.round, self.done, self.total)
        known = pulse.activity if pulse.activity in pb.Activity.values() else pb.ACTIVITY_UNSPECIFIED
        now = (known, pulse.run_id[:_RUN_CHARS], pulse.round, pulse.done, pulse.total)
        self.activity, self.run_id, self.round, self.done, self.total = now
        return before != now


@dataclass(slots=True, eq=False)
class SiloSession:
    """A control stream. Any thread sends; only the stream's own coroutine calls `next`.

    on_change: called from any thread after a message was queued, the Hello has come or the session is over.
    """

    peer: PeerCertificate
    activity: SiloActivity = field(default_factory=SiloActivity)
    last_heard: float = field(default_factory=time.monotonic)
    over: bool = False
    error: FederationError | None = None
    hello: pb.Hello | None = None
    on_change: Callable[[], None] = lambda: None
    _out: deque[pb.CoordinatorMessage] = field(default_factory=deque)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def name(self) -> str:
        return self.peer.identity.name

    def conflict_with(self, other: SiloSession, alive_s: float) -> str | None:
        """Return why a newer session of the same name may not replace this one; None when it may.

        It may with a newer certificate, from the same home, and when this session was silent for `alive_s` seconds.
        """
        if self.over or self.peer.not_before < other.peer.not_before:
            return None
        if self.peer.not_before > other.peer.not_before:
            return "with a newer certificate"
        mine, theirs = self.hello or pb.Hello(), other.hello or pb.Hello()
        silent = time.monotonic() - self.last_heard >= alive_s
        if silent or mine.instance in (theirs.instance, theirs.previous_instance):
            return None
        return "with this certificate on another home"

    def send(self, message: pb.CoordinatorMessage) -> None:
        """Queue a message; one for a session that is over is lost."""
        with self._lock:
            self._out.append(message)
        self.on_change()

    def receive_hello(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.on_change()

    def finish(self, error: FederationError | None = None) -> None:
        """End the session, for cause or (None) because it was replaced or the silo has gone."""
        with self._lock:
            if self.over:
                return
            self.over, self.error = True, error
        self.on_change()

    def close_and_drain(self) -> list[pb.CoordinatorMessage]:
        """End the session and return the messages that were not sent."""
        with self._lock:
            left = list(self._out)
            self._out.clear()
            self.finish()
            return left

    def next(self) -> pb.CoordinatorMessage | None:
        """Take the next message to send; None: there is none, or the session is over."""
        with self._lock:
            return self._out.popleft() if self._out and not self.over else None
