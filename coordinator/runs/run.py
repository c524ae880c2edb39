"""A running run: from its last closed round to its end, on its own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coordinator.runs import lineage
from coordinator.runs.masked_rounds import MaskedRounds
from coordinator.runs.open_round import OpenRound, Waiting, excluded_error
from coordinator.runs.plain_rounds import PlainRounds
from coordinator.runs.services import Services
from coordinator.runs.tasks import PendingTask, RoundTask, RunInterrupted, unless_over
from coordinator.runs.update_checks import UpdateChecks, checked, declared_sizes
from fl_core.aggregation.options import NormClipped
from fl_core.aggregation.round_sum import MIN_UPDATES_FOR_MEDIAN
from fl_core.aggregation.update_check import MeasuredUpdate
from fl_core.errors import UnavailableError
from fl_core.rounds.engine import Observer, RoundLoop
from fl_core.rounds.manifest import RunManifest
from fl_core.types import tensor_maps
from fl_core.types.class_coverage import LEFT_OUT, ClassCoverage, counted_holders, listed
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, RoundContext, State
from privacy.compiled_run import CompiledRun
from protos.wire.codec import BundleFile, read_state, write_state
from service_core.storage.object_store import ObjectStore

log = logging.getLogger(__name__)
_LOOK_S = 0.2


class StoredObject(NamedTuple):
    """A round's broadcast, as an object."""

    digest: str
    size: int

    @classmethod
    def stored(cls, state: State, objects: ObjectStore) -> StoredObject:
        """Store a state as an object; it is on the disk on return."""
        return cls(*objects.put_file(lambda file: write_state(state, file)))


class ActiveRun(Observer):
    """A running run: it is prepared, its rounds are opened and closed one after the other, and it ends.

    `rounds` has the differences of plain and masked rounds. Other threads than that of `execute` call `waiting` and
    `interrupt`. After an interruption it does nothing more; a resumed run is a new object.

    Guarantees: it begins after the last closed round; whenever the process ends, the final model is the same to the
    bit; a closed round is on disk before its close is announced; an update that was taken before a crash is not asked
    for again.
    """

    def __init__(
        self, run_id: str, services: Services, checks: UpdateChecks, delete_unused: Callable[[str], None]
    ) -> None:
        """Prepare the execution. delete_unused: called with the run's id when it needs fewer of its objects."""
        self.id = run_id
        self.services, self.checks, self._delete_unused = services, checks, delete_unused
        self.tasks = services.dispatcher.add_run(run_id)
        self.thread = threading.current_thread()
        self.round: OpenRound | None = None
        self._lock = threading.Lock()
        self._stored: tuple[State, StoredObject] | None = None
        self._broadcast: StoredObject | None = None
        self._due = 0.0

    def waiting(self) -> Waiting | None:
        """Return whom the open round waits for; None if none is open."""
        now = self.round
        return None if now is None else now.waiting()

    def interrupt(self) -> None:
        """Stop asking and waiting; `execute` then raises RunInterrupted."""
        self.tasks.interrupt()

    def execute(self) -> None:
        """Return when the run has ended; raises what stopped it: RunInterrupted, or the error in its stored end."""
        services, store = self.services, self.services.store
        run = store.runs.get(self.id)
        if run.state.ended:
            return
        manifest = RunManifest.from_json(run.manifest)
        with services.model_lock:
            self.compiled = CompiledRun.of(manifest)
        self.row, self.steering, self.manifest = run, store.steering.of(run.id), manifest
        self.tasks.note_software(services.dispatcher.software_of(run.members))
        rounds = MaskedRounds if self.compiled.masked else PlainRounds
        self.rounds = rounds(run, self.compiled, services, self.tasks)
        coverage = self.rounds.prepare(self.steering)
        if not self.compiled.counts_classes:
            coverage = self._declared()
        self._keep_coverage(coverage)
        self._warn_of_few()
        server = self._begin()
        self.replaces = run.parent if lineage.removes_sums(run) else ""
        self.loop = self._round_loop()
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), name=f"watch-{run.id}", daemon=True)
        watch.start()
        try:
            server, coverage = self.rounds.begin(self.loop, self, server)
            self._keep_coverage(coverage)
            medians = [row.record.medians for row in store.runs.rounds(run.id)]
            self.loop.run(server, self, start=run.closed, closed=medians)
        finally:
            self.round = None
            over.set()
            watch.join()

    # ---- before the rounds -----------------------------------------------------------------------------------------

    def _declared(self) -> ClassCoverage:
        """Return the class coverage from the members' declarations, for runs that may not ask records."""
        manifest, compiled = self.manifest, self.compiled
        declared = dict[str, tuple[str, ...]]()
        if compiled.kind.trains:
            members, silos = {member.name for member in manifest.members}, self.services.store.members.silos()
            declared = {s.name: s.data.holds for s in silos if s.name in members and s.data.holds}
            if len(declared) == len(members):
                return compiled.coverage(counted_holders(manifest.schema.classes, declared.values()))
        why = "private run, and not all hospitals declare their classes (silo serve --holds)"
        return compiled.coverage((), why=why if compiled.private else "")

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
                f"{LEFT_OUT}: expected every class at {coverage.least} hospitals or more, found {listed(left_out)} at "
                f"fewer: left out, the model will not know {them}. To go on without {them}: coordinator resume "
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
        if isinstance(self.compiled.aggregator, NormClipped):
            may = "one of them can move the model by several times the norm of its initial weights in a round"
        text = f"fewer than {MIN_UPDATES_FOR_MEDIAN} silos: {may}, and one refused update pauses the run"
        self.tasks.event("warning", text=text)

    def _begin(self) -> State:
        """Return the server state to continue from: the stored one, or that of round 0, which is stored first."""
        objects, store = self.services.objects, self.services.store
        if self.row.state_object is None:
            with self.services.model_lock:
                state = self.compiled.initial_state()
            with objects.lock:
                stored = StoredObject.stored(state, objects)
                unless_over(lambda: store.runs.begin(self.id, *stored))
        else:
            file = objects.verified(self.row.state_object)
            state, stored = read_state(file), StoredObject(self.row.state_object, file.stat().st_size)
            unless_over(lambda: store.runs.begin(self.id, *stored))
        self._stored = state, stored
        return state

    def _round_loop(self) -> RoundLoop:
        ports = [HospitalPort(member.name, self) for member in self.manifest.members]
        sizes = declared_sizes(self.services.store, self.id)
        loop = self.compiled.round_loop(ports, parallel=len(ports), sizes=sizes, unmask=self.rounds.unmask)
        return replace(loop, schedule=replace(loop.schedule, quorum=self.steering.quorum or loop.schedule.quorum))

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_S):
            try:
                if (now := self.round) is not None:
                    now.look()
            except Exception:  # even if the database does not answer, the round must close
                log.exception("cannot check the open round of %s", self.id)

    # ---- the rounds ------------------------------------------------------------------------------------------------

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        """Store a round as open unless it is; a round with a fixed set waits only for the set's updates."""
        store, number = self.services.store, context.round
        unless_over(lambda: store.runs.open_round(self.id, number, kind, names, self.rounds.base(kind)))
        row, needed = store.runs.round(self.id, number), self.rounds.needed(self.loop, kind, len(names))
        assert row is not None
        if (fixed := self.rounds.fixed_set(number, kind)) is not None:
            row, needed = replace(row, cohort=tuple(fixed)), len(fixed)
        self._broadcast, self._due = None, time.monotonic() + self.manifest.deadline_s
        self.round = OpenRound(row, needed, self.manifest, self.services, self.tasks)
        self.rounds.opened(self.round)

    def broadcast(self, msg: State, round: int) -> StoredObject:
        """Return a round's broadcast as an object; the first caller stores it for the whole cohort.

        Guarantees: a broadcast with the same tensors as the state stored just before reuses that object.
        """
        objects = self.services.objects
        with self._lock:
            if self._broadcast is None:
                with objects.lock:
                    stored = self._already_stored(msg) or StoredObject.stored(msg, objects)
                    self.services.store.runs.set_base(self.id, round, stored.digest, stored.size)
                self._broadcast = stored
                self._delete_unused(self.id)  # while silos download
            return self._broadcast

    def _already_stored(self, msg: State) -> StoredObject | None:
        if self._stored is None or set(msg) != set(self._stored[0]):
            return None
        state, stored = self._stored
        return stored if all(msg[group] is state[group] for group in msg) else None

    def task(self, silo: str, msg: State, context: RoundContext, kind: TaskKind) -> RoundTask:
        """Return a silo's task in the open round."""
        store, base = self.services.store, self.rounds.base(kind)
        sent = StoredObject(base, 0) if base else self.broadcast(msg, context.round)
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

    def arrived(self, name: str) -> None:
        """Count an update towards the quorum."""
        if self.round is not None:
            self.round.accepted(name)

    def refused(self, name: str, why: str) -> None:  # noqa: ARG002
        """Record that a silo will send nothing in this round."""
        if self.round is not None:
            self.round.refused(name)

    def closed(self, record: RoundRecord, server: State) -> None:
        """Store a round's result and the state after it; then announce the close to the silos."""
        store, objects, train = self.services.store, self.services.objects, record.kind.trains
        assert self.round is not None
        self.round.close()
        self.round = None
        # Between rounds it is computed when it is asked for: `RunScheduler.with_model_digest`.
        model = "" if train else tensor_maps.digest(server["w"])
        with objects.lock:
            stored = StoredObject.stored(server, objects) if train else None
            unless_over(lambda: store.runs.close_round(self.id, record, stored, model, self.replaces))
        if stored is not None:
            self._stored = server, stored
        row = store.runs.round(self.id, record.round)
        assert row is not None
        self.services.dispatcher.announce_close(row)
        if not train:
            self.services.dispatcher.announce_end(store.runs.get(self.id))
            if self.replaces:
                self._delete_unused(self.replaces)


@dataclass(frozen=True, slots=True)
class HospitalPort:
    """A silo over the network; see `fl_core.types.interfaces.SiloPort`.

    Guarantees: the bundle is the silo's, bit for bit.
    """

    name: str
    run: ActiveRun

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        """Ask the silo for its update and return it; it is read when it is added.

        In a round with a fixed set only its updates are taken, and a lost one is asked for again.
        Raises FederationError if the silo refuses, is revoked, excluded or given up: the round continues without it.
        Raises RunInterrupted if the run was aborted or the service stops: the round ends unclosed.
        """
        run, store = self.run, self.run.services.store
        task = run.task(self.name, msg, context, kind)
        fixed = run.rounds.fixed_set(context.round, kind)
        if fixed is not None and self.name not in fixed:
            raise UnavailableError("E-RUN-13", "no update: the aggregation set was fixed without it")
        # Pending before we look, so that a later delivery settles it; offered only after, so that no silo makes again,
        # and pays for, what is here.
        with run.tasks.pending_task(task) as pending:
            digest = self._received_digest(task)
            if digest is None:
                if fixed is None and self.name in store.steering.of(run.id).excluded:
                    raise excluded_error()
                run.tasks.offer(pending)
                digest = self._outcome(task, pending)
        update = checked(BundleFile(run.services.objects.verified(digest)), run.compiled.dtypes)
        if run.round is not None and (classes := run.rounds.classes_in(update)) is not None:
            run.round.record_classes(self.name, classes)
        measured = run.checks.measured(task.contribution_id)
        return update if measured is None else MeasuredUpdate(update, measured)

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        """Do nothing: the stored close is announced to every silo."""

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
        """Return the digest of an update received before; one that the disk has lost is asked for again."""
        services = self.run.services
        contribution = services.store.contributions.contribution(task.contribution_id)
        if contribution is None or contribution.received is None:
            return None
        with services.objects.lock:
            if services.objects.holds(contribution.object_digest):
                return contribution.object_digest
            services.store.contributions.reopen(contribution)
        log.warning("the update of %s is damaged or missing: requested again", self.name)
        return None
