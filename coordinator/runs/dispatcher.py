"""The sessions of silos: sends messages to silos, and passes their messages to the runs.

All of it is in memory: after a restart the store's open rounds are offered again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.runs.tasks import FromSilo, RunTasks
from coordinator.storage.records import Contribution, RoundRow, RunState, StoredRun
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import FederationError, RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import FROM_WIRE, TO_WIRE
from service_core.pki.identity import PeerCertificate

log = logging.getLogger(__name__)
MISSED_PULSES = 3
_ALIVE_PULSES = 2
"""Missed pulses after which a silent session counts as dead and may be replaced."""
_LOST_MESSAGES_S = 300.0
"""A run's end is sent again to a silo that was last seen before the end, or less than this long after it."""

_ALL_SEEN_S = 60.0
_SOFTWARE_CHARS = 80
"""Length limit of a silo's software name, which is stored with each run."""
_RUN_CHARS = 128
"""Maximum length of a run id, since the id in a pulse is shown to every lead."""


@dataclass(slots=True)
class SiloActivity:
    """A silo's current activity, from its newest pulse."""

    activity: pb.Activity.ValueType = pb.IDLE
    run_id: str = ""
    round: int = 0
    done: int = 0
    total: int = 0

    def update(self, pulse: pb.Pulse) -> bool:
        """Apply a pulse; return whether anything has changed."""
        before = (self.activity, self.run_id, self.round, self.done, self.total)
        activity = pulse.activity if pulse.activity in pb.Activity.values() else pb.ACTIVITY_UNSPECIFIED
        now = (activity, pulse.run_id[:_RUN_CHARS], pulse.round, pulse.done, pulse.total)
        self.activity, self.run_id, self.round, self.done, self.total = now
        return before != now


@dataclass(slots=True, eq=False)
class SiloSession:
    """A control stream. Any thread sends; only the stream's own coroutine calls `next`.

    on_change: called from any thread after a message was queued, the Hello arrived or the session ended.
    """

    peer: PeerCertificate
    activity: SiloActivity = field(default_factory=SiloActivity)
    last_heard: float = field(default_factory=time.monotonic)
    hearing: bool = False
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
        """Return why a newer session of the same name may not replace this one; None if it may.

        With a newer certificate it may, with an older one it may not. With the same certificate it may if it comes from
        the same home, or after this session was silent for `alive_s` seconds.
        """
        if self.over or self.peer.not_before < other.peer.not_before:
            return None
        if self.peer.not_before > other.peer.not_before:
            return "with a newer certificate"
        mine, theirs = self.hello or pb.Hello(), other.hello or pb.Hello()
        if self.silent_s >= alive_s or mine.instance in (theirs.instance, theirs.previous_instance):
            return None
        return "with this certificate on another home"

    @property
    def silent_s(self) -> float:
        """Seconds since the last message; 0 while one is processed, since later ones are not read until then."""
        return 0.0 if self.hearing else time.monotonic() - self.last_heard

    @contextmanager
    def hear(self) -> Iterator[None]:
        """Process a message inside the block."""
        self.hearing = True
        try:
            yield
        finally:
            self.last_heard, self.hearing = time.monotonic(), False

    def send(self, message: pb.CoordinatorMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        with self._lock:
            self._out.append(message)
        self.on_change()

    def receive_hello(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.on_change()

    def finish(self, error: FederationError | None = None) -> None:
        """End the session. error: None if it was replaced or the silo has left."""
        with self._lock:
            if self.over:
                return
            self.over, self.error = True, error
        self.on_change()

    def close_and_drain(self) -> list[pb.CoordinatorMessage]:
        """End the session and return the messages that were not sent."""
        with self._lock:
            queued = list(self._out)
            self._out.clear()
            self.finish()
            return queued

    def next(self) -> pb.CoordinatorMessage | None:
        """Take the next message to send; None if there is none, or the session has ended."""
        with self._lock:
            return self._out.popleft() if self._out and not self.over else None


class Dispatcher:
    """The sessions of all silos, and the running runs that receive their messages. Thread-safe.

    Guarantees: a silo has at most one session; no run waits for the task of a revoked silo.
    """

    def __init__(
        self, store: CoordinatorStore, pulse_s: float, on_close: Callable[[RoundRow], None] = lambda _row: None
    ) -> None:
        """Set up without sessions. on_close: called once for each round that closes."""
        self._on_close = on_close
        self.store = store
        self.pulse_s = pulse_s
        self.changes = ChangeCounter()
        self._lock = threading.RLock()
        self._sessions: dict[str, SiloSession] = {}
        self._runs: dict[str, RunTasks] = {}
        self._began = time.monotonic()
        self._left: dict[str, float] = {}
        self._left_training: set[str] = set()
        self._seen: set[str] = set()
        self._all_seen = time.monotonic()

    # ---- runs under way --------------------------------------------------------------------------------------------

    def add_run(self, run_id: str) -> RunTasks:
        """Allow a run to ask silos, until `remove_run`."""
        tasks = RunTasks(run_id, self.store, self.send, self.changes.notify)
        with self._lock:
            self._runs[run_id] = tasks
        return tasks

    def remove_run(self, run_id: str) -> None:
        with self._lock:
            self._runs.pop(run_id, None)

    def tasks_of(self, run_id: str) -> RunTasks | None:
        """Return a run's open tasks; None if it is not running."""
        with self._lock:
            return self._runs.get(run_id)

    def _running(self) -> list[RunTasks]:
        with self._lock:
            return list(self._runs.values())

    # ---- sessions --------------------------------------------------------------------------------------------------

    def attach(self, session: SiloSession) -> None:
        """Make this the session of its silo and end an older one.

        Raises RefusedError (E-ID-26) if two machines use one name: the older session has a newer certificate, or it is
        alive with the same certificate on another home.
        """
        with self._lock:
            older = self._sessions.get(session.name)
            conflict = None if older is None else older.conflict_with(session, _ALIVE_PULSES * self.pulse_s)
            if conflict is None:
                self._sessions[session.name] = session
        if conflict is not None:
            error = RefusedError(
                "E-ID-26",
                f"two machines use the name {session.name!r}: there is already a session {conflict}. Stop one of "
                f"them. If one machine replaces the other, it must join again (coordinator invite {session.name} "
                "--again)",
            )
            log.warning("refused a session: %s", error)
            self.note_refusal(session.peer, error)
            raise error
        if older is None:
            self._note(session.name, "here")
        else:
            for message in older.close_and_drain():
                session.send(message)
        self.changes.notify()

    def catch_up(self, session: SiloSession, hello: pb.Hello, last_seen: float) -> None:
        """Send the messages that a silo missed: closed rounds, ended runs, open tasks, and those of fixed sets."""
        for ref in hello.staged:
            if message := self._close_of(session.name, ref):
                session.send(message)
        for run in self.store.runs.all():
            past = run.state in (RunState.FINISHED, RunState.ABORTED) and run.ended > last_seen - _LOST_MESSAGES_S
            if past and session.name in run.members:
                session.send(run_ended(run))
        for tasks in self._running():
            tasks.catch_up(session.name, session.send)

    def _close_of(self, name: str, ref: pb.RoundRef) -> pb.CoordinatorMessage | None:
        if ref.kind == pb.CENSUS:
            return census_closed(ref.run_id) if self.store.secagg.census(ref.run_id) else None
        row = self.store.runs.round(ref.run_id, ref.round)
        if row is None or row.is_open or ref.kind not in FROM_WIRE:
            return None
        if row.record.kind is FROM_WIRE[ref.kind]:
            return round_closed(row, name)
        return pb.CoordinatorMessage(round_closed=pb.RoundClosed(run_id=row.run_id, round=row.round, kind=ref.kind))

    def detach(self, session: SiloSession) -> None:
        with self._lock:
            if self._sessions.get(session.name) is not session:
                return
            del self._sessions[session.name]
            self._left[session.name] = time.monotonic()
            self._seen.add(session.name)
            self._left_training.discard(session.name)
            if session.activity.activity == pb.TRAINING:
                self._left_training.add(session.name)
        why = "" if session.error is None else f": {session.error}"
        gone = f", {word}" if (word := self.last_word(session.name)) else ""
        self._note(session.name, f"away{gone}{why}")
        self.changes.notify()

    def store_last_seen(self) -> None:
        """Store the time at which silos were last seen: of those that left since the last call, once a minute of all.

        One transaction for all of them. Raises as `Database.write`; the next call then stores them.
        """
        with self._lock:
            names, self._seen = self._seen, set()
            if (now := time.monotonic()) - self._all_seen > _ALL_SEEN_S:
                self._all_seen = now
                names |= set(self._sessions)
        try:
            if names:
                self.store.members.mark_connected(names)
        except FederationError:
            with self._lock:
                self._seen |= names
            raise

    def close(self) -> None:
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.finish()

    # ---- messages from silos ---------------------------------------------------------------------------------------

    def pulse(self, session: SiloSession, pulse: pb.Pulse) -> None:
        if session.activity.update(pulse):
            self.changes.notify()

    def hear(self, session: SiloSession, message: FromSilo) -> None:
        """Pass a silo's message to its run."""
        if isinstance(message, pb.SecaggConfirm):
            self.store.secagg.note_answers(session.name, message.masked_answers)
        if (tasks := self.tasks_of(message.run_id)) is not None:
            tasks.hear(session.name, message, self.software_of([session.name]))

    def delivered(self, update: Contribution) -> None:
        """Report to the run that an update and its record are on disk."""
        if (tasks := self.tasks_of(update.run_id)) is not None:
            tasks.delivered(update)
        self.changes.notify()

    def reject(self, update: Contribution, error: FederationError) -> None:
        """Report to the run that an update is invalid for any round."""
        if (tasks := self.tasks_of(update.run_id)) is not None:
            tasks.reject(update, error)

    def fail_revoked_tasks(self) -> None:
        """Settle the tasks of silos that are no longer members; called once per pulse."""
        members = self.store.members.member_names()
        for tasks in self._running():
            tasks.revoke(members)

    # ---- messages to silos -----------------------------------------------------------------------------------------

    def announce_close(self, row: RoundRow) -> None:
        """Send the close of a round to its cohort; silos without a session get it in `catch_up`."""
        self._on_close(row)
        for name in row.cohort:
            self.send(name, round_closed(row, name))
        self.changes.notify()

    def announce_end(self, run: StoredRun) -> None:
        for name in run.members:
            self.send(name, run_ended(run))
        self.changes.notify()

    def send(self, name: str, message: pb.CoordinatorMessage) -> None:
        """Queue a message in the session of a silo; without one it is dropped."""
        with self._lock:
            session = self._sessions.get(name)
        if session is not None:
            session.send(message)

    # ---- for the lead ----------------------------------------------------------------------------------------------

    def activity_of(self, name: str) -> tuple[SiloActivity, float] | None:
        """Return a silo's activity and the seconds since its last message; None without a session."""
        with self._lock:
            session = self._sessions.get(name)
            return None if session is None else (session.activity, session.silent_s)

    def connected(self) -> set[str]:
        """Return the names of silos with a session."""
        with self._lock:
            return set(self._sessions)

    def offline_for(self, name: str) -> float | None:
        """Return the seconds since a silo's session ended, or since the service began; None while connected."""
        with self._lock:
            return None if name in self._sessions else time.monotonic() - self._left.get(name, self._began)

    def last_word(self, name: str) -> str:
        """Report that a disconnected silo left in the middle of training; empty if it did not."""
        with self._lock:
            gone = name in self._left_training and name not in self._sessions
        return "connection lost during training: the hospital's service or machine may have stopped" if gone else ""

    def note_refusal(self, peer: PeerCertificate, error: FederationError) -> None:
        """Show a refused call of a silo in the runs that wait for it, once per reason."""
        self._note(peer.identity.name, str(error), kind="refused")

    def _note(self, name: str, text: str, kind: str = "silo") -> None:
        for tasks in self._running():
            tasks.note(name, text, kind)

    def software_of(self, names: Collection[str]) -> dict[str, str]:
        """Return the software of the connected ones among these silos."""
        with self._lock:
            hellos = {name: self._sessions[name].hello for name in names if name in self._sessions}
        return {name: hello.software[:_SOFTWARE_CHARS] for name, hello in hellos.items() if hello is not None}


def census_closed(run_id: str) -> pb.CoordinatorMessage:
    """Announce to a member of a masked run that its census has ended."""
    return pb.CoordinatorMessage(round_closed=pb.RoundClosed(run_id=run_id, kind=pb.CENSUS, included=True))


def negotiate(hello: pb.Hello, ours: int) -> None:
    """Raise RefusedError (E-WIRE-01) unless the silo speaks protocol version `ours`."""
    if not hello.protocol_min <= ours <= hello.protocol_max:
        older = "the silo" if hello.protocol_max < ours else "the coordinator"
        raise RefusedError(
            "E-WIRE-01",
            f"the coordinator speaks protocol {ours}, this silo {hello.protocol_min} to {hello.protocol_max} "
            f"({hello.software[:60]}): upgrade {older}",
        )


def round_closed(row: RoundRow, name: str) -> pb.CoordinatorMessage:
    """Report to a silo whether its update is in a closed round, and why it or parts of it are not."""
    record = row.record
    reason = record.missing.get(name) or record.cut.get(name, "")
    closed = pb.RoundClosed(
        run_id=row.run_id, round=row.round, kind=TO_WIRE[record.kind], included=name in record.included, reason=reason
    )
    return pb.CoordinatorMessage(round_closed=closed)


def run_ended(run: StoredRun) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(run_ended=pb.RunEnded(run_id=run.id, state=run.state.value, reason=run.reason))


# ---- waiting for a change --------------------------------------------------------------------------------------------


class ChangeCounter:
    """Notifies listeners of changes."""

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
        """Call a function at every change inside the block; it must return quickly."""
        with self._lock:
            number = self._next
            self._next += 1
            self._listeners[number] = listener
        try:
            yield
        finally:
            with self._lock:
                del self._listeners[number]
