"""Dispatch of tasks to silos over their sessions.

Nothing here must survive the process: after a restart tasks are offered again from the store's open rounds, and staged
updates are answered from its closed ones.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.runs.changes import ChangeCounter
from coordinator.runs.session import SiloActivity, SiloSession
from coordinator.runs.tasks import PendingTask, Preflight, PreflightKey, RunInterrupted, SiloTaskKey, Task
from coordinator.storage.records import RoundRow, Run, RunState
from coordinator.storage.store import Store
from fl_core.errors import REASON_CHARS, FederationError, RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from protos.pki.identity import PeerCertificate
from protos.wire.tasks import FROM_WIRE, TO_WIRE

log = logging.getLogger(__name__)
_CODE = re.compile(r"E-[A-Z]+-\d\d")
MISSED_PULSES = 3
_ALIVE_PULSES = 2
"""Heartbeats after which a silent session counts as dead and may be replaced."""
_LOST_MESSAGES_S = 300.0
"""A run's end is sent again to a silo that was last seen before the end, or less than this long after it."""


class Dispatcher:
    """The sessions and open tasks of all silos. Thread-safe.

    Guarantees: a silo has at most one session; a task that is open is offered on every new session of its silo; a
    task of a silo that was revoked, or of a run that was interrupted, does not wait.
    """

    def __init__(self, store: Store, pulse_s: float) -> None:
        self.store = store
        self.pulse_s = pulse_s
        self.changes = ChangeCounter()
        self._lock = threading.RLock()
        self._sessions: dict[str, SiloSession] = {}
        self._pending: dict[SiloTaskKey | PreflightKey, PendingTask] = {}
        self._stopped: set[str] = set()
        self._last_notes: dict[tuple[str, str], str] = {}

    # ---- sessions --------------------------------------------------------------------------------------------------

    def attach(self, session: SiloSession) -> None:
        """Make this the session of its silo and end an older one: of the same process, or of the same home before.

        Raises RefusedError (E-ID-26) when two machines have one name: the older session has a newer certificate, or
        this one on another home, and is alive. The lead sees it in the runs of that silo.
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
        """Send a silo what it missed: closed rounds, ended runs, open tasks."""
        for ref in hello.staged:
            if message := self._close_of(session.name, ref):
                session.send(message)
        for run in self.store.runs.all():
            past = run.state in (RunState.FINISHED, RunState.ABORTED) and run.ended > last_seen - _LOST_MESSAGES_S
            if past and session.name in run.members:
                session.send(run_ended(run))
        with self._lock:
            mine = [p.task for key, p in self._pending.items() if key.silo == session.name and not p.settled]
            for task in mine:
                if task.key.run_id not in self._stopped:  # as in `offer`
                    session.send(task.offer())

    def _close_of(self, name: str, ref: pb.RoundRef) -> pb.CoordinatorMessage | None:
        row = self.store.runs.round(ref.run_id, ref.round)
        if row is not None and not row.is_open and ref.kind in FROM_WIRE:
            included = row.kind is FROM_WIRE[ref.kind] and name in row.included
            return round_closed(row.run_id, row.round, ref.kind, included)
        return None

    def detach(self, session: SiloSession) -> None:
        """Remove a session that has ended."""
        with self._lock:
            if self._sessions.get(session.name) is not session:
                return
            del self._sessions[session.name]
        self.store.members.seen(session.name)
        self._note(session.name, "away" if session.error is None else f"away: {session.error}")
        self.changes.notify()

    def close(self) -> None:
        """End all sessions: the service stops."""
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.finish()

    # ---- messages from silos ---------------------------------------------------------------------------------------

    def pulse(self, session: SiloSession, pulse: pb.Pulse) -> None:
        """Process a heartbeat."""
        if session.activity.update(pulse):
            self.changes.notify()

    def answer(self, session: SiloSession, answer: pb.Answer) -> None:
        """Process a silo's answer to an offer; a refusal settles the task."""
        if answer.kind not in FROM_WIRE:
            return
        key = SiloTaskKey(answer.run_id, answer.round, FROM_WIRE[answer.kind], session.name)
        with self._lock:
            pending = self._pending.get(key)
        if pending is None:
            return  # an answer to a task that is settled: nothing to do
        if answer.accepted:
            if not pending.accepted:
                pending.accepted = True
                self._event(key, "accepted")
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
            self._event(key, "ready")
            pending.settle(answer.manifest_digest)
        else:
            self._refuse(pending, answer.code, answer.reason)

    def _refuse(self, pending: PendingTask, code: str, reason: str) -> None:
        code = code if _CODE.fullmatch(code) else "E-RUN-14"
        error = RefusedError(code, f"the hospital refused: {reason[:REASON_CHARS] or 'it gave no reason'}")
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

    def offer(self, task: Task | Preflight) -> None:
        """Offer an open task to its silo unless its run is interrupted; a silo without a session gets it in `catch_up`.

        Under one lock with `interrupt`, after which the run's end is sent: no silo gets an offer after that.
        """
        with self._lock:
            session = self._sessions.get(task.key.silo)
            if session is not None and task.key.run_id not in self._stopped:
                session.send(task.offer())

    def delivered(self, key: SiloTaskKey, digest: str) -> None:
        """Settle the task whose update is on disk, with its record."""
        with self._lock:
            pending = self._pending.get(key)
        if pending is not None:
            pending.settle(digest)
        self.changes.notify()

    def interrupt(self, run_id: str) -> None:
        """Fail all pending tasks of a run, and those that it opens until `allow`."""
        with self._lock:
            self._stopped.add(run_id)
            mine = [p for key, p in self._pending.items() if key.run_id == run_id]
        for pending in mine:
            pending.settle(RunInterrupted(run_id))
        self.changes.notify()

    def allow(self, run_id: str) -> None:
        """Undo `interrupt`."""
        with self._lock:
            self._stopped.discard(run_id)

    def fail_revoked_tasks(self) -> None:
        """Settle the tasks of silos that are no longer members; called once per pulse."""
        with self._lock:
            waiting = {key.silo for key in self._pending}
        for name in waiting:
            if self.store.members.is_member(name):
                continue
            error = RefusedError("E-ID-12", f"silo {name!r} was revoked")
            with self._lock:
                mine = [p for key, p in self._pending.items() if key.silo == name]
            for pending in mine:
                self._event(pending.task.key, "refused", str(error))
                pending.settle(error)

    # ---- messages to silos -----------------------------------------------------------------------------------------

    def announce_close(self, row: RoundRow) -> None:
        """Send the close of a round to its cohort; silos without a session get it in `catch_up`."""
        for name in row.cohort:
            self._send(name, round_closed(row.run_id, row.round, TO_WIRE[row.kind], name in row.included))
        self.changes.notify()

    def announce_end(self, run: Run) -> None:
        """Send a run's end to its members."""
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

    def _event(self, key: SiloTaskKey | PreflightKey, kind: str, text: str = "") -> None:
        self.store.runs.event(key.run_id, kind, key.round, key.silo, text)
        self.changes.notify()


def negotiate(hello: pb.Hello, ours: int) -> None:
    """Raise RefusedError (E-WIRE-01) unless the silo speaks protocol version `ours`."""
    if not hello.protocol_min <= ours <= hello.protocol_max:
        older = "the silo" if hello.protocol_max < ours else "the coordinator"
        raise RefusedError(
            "E-WIRE-01",
            f"expected protocol {ours}, found a silo that speaks {hello.protocol_min} to {hello.protocol_max} "
            f"({hello.software[:60]}): upgrade {older}",
        )


def round_closed(run_id: str, round: int, kind: pb.TaskKind.ValueType, included: bool) -> pb.CoordinatorMessage:
    closed = pb.RoundClosed(run_id=run_id, round=round, kind=kind, included=included)
    return pb.CoordinatorMessage(round_closed=closed)


def run_ended(run: Run) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(run_ended=pb.RunEnded(run_id=run.id, state=run.state.value, reason=run.reason))
