"""The worker thread: fetches, admits, trains, stages and sends one task after the other."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from torch import nn

from fl_core.errors import ConfigError, FederationError, ProtocolError, RefusedError, StateError
from fl_core.methods.personal.local_only import LocalOnly
from fl_core.rounds.manifest import MAX_WEIGHTS_BYTES, RESTART, RunManifest, Weights
from fl_core.types.values import State, Tensors
from privacy.compiled_run import CompiledRun
from privacy.ledger.account import ATTEMPTS
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from protos.wire.size_limits import max_object_bytes
from protos.wire.tasks import TaskKey
from service_core.console import pluralize
from silo.admission.controls import AwaitingDecisionError, HospitalControls, TaskAccess, TaskQuestion
from silo.admission.run_request import privacy_of, update_contents
from silo.connection.retry import CancelledError, CancelToken
from silo.connection.session import PULSE_CEILING_S, PULSE_FLOOR_S
from silo.connection.transfer import ReceiptVerifier, Transfer
from silo.events import EmitEvent, error_event, event
from silo.service.secagg import MAX_KEYS_BYTES, SecaggMember, TaskMasks
from silo.service.task_queue import PreflightTask, QueuedTask, TaskQueue
from silo.storage.outbox import Outbox, PendingEntry
from silo.storage.run_data import RunData
from silo.storage.tasks import OutboxEntry
from silo.training import evaluation_summary
from silo.training.data_source import BrokenRecords
from silo.training.trainer import PreparedRun, Trainer

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
SHOWN = 5
"""Names of broken records shown in a line; all are in `silo status --json`."""
MAX_KILLS = 2
"""How often the service may be killed during one task before it gives up the run."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """Does the tasks one by one; `run` is the body of the worker thread.

    receipt_verifier: created for each use, since the identity may be renewed   recycle: asks for a new session, in
    which the coordinator names every closed round.
    """

    queue: TaskQueue
    outbox: Outbox
    transfer: Transfer
    trainer: Trainer
    controls: HospitalControls
    secagg: SecaggMember
    receipt_verifier: Callable[[], ReceiptVerifier]
    emit: EmitEvent
    recycle: Callable[[], None]
    session_opened: threading.Event
    """Set by the client when a session begins: the moment to ask for lost receipts."""
    timing: ResponseTiming
    on_receipt: Callable[[bytes], None] = lambda _: None
    """Called with each receipt after it is stored."""

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
            except AwaitingDecisionError:
                if self.queue.defer(task):
                    text = f"{task.key.run_id} waits for the hospital's decision: silo approve {task.key.run_id}"
                    self.emit(event("approval", text, task.key))
            except CancelledError as error:
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

    def _run_preflight(self, preflight_task: PreflightTask) -> None:
        """Answer before round 0 whether this hospital can do the whole run; charges and releases nothing."""
        key, digest = preflight_task.key, preflight_task.request.manifest_digest
        self.queue.set_activity(preflight_task, pb.FETCHING)
        self.secagg.apply_roster(preflight_task.request.signed_roster)
        run = self._admitted_run(preflight_task, digest)
        prepared = self._ready_for_whole_run(preflight_task, run)
        leaves, privacy = update_contents(run).to_json(), privacy_of(run)
        if self.outbox.store.record_run(key.run_id, run.manifest.name, digest, leaves=leaves, privacy=privacy):
            self.queue.cleanup_needed.set()
        counts = run.counts_classes and run.updates.counts_in_preflight
        trains: Sequence[int] = ()
        if counts:
            census = TaskQuestion(prepared.access, TaskKey.census(key.run_id), len(run.manifest.members))
            trains = self.trainer.trained_classes(prepared, self._admit_task(prepared, census))
        self.queue.ready(preflight_task, self.secagg.entry(key.run_id, run) if run.masked else None, trains)
        self.emit(event("ready", f"{key.run_id} of {run.manifest.name}: ready for all its rounds", key))

    def _ready_for_whole_run(self, preflight_task: PreflightTask, run: CompiledRun) -> PreparedRun:
        """Return the prepared run; raises RefusedError unless all of it can be done here."""
        run_id = preflight_task.key.run_id
        began = self.outbox.store.run_data.find(run_id)
        prepared = self.trainer.prepare(run_id, run, self._fetch_weights(preflight_task), began)
        self.controls.admit(self.trainer.request(run_id, run.manifest)._replace(whole=prepared.access))
        try:
            prepared.require_room(self.outbox.objects.folder)
        except RefusedError as error:
            if run.private:
                self.controls.record_refusal(run_id, error)
            raise
        return prepared

    def _past_kill(self, task: QueuedTask) -> RefusedError | None:
        """Return an error if the service was killed during this run; raises it after MAX_KILLS times."""
        kills = self.outbox.store.kills(task.key.run_id, task.offer.attempt)
        if kills == 0:
            return None
        again = kills < MAX_KILLS
        error = RefusedError(
            "E-RUN-46",
            f"expected a service that survives its task, found that it was killed {pluralize(kills, 'time')} in the "
            "middle of a task of this run, most likely out of memory: "
            + ("it tries once more" if again else "the run is given up here")
            + ". Give it more memory, or choose smaller batches or images",
        )
        if not again:
            raise error
        return error

    @contextmanager
    def _marked(self, task: QueuedTask) -> Iterator[None]:
        """Mark a task on the disk while it is worked on: a mark found at the next start means a kill."""
        store = self.outbox.store
        store.begin_training(task.key, task.offer.attempt)
        try:
            yield
        finally:
            store.end_trainings()

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
        """Ask for the receipt of an update whose bytes are gone; if there is one, nothing is made or charged again."""
        self.queue.set_activity(task, pb.FETCHING)
        receipt = self.transfer.taken(entry, self.receipt_verifier(), task.stop)
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
        """Train and write the result; in a private or masked run all of it is on the disk before anything leaves.

        Guarantees: a task of a masked run is masked once; if that update is gone, or another model is offered for its
        round, the task is refused (E-RUN-49, E-RUN-50) before any record is read.
        """
        offer, key = task.offer, task.key
        killed = self._past_kill(task)
        self.queue.set_activity(task, pb.FETCHING)
        prepared, data, begins = self._prepare(task)
        name, private = prepared.run.manifest.name, prepared.run.private
        masks = self._masks(task, prepared) if prepared.run.masked else None
        self.queue.accept(task)
        if killed is not None:
            self.queue.tell(task, killed)
        state, comparison_model = self._kept_state(task, prepared), self._comparison_model(task, prepared)
        access = self._admit_task(prepared, self._question(task, prepared, data if begins else None))
        begun = f"{key} of {name} ({prepared.run.updates.reading}): {key.kind.doing}"
        self.emit(event("training", begun, key, {"name": name}))
        self._tell_repeated_charge(access)
        self.queue.set_activity(task, pb.TRAINING)
        progress = self._progress(task, pb.TRAINING, quiet=private)
        self.timing.begin((key, offer.base_digest), private)
        try:
            with self._marked(task):
                broken = self._broken_records(key, data.broken)
                result = self.trainer.train(prepared, access, state, progress, comparison_model, broken)
        except CancelledError:
            raise
        except Exception:
            self.timing.hold((key, offer.base_digest), task.stop)  # the time of a failure must not leak either
            raise
        task.stop.raise_if_cancelled()
        if masks is not None:
            result = replace(result, bundle=masks.cover(result.bundle))
        attestation = self.controls.attestation()

        facts = evaluation_summary.facts(result.evaluation)
        text = prepared.run.kind.staged(key.kind) or evaluation_summary.sentence(result.evaluation)
        if key.kind.census:
            text = "masked: the classes that this hospital contributes to"

        def on_entered(entry: OutboxEntry) -> None:
            self.emit(event("staged", f"{key}: {text}", key, facts | {"bytes": entry.size}))

        pending = self.outbox.begin(
            key, offer.manifest_digest, offer.base_digest, result, attestation, offer.incarnation, on_entered
        )
        if private or masks is not None:
            pending.finish()
        access.commit(pending.entry.object_digest)
        return pending

    def _question(self, task: QueuedTask, prepared: PreparedRun, begins: RunData | None) -> TaskQuestion:
        offer, fetch = task.offer, self._fetch_of(task)
        return TaskQuestion(
            prepared.access,
            task.key,
            offer.cohort,
            offer.base_digest,
            dict if task.key.kind.census else partial(self._message, task, prepared),
            offer.incarnation,
            proof=partial(fetch, offer.secagg_census_digest) if offer.secagg_census_digest else None,
            begins=begins,
        )

    def _admit_task(self, prepared: PreparedRun, question: TaskQuestion) -> TaskAccess:
        """Ask for admission of a task; raises as `HospitalControls.admit`."""
        request = self.trainer.request(question.key.run_id, prepared.run.manifest)
        access = self.controls.admit(request._replace(task=question)).task
        assert access is not None
        if access.census is not None:
            text = "; ".join([f"{question.key.run_id}: the census is proved", *access.census.sentences()])
            left_out = len(access.census.left_out)
            self.emit(event("census", text, facts={"run": question.key.run_id, "withheld": left_out}))
        return access

    def _message(self, task: QueuedTask, prepared: PreparedRun) -> State:
        """Fetch the coordinator's message for a task; raises as `Trainer.check_message`."""
        offer, progress = task.offer, self._progress(task, pb.FETCHING)
        most = max_object_bytes(prepared.run.manifest, _numbers(prepared.broadcast))
        file = self.transfer.fetch(offer.base_digest, offer.base_size, task.stop, progress, most)
        message = codec.read_state(file)
        self.trainer.check_message(prepared, task.key, message)
        return message

    def _fetch_of(self, task: QueuedTask) -> Callable[[str], Path]:
        def fetch(digest: str) -> Path:
            return self.transfer.fetch(digest, 0, task.stop, self._progress(task, pb.FETCHING), MAX_KEYS_BYTES)

        return fetch

    def _masks(self, task: QueuedTask, prepared: PreparedRun) -> TaskMasks:
        return self.secagg.begin(task.key, task.offer, prepared.run, self._fetch_of(task))

    def _tell_repeated_charge(self, access: TaskAccess) -> None:
        if access.times_charged:
            text = (
                f"{access.key} was charged before ({access.times_charged} of at most {ATTEMPTS} times), and the "
                "coordinator has shown no receipt for it: it is charged again"
            )
            self.emit(event("charged", text, access.key))

    def _kept_state(self, task: QueuedTask, prepared: PreparedRun) -> State | None:
        """Return the silo state that the round starts from, according to the rounds that the coordinator closed.

        Raises StateError (E-STATE-24) if it is lost, unless the manifest says lost_state=restart.
        """
        offer, key = task.offer, task.key
        last = int(offer.included_before) - 1 if offer.incarnation else -1
        tracked = bool(offer.incarnation) and prepared.run.method.server_tracks_state
        if key.kind.census:
            return None
        try:
            return self.outbox.state(key.run_id, before=last + 1 if tracked else key.round, at_least=last)
        except StateError as error:
            if not key.kind.trains or not self.trainer.keeps_state(prepared, key, offer.cohort):
                return None
            if prepared.run.manifest.lost_state != RESTART:
                raise
            self.emit(
                event("restarted", f"{key}: restarting without the lost state: {error}", key, {"code": error.code})
            )
            self.queue.tell(task, error)
            return None

    def _comparison_model(self, task: QueuedTask, prepared: PreparedRun) -> nn.Module | None:
        """Return the model that an evaluation compares with: another run's last, or this hospital's local one.

        Returns None, with an event, if this hospital trained no local model in that run or no longer has it.
        Raises ProtocolError (E-WIRE-06) on another model than the manifest names, E-WIRE-05 on NaN.
        """
        manifest, key = prepared.run.manifest, task.key
        terms = manifest.evaluation
        if not terms.beside or not key.kind.ends_run:
            return None
        if terms.other is not None:
            other, progress = terms.other, self._progress(task, pb.FETCHING)
            file = self.transfer.fetch(other.object, other.size, task.stop, progress, MAX_WEIGHTS_BYTES)
            return prepared.run.for_comparison(other).sent_model(codec.read_state(file))
        try:
            digest, state = self.outbox.store.manifest_of(terms.beside), self.outbox.state(terms.beside)
            if digest is None or state is None:
                raise StateError("E-STATE-24", f"expected a local model of this hospital of {terms.beside}, found none")
            kept = CompiledRun.of(_read_manifest(self.outbox.objects.verified(digest), digest))
            if not isinstance(kept.method, LocalOnly) or kept.manifest.schema != manifest.schema:
                raise StateError("E-STATE-24", f"expected a run of method=local on such data, found {terms.beside}")
            return kept.method.own_model(kept.new_model(), state)
        except (FederationError, FileNotFoundError) as error:
            self.emit(event("alone", f"{key}: no local model of this hospital to compare with: {error}", key))
            return None

    def _prepare(self, task: QueuedTask) -> tuple[PreparedRun, RunData, bool]:
        """Return the prepared run, the data that it began with, and whether it begins with this task."""
        run = self._admitted_run(task, task.offer.manifest_digest)
        began = self.outbox.store.run_data.find(task.key.run_id)
        prepared = self.trainer.prepare(task.key.run_id, run, self._fetch_weights(task), began)
        data = began or self.trainer.data_now()
        self.trainer.require_memory(prepared)
        self.outbox.store.record_run(
            task.key.run_id,
            run.manifest.name,
            task.offer.manifest_digest,
            task.offer.base_digest,
            leaves=update_contents(run).to_json(),
            privacy=privacy_of(run),
        )
        return prepared, data, began is None

    def _broken_records(self, key: TaskKey, excluded: Collection[str]) -> BrokenRecords:
        """Return the unreadable records that a run excludes; new ones are stored and logged here only."""
        store = self.outbox.store.run_data

        def keep(names: Sequence[str]) -> None:
            number = store.leave_out(key.run_id, names)
            shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            text = f"{key}: {pluralize(number, 'record')} unreadable, excluded from the run from now on: {shown}"
            self.emit(event("broken", text, key, {"left_out": number}))

        return BrokenRecords(set(excluded), keep)

    def _admitted_run(self, task: QueuedTask | PreflightTask, digest: str) -> CompiledRun:
        """Fetch the manifest of a run that the hospital takes part in.

        Raises RefusedError (E-RUN-33) if the run's manifest has changed, and as `HospitalControls.admit`.
        """
        run_id = task.key.run_id
        recorded = self.outbox.store.manifest_of(run_id)
        if recorded not in (None, digest):
            raise RefusedError(
                "E-RUN-33",
                f"expected run {run_id} under the manifest {recorded[:16]}, found {digest[:16]}: ask the lead",
            )
        path = self.transfer.fetch(digest, 0, task.stop, self._progress(task, pb.FETCHING))
        return self.controls.admit(self.trainer.request(run_id, _read_manifest(path, digest))).run

    def _fetch_weights(self, task: QueuedTask | PreflightTask) -> Callable[[Weights], Tensors]:
        def fetch(weights: Weights) -> Tensors:
            progress = self._progress(task, pb.FETCHING)
            path = self.transfer.fetch(weights.object, weights.size, task.stop, progress, MAX_WEIGHTS_BYTES)
            return codec.read_weights(path)

        return fetch

    def _send(self, task: QueuedTask, entry: OutboxEntry, ready: Callable[[], None]) -> None:
        """Upload until the receipt is here; an update that the coordinator refuses waits for the round's close.

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
            # An error of the certificate does not refuse the update: it is sent again after the repair.
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
        quiet: bool = False,
    ) -> Callable[[int, int], None]:
        """Make a progress callback that stops the training of a cancelled task. quiet: see `TaskQueue.set_activity`."""

        def update(done: int, total: int) -> None:
            if checked:
                task.stop.raise_if_cancelled()
            self.queue.set_activity(task, activity, done, total, quiet)

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

    def _clean_up(self) -> None:
        if self.queue.cleanup_needed.is_set():
            self.queue.cleanup_needed.clear()
            self.outbox.sweep()


def _numbers(broadcast: Mapping[str, object]) -> int:
    """Describe a message of the server: by group, the names with shapes and dtypes."""
    groups = (group for group in broadcast.values() if isinstance(group, Mapping))
    return sum(math.prod(shape) for group in groups for shape, _ in group.values())


@lru_cache(maxsize=1)
def _read_manifest(path: Path, digest: str) -> RunManifest:
    try:
        manifest = RunManifest.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ProtocolError("E-WIRE-06", f"expected a manifest in UTF-8, found other bytes: {error}") from error
    if manifest.digest() != digest:
        raise ProtocolError("E-WIRE-04", f"expected the manifest {digest} in canonical form, found another text")
    return manifest
