"""The sessions of silos, and the dispatch of tasks over them.

Nothing here survives the process: after a restart the store's open rounds are offered again.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.runs.tasks import PendingTask, Preflight, PreflightKey, RunInterrupted, SiloTaskKey, Task
from coordinator.storage.records import RoundRow, Run, RunState
from coordinator.storage.store import Store
from fl_core.errors import REASON_CHARS, FederationError, RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import FROM_WIRE, TO_WIRE
from service_core.pki.identity import PeerCertificate
from service_core.version import software

log = logging.getLogger(__name__)
_CODE = re.compile(r"E-[A-Z]+-\d\d")
MISSED_PULSES = 3
_ALIVE_PULSES = 2
"""Pulses after which a silent session counts as dead and may be replaced."""
_LOST_MESSAGES_S = 300.0
"""A run's end is sent again to a silo that was last seen before the end, or less than this long after it."""

_ALL_SEEN_S = 60.0
_SOFTWARE_CHARS = 80
"""What a silo calls itself is kept with each run."""
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


FromMember = pb.SecaggConfirm | pb.SecaggShares | pb.SecaggRefusal


class SealedSet(Protocol):
    """What is asked of a masked round's members once its set is fixed; called by any thread."""

    def messages_for(self, silo: str) -> Sequence[pb.CoordinatorMessage]:
        """Return what a silo is still asked for; nothing where it is no member, or has answered."""
        ...

    def receive(self, silo: str, message: FromMember) -> None:
        """Take what a silo said; what is wrong with it is noted, and raises nothing."""
        ...

    def interrupt(self) -> None:
        """Ask and wait no longer."""
        ...


class Dispatcher:
    """The sessions and open tasks of all silos. Thread-safe.

    Guarantees: a silo has at most one session; a task that was offered once is offered on every new session of its silo
    until it has an outcome, and one that was not, on none; a task of a silo that was revoked, or of a run that was
    interrupted, does not wait.
    """

    def __init__(self, store: Store, pulse_s: float, on_close: Callable[[RoundRow], None] = lambda _row: None) -> None:
        """Set up without sessions. on_close: called once for each round that is closed."""
        self._on_close = on_close
        self.store = store
        self.pulse_s = pulse_s
        self.changes = ChangeCounter()
        self._lock = threading.RLock()
        self._sessions: dict[str, SiloSession] = {}
        self._pending: dict[SiloTaskKey | PreflightKey, PendingTask] = {}
        self._stopped: set[str] = set()
        self._sealed: dict[str, SealedSet] = {}
        self._last_notes: dict[tuple[str, str], str] = {}
        self._software: dict[str, dict[str, str]] = {}
        self._began = time.monotonic()
        self._left: dict[str, float] = {}
        self._left_training: set[str] = set()
        self._seen: set[str] = set()
        self._all_seen = time.monotonic()

    # ---- sessions --------------------------------------------------------------------------------------------------

    def attach(self, session: SiloSession) -> None:
        """Make this the session of its silo and end an older one.

        Raises RefusedError (E-ID-26) when two machines have one name: the older session is alive, and has a newer
        certificate or this one on another home.
        """
        with self._lock:
            older = self._sessions.get(session.name)
            conflict = None if older is None else older.conflict_with(session, _ALIVE_PULSES * self.pulse_s)
            if conflict is None:
                self._sessions[session.name] = session
        if conflict is not None:
            error = RefusedError(
                "E-ID-26",
                f"expected {session.name!r} once, found it here already {conflict}: two machines use one name. Stop "
                f"one of them; a machine that replaces another joins anew (coordinator invite {session.name} --again)",
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
        """Send a silo what it missed: closed rounds, ended runs, open tasks, and what sealed rounds ask of it."""
        for ref in hello.staged:
            if message := self._close_of(session.name, ref):
                session.send(message)
        for run in self.store.runs.all():
            past = run.state in (RunState.FINISHED, RunState.ABORTED) and run.ended > last_seen - _LOST_MESSAGES_S
            if past and session.name in run.members:
                session.send(run_ended(run))
        with self._lock:
            for key, pending in self._pending.items():
                if key.silo == session.name and pending.offered:
                    self._ask(pending, session)
            asking = list(self._sealed.values())
        for sealed in asking:
            for message in sealed.messages_for(session.name):
                session.send(message)

    def announce_census(self, run_id: str, names: Collection[str]) -> None:
        """Tell the members of a masked run that its census is over."""
        for name in names:
            self._send(name, _census_closed(run_id))

    def _close_of(self, name: str, ref: pb.RoundRef) -> pb.CoordinatorMessage | None:
        if ref.kind == pb.CENSUS:
            return _census_closed(ref.run_id) if self.store.secagg.census(ref.run_id) else None
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
        gone = f", {said}" if (said := self.last_word(session.name)) else ""
        self._note(session.name, f"away{gone}{why}")
        self.changes.notify()

    def store_last_seen(self) -> None:
        """Store that silos were here until now: those that left since the last call, and once a minute all others.

        One change however many there are. Raises as `Database.write`; the next call then stores them.
        """
        with self._lock:
            names, self._seen = self._seen, set()
            if (now := time.monotonic()) - self._all_seen > _ALL_SEEN_S:
                self._all_seen = now
                names |= set(self._sessions)
        try:
            if names:
                self.store.members.seen(names)
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

    def answer(self, session: SiloSession, answer: pb.Answer) -> None:
        if answer.kind not in FROM_WIRE:
            return
        key = SiloTaskKey(answer.run_id, answer.round, FROM_WIRE[answer.kind], session.name)
        with self._lock:
            pending = self._pending.get(key)
        if pending is None:
            return  # an answer to a task that is settled: nothing to do
        if answer.accepted:
            self.note_software(key.run_id, [key.silo])
            if not pending.accepted:
                pending.accepted = True
                self._event(key, "accepted")
            if answer.code and not pending.noted:
                pending.noted = True
                self._event(key, "restarted", str(stated(answer.code, answer.reason)))
            return
        self._refuse(pending, answer.code, answer.reason)

    def preflight(self, session: SiloSession, answer: pb.PreflightAnswer) -> None:
        """Process a silo's answer to a preflight; one about another manifest, or to none, is ignored."""
        key = PreflightKey(answer.run_id, session.name)
        with self._lock:
            pending = self._pending.get(key)
        if pending is None or pending.settled or pending.task.manifest_digest != answer.manifest_digest:
            return
        if answer.ready:
            self.note_software(key.run_id, [key.silo])
            self._event(key, "ready")
            if answer.HasField("secagg_entry"):
                pending.entry = answer.secagg_entry
            pending.trains = tuple(answer.trains)
            pending.settle(answer.manifest_digest)
        else:
            self._refuse(pending, answer.code, answer.reason)

    def _refuse(self, pending: PendingTask, code: str, reason: str) -> None:
        error = stated(code, f"the hospital refused: {reason[:REASON_CHARS] or 'it gave no reason'}")
        self._event(pending.task.key, "refused", str(error))
        pending.settle(error)

    # ---- tasks -----------------------------------------------------------------------------------------------------

    @contextmanager
    def pending_task(self, task: Task | Preflight) -> Iterator[PendingTask]:
        """Keep a task open inside the block; raises RunInterrupted when its run was interrupted."""
        pending = PendingTask(task)
        with self._lock:
            if task.key.run_id in self._stopped:
                raise RunInterrupted(task.key.run_id)
            self._pending[task.key] = pending
        try:
            yield pending
        finally:
            with self._lock:
                self._pending.pop(task.key, None)

    def offer(self, pending: PendingTask) -> None:
        """Offer an open task to its silo; without a session it gets it in `catch_up`, after `interrupt` never."""
        with self._lock:
            pending.offered = True
            session = self._sessions.get(pending.task.key.silo)
            if session is not None:
                self._ask(pending, session)

    def _ask(self, pending: PendingTask, session: SiloSession) -> None:
        if not pending.settled and pending.task.key.run_id not in self._stopped:
            session.send(pending.task.offer())

    def delivered(self, key: SiloTaskKey, digest: str) -> None:
        """Settle the task whose update is on disk, with its record."""
        with self._lock:
            pending = self._pending.get(key)
        if pending is not None:
            pending.settle(digest)
        self.changes.notify()

    def open_silos(self, run_id: str) -> set[str]:
        """Name the silos whose task of a run has no outcome yet."""
        with self._lock:
            return {key.silo for key, p in self._pending.items() if key.run_id == run_id and not p.settled}

    def give_up(self, run_id: str, reasons: Mapping[str, FederationError]) -> None:
        """Settle tasks of a run that have no outcome yet; reasons: by silo."""
        with self._lock:
            mine = [(p, reasons[k.silo]) for k, p in self._pending.items() if k.run_id == run_id and k.silo in reasons]
        for pending, error in mine:
            pending.settle(error)
        self.changes.notify()

    def reject(self, key: SiloTaskKey, error: FederationError) -> None:
        """Settle the task whose update no round would take, so that nobody waits for its silo."""
        with self._lock:
            pending = self._pending.get(key)
        if pending is not None and not pending.settled:
            self._event(key, "refused", str(error))
            pending.settle(error)

    def interrupt(self, run_id: str) -> None:
        """Fail all pending tasks of a run, and those that it opens until `allow`."""
        with self._lock:
            self._stopped.add(run_id)
            mine = [p for key, p in self._pending.items() if key.run_id == run_id]
            sealed = self._sealed.get(run_id)
        for pending in mine:
            pending.settle(RunInterrupted(run_id))
        if sealed is not None:
            sealed.interrupt()
        self.changes.notify()

    def allow(self, run_id: str) -> None:
        with self._lock:
            self._stopped.discard(run_id)

    # ---- sealed rounds ---------------------------------------------------------------------------------------------

    @contextmanager
    def asking(self, run_id: str, sealed: SealedSet) -> Iterator[None]:
        """Ask the members of a sealed round inside the block, each new session again.

        Raises RunInterrupted when the run was interrupted.
        """
        with self._lock:
            if run_id in self._stopped:
                raise RunInterrupted(run_id)
            self._sealed[run_id] = sealed
        try:
            yield
        finally:
            with self._lock:
                self._sealed.pop(run_id, None)

    def ask_members(self, sealed: SealedSet, names: Collection[str]) -> None:
        """Send those that are connected what a sealed round asks of them now."""
        for name in names:
            for message in sealed.messages_for(name):
                self._send(name, message)

    def member_says(self, session: SiloSession, message: FromMember) -> None:
        """Process what a silo says of a sealed set; about a round that nobody asks for any more it is ignored."""
        if isinstance(message, pb.SecaggConfirm):
            self.store.secagg.note_answers(session.name, message.masked_answers)
        with self._lock:
            sealed = self._sealed.get(message.run_id)
        if sealed is not None:
            sealed.receive(session.name, message)

    def fail_revoked_tasks(self) -> None:
        """Settle the tasks of silos that are no longer members; called once per pulse."""
        with self._lock:
            waiting = {key.silo for key in self._pending}
        for name in waiting - self.store.members.member_names():
            error = RefusedError("E-ID-12", f"silo {name!r} was revoked")
            with self._lock:
                mine = [p for key, p in self._pending.items() if key.silo == name]
            for pending in mine:
                self._event(pending.task.key, "refused", str(error))
                pending.settle(error)

    # ---- messages to silos -----------------------------------------------------------------------------------------

    def announce_close(self, row: RoundRow) -> None:
        """Send the close of a round to its cohort; silos without a session get it in `catch_up`."""
        self._on_close(row)
        for name in row.cohort:
            self._send(name, round_closed(row, name))
        self.changes.notify()

    def announce_end(self, run: Run) -> None:
        with self._lock:
            self._software.pop(run.id, None)
        for name in run.members:
            self._send(name, run_ended(run))
        self.changes.notify()

    def _send(self, name: str, message: pb.CoordinatorMessage) -> None:
        with self._lock:
            session = self._sessions.get(name)
        if session is not None:
            session.send(message)

    # ---- what the lead sees ----------------------------------------------------------------------------------------

    def activity_of(self, name: str) -> tuple[SiloActivity, float] | None:
        """Return what a silo is doing and the seconds since its last message; None without a session."""
        with self._lock:
            session = self._sessions.get(name)
            return None if session is None else (session.activity, time.monotonic() - session.last_heard)

    def connected(self) -> set[str]:
        """Name the silos that have a session."""
        with self._lock:
            return set(self._sessions)

    def offline_for(self, name: str) -> float | None:
        """Return the seconds since a silo's session ended, or since the service began; None while it has one."""
        with self._lock:
            return None if name in self._sessions else time.monotonic() - self._left.get(name, self._began)

    def last_word(self, name: str) -> str:
        """Say of a silo without a session that it went in the middle of training; empty where it did not."""
        with self._lock:
            gone = name in self._left_training and name not in self._sessions
        return "gone in the middle of training: the hospital's service or machine may have been ended" if gone else ""

    def note_refusal(self, peer: PeerCertificate, error: FederationError) -> None:
        """Show a refused call of a silo in the runs that wait for it, once per reason."""
        self._note(peer.identity.name, str(error), kind="refused")

    def _note(self, name: str, text: str, kind: str = "silo") -> None:
        with self._lock:
            keys = [key for key in self._pending if key.silo == name]
            fresh = [key for key in keys if self._last_notes.get((key.run_id, name)) != text]
            self._last_notes |= {(key.run_id, name): text for key in fresh}
        for key in fresh:
            self._event(key, kind, text)

    def note_software(self, run_id: str, silos: Collection[str]) -> None:
        """Record with which software the coordinator and those silos that are here do a run; warn of another build.

        What was recorded before is not recorded again, unless the coordinator's own has changed.
        """
        ours, stored = software(), self._software.get(run_id) or self.store.runs.software(run_id)
        with self._lock:
            known = self._software.setdefault(run_id, stored)
            fresh = {} if known.get("") == ours else {"": ours}
            if fresh:
                known.clear()
            here = {name: self._sessions[name].hello for name in silos if name in self._sessions}
            said = {name: hello.software[:_SOFTWARE_CHARS] for name, hello in here.items() if hello is not None}
            fresh |= {name: text for name, text in said.items() if known.get(name) != text}
            known |= fresh
        for name, text in fresh.items():
            self.store.runs.event(run_id, "software", silo=name, text=text)
        others = [f"{name} ({text or 'no version given'})" for name, text in sorted(fresh.items()) if text != ours]
        if others:
            text = f"expected {ours} on all sides, found {', '.join(others)}: the run goes on, see docs/protocol.md"
            self.store.runs.event(run_id, "warning", text=text)
        if fresh:
            self.changes.notify()

    def _event(self, key: SiloTaskKey | PreflightKey, kind: str, text: str = "") -> None:
        self.store.runs.event(key.run_id, kind, key.round, key.silo, text)
        self.changes.notify()


def _census_closed(run_id: str) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(round_closed=pb.RoundClosed(run_id=run_id, kind=pb.CENSUS, included=True))


def stated(code: str, reason: str) -> RefusedError:
    """Make an error of what a silo says; a code that is none becomes E-RUN-14."""
    return RefusedError(code if _CODE.fullmatch(code) else "E-RUN-14", reason[: 2 * REASON_CHARS])


def negotiate(hello: pb.Hello, ours: int) -> None:
    """Raise RefusedError (E-WIRE-01) unless the silo speaks protocol version `ours`."""
    if not hello.protocol_min <= ours <= hello.protocol_max:
        older = "the silo" if hello.protocol_max < ours else "the coordinator"
        raise RefusedError(
            "E-WIRE-01",
            f"expected protocol {ours}, found a silo that speaks {hello.protocol_min} to {hello.protocol_max} "
            f"({hello.software[:60]}): upgrade {older}",
        )


def round_closed(row: RoundRow, name: str) -> pb.CoordinatorMessage:
    """Tell a silo what became of its update, and why not all of it was taken."""
    record = row.record
    reason = record.missing.get(name) or record.cut.get(name, "")
    closed = pb.RoundClosed(
        run_id=row.run_id, round=row.round, kind=TO_WIRE[record.kind], included=name in record.included, reason=reason
    )
    return pb.CoordinatorMessage(round_closed=closed)


def run_ended(run: Run) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(run_ended=pb.RunEnded(run_id=run.id, state=run.state.value, reason=run.reason))


# ---- waiting for a change --------------------------------------------------------------------------------------------


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
