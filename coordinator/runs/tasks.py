"""A run's messages to its silos (tasks, preflights, the opening of a fixed set), and waiting for the outcomes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol, TypeVar

from coordinator.storage.records import Contribution
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import REASON_CHARS, FederationError, RefusedError, StateError, UnavailableError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import FROM_WIRE, TO_WIRE, contribution_id
from service_core.version import software

T = TypeVar("T")
_CODE = re.compile(r"E-[A-Z]+-\d\d")


class RunInterrupted(Exception):  # noqa: N818 - no error: the run was aborted, or the service stops
    """Stops a run's loop at once; unlike an error it is no silo's fault and closes no round."""


def unless_over(write: Callable[[], T]) -> T:
    """Run a write on a run's records and return its result; raises RunInterrupted if the run has ended."""
    try:
        return write()
    except StateError as error:
        if error.code != "E-RUN-11":
            raise
        raise RunInterrupted(str(error)) from error


@dataclass(frozen=True, slots=True)
class RoundTask:
    """One silo's part of a round.

    due: time.monotonic() of the round's deadline, as in the offer; `OpenRound` decides when a silo is given up
    attempt: how often the run was resumed
    incarnation, included_before: as in the message `Offer`   masks: its fields for a masked run.
    """

    run_id: str
    round: int
    kind: TaskKind
    silo: str
    manifest_digest: str
    base_digest: str
    base_size: int
    cohort: int
    due: float
    attempt: int = 0
    incarnation: str = ""
    included_before: int = 0
    masks: Mapping[str, str] = field(default_factory=dict)

    @property
    def contribution_id(self) -> str:
        return contribution_id(self.run_id, self.round, self.kind, self.silo, self.base_digest)

    def offer(self) -> pb.CoordinatorMessage:
        return pb.CoordinatorMessage(
            offer=pb.Offer(
                run_id=self.run_id,
                round=self.round,
                kind=TO_WIRE[self.kind],
                manifest_digest=self.manifest_digest,
                base_digest=self.base_digest,
                base_size=self.base_size,
                cohort=self.cohort,
                attempt=self.attempt,
                deadline_unix=_unix(self.due),
                incarnation=self.incarnation,
                included_before=self.included_before,
                **self.masks,
            )
        )


@dataclass(frozen=True, slots=True)
class Preflight:
    """Asks one silo whether it can do its part of a run. due: as in `RoundTask`   signed_roster: as in the message."""

    run_id: str
    silo: str
    manifest_digest: str
    due: float
    signed_roster: bytes = b""
    round: ClassVar[int] = 0
    kind: ClassVar[None] = None

    def offer(self) -> pb.CoordinatorMessage:
        return pb.CoordinatorMessage(
            preflight=pb.Preflight(
                run_id=self.run_id,
                manifest_digest=self.manifest_digest,
                deadline_unix=_unix(self.due),
                signed_roster=self.signed_roster,
            )
        )


def _unix(due: float) -> float:
    return time.time() + max(0.0, due - time.monotonic())


def stated(code: str, reason: str) -> RefusedError:
    """Make an error from a silo's message; an unknown code becomes E-RUN-14."""
    return RefusedError(code if _CODE.fullmatch(code) else "E-RUN-14", reason[: 2 * REASON_CHARS])


def no_answer() -> FederationError:
    return UnavailableError("E-RUN-37", "no answer to the preflight")


@dataclass(slots=True)
class PendingTask:
    """A task or preflight that waits for its one outcome: a delivery, an answer, an error or an interruption.

    offered: its silo is asked for it, now and in each new session
    entry, trains: keys and classes from a preflight's answer.
    """

    task: RoundTask | Preflight
    offered: bool = False
    accepted: bool = False
    noted: bool = False
    entry: pb.SecaggEntry | None = None
    trains: Sequence[int] = ()
    outcome: Future[str] = field(default_factory=Future)

    @property
    def settled(self) -> bool:
        return self.outcome.done()

    def settle(self, outcome: str | FederationError | RunInterrupted) -> None:
        """Set the outcome (a digest: delivered, or ready for this manifest); later calls change nothing."""
        with suppress(InvalidStateError):
            if isinstance(outcome, str):
                self.outcome.set_result(outcome)
            else:
                self.outcome.set_exception(outcome)

    def wait(self) -> str:
        """Return the digest of the outcome; raises its error, and E-RUN-37 at a preflight's deadline."""
        if isinstance(self.task, Preflight):
            wait([self.outcome], max(0.0, self.task.due - time.monotonic()))
            self.settle(no_answer())
        return self.outcome.result()


# ---- the open tasks of a run -----------------------------------------------------------------------------------------

FromMember = pb.SecaggConfirm | pb.SecaggShares | pb.SecaggRefusal
FromSilo = pb.Answer | pb.PreflightAnswer | FromMember


class FixedSet(Protocol):
    """Messages to a masked round's members once its set is fixed; called by any thread."""

    def messages_for(self, silo: str) -> Sequence[pb.CoordinatorMessage]:
        """Return the pending messages for a silo; empty for non-members and after it has answered."""
        ...

    def receive(self, silo: str, message: FromMember) -> None:
        """Process a silo's message. Invalid messages are recorded, and raise nothing."""
        ...

    def interrupt(self) -> None:
        """Stop waiting for members."""
        ...


class RunTasks:
    """A running run's open tasks: at most one per silo, or the opening of a fixed set. Thread-safe.

    Guarantees: an offered task is offered again in every new session of its silo until it has an outcome; other tasks
    are not sent. After an interruption nothing is sent or awaited.
    """

    def __init__(
        self,
        run_id: str,
        store: CoordinatorStore,
        send: Callable[[str, pb.CoordinatorMessage], None],
        notify: Callable[[], None],
    ) -> None:
        """Begin without a task. send: sends a message to a connected silo   notify: reports a change."""
        self.run_id = run_id
        self._store, self._send, self.notify = store, send, notify
        self._lock = threading.RLock()
        self._pending: dict[str, PendingTask] = {}
        self._set: FixedSet | None = None
        self._interrupted = False
        self._notes: dict[str, str] = {}
        self._software: dict[str, str] | None = None

    # ---- called by the run ---------------------------------------------------------------------------------------

    def begin(self, task: RoundTask | Preflight) -> PendingTask:
        """Keep a task open until `end`; raises RunInterrupted if the run was interrupted."""
        pending = PendingTask(task)
        with self._lock:
            self._require_going_on()
            self._pending[task.silo] = pending
        return pending

    def end(self, pending: PendingTask) -> None:
        with self._lock:
            if self._pending.get(pending.task.silo) is pending:
                del self._pending[pending.task.silo]

    @contextmanager
    def pending_task(self, task: RoundTask | Preflight) -> Iterator[PendingTask]:
        """Keep a task open inside the block; raises as `begin`."""
        pending = self.begin(task)
        try:
            yield pending
        finally:
            self.end(pending)

    def offer(self, pending: PendingTask) -> None:
        """Offer an open task to its silo; a disconnected silo gets it in its next session, unless interrupted."""
        with self._lock:  # until the message is queued, so that none is sent after the run's end
            pending.offered = True
            self._ask(pending, partial(self._send, pending.task.silo))

    def open_silos(self) -> set[str]:
        """Return the silos whose task has no outcome yet."""
        with self._lock:
            return {silo for silo, pending in self._pending.items() if not pending.settled}

    def give_up(self, reasons: Mapping[str, FederationError]) -> None:
        """Settle tasks that have no outcome yet; reasons: by silo."""
        with self._lock:
            mine = [(pending, reasons[silo]) for silo, pending in self._pending.items() if silo in reasons]
        for pending, error in mine:
            pending.settle(error)
        self.notify()

    @contextmanager
    def asking(self, fixed: FixedSet) -> Iterator[None]:
        """Ask the members of a fixed set inside the block, again in each new session; raises as `begin`."""
        with self._lock:
            self._require_going_on()
            self._set = fixed
        try:
            yield
        finally:
            self._set = None

    def ask_members(self, fixed: FixedSet, names: Sequence[str]) -> None:
        """Send the pending messages of a fixed set to its connected members."""
        for name in names:
            self._ask_of_set(fixed, name, partial(self._send, name))

    def interrupt(self) -> None:
        """Settle all tasks with RunInterrupted; from now on `begin` and `asking` raise it."""
        with self._lock:
            self._interrupted = True
            mine, fixed = list(self._pending.values()), self._set
        for pending in mine:
            pending.settle(RunInterrupted(self.run_id))
        if fixed is not None:
            fixed.interrupt()
        self.notify()

    def event(self, kind: str, round: int = 0, silo: str = "", text: str = "") -> None:
        """Store an event of the run, and notify its watchers."""
        self._store.runs.event(self.run_id, kind, round, silo, text)
        self.notify()

    def _require_going_on(self) -> None:
        if self._interrupted:
            raise RunInterrupted(self.run_id)

    # ---- called by the dispatcher --------------------------------------------------------------------------------

    def catch_up(self, silo: str, send: Callable[[pb.CoordinatorMessage], None]) -> None:
        """Send a silo's pending messages in its new session."""
        with self._lock:
            pending, fixed = self._pending.get(silo), self._set
            if pending is not None and pending.offered:
                self._ask(pending, send)
        if fixed is not None:
            self._ask_of_set(fixed, silo, send)

    def _ask_of_set(self, fixed: FixedSet, silo: str, send: Callable[[pb.CoordinatorMessage], None]) -> None:
        for message in fixed.messages_for(silo):
            with self._lock:  # as in `offer`
                if not self._interrupted:
                    send(message)

    def _ask(self, pending: PendingTask, send: Callable[[pb.CoordinatorMessage], None]) -> None:
        if not pending.settled and not self._interrupted:
            send(pending.task.offer())

    def _pending_of(self, silo: str, round: int, kind: TaskKind | None) -> PendingTask | None:
        with self._lock:
            pending = self._pending.get(silo)
        return pending if pending is not None and (pending.task.round, pending.task.kind) == (round, kind) else None

    def hear(self, silo: str, message: FromSilo, software_of: Mapping[str, str]) -> None:
        """Process a silo's message; one that no open task expects is ignored. software_of: the silo's software."""
        if isinstance(message, pb.Answer):
            pending = self._pending_of(silo, message.round, FROM_WIRE.get(message.kind))
            if pending is not None and isinstance(pending.task, RoundTask):
                self._answer(pending, message, software_of)
        elif isinstance(message, pb.PreflightAnswer):
            pending = self._pending_of(silo, 0, None)
            if pending is not None and not pending.settled and pending.task.manifest_digest == message.manifest_digest:
                self._preflight(pending, message, software_of)
        elif (fixed := self._set) is not None:
            fixed.receive(silo, message)

    def _answer(self, pending: PendingTask, answer: pb.Answer, software_of: Mapping[str, str]) -> None:
        if not answer.accepted:
            self._refuse(pending, answer.code, answer.reason)
            return
        self.note_software(software_of)
        if not pending.accepted:
            pending.accepted = True
            self.event("accepted", answer.round, pending.task.silo)
        if answer.code and not pending.noted:
            pending.noted = True
            self.event("restarted", answer.round, pending.task.silo, str(stated(answer.code, answer.reason)))

    def _preflight(self, pending: PendingTask, answer: pb.PreflightAnswer, software_of: Mapping[str, str]) -> None:
        if not answer.ready:
            self._refuse(pending, answer.code, answer.reason)
            return
        self.note_software(software_of)
        self.event("ready", 0, pending.task.silo)
        if answer.HasField("secagg_entry"):
            pending.entry = answer.secagg_entry
        pending.trains = tuple(answer.trains)
        pending.settle(answer.manifest_digest)

    def delivered(self, update: Contribution) -> None:
        """Settle the task whose update is on disk, with its record."""
        if (pending := self._pending_of(update.silo, update.round, update.kind)) is not None:
            pending.settle(update.object_digest)

    def reject(self, update: Contribution, error: FederationError) -> None:
        """Settle the task whose update is invalid, so that the run does not wait for its silo."""
        pending = self._pending_of(update.silo, update.round, update.kind)
        if pending is not None and not pending.settled:
            self._settle(pending, error)

    def revoke(self, members: Collection[str]) -> None:
        """Settle the tasks of silos that are no longer members."""
        with self._lock:
            gone = [p for silo, p in self._pending.items() if silo not in members and not p.settled]
        for pending in gone:
            self._settle(pending, RefusedError("E-ID-12", f"silo {pending.task.silo!r} was revoked"))

    def _refuse(self, pending: PendingTask, code: str, reason: str) -> None:
        why = f"the hospital refused: {reason[:REASON_CHARS] or 'it gave no reason'}"
        self._settle(pending, stated(code, why))

    def _settle(self, pending: PendingTask, error: FederationError) -> None:
        self.event("refused", pending.task.round, pending.task.silo, str(error))
        pending.settle(error)

    # ---- for the lead --------------------------------------------------------------------------------------------

    def note(self, silo: str, text: str, kind: str = "silo") -> None:
        """Store an event about a silo with an open task, unless its last event had the same text."""
        with self._lock:
            pending = self._pending.get(silo)
            if pending is None or self._notes.get(silo) == text:
                return
            self._notes[silo] = text
        self.event(kind, pending.task.round, silo, text)

    def note_software(self, stated: Mapping[str, str]) -> None:
        """Record the software of the coordinator and these silos in the run; warn of other builds.

        stated: by silo. Unchanged software is not recorded again, unless the coordinator's own has changed.
        """
        ours = software()
        with self._lock:
            if self._software is None:
                self._software = self._store.runs.software(self.run_id)
            fresh = {} if self._software.get("") == ours else {"": ours}
            recorded = {} if fresh else self._software
            fresh |= {name: text for name, text in stated.items() if recorded.get(name) != text}
            self._software = {**recorded, **fresh}
        for name, text in fresh.items():
            self._store.runs.event(self.run_id, "software", silo=name, text=text)
        others = [f"{name} ({text or 'no version given'})" for name, text in sorted(fresh.items()) if text != ours]
        if others:
            text = f"expected {ours} on all sides, found {', '.join(others)}: the run continues, see docs/protocol.md"
            self._store.runs.event(self.run_id, "warning", text=text)
        if fresh:
            self.notify()
