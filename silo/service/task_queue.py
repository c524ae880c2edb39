"""The queue of tasks: offers come in, one task at a time goes out, and closed rounds are settled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_core.errors import REASON_CHARS, FederationError, ProtocolError, RefusedError, SchemaError
from fl_core.errors.catalogue import EXPLANATIONS
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey
from service_core.console import printable
from silo.cancellation import CancelToken
from silo.connection.retry import Pace
from silo.events import EmitEvent, event
from silo.storage.store import SiloStore

Send = Callable[[pb.SiloMessage], None]
_Name = tuple[TaskKey, str, str]
_MAX_TASKS = 1000
"""Limit of waiting tasks, and of remembered refusals and runs, since a coordinator may name any number of them."""
PREFLIGHTS_PER_MIN, PREFLIGHTS_AT_ONCE = 10, 30
"""Rate limit of preflights; those above it are refused unread (E-WIRE-17)."""


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """An offer in work, with the token that cancels it."""

    key: TaskKey
    offer: pb.Offer
    stop: CancelToken = field(default_factory=CancelToken)


@dataclass(frozen=True, slots=True)
class PreflightTask:
    """A preflight of one run under one manifest. key: of the run's first task."""

    key: TaskKey
    request: pb.Preflight
    stop: CancelToken = field(default_factory=CancelToken)

    @classmethod
    def of(cls, request: pb.Preflight) -> PreflightTask:
        """Read a preflight; raises ProtocolError (E-WIRE-06) if it names no run."""
        return cls(TaskKey.of(pb.RoundRef(run_id=request.run_id, kind=pb.TRAIN)), request)

    def answer(
        self, code: str = "", reason: str = "", entry: pb.SecaggEntry | None = None, trains: Sequence[int] = ()
    ) -> pb.SiloMessage:
        run_id, digest = self.request.run_id, self.request.manifest_digest
        answer = pb.PreflightAnswer(run_id=run_id, manifest_digest=digest, ready=not code, code=code, reason=reason)
        answer.trains.extend(trains)
        if entry is not None:
            answer.secagg_entry.CopyFrom(entry)
        return pb.SiloMessage(preflight=answer)


class TaskQueue:
    """Tasks offered by the coordinator, taken one at a time by the task runner. Thread-safe.

    Guarantees: a repeated offer is worked on once; a later round of a run supersedes an earlier one; a refused task is
    refused again without another try until the run is resumed; if a round closes while its task is running, the task
    ends first and the close is settled afterwards.
    """

    def __init__(
        self, store: SiloStore, send: Send, emit: EmitEvent, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._send = send
        self._emit = emit
        self._lock = threading.Condition()
        self._waiting: dict[TaskKey, pb.Offer] = {}
        self._preflights: dict[TaskKey, PreflightTask] = {}
        self._current: QueuedTask | PreflightTask | None = None
        self._accepted = False
        self._refused: dict[_Name, tuple[int, FederationError]] = {}
        self._closing: dict[TaskKey, bool] = {}
        self._ending: dict[str, pb.RunEnded] = {}
        self._closed = False
        self._undecided: set[str] = set()
        self._asked: dict[str, None] = {}
        self._pace, self._too_often = Pace(PREFLIGHTS_PER_MIN / 60, PREFLIGHTS_AT_ONCE, clock), False
        self._pulse = self._local_pulse = pb.Pulse(activity=pb.IDLE)
        self.cleanup_needed = threading.Event()

    # ---- from the coordinator ----------------------------------------------------------------------------------

    def offer(self, offer: pb.Offer) -> None:
        key = TaskKey.of(offer)
        with self._lock:
            if self._closed:
                return
            if offer.incarnation and self._store.reopen(key, offer.incarnation):
                text = f"the coordinator asks for {key} again, because it was restored from a backup"
                self._emit(event("restored", text, key))
                self._forget_later(key)
            elif self._store.closed(key):
                error = ProtocolError("E-RUN-33", f"{key} was closed here before, and a task needs an open round")
                self._answer(key, error)
                return
            attempt, refusal = self._refused.get((key, offer.base_digest, offer.incarnation), (0, None))
            if refusal is not None and offer.attempt <= attempt:
                self._answer(key, refusal)
                return
            if isinstance(self._current, QueuedTask) and self._current.key.run_id == key.run_id:
                if (key, offer.base_digest) == (self._current.key, self._current.offer.base_digest):
                    if self._accepted:
                        self._answer(key, None)
                    return
                if self._current.key.round > key.round and not self._current.stop.is_cancelled:
                    return
                self._current.stop.cancel(f"{key} was offered instead")
            for old in [k for k in self._waiting if k.run_id == key.run_id and k.round < key.round]:
                del self._waiting[old]
            self._require_room(key, self._waiting)
            self._waiting[key] = offer
            self._lock.notify_all()

    def preflight(self, request: pb.Preflight) -> None:
        """Queue the question whether this silo is ready for a run; every question is answered anew.

        One above the rate limit is refused at once; nothing of it is stored, and the limit is logged once.
        """
        task = PreflightTask.of(request)
        with self._lock:
            if self._closed:
                return
            if task.key in self._preflights or self._pace.allows():
                self._too_often = False
                self._require_room(task.key, self._preflights)
                self._preflights[task.key] = task
                self._lock.notify_all()
                return
            news, self._too_often = not self._too_often, True
        refusal = RefusedError(
            "E-WIRE-17",
            f"more than {PREFLIGHTS_PER_MIN} preflights a minute, or {PREFLIGHTS_AT_ONCE} at once: ask again in a "
            "minute",
        )
        if news:
            self._emit(event("refused", f"{task.key}: {refusal}", task.key, {"code": refusal.code}))
        self._send(task.answer(refusal.code, refusal.message))

    def round_closed(self, closed: pb.RoundClosed) -> None:
        key = TaskKey.of(closed)
        if closed.reason and self._concerns(key.run_id):
            why = printable(closed.reason[:REASON_CHARS])
            self._emit(event("judged", f"{key}: {why}", key, {"included": closed.included, "reason": why}))
        with self._lock:
            self._waiting.pop(key, None)
            if isinstance(self._current, QueuedTask) and self._current.key == key:
                self._closing[key] = closed.included
                self._current.stop.cancel(f"{key} is closed")
            else:
                self._settle(key, closed.included)

    def run_ended(self, ended: pb.RunEnded) -> None:
        with self._lock:
            for key in [k for k in self._waiting if k.run_id == ended.run_id]:
                del self._waiting[key]
            for key in [k for k in self._preflights if k.run_id == ended.run_id]:
                del self._preflights[key]
            if self._current is not None and self._current.key.run_id == ended.run_id:
                self._ending[ended.run_id] = ended
                self._current.stop.cancel(f"run {ended.run_id} has ended: {ended.state}")
            else:
                self._end_run(ended)

    def pulse(self) -> pb.Pulse:
        """Return the activity for the coordinator; without step counts in a private run's training."""
        with self._lock:
            pulse = pb.Pulse()
            pulse.CopyFrom(self._pulse)
            return pulse

    def local_pulse(self) -> pb.Pulse:
        """Return the activity for the hospital's own screen, with all steps."""
        with self._lock:
            now, local = self._pulse, self._local_pulse
            same = (now.activity, now.run_id, now.round) == (local.activity, local.run_id, local.round)
            pulse = pb.Pulse()
            pulse.CopyFrom(local if same else now)
            return pulse

    def _require_room(self, key: TaskKey, waiting: Collection[TaskKey]) -> None:
        """Record a run that asks this silo; raises ProtocolError (E-WIRE-06) if too many wait already."""
        if key not in waiting and len(waiting) >= _MAX_TASKS:
            raise ProtocolError("E-WIRE-06", f"{_MAX_TASKS} tasks wait already, which is the limit: {key} is ignored")
        self._asked[key.run_id] = None
        _drop_oldest(self._asked)

    def _concerns(self, run_id: str) -> bool:
        """Tell whether a run ever asked this silo for something; the end of other runs is ignored."""
        return run_id in self._asked or self._store.manifest_of(run_id) is not None

    def _forget_later(self, key: TaskKey) -> None:
        """Drop the tasks of later rounds of a run, and cancel a running one: that coordinator no longer exists."""
        for later in [k for k in self._waiting if k.run_id == key.run_id and k.round > key.round]:
            del self._waiting[later]
        current = self._current
        if current is not None and current.key.run_id == key.run_id and current.key.round > key.round:
            current.stop.cancel(f"{key} was offered instead: the coordinator was restored")

    # ---- for the worker ----------------------------------------------------------------------------------------

    def take(self, seconds: float) -> QueuedTask | PreflightTask | None:
        with self._lock:
            if not self._closed and all(self._undecided_on(key) for key in (*self._waiting, *self._preflights)):
                self._lock.wait(seconds)
            first = next((k for k in self._preflights if not self._undecided_on(k)), None)
            if first is not None and not self._closed:
                self._current = self._preflights.pop(first)
                return self._current
            free = (k for k in self._waiting if not (self._undecided_on(k) or self._awaits_previous_close(k)))
            key = next(free, None)
            if key is None or self._closed:
                return None
            self._current = QueuedTask(key, self._waiting.pop(key))
            self._accepted = False
            return self._current

    def awaits_close(self) -> bool:
        """Tell whether a task waits for the close of its previous round, which is not announced yet."""
        with self._lock:
            return any(self._awaits_previous_close(key) for key in self._waiting)

    def _undecided_on(self, key: TaskKey) -> bool:
        return key.run_id in self._undecided and self._store.approvals.waits(key.run_id)

    def _awaits_previous_close(self, key: TaskKey) -> bool:
        """Tell whether a state of an earlier round waits for its close, which decides where this round starts."""
        return any(
            e.key.run_id == key.run_id and e.key.round < key.round and e.state_digest for e in self._store.outbox()
        )

    def finish(self, task: QueuedTask | PreflightTask) -> None:
        with self._lock:
            self._current = None
            if isinstance(task, PreflightTask) and (self._pulse.run_id, self._pulse.activity) == (
                task.key.run_id,
                pb.FETCHING,
            ):
                self._pulse = pb.Pulse(activity=pb.IDLE)
            if task.key in self._closing:
                self._settle(task.key, self._closing.pop(task.key))
            if task.key.run_id in self._ending:
                self._end_run(self._ending.pop(task.key.run_id))

    def defer(self, task: QueuedTask | PreflightTask) -> bool:
        """Put a task or a preflight back until the hospital has decided; return whether the run is new."""
        with self._lock:
            if not task.stop.is_cancelled and isinstance(task, PreflightTask):
                self._preflights.setdefault(task.key, task)
            elif not task.stop.is_cancelled and isinstance(task, QueuedTask):
                self._waiting.setdefault(task.key, task.offer)
            self._pulse = pb.Pulse(activity=pb.AWAITING_APPROVAL, run_id=task.key.run_id, round=task.key.round)
            news = task.key.run_id not in self._undecided
            self._undecided.add(task.key.run_id)
            return news

    def put_back(self, task: QueuedTask) -> None:
        """Have a task done once more, unless it was given up."""
        with self._lock:
            if not task.stop.is_cancelled:
                self._waiting.setdefault(task.key, task.offer)

    def accept(self, task: QueuedTask) -> None:
        with self._lock:
            self._accepted = True
            self._answer(task.key, None)

    def tell(self, task: QueuedTask, error: FederationError) -> None:
        """Report an error in an accepted task to the coordinator."""
        self._send(
            pb.SiloMessage(
                answer=pb.Answer(
                    run_id=task.key.run_id,
                    round=task.key.round,
                    kind=task.key.wire_kind,
                    accepted=True,
                    code=error.code,
                    reason=public_reason(error),
                )
            )
        )

    def ready(
        self, preflight_task: PreflightTask, entry: pb.SecaggEntry | None = None, trains: Sequence[int] = ()
    ) -> None:
        """Answer that the whole run can be done here. entry, trains: as in `PreflightAnswer`."""
        self._send(preflight_task.answer(entry=entry, trains=trains))

    def refuse(self, task: QueuedTask | PreflightTask, error: FederationError) -> None:
        """Report the full reason to the hospital and the public one to the coordinator; fetched files are not kept."""
        self.cleanup_needed.set()
        self._emit(event("refused", f"{task.key}: {error}", task.key, {"code": error.code}))
        with self._lock:
            if isinstance(task, PreflightTask):
                self._send(task.answer(error.code, public_reason(error)))
            else:
                self._refused[task.key, task.offer.base_digest, task.offer.incarnation] = task.offer.attempt, error
                _drop_oldest(self._refused)
                self._answer(task.key, error)

    def set_activity(
        self,
        task: QueuedTask | PreflightTask,
        activity: pb.Activity.ValueType,
        done: int = 0,
        total: int = 0,
        quiet: bool = False,
    ) -> None:
        """Record progress for the next pulse; quiet: the coordinator sees the activity without the steps."""
        run, round = task.key.run_id, task.key.round
        public = pb.Pulse(activity=activity, run_id=run, round=round)
        with self._lock:
            self._local_pulse = pb.Pulse(activity=activity, run_id=run, round=round, done=done, total=total)
            self._pulse = public if quiet else self._local_pulse

    def retry_now(self) -> None:
        """Let the running task retry now instead of waiting: the coordinator is reachable again."""
        with self._lock:
            if self._current is not None:
                self._current.stop.wake()

    def close(self, reason: str) -> None:
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._preflights.clear()
            if self._current is not None:
                self._current.stop.cancel(reason, gently=self._pulse.activity == pb.UPLOADING)
            self._lock.notify_all()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _answer(self, key: TaskKey, error: FederationError | None) -> None:
        answer = pb.Answer(run_id=key.run_id, round=key.round, kind=key.wire_kind, accepted=error is None)
        if error is not None:
            answer.code, answer.reason = error.code, public_reason(error)
        self._send(pb.SiloMessage(answer=answer))

    def _settle(self, key: TaskKey, included: bool) -> None:
        claimed, included = included, included and self._store.entry(key) is not None
        if self._concerns(key.run_id) and self._store.close(key, included):
            remark = ": nothing was sent from here, although the coordinator says it was" if claimed != included else ""
            text = f"{key} closed, {'' if included else 'not '}included{remark}"
            self._emit(event("closed", text, key, {"included": included}))
        if (self._pulse.run_id, self._pulse.round) == (key.run_id, key.round):
            self._pulse = pb.Pulse(activity=pb.IDLE)
        self._refused = {name: refusal for name, refusal in self._refused.items() if name[0] != key}
        self._send(pb.SiloMessage(settled=pb.Settled(run_id=key.run_id, round=key.round, kind=key.wire_kind)))
        self.cleanup_needed.set()

    def _end_run(self, ended: pb.RunEnded) -> None:
        is_known = self._store.end_run(ended.run_id, ended.state, ended.reason)
        if self._pulse.run_id == ended.run_id:
            self._pulse = pb.Pulse(activity=pb.IDLE)
        self._refused = {name: refusal for name, refusal in self._refused.items() if name[0].run_id != ended.run_id}
        self.cleanup_needed.set()
        if not is_known and ended.run_id not in self._asked:
            return
        why = f": {ended.reason}" if ended.reason else ""
        facts = {"run": ended.run_id, "state": ended.state, "reason": ended.reason}
        self._emit(event("ended", f"run {ended.run_id} {ended.state}{why}", facts=facts))


def _drop_oldest(entries: dict[Any, Any]) -> None:
    while len(entries) > _MAX_TASKS:
        del entries[next(iter(entries))]


_PUBLIC_CODES = ("E-RUN", "E-WIRE", "E-PRIV", "E-ID", "E-TLS", "E-NET", "E-POLICY-20")
"""Families of codes whose messages contain only the run and the wire, and the code whose number the lead has to set.
All others, and all new ones, are sent as the meaning of their code."""


def public_reason(error: FederationError) -> str:
    """Return the part of an error that the coordinator may see: the message of a public code, otherwise its meaning.

    Guarantees: no path, file name or count of the hospital leaves it, and no number of its budget or policy except that
    of E-POLICY-20.
    """
    if isinstance(error, RefusedError | ProtocolError) and error.code.startswith(_PUBLIC_CODES):
        return error.message
    if isinstance(error, SchemaError):
        return error.message[:REASON_CHARS]
    title, cause, *_ = EXPLANATIONS.get(error.code, EXPLANATIONS["E-RUN-31"])
    return f"{title}: {cause[0].lower()}{cause[1:].rstrip('.')} (the hospital's own log has the details)"
