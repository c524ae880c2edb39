"""A running run: from its last closed round to its end, on its own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coordinator.runs import lineage
from coordinator.runs.exchange import Rounds, Written
from coordinator.runs.masked_rounds import MaskedRounds
from coordinator.runs.open_round import OpenRound, Waiting, excluded_error
from coordinator.runs.plain_rounds import PlainRounds
from coordinator.runs.run_facts import DerivedFacts
from coordinator.runs.services import Services
from coordinator.runs.tasks import PendingTask, RoundTask, RunInterrupted, unless_over
from coordinator.runs.workers import RunWorker, RunWorkers
from fl_core.aggregation.options import MIN_UPDATES_FOR_MEDIAN, NormClipped
from fl_core.errors import UnavailableError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.class_coverage import LEFT_OUT, ClassCoverage, counted_holders, listed
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State
from privacy.secagg.coordinator_side import OpenedSeeds
from protos.wire.codec import write_state
from service_core.storage.object_store import ObjectStore
from service_core.workers.calls import Later

log = logging.getLogger(__name__)
_LOOK_S = 0.2


class StoredObject(NamedTuple):
    """A stored object: its digest, and its size in bytes."""

    digest: str
    size: int

    @classmethod
    def stored(cls, state: State, objects: ObjectStore) -> StoredObject:
        """Store a state as an object; it is on the disk on return."""
        return cls(*objects.put_file(lambda file: write_state(state, file)))

    @classmethod
    def adopt(cls, written: Written, objects: ObjectStore) -> StoredObject:
        """Take over a file that a worker wrote; it is on the disk on return."""
        objects.commit(Path(written.path), written.digest, written.digest)
        return cls(written.digest, written.size)


class ActiveRun:
    """A running run: it is prepared, its rounds are opened and closed one after the other, and it ends.

    A worker does the arithmetic and calls this object's methods (`coordinator.runs.exchange.RunService`). `rounds` has
    the differences between plain and masked rounds. Other threads may call `waiting` and `interrupt`. An interrupted
    object does nothing more; a resumed run is a new object.

    Guarantees: it begins after the last closed round. The final model is the same to the bit, whenever the process
    ends. A closed round is on disk before its close is announced. An update that was accepted before a crash is not
    requested again.
    """

    def __init__(
        self, run_id: str, services: Services, workers: RunWorkers, delete_unused: Callable[[str], None]
    ) -> None:
        """Prepare the execution. delete_unused: called with a run's id once the run needs fewer objects."""
        self.id = run_id
        self.services, self.workers, self._delete_unused = services, workers, delete_unused
        self.tasks = services.dispatcher.add_run(run_id)
        self.thread = threading.current_thread()
        self.round: OpenRound | None = None
        self._state: StoredObject | None = None
        self._broadcast: StoredObject | None = None
        self._due = 0.0
        self._computes = self._interrupted = False

    def waiting(self) -> Waiting | None:
        """Return the silos that the open round waits for; None if none is open."""
        now = self.round
        return None if now is None else now.waiting()

    def interrupt(self) -> None:
        """Stop asking, waiting and computing; `execute` then raises RunInterrupted."""
        self._interrupted = True
        self.tasks.interrupt()
        if self._computes:
            self.workers.interrupt(self.id)

    def execute(self) -> None:
        """Run the run to its end. Raises RunInterrupted, or the error that stops it."""
        services, store = self.services, self.services.store
        run = store.runs.get(self.id)
        if run.state.ended:
            return
        manifest = RunManifest.from_json(run.manifest)
        self.facts = DerivedFacts.of(run)
        self.row, self.steering, self.manifest = run, store.steering.of(run.id), manifest
        self.tasks.note_software(services.dispatcher.software_of(run.members))
        rounds = MaskedRounds if self.facts.masked else PlainRounds
        self.rounds = rounds(run, manifest, self.facts, services, self.tasks)
        coverage = self.rounds.prepare(self.steering)
        if not self.facts.counts_classes:
            coverage = self._declared()
        self._keep_coverage(coverage)
        self._warn_of_few()
        self.replaces = run.parent if lineage.removes_sums(run) else ""
        self._computes = True
        try:
            with self.workers.of(self.id, self._require_wanted) as worker:
                worker.service = self
                self._compute(worker)
        except UnavailableError as error:
            if self._interrupted and error.code == "E-RUN-56":  # `interrupt` has ended the worker
                raise RunInterrupted(self.id) from error
            raise
        finally:
            self._computes = False

    def _require_wanted(self) -> None:
        if self._interrupted:
            raise RunInterrupted(self.id)

    def _compute(self, worker: RunWorker) -> None:
        """Have the worker compute the remaining rounds."""
        run, runs = self.row, self.services.store.runs
        state = self._begin(worker)
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), name=f"watch-{run.id}", daemon=True)
        watch.start()
        try:
            counted, coverage = self.rounds.begin(partial(worker.census, self.steering.quorum))
            self._keep_coverage(coverage)
            medians = [row.record.medians for row in runs.rounds(run.id)]
            worker.run(Rounds(str(state), run.closed, self.steering.quorum, medians, counted))
        finally:
            with self.services.objects.lock:
                self.round = None
            over.set()
            watch.join()
            self.tasks.interrupt()
            worker.settle()  # a round that is being stored is closed before the run pauses

    # ---- before the rounds -----------------------------------------------------------------------------------------

    def _declared(self) -> ClassCoverage:
        """Return the class coverage from the members' declarations, for runs that may not ask records."""
        manifest, facts = self.manifest, self.facts
        declared = dict[str, tuple[str, ...]]()
        if manifest.kind.trains:
            members, silos = {member.name for member in manifest.members}, self.services.store.members.silos()
            declared = {s.name: s.data.holds for s in silos if s.name in members and s.data.holds}
            if len(declared) == len(members):
                counted = counted_holders(manifest.schema.classes, declared.values())
                return facts.coverage(manifest.schema.classes, counted)
        why = "private run, and not all hospitals declare their classes (silo serve --holds)"
        return facts.coverage(manifest.schema.classes, (), why=why if facts.private else "")

    def _keep_coverage(self, coverage: ClassCoverage | None) -> None:
        """Store the classes that a run trains, once; if some are left out, pause it for the lead's decision.

        Raises RunInterrupted if it is paused. Guarantees: a run that is resumed after this question continues.
        """
        run, store = self.row, self.services.store
        if coverage is None or run.coverage is not None or not run.kind.measures:
            return
        if run.parent:
            parent = store.runs.get(run.parent).coverage
            coverage = coverage.after(None if parent is None else ClassCoverage.of(parent), trains=run.kind.trains)
        question = ""
        if left_out := coverage.left_out:
            them = "it" if len(left_out) == 1 else "them"
            question = (
                f"{LEFT_OUT}: every class must be at {coverage.least} hospitals or more, but these are at fewer: "
                f"{listed(left_out)}. The model will not know {them}. To continue without {them}: coordinator resume "
                f"{run.id}. To learn {them}: coordinator abort {run.id}, and start the run with "
                "secagg.min_contributors=1"
            )
        unless_over(lambda: store.runs.keep_coverage(run.id, coverage, question))
        if question:
            self.tasks.notify()
            raise RunInterrupted(question)

    def _warn_of_few(self) -> None:
        run, store = self.row, self.services.store
        if not run.kind.trains or len(run.members) >= MIN_UPDATES_FOR_MEDIAN or store.runs.round(run.id, 0) is not None:
            return
        may = "nothing limits how far one of them can move the model"
        if self.facts.aggregator == NormClipped.name:
            may = "one of them can move the model by several times the norm of its initial weights in a round"
        text = f"fewer than {MIN_UPDATES_FOR_MEDIAN} silos: {may}, and one refused update pauses the run"
        self.tasks.event("warning", text=text)

    def _begin(self, worker: RunWorker) -> Path:
        """Return the file of the server state to continue from: the stored one, or that of round 0, stored first."""
        objects, store = self.services.objects, self.services.store
        digest = self.row.state_object
        written = worker.initial() if digest is None else None
        with objects.lock:
            if written is not None:
                stored = StoredObject.adopt(written, objects)
            else:
                assert digest is not None
                stored = StoredObject(digest, objects.verified(digest).stat().st_size)
            unless_over(lambda: store.runs.begin(self.id, *stored))
        self._state = stored
        return objects.path(stored.digest)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_S):
            try:
                if (now := self.round) is not None:
                    now.look()
            except Exception:  # even if the database does not answer, the round must close
                log.exception("cannot check the open round of %s", self.id)

    # ---- the rounds ------------------------------------------------------------------------------------------------

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str], needed: int) -> None:
        """Store a round as open, unless it is stored; a round with a fixed set waits only for the set's updates."""
        store, number = self.services.store, context.round
        unless_over(lambda: store.runs.open_round(self.id, number, kind, names, self.rounds.base(kind)))
        row, needed = store.runs.round(self.id, number), self.rounds.needed(kind, len(names), needed)
        assert row is not None
        if (fixed := self.rounds.fixed_set(number, kind)) is not None:
            row, needed = replace(row, cohort=tuple(fixed)), len(fixed)
        self._broadcast, self._due = None, time.monotonic() + self.manifest.deadline_s
        self.round = OpenRound(row, needed, self.manifest, self.services, self.tasks)
        self.rounds.opened(self.round)

    def broadcast(self, round: int, written: Written | None) -> None:
        """Store a round's broadcast as an object. written: None: it is the state that was stored last."""
        objects = self.services.objects
        with self._open_round():
            self._broadcast = self._state if written is None else StoredObject.adopt(written, objects)
            assert self._broadcast is not None
            self.services.store.runs.set_base(self.id, round, *self._broadcast)
        self._delete_unused(self.id)  # while silos download

    @contextmanager
    def _open_round(self) -> Iterator[OpenRound]:
        """Keep the open round open inside the block.

        Raises RunInterrupted if none is open: the call may come from a worker that was killed in the meantime.
        """
        with self.services.objects.lock:
            if self.round is None:
                raise RunInterrupted(self.id)
            yield self.round

    def ask(self, silo: str, context: RoundContext, kind: TaskKind) -> Later[tuple[str, Path]]:
        """Ask a silo for its update; return the update's id and its file, once it is here.

        In a round with a fixed set only its updates are taken, and a lost one is requested again. No thread waits.
        Raises FederationError if the silo refuses, is revoked, excluded or given up: the round continues without it.
        Raises RunInterrupted if the run was aborted or the service stops: the round ends unclosed.
        """
        task, store = self._task(silo, context, kind), self.services.store
        fixed = self.rounds.fixed_set(context.round, kind)
        if fixed is not None and silo not in fixed:
            raise UnavailableError("E-RUN-13", "no update: the aggregation set was fixed without it")
        # Pending before the look-up, so that a later delivery settles it. Offered after it, so that no silo repeats and
        # pays for, an update that is here.
        pending = self.tasks.begin(task)
        try:
            digest = self._received_digest(task)
            if digest is not None:
                pending.settle(digest)
            elif fixed is None and silo in store.steering.of(self.id).excluded:
                raise excluded_error()
            else:
                self.tasks.offer(pending)
        except BaseException:
            self.tasks.end(pending)
            raise
        return Later(pending.outcome, partial(self._update, task, pending))

    def _update(self, task: RoundTask, pending: PendingTask) -> tuple[str, Path]:
        try:
            digest = self._outcome(task, pending)
        finally:
            self.tasks.end(pending)
        return task.contribution_id, self.services.objects.verified(digest)

    def _outcome(self, task: RoundTask, pending: PendingTask) -> str:
        """Wait for an update; an update committed after its silo was given up has a receipt, and is taken."""
        try:
            return pending.wait()
        except UnavailableError as error:
            digest = self._received_digest(task) if error.code == "E-RUN-13" else None
            if digest is None:
                raise
            return digest

    def _received_digest(self, task: RoundTask) -> str | None:
        """Return the digest of an update received before; None if there is none, or if the disk has lost it."""
        services = self.services
        contribution = services.store.contributions.contribution(task.contribution_id)
        if contribution is None or contribution.received is None:
            return None
        with services.objects.lock:
            if services.objects.holds(contribution.object_digest):
                return contribution.object_digest
            services.store.contributions.reopen(contribution)
        log.warning("the update of %s is damaged or missing: requested again", task.silo)
        return None

    def _task(self, silo: str, context: RoundContext, kind: TaskKind) -> RoundTask:
        """Return a silo's task in the open round."""
        store, base = self.services.store, self.rounds.base(kind)
        sent = StoredObject(base, 0) if base else self._broadcast
        assert sent is not None
        return RoundTask(
            self.id,
            context.round,
            kind,
            silo,
            self.row.manifest_digest,
            sent.digest,
            sent.size,
            context.cohort,
            self._due,
            self.steering.attempt,
            incarnation=store.database.incarnation,
            included_before=store.runs.included_before(self.id, silo, context.round),
            masks=self.rounds.masks,
        )

    def arrived(self, silo: str, classes: Collection[str] | None) -> None:
        """Count an update towards the quorum. classes: those that it trains; None if unknown."""
        if self.round is not None:
            if classes is not None:
                self.round.record_classes(silo, frozenset(classes))
            self.round.accepted(silo)

    def refused(self, silo: str, why: str) -> None:  # noqa: ARG002 - the round's record has it
        """Record that a silo will send nothing in this round."""
        if self.round is not None:
            self.round.refused(silo)

    def unmask(self, round: int, kind: TaskKind, members: Collection[str], blocks: Collection[str]) -> OpenedSeeds:
        """Have the members open the sum of a round; raises as `MaskedRounds.unmask`."""
        assert isinstance(self.rounds, MaskedRounds)
        return self.rounds.unmask(round, kind, members, blocks)

    def counted(self, hospitals: Sequence[int]) -> None:
        """Store the proof of the census whose sum was just opened. hospitals: per class."""
        assert isinstance(self.rounds, MaskedRounds)
        self.rounds.keep_census(hospitals)

    def closed(self, record: RoundRecord, written: Written | None, model: str) -> None:
        """Store a round's result and the state after it; then announce the close to the silos.

        model: the model's digest after the last round; between rounds it is computed on request
        (`RunScheduler.with_model_digest`).
        Raises StateError (E-STATE-63) if the file of the previous state was damaged in the meantime.
        """
        store, objects = self.services.store, self.services.objects
        with self._open_round() as now:
            now.close()
            self.round = None
            if self._state is not None:
                objects.verified(self._state.digest)  # the worker read the previous state from this file
            stored = None if written is None else StoredObject.adopt(written, objects)
            unless_over(lambda: store.runs.close_round(self.id, record, stored, model, self.replaces))
        self._state = stored or self._state
        row = store.runs.round(self.id, record.round)
        assert row is not None
        self.services.dispatcher.announce_close(row)
        if not record.kind.trains:
            self.services.dispatcher.announce_end(store.runs.get(self.id))
            if self.replaces:
                self._delete_unused(self.replaces)
