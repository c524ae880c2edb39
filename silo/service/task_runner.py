"""The task runner: a thread that has the worker run one task at a time, and uploads the results."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fl_core.errors import ConfigError, FederationError, RefusedError, StateError
from privacy.policy_terms import REQUIRED
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.size_limits import MANIFEST_BYTES
from service_core.console import pluralize
from silo.admission.rules import HospitalRules
from silo.cancellation import CancelledError, CancelToken
from silo.connection.session import PULSE_CEILING_S, PULSE_FLOOR_S
from silo.connection.transfer import ReceiptVerifier, Transfer
from silo.events import EmitEvent, SiloEvent, error_event, event
from silo.service.secagg import SecaggMember
from silo.service.task_queue import PreflightTask, QueuedTask, TaskQueue
from silo.service.workers import Worker, WorkerEndedError
from silo.storage.approvals import AwaitingDecisionError
from silo.storage.outbox import Outbox, PendingEntry, read_manifest
from silo.storage.tasks import OutboxEntry
from silo.worker.exchange import PreflightReadiness

MAX_S = 86_400.0
_REMEMBERED = 1000


@dataclass(slots=True)
class ResponseTiming:
    """When a hospital answers: pulses not too often, and results of private runs at planned moments.

    How long training takes depends on the records. An answer that leaves a whole number of `after` seconds after the
    training began reveals only that number: nothing, if `after` is longer than any training.

    after: seconds between possible answers, 0 to answer at once   pulse_floor: minimum seconds between two pulses.

    Raises ConfigError (E-CFG-02) unless `after` is 0 to a day and `pulse_floor` 0.01 to 300.
    """

    after: float = 0.0
    pulse_floor: float = PULSE_FLOOR_S
    clock: Callable[[], float] = time.monotonic
    _born: float = field(init=False)
    _began: dict[Hashable, float] = field(default_factory=dict)
    _due: dict[Hashable, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value, least, most in (
            ("seconds of --answer-after", self.after, 0.0, MAX_S),
            ("seconds of --pulse-floor", self.pulse_floor, 0.01, PULSE_CEILING_S),
        ):
            if not least <= value <= most:
                raise ConfigError("E-CFG-02", f"expected {what} from {least:g} to {most:g}, found {value:g}")
        self._born = self.clock()

    def begin(self, task: Hashable, private: bool) -> None:
        """Record the start of a task's training; only private ones are delayed."""
        if len(self._began) >= _REMEMBERED:
            oldest = next(iter(self._began))
            del self._began[oldest]
            self._due.pop(oldest, None)
        self._due.pop(task, None)
        self._began[task] = self.clock()
        if not private:
            self._due[task] = -math.inf

    def holds(self, task: Hashable) -> bool:
        return self.after > 0 and self.clock() < self._due_at(task)

    def hold(self, task: Hashable, stop: CancelToken) -> None:
        """Wait until the answer of a task may leave; raises CancelledError if the task is cancelled.

        Guarantees: the moment is fixed once, however often the task is offered again; an answer of an earlier process
        waits `after` seconds from this one's start.
        """
        if self.after <= 0:
            return
        due = self._due.setdefault(task, self._due_at(task))
        while (left := due - self.clock()) > 0:
            stop.wait(left)
            stop.raise_if_cancelled()

    def _due_at(self, task: Hashable) -> float:
        if task in self._due:
            return self._due[task]
        if task not in self._began:
            return self._born + self.after
        took = self.clock() - self._began[task]
        return self._began[task] + self.after * max(1, math.ceil(took / self.after))


IDLE_S = 1.0
MAX_KILLS = 2
"""How often the service or its worker may be killed during one task before it gives up the run."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """Runs the queued tasks one at a time; `run` is the body of its thread.

    receipt_verifier: created for each use, since the identity may be renewed   recycle: requests a new session, in
    which the coordinator lists every closed round.
    """

    queue: TaskQueue
    outbox: Outbox
    transfer: Transfer
    worker: Worker
    controls: HospitalRules
    secagg: SecaggMember
    receipt_verifier: Callable[[], ReceiptVerifier]
    emit: EmitEvent
    recycle: Callable[[], None]
    session_opened: threading.Event
    """Set by the client when a session begins, so that missing receipts are fetched."""
    timing: ResponseTiming
    on_receipt: Callable[[bytes], None] = lambda _: None
    """Called with each receipt after it is stored."""
    prepare_data: Callable[[str, CancelToken, Callable[[int, int], None]], None] = lambda *_: None
    """Makes a run's images available before its worker starts. Fetches PACS images, or waits for them."""

    def run(self, over: threading.Event) -> None:
        self.outbox.sweep()
        while not over.is_set():
            task = self.queue.take(IDLE_S)
            if task is None:
                self._idle()
                continue
            try:
                if isinstance(task, PreflightTask):
                    self._run_preflight(task)
                else:
                    self._run_task(task)
            except WorkerEndedError as error:
                self._note_killed(task, error)
            except AwaitingDecisionError:
                if self.queue.defer(task):
                    text = f"{task.key.run_id} waits for the hospital's decision: silo approve {task.key.run_id}"
                    self.emit(event("approval", text, task.key))
            except CancelledError as error:
                self.outbox.store.end_trainings()  # a killed worker could not do this itself
                self.emit(event("stopped", f"{task.key}: {error.reason}", task.key, {"reason": error.reason}))
            except FederationError as error:
                self.queue.refuse(task, error)
            except Exception as error:  # from a library or a full disk: tell the coordinator, and continue
                log.exception("%s failed", task.key)
                cause = f"{type(error).__name__}: {error}"
                self.queue.refuse(task, StateError("E-RUN-31", f"the task failed at this silo: {cause}"))
            finally:
                self.queue.finish(task)
                self._clean_up()
                self.worker.rest(self.outbox.store.state_of)
        self.worker.end()

    def count_kills(self, who: str) -> None:
        """Count a kill for each task in progress, and emit an event. who: which process was killed."""
        for key, kills in self.outbox.store.count_kills():
            text = f"{key}: {who} was killed in the middle of it ({pluralize(kills, 'time')} so far)"
            self.emit(event("killed", text, key, {"code": "E-RUN-46", "kills": kills}))

    def _note_killed(self, task: QueuedTask | PreflightTask, error: WorkerEndedError) -> None:
        """Requeue a task whose worker died, as after a kill of the whole service; refuse a preflight."""
        log.error("%s: the worker failed: %s", task.key, error)
        if isinstance(task, PreflightTask):
            text = f"the worker did not survive the preflight: {error}. Give it more memory"
            self.queue.refuse(task, RefusedError("E-RUN-46", text))
            return
        self.outbox.store.begin_training(task.key, task.offer.attempt)
        self.count_kills("the worker")
        self.queue.put_back(task)

    def _begin_work(self, task: QueuedTask | PreflightTask) -> None:
        """Prepare a worker as the policy requires. Reads the policy here: the sandbox maps root's files to nobody.

        Raises RefusedError: E-POLICY-21 if the worker could reach a network and the policy forbids that, and as
        `HospitalRules.policy`; as `Worker.begin`.
        """
        policy, run_id = self.controls.policy(), task.key.run_id
        self.prepare_data(run_id, task.stop, partial(self.queue.set_activity, task, pb.AWAITING_IMAGES, quiet=True))
        walls = self.worker.begin(run_id, task.stop)
        if policy.worker.isolation == REQUIRED and not walls.offline:
            error = RefusedError(
                "E-POLICY-21",
                "[worker] isolation: the worker must have no network, but this machine offers neither namespaces "
                "nor a seccomp filter. To see why, run silo doctor",
            )
            self.controls.record_refusal(run_id, error)
            raise error

    def _run_preflight(self, task: PreflightTask) -> None:
        """Answer before round 0 whether this hospital can do the whole run; nothing is charged or released."""
        key, digest = task.key, task.request.manifest_digest
        self.queue.set_activity(task, pb.FETCHING)
        self.secagg.apply_roster(task.request.signed_roster)
        try:
            ready = self._preflight(task)
        except WorkerEndedError as error:  # retry once, as after a kill of the service
            log.error("%s: the worker failed: %s", task.key, error)
            ready = self._preflight(task)
        if ready.lapsed:
            self.queue.cleanup_needed.set()
        manifest = read_manifest(self.outbox.objects.path(digest), digest) if ready.masked else None
        entry = None if manifest is None else self.secagg.entry(key.run_id, manifest)
        self.queue.ready(task, entry, ready.trains)
        self.emit(event("ready", f"{key.run_id} of {ready.name}: ready for all its rounds", key))

    def _preflight(self, task: PreflightTask) -> PreflightReadiness:
        self._begin_work(task)
        return self.worker.preflight(task.request, _TaskService(self, task))

    def _past_kill(self, task: QueuedTask) -> RefusedError | None:
        """Return an error if the service was killed during this run; raises it after MAX_KILLS times."""
        kills = self.outbox.store.kills(task.key.run_id, task.offer.attempt)
        if kills == 0:
            return None
        again = kills < MAX_KILLS
        error = RefusedError(
            "E-RUN-46",
            f"the service or its worker was killed {pluralize(kills, 'time')} in the middle of a task of this run, "
            "most likely because of too little memory: "
            + ("it tries once more" if again else "the run is given up here")
            + ". Give it more memory, or choose smaller batches or images",
        )
        if not again:
            raise error
        return error

    def _run_task(self, task: QueuedTask) -> None:
        entry = self.outbox.find(task.key, task.offer.base_digest)
        if entry is not None and not self.outbox.holds(entry):
            if self._was_taken(task, entry):
                return
            entry = None
        if entry is None:
            pending = self._train(task)
            try:
                self._send(task, pending.entry, pending.finish)
            finally:
                pending.finish()  # the result is kept, however sending ended
            return
        if task.offer.incarnation and entry.coordinator != task.offer.incarnation:
            entry = self.outbox.store.adopt(entry, task.offer.incarnation)
        if entry.refused is not None and not task.offer.attempt:  # when the lead resumes the run, it is sent again
            code, _, reason = entry.refused.partition(": ")
            raise RefusedError(code, reason)
        self.queue.accept(task)
        self._send(task, entry, lambda: None)

    def _was_taken(self, task: QueuedTask, entry: OutboxEntry) -> bool:
        """Fetch the receipt of an update whose bytes are lost. If there is one, nothing is trained or charged again."""
        self.queue.set_activity(task, pb.FETCHING)
        receipt = self.transfer.receipt_for(entry, self.receipt_verifier(), task.stop)
        if receipt is not None:
            self.queue.accept(task)
            self._keep_receipt(task, entry, receipt)
            text = f"{task.key}: the coordinator has this update already, receipt kept: nothing is computed again"
            self.emit(event("taken", text, task.key))
            return True
        what = "is damaged" if entry.staged else "is no longer here"
        signed = ", although it signed for it before" if entry.receipt is not None else ""
        then = (
            "this hospital skips the round"
            if self.outbox.store.secagg.state(task.key.run_id)
            else "it is computed again"
        )
        text = f"{task.key}: the update {what}, and the coordinator has no receipt for it{signed}: {then}"
        self.emit(event("damaged" if entry.staged else "repeated", text, task.key))
        return False

    def _train(self, task: QueuedTask) -> PendingEntry:
        """Have the worker run a task; raises as `TaskWork.train`."""
        service = _TaskService(self, task, self._past_kill(task))
        self.queue.set_activity(task, pb.FETCHING)
        self._begin_work(task)
        try:
            return self.worker.train(task.offer, service)
        except (CancelledError, WorkerEndedError):
            raise
        except Exception:
            if service.begun:
                self.timing.hold(_name(task), task.stop)  # the time of a failure must not leak either
            raise

    def _send(self, task: QueuedTask, entry: OutboxEntry, ready: Callable[[], None]) -> None:
        """Upload an update until its receipt arrives. An update that the coordinator refuses waits for the round's end.

        ready: called before the commit, and before a refusal is recorded.
        """
        task.stop.raise_if_cancelled()
        self.timing.hold((entry.key, entry.base_digest), task.stop)
        self.queue.set_activity(task, pb.UPLOADING, 0, entry.size)
        progress = self._progress(task, pb.UPLOADING, checked=False)
        try:
            receipt = self.transfer.upload(
                entry, self.outbox.bundle(entry), self.receipt_verifier(), task.stop, progress, ready
            )
        except FederationError as error:
            # A certificate error does not refuse the update: it is sent again once the certificate works.
            if not isinstance(error, CancelledError) and not error.code.startswith(("E-ID", "E-TLS")):
                ready()
                self.outbox.store.refuse(entry.key, str(error))
                self.recycle()
            raise
        ready()  # also if it was accepted before, without another commit
        self._keep_receipt(task, entry, receipt)
        self.emit(event("sent", f"{task.key}: sent {entry.size} bytes, receipt kept", task.key, {"bytes": entry.size}))

    def _keep_receipt(self, task: QueuedTask, entry: OutboxEntry, receipt: bytes) -> None:
        self.outbox.store.deliver(entry.key, receipt)
        self.on_receipt(receipt)
        self.queue.set_activity(task, pb.WAITING)

    def _progress(
        self,
        task: QueuedTask | PreflightTask,
        activity: pb.Activity.ValueType,
        checked: bool = True,
    ) -> Callable[[int, int], None]:
        """Make a progress callback. checked: it raises CancelledError once the task is cancelled."""

        def update(done: int, total: int) -> None:
            if checked:
                task.stop.raise_if_cancelled()
            self.queue.set_activity(task, activity, done, total)

        return update

    def _idle(self) -> None:
        if self.session_opened.is_set():
            self.session_opened.clear()
            for entry in self.outbox.store.missing_receipts():
                try:
                    receipt = self.transfer.fetch_receipt(entry, self.receipt_verifier())
                except FederationError as error:
                    self.emit(error_event(error))
                    return
                if receipt is not None:
                    self.outbox.store.deliver(entry.key, receipt)
        if self.queue.awaits_close():
            self.recycle()
        self._clean_up()
        self.worker.rest(self.outbox.store.state_of)

    def _clean_up(self) -> None:
        if self.queue.cleanup_needed.is_set():
            self.queue.cleanup_needed.clear()
            self.outbox.sweep()


@dataclass(slots=True)
class _TaskService:
    """The service's side of one task, called by the worker."""

    runner: TaskRunner
    task: QueuedTask | PreflightTask
    killed: RefusedError | None = None
    begun: bool = False
    _quiet: bool = False

    @property
    def stop(self) -> CancelToken:
        return self.task.stop

    def fetch(self, digest: str, size: int = 0, most: int = MANIFEST_BYTES) -> Path:
        progress = self.runner._progress(self.task, pb.FETCHING)
        return self.runner.transfer.fetch(digest, size, self.task.stop, progress, most)

    def progress(self, done: int, total: int) -> None:
        self.runner.queue.set_activity(self.task, pb.TRAINING, done, total, self._quiet)

    def accept(self) -> None:
        assert isinstance(self.task, QueuedTask)
        self.runner.queue.accept(self.task)
        if self.killed is not None:
            self.tell(self.killed)

    def tell(self, error: FederationError) -> None:
        assert isinstance(self.task, QueuedTask)
        self.runner.queue.tell(self.task, error)

    def training_begins(self, private: bool) -> None:
        assert isinstance(self.task, QueuedTask)
        self.begun, self._quiet = True, private
        self.runner.queue.set_activity(self.task, pb.TRAINING)
        self.runner.timing.begin(_name(self.task), private)

    def emit(self, event: SiloEvent) -> None:
        self.runner.emit(event)


def _name(task: QueuedTask) -> Hashable:
    return task.key, task.offer.base_digest
