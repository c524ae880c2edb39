"""Run one task at a time: admit, prepare, train, mask and stage it, in this order.

Nothing here uses a network. A task reaches the service, which has one, through `ServiceSide`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fl_core.errors import FederationError, RefusedError, StateError
from fl_core.methods.personal.local_only import LocalOnly
from fl_core.rounds.manifest import MAX_WEIGHTS_BYTES, RESTART, Weights
from fl_core.rounds.silo_round import SiloRound, run_silo_round
from fl_core.tensors import nn
from fl_core.training.devices import choose_device
from fl_core.types.enums import TaskKind
from fl_core.types.values import State, Tensors
from privacy.compiled_run import CompiledRun
from privacy.ledger.account import ATTEMPTS
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from protos.wire.size_limits import max_object_bytes
from protos.wire.tasks import TaskKey
from service_core.console import pluralize
from service_core.storage.object_store import ObjectStore
from service_core.storage.private_files import private_folder
from silo.admission.controls import HospitalControls, TaskAccess, TaskQuestion
from silo.admission.run_request import privacy_of, update_contents
from silo.events import event
from silo.identity.identity import SiloIdentity
from silo.settings import SiloSettings
from silo.storage.feature_cache import FeatureCache
from silo.storage.outbox import Outbox, PendingEntry, read_manifest
from silo.storage.run_data import RunData
from silo.storage.store import SiloStore
from silo.storage.tasks import OutboxEntry
from silo.training import evaluation_summary
from silo.training.data_source import BrokenRecords, data_offer
from silo.training.helpers import Helpers
from silo.training.trainer import PreparedRun, RunRound, Trainer
from silo.worker.exchange import Description, PreflightReadiness, ServiceSide
from silo.worker.masks import MAX_KEYS_BYTES, RunMasks

SHOWN = 5
"""Maximum broken records named in one line; `silo status --json` lists all."""


class Task(NamedTuple):
    """A task and its connection to the service. offer: empty for a preflight."""

    key: TaskKey
    service: ServiceSide
    offer: pb.Offer

    def keys(self, digest: str) -> Path:
        return self.service.fetch(digest, 0, MAX_KEYS_BYTES)

    def weights(self, weights: Weights) -> Tensors:
        return codec.read_weights(self.service.fetch(weights.object, weights.size, MAX_WEIGHTS_BYTES))


@dataclass(frozen=True, slots=True)
class TaskWork:
    """One hospital's tasks, one at a time."""

    outbox: Outbox
    trainer: Trainer
    controls: HospitalControls
    masks: RunMasks

    @classmethod
    def of(
        cls,
        settings: SiloSettings,
        store: SiloStore,
        controls: HospitalControls,
        computed: Callable[[TaskKind, float], None],
        run_round: RunRound = run_silo_round,
        helpers: Helpers | None = None,
    ) -> TaskWork:
        """Create a hospital's task runner.

        computed: called with a round's seconds   run_round: computes a round, replaced in tests and benchmarks
        helpers: processes that share training steps. Raises as `Helpers.require_gpus`.
        """

        def timed(*parts: Any) -> SiloRound:  # noqa: ANN401
            began = time.monotonic()
            done = run_round(*parts)
            computed(parts[-1], time.monotonic() - began)
            return done

        home, source = settings.home, settings.source()
        identity = SiloIdentity(home.path)
        silo, objects = identity.load().identity.name, ObjectStore(private_folder(home.objects))
        source.follow_ledger(controls.as_registered)
        features = FeatureCache(home.features, int(settings.feature_cache_gib * 2**30))
        features.forget(but=str(source.reference))
        device = choose_device(settings.device)
        if helpers is not None:
            helpers.require_gpus(device)
        trainer = Trainer(silo, source, controls, device, features, settings.prototypes, timed, helpers)
        return cls(Outbox(store, objects, silo), trainer, controls, RunMasks(store, identity))

    def describe(self) -> Description:
        """Load the data, and describe them; raises ConfigError or DataError as `DataSource.load`."""
        source = self.trainer.source
        return Description(data_offer(source), str(self.trainer.device), source.cache_text())

    def preflight(self, request: pb.Preflight, service: ServiceSide) -> PreflightReadiness:
        """Check before round 0 that this hospital can do the whole run. Charges and releases nothing.

        Raises AwaitingDecisionError, and the error that refuses the run.
        """
        key = TaskKey.of(pb.RoundRef(run_id=request.run_id, kind=pb.TRAIN))
        task, digest = Task(key, service, pb.Offer()), request.manifest_digest
        run = self._admitted_run(task, digest)
        prepared = self._ready_for_whole_run(task, run)
        leaves, privacy = update_contents(run).to_json(), privacy_of(run)
        lapsed = self.outbox.store.record_run(key.run_id, run.manifest.name, digest, leaves=leaves, privacy=privacy)
        trains: Sequence[int] = ()
        if run.counts_classes and run.updates.counts_in_preflight:
            census = TaskQuestion(prepared.access, TaskKey.census(key.run_id), len(run.manifest.members))
            trains = self.trainer.trained_classes(prepared, self._admit_task(task, prepared, census))
        return PreflightReadiness(run.manifest.name, run.masked, trains, bool(lapsed))

    def train(self, offer: pb.Offer, service: ServiceSide) -> PendingEntry:
        """Train and write the result. For a private or masked run, all of it is on disk before this returns.

        Guarantees: a task of a masked run is masked once. If that update is lost, or its round is offered with another
        model, the task is refused (E-RUN-49, E-RUN-50) before any record is read.
        """
        task = Task(TaskKey.of(offer), service, offer)
        key = task.key
        prepared, data, begins = self._prepare(task)
        run, private = prepared.run, prepared.run.private
        masks = self.masks.begin(offer, run.manifest, task.keys, service.emit) if run.masked else None
        service.accept()
        state, comparison_model = self._kept_state(task, prepared), self._comparison_model(task, prepared)
        access = self._admit_task(task, prepared, self._question(task, prepared, data if begins else None))
        begun = f"{key} of {run.manifest.name} ({run.updates.reading}): {key.kind.doing}"
        about: dict[str, Any] = {"name": run.manifest.name}
        if key.kind.trains and (helpers := self.trainer.helpers) is not None:
            about["processes"] = 1 if prepared.undivided else helpers.size
            begun += f" in {about['processes']} of {helpers.size} processes"
            begun += f", since {prepared.undivided}" if prepared.undivided else ""
        service.emit(event("training", begun, key, about))
        _tell_repeated_charge(task, access)
        service.training_begins(private)
        with self._marked(task):
            broken = self._broken_records(task, data.broken)
            result = self.trainer.train(prepared, access, state, partial(_progress, service), comparison_model, broken)
        service.stop.raise_if_cancelled()
        if masks is not None:
            result = replace(result, bundle=masks.cover(result.bundle))
        attestation = self.controls.attestation()

        facts = evaluation_summary.facts(result.evaluation)
        text = run.kind.staged(key.kind) or evaluation_summary.sentence(result.evaluation)
        if key.kind.census:
            text = "masked: the classes that this hospital contributes to"

        def on_entered(entry: OutboxEntry) -> None:
            service.emit(event("staged", f"{key}: {text}", key, facts | {"bytes": entry.size}))

        pending = self.outbox.begin(
            key, offer.manifest_digest, offer.base_digest, result, attestation, offer.incarnation, on_entered
        )
        if private or masks is not None:
            pending.finish()
        access.commit(pending.entry.object_digest)
        return pending

    @contextmanager
    def _marked(self, task: Task) -> Iterator[None]:
        """Mark a task on disk while it runs. A mark left behind shows that the process was killed."""
        store = self.outbox.store
        store.begin_training(task.key, task.offer.attempt)
        try:
            yield
        finally:
            store.end_trainings()

    def _ready_for_whole_run(self, task: Task, run: CompiledRun) -> PreparedRun:
        """Return the prepared run; raises RefusedError if this hospital cannot do all of it."""
        run_id = task.key.run_id
        began = self.outbox.store.run_data.find(run_id)
        prepared = self.trainer.prepare(run_id, run, task.weights, began)
        self.controls.admit(self.trainer.request(run_id, run.manifest)._replace(whole_run=prepared.access))
        try:
            prepared.require_room(self.outbox.objects.folder)
        except RefusedError as error:
            if run.private:
                self.controls.record_refusal(run_id, error)
            raise
        return prepared

    def _question(self, task: Task, prepared: PreparedRun, begins: RunData | None) -> TaskQuestion:
        offer = task.offer
        return TaskQuestion(
            prepared.access,
            task.key,
            offer.cohort,
            offer.base_digest,
            dict if task.key.kind.census else partial(self._message, task, prepared),
            offer.incarnation,
            proof=partial(task.keys, offer.secagg_census_digest) if offer.secagg_census_digest else None,
            begins=begins,
        )

    def _admit_task(self, task: Task, prepared: PreparedRun, question: TaskQuestion) -> TaskAccess:
        """Ask for admission of a task; raises as `HospitalControls.admit`."""
        request = self.trainer.request(question.key.run_id, prepared.run.manifest)
        access = self.controls.admit(request._replace(task=question)).task
        assert access is not None
        if access.census is not None:
            text = "; ".join([f"{question.key.run_id}: the census is verified", *access.census.sentences()])
            left_out = len(access.census.left_out)
            task.service.emit(event("census", text, facts={"run": question.key.run_id, "withheld": left_out}))
        return access

    def _message(self, task: Task, prepared: PreparedRun) -> State:
        """Fetch the coordinator's message for a task; raises as `Trainer.check_message`."""
        most = max_object_bytes(prepared.run.manifest, _numbers(prepared.broadcast))
        message = codec.read_state(task.service.fetch(task.offer.base_digest, task.offer.base_size, most))
        self.trainer.check_message(prepared, task.key, message)
        return message

    def _kept_state(self, task: Task, prepared: PreparedRun) -> State | None:
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
            task.service.emit(
                event("restarted", f"{key}: restarting without the lost state: {error}", key, {"code": error.code})
            )
            task.service.tell(error)
            return None

    def _comparison_model(self, task: Task, prepared: PreparedRun) -> nn.Module | None:
        """Return the model that an evaluation compares with: another run's last, or this hospital's local one.

        Returns None, with an event, if this hospital trained no local model in that run or no longer has it.
        Raises ProtocolError (E-WIRE-06) on another model than the manifest names, E-WIRE-05 on NaN.
        """
        manifest, key = prepared.run.manifest, task.key
        terms = manifest.evaluation
        if not terms.beside or not key.kind.ends_run:
            return None
        if terms.other is not None:
            file = task.service.fetch(terms.other.object, terms.other.size, MAX_WEIGHTS_BYTES)
            return prepared.run.for_comparison(terms.other).sent_model(codec.read_state(file))
        try:
            digest, state = self.outbox.store.manifest_of(terms.beside), self.outbox.state(terms.beside)
            if digest is None or state is None:
                raise StateError("E-STATE-24", f"this hospital has no local model of {terms.beside}")
            kept = CompiledRun.of(read_manifest(self.outbox.objects.verified(digest), digest))
            if not isinstance(kept.method, LocalOnly) or kept.manifest.schema != manifest.schema:
                raise StateError("E-STATE-24", f"{terms.beside} is not a run of method=local on data with this schema")
            return kept.method.own_model(kept.new_model(), state)
        except (FederationError, FileNotFoundError) as error:
            task.service.emit(event("alone", f"{key}: no local model of this hospital to compare with: {error}", key))
            return None

    def _prepare(self, task: Task) -> tuple[PreparedRun, RunData, bool]:
        """Return the prepared run, the data that it began with, and whether it begins with this task."""
        run = self._admitted_run(task, task.offer.manifest_digest)
        began = self.outbox.store.run_data.find(task.key.run_id)
        prepared = self.trainer.prepare(task.key.run_id, run, task.weights, began)
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

    def _broken_records(self, task: Task, excluded: Collection[str]) -> BrokenRecords:
        """Return the unreadable records that a run excludes; new ones are stored and logged here only."""
        key, store = task.key, self.outbox.store.run_data

        def keep(names: Sequence[str]) -> None:
            number = store.leave_out(key.run_id, names)
            shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            text = f"{key}: {pluralize(number, 'record')} unreadable, excluded from the run from now on: {shown}"
            task.service.emit(event("broken", text, key, {"left_out": number}))

        return BrokenRecords(set(excluded), keep)

    def _admitted_run(self, task: Task, digest: str) -> CompiledRun:
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
        path = task.service.fetch(digest)
        return self.controls.admit(self.trainer.request(run_id, read_manifest(path, digest))).run


def _progress(service: ServiceSide, done: int, total: int) -> None:
    """Report training progress; raises CancelledError if the task was cancelled."""
    service.stop.raise_if_cancelled()
    service.progress(done, total)


def _tell_repeated_charge(task: Task, access: TaskAccess) -> None:
    if access.times_charged:
        text = (
            f"{access.key} was charged before ({access.times_charged} of at most {ATTEMPTS} times), and the "
            "coordinator has shown no receipt for it: it is charged again"
        )
        task.service.emit(event("charged", text, access.key))


def _numbers(broadcast: Mapping[str, object]) -> int:
    """Count the numbers in a server message. broadcast: by group, the names with shapes and dtypes."""
    groups = (group for group in broadcast.values() if isinstance(group, Mapping))
    return sum(math.prod(shape) for group in groups for shape, _ in group.values())
