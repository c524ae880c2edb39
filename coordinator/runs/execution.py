"""One run while it is under way: from its last closed round to its end, on the thread that calls `run`.

Before round 0 every silo says whether it can do its part of all rounds; one that cannot stops the run. A private run
waits for all of them, and so does a masked one, for their keys, which are stored then. A run without privacy charges
nothing and may go on with its quorum: it waits for those that are connected, at most the manifest's patience. No other
answer is stored: after a restart all are asked again.
"""

from __future__ import annotations

import math
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coordinator.runs import lineage
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.grpc_port import BroadcastCache, GrpcPort, MaskedTasks, StoredObject
from coordinator.runs.member_keys import MemberKeys
from coordinator.runs.opening import Openings
from coordinator.runs.round_closer import RoundCloser, Waiting
from coordinator.runs.tasks import PendingTask, Preflight, PreflightKey, RunInterrupted, no_answer
from coordinator.runs.update_checks import UpdateChecks, declared_sizes
from coordinator.storage.records import Run
from coordinator.storage.store import Store
from fl_core.aggregation.contributor_floor import HOSPITALS
from fl_core.aggregation.options import NormClipped
from fl_core.aggregation.round_sum import MIN_UPDATES_FOR_MEDIAN
from fl_core.errors import FederationError, RefusedError, StateError, UnavailableError
from fl_core.rounds.engine import Observer, RoundLoop
from fl_core.rounds.manifest import RunManifest
from fl_core.types import tensor_maps
from fl_core.types.class_coverage import LEFT_OUT, ClassCoverage, counted_holders, listed
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.secagg import read_alone
from fl_core.types.survey import SURVEY
from fl_core.types.values import RoundContext, State
from privacy.compiled_run import CompiledRun, secagg_run
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import read_state
from service_core.audit_log.lines import Entry
from service_core.pki.identity import identity_of
from service_core.storage.object_store import ObjectStore
from service_core.storage.private_files import Credentials


@dataclass(slots=True, eq=False)
class RunExecution:
    """The rounds of one run. `waiting` and `steered` are called by other threads than `run`.

    model_lock: as in `RunScheduler`   delete_unused: called with the run's id when a broadcast is no longer needed
    signer: the coordinator's certificate in force   record: writes a line into the audit log   roster: the newest one.
    """

    run_id: str
    store: Store
    objects: ObjectStore
    dispatcher: Dispatcher
    checks: UpdateChecks
    model_lock: threading.Lock
    delete_unused: Callable[[str], None]
    signer: Callable[[], Credentials]
    record: Callable[[Entry], object]
    roster: Callable[[], bytes]
    _closer: RoundCloser | None = field(init=False, default=None)
    _openings: Openings | None = field(init=False, default=None)

    def run(self) -> None:
        """Return when the run has ended; raises what stopped it: RunInterrupted, or the error that its end is told by.

        Guarantees: begins at the last closed round; whenever the process ends, the final model is the same to the bit.
        """
        run = self.store.runs.get(self.run_id)
        if run.state.ended:
            return
        manifest = RunManifest.from_json(run.manifest)
        with self.model_lock:
            compiled = CompiledRun.of(manifest)
        steering = self.store.steering.of(run.id)
        self.dispatcher.note_software(run.id, run.members)
        keys = self._member_keys(run, manifest) if compiled.masked else None
        if keys is None and self.store.runs.round(run.id, 0) is None:
            self.store.runs.event(run.id, "clear", text=read_alone(len(run.members)))
        if keys is not None:
            if keys.object is None:
                ready = self._ready(run, manifest, keys)
                keys.keep({name: pending.entry for name, pending in ready.items() if pending.entry is not None})
        elif preflight_is_due(run, self.store):
            named = 0 if compiled.private else steering.quorum or manifest.quorum
            ready = ask_preflight(run, manifest, self.dispatcher, steering.excluded, compiled.private, named)
            if compiled.counts_classes:
                trains = [set(pending.trains) for pending in ready.values() if pending.trains]
                counted = [sum(c in each for each in trains) for c in range(len(manifest.schema.classes))]
                silent = len(trains) < len(run.members) - len(steering.excluded)
                self._keep_coverage(run, compiled.coverage(counted if trains else (), partial=silent))
        if not compiled.counts_classes:
            self._keep_coverage(run, self._declared(compiled))
        few = run.rounds and len(run.members) < MIN_UPDATES_FOR_MEDIAN
        if few and self.store.runs.round(run.id, 0) is None:
            may = "nothing bounds what one of them does to the model"
            if isinstance(compiled.aggregator, NormClipped):
                may = "one of them may move the model by several times the length of its initial weights in a round"
            text = f"fewer than {MIN_UPDATES_FOR_MEDIAN} silos: {may}, and one update that is refused pauses the run"
            self.store.runs.event(run.id, "warning", text=text)
        broadcasts = BroadcastCache(run.id, manifest.deadline_s, self.store, self.objects, self.delete_unused)
        server = self._begin(run, compiled, broadcasts)
        with self._open_rounds(manifest) as closer:
            services = broadcasts, self.store, self.objects, self.dispatcher
            task = run.id, run.manifest_digest, compiled.dtypes, steering.attempt
            masks: MaskedTasks | None = None
            if keys is not None:
                due = time.monotonic() + manifest.deadline_s
                known = self.store.secagg.census(run.id) or ""
                masks = MaskedTasks(keys.object or "", keys.vouched().digest.hex(), due, known)
            ports = [GrpcPort(m.name, *task, closer, self.checks, *services, masks) for m in manifest.members]
            closed = [row.record.medians for row in self.store.runs.rounds(run.id)]
            if keys is not None:
                asked = keys.run, keys.vouched(), manifest.deadline_s, self.signer, self.record, closer
                self._openings = Openings(*asked, self.store, self.objects, self.dispatcher)
            sizes = declared_sizes(self.store, run.id)
            loop = compiled.round_loop(ports, parallel=len(ports), sizes=sizes, openings=self._openings)
            loop = replace(loop, schedule=replace(loop.schedule, quorum=steering.quorum or loop.schedule.quorum))
            replaces = run.parent if lineage.taken_out(run) else ""
            base = "" if masks is None else masks.base
            checkpointer = RunCheckpointer(run.id, closer, loop.needed, *services, replaces=replaces, census_base=base)
            if masks is not None and compiled.counts_classes and not run.closed:
                found = self._census(run, loop, checkpointer, must=compiled.contributor_floor is not None)
                masks.census = self.store.secagg.census(run.id) or ""
                hospitals = () if found is None else found.int().tolist()
                why = "" if hospitals else "not all hospitals were there when it was counted"
                self._keep_coverage(run, compiled.coverage(hospitals, why=why))
                if found is not None and compiled.contributor_floor is not None:
                    server = {**server, HOSPITALS: {HOSPITALS: found}}
            loop.run(server, checkpointer, start=run.closed, closed=closed)

    def _ready(self, run: Run, manifest: RunManifest, keys: MemberKeys) -> Mapping[str, PendingTask]:
        """Ask all members of a masked run until they were asked beside the list of members that is in force then.

        One that renewed its certificate meanwhile signs its keys with an identity that only that list names.
        """
        while True:
            roster = self.roster()
            ready = ask_preflight(run, manifest, self.dispatcher, check=keys.check, roster=roster)
            if self.roster() == roster:
                return ready

    def _census(self, run: Run, loop: RoundLoop, checkpointer: RunCheckpointer, *, must: bool) -> Tensor | None:
        """Return how many hospitals each class has (C,): as it was counted before, or counted now.

        must: the run needs the answer. Without, None where not all hospitals answer, or a round has begun before it.
        """
        digest = self.store.secagg.census(run.id)
        if digest is not None:
            proof = pb.SecaggCensus.FromString(self.objects.verified(digest).read_bytes())
            return torch.tensor(proof.hospitals, dtype=torch.float64)
        begun = self.store.runs.round(run.id, 0)
        if not must and (run.coverage is not None or (begun and begun.record.kind is TaskKind.TRAIN)):
            return None
        try:
            found = loop.census(checkpointer if must else replace(checkpointer, census_needed=loop.needed))
        except UnavailableError:
            if must or self.store.secagg.updates(run.id, 0, TaskKind.CENSUS) is not None:  # its set was fixed
                raise
            self.store.secagg.drop_census(run.id)
            return None
        self.dispatcher.announce_census(run.id, run.members)
        return found[HOSPITALS]

    def _declared(self, compiled: CompiledRun) -> ClassCoverage:
        """Say what is known of classes where no record may be asked: what all members declare."""
        names, declared = compiled.manifest.schema.classes, dict[str, tuple[str, ...]]()
        if compiled.manifest.rounds and compiled.manifest.method.name != SURVEY:
            members = {member.name for member in compiled.manifest.members}
            declared = {s.name: s.data.holds for s in self.store.members.silos() if s.name in members and s.data.holds}
            if len(declared) == len(members):
                return compiled.coverage(counted_holders(names, declared.values()))
        why = (
            "private run, and not all hospitals declare their classes (silo serve --holds)" if compiled.private else ""
        )
        return compiled.coverage((), why=why)

    def _keep_coverage(self, run: Run, found: ClassCoverage) -> None:
        """Store which classes a run teaches, once; where some are left out, pause it for the lead to decide.

        Raises RunInterrupted where it is paused. Guarantees: a run that was resumed after this question goes on.
        """
        if run.coverage is not None or run.method == SURVEY:
            return
        if run.parent:
            parent = self.store.runs.get(run.parent).coverage
            found = found.after(None if parent is None else ClassCoverage.of(parent), trains=run.rounds > 0)
        question = ""
        if left_out := found.left_out:
            them = "it" if len(left_out) == 1 else "them"
            question = (
                f"{LEFT_OUT}: expected every class at {found.least} hospitals or more, found {listed(left_out)} at "
                f"fewer: left out, the model will not know {them}. To go on without {them}: coordinator resume "
                f"{run.id}. To learn {them}: coordinator abort {run.id}, and start the run with "
                "secagg.min_contributors=1"
            )
        try:
            self.store.runs.keep_coverage(run.id, found, question)
        except StateError as error:
            raise RunInterrupted(str(error)) from error
        if question:
            self.dispatcher.changes.notify()
            raise RunInterrupted(question)

    def waiting(self) -> Waiting | None:
        """Say whom the open round waits for; None where none is open."""
        if (openings := self._openings) is not None and (sealed := openings.current) is not None:
            return sealed.waiting()
        closer = self._closer
        return None if closer is None else closer.waiting()

    def steered(self) -> None:
        """Take over what the lead has changed."""
        if (closer := self._closer) is not None:
            closer.steered()

    @contextmanager
    def _open_rounds(self, manifest: RunManifest) -> Iterator[RoundCloser]:
        closer = RoundCloser(self.run_id, manifest, self.store, self.dispatcher)
        self._closer = closer
        try:
            with closer.running():
                yield closer
        finally:
            self._closer = self._openings = None

    def _member_keys(self, run: Run, manifest: RunManifest) -> MemberKeys:
        consortium = identity_of(self.signer().cert_pem).identity.consortium
        return MemberKeys(secagg_run(run.id, manifest), consortium, self.store, self.objects)

    def _begin(self, run: Run, compiled: CompiledRun, broadcasts: BroadcastCache) -> State:
        """Return the server state to go on from: the stored one, or that of round 0, which is stored first."""
        if run.state_object is None:
            with self.model_lock:
                state = compiled.initial_state()
            with self.objects.lock:
                base = StoredObject.stored(state, self.objects)
                self.store.runs.begin(run.id, *base)
        else:
            file = self.objects.verified(run.state_object)
            state, base = read_state(file), StoredObject(run.state_object, file.stat().st_size)
            self.store.runs.begin(run.id, *base)
        broadcasts.remember(state, base)
        return state


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunCheckpointer(Observer):
    """Observes the rounds of one run; a closed round is on disk before its close is announced.

    needed: from a cohort's size to the updates that close a round   replaces: as in `RunStore.close_round`
    census_base: of a masked run, what its census begins from   census_needed: as `needed`, for its answers.
    """

    run_id: str
    closer: RoundCloser
    needed: Callable[[int], int]
    broadcasts: BroadcastCache
    store: Store
    objects: ObjectStore
    dispatcher: Dispatcher
    replaces: str = ""
    census_base: str = ""
    census_needed: Callable[[int], int] = int

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        census = kind is TaskKind.CENSUS
        base, needed = (self.census_base, self.census_needed(len(names))) if census else ("", self.needed(len(names)))
        self._unless_aborted(lambda: self.store.runs.open_round(self.run_id, context.round, kind, names, base))
        row = self.store.runs.round(self.run_id, context.round)
        assert row is not None
        if (sealed := self.store.secagg.updates(self.run_id, context.round, kind)) is not None:
            row, needed = replace(row, cohort=tuple(sealed)), len(sealed)
        self.closer.opened(row, needed)

    def arrived(self, name: str) -> None:
        """Count an update towards the quorum."""
        self.closer.accepted(name)

    def refused(self, name: str, why: str) -> None:  # noqa: ARG002
        """Note that nothing will come of a silo in this round."""
        self.closer.refused(name)

    def closed(self, record: RoundRecord, server: State) -> None:
        self.closer.closed()
        close, train = self.store.runs.close_round, record.kind is TaskKind.TRAIN
        # Between rounds it is computed when it is asked for: `RunScheduler.with_model_digest`.
        model = "" if train else tensor_maps.digest(server["w"])
        with self.objects.lock:
            base = StoredObject.stored(server, self.objects) if train else None
            self._unless_aborted(lambda: close(self.run_id, record, base, model, self.replaces))
        if base is not None:
            self.broadcasts.remember(server, base)
        row = self.store.runs.round(self.run_id, record.round)
        assert row is not None
        self.dispatcher.announce_close(row)
        if record.kind is TaskKind.EVALUATE:
            self.dispatcher.announce_end(self.store.runs.get(self.run_id))
            if self.replaces:
                self.broadcasts.collect(self.replaces)

    def _unless_aborted(self, write: Callable[[], object]) -> None:
        try:
            write()
        except StateError as error:
            raise RunInterrupted(str(error)) from error


# ---- preflight -------------------------------------------------------------------------------------------------------

GRACE_S = 30.0
"""After the first refusal the others have this long to answer, so that the lead sees all refusals at once."""
_REASON_CHARS = 200
_LOOK_S = 0.05
_NO_ANSWER = no_answer().code


def preflight_is_due(run: Run, store: Store) -> bool:
    """Return whether the silos are asked: no round of the run was ever opened."""
    return run.closed == 0 and store.runs.round(run.id, 0) is None


def ask_preflight(
    run: Run,
    manifest: RunManifest,
    dispatcher: Dispatcher,
    excluded: Collection[str] = (),
    all_answer: bool = True,
    quorum: int = 0,
    check: Callable[[str, pb.SecaggEntry | None], None] | None = None,
    roster: bytes = b"",
) -> dict[str, PendingTask]:
    """Ask the silos of a run at once, and return when all are ready, with the answers of those that are.

    excluded: silos that are not asked   all_answer: one that is away is asked when it comes, and awaited until the
    run's deadline; else those that are connected are asked, and who does not answer in time is asked for its task
    quorum: that the lead named, with which the run begins although others refuse; 0: a refusal stops it
    check: of a masked run, of a silo's keys; what it raises counts as that silo's refusal   roster: sent beside the
    question.

    Raises RefusedError (E-RUN-36) that names every silo that refused, with its code; UnavailableError (E-RUN-37) that
    names those that did not answer and must; RunInterrupted when the run was aborted or the service stops.
    Guarantees: no task of a run is offered before this has returned.
    """
    wait_s = manifest.deadline_s if all_answer else min(manifest.deadline_s, manifest.patience_s)
    names, due = [name for name in run.members if name not in excluded], time.monotonic() + wait_s
    away = [name for name in names if dispatcher.activity_of(name) is None]
    if not all_answer:
        names = [name for name in names if name not in away]
    text = f"{len(names)} silos are asked whether they are ready" + (f"; away: {', '.join(away)}" if away else "")
    dispatcher.store.runs.event(run.id, "preflight", text=text)
    dispatcher.changes.notify()
    with ExitStack() as stack:
        asked = {
            name: stack.enter_context(
                dispatcher.pending_task(Preflight(PreflightKey(run.id, name), run.manifest_digest, due, roster))
            )
            for name in names
        }
        for pending in asked.values():
            dispatcher.offer(pending)
        failures = _failures(asked, lambda name: all_answer or _works_on_it(dispatcher, name, run.id), check)
    found = {name: pending for name, pending in asked.items() if name not in failures}
    if not all_answer:
        failures = {name: error for name, error in failures.items() if error.code != _NO_ANSWER}
    if not failures:
        return found
    error = _combined_error(failures, len(names), run.id)
    if not 0 < quorum <= len(run.members) - len(excluded) - len(failures):
        raise error
    text = f"begun with the quorum of {quorum} that was named, although {len(failures)} refused: {error}"
    dispatcher.store.runs.event(run.id, "warning", text=text)
    return found


def _works_on_it(dispatcher: Dispatcher, name: str, run_id: str) -> bool:
    """Tell whether a silo may answer soon: it is connected, and its hospital has nothing to decide first."""
    if (found := dispatcher.activity_of(name)) is None:
        return False
    return (found[0].activity, found[0].run_id) != (pb.AWAITING_APPROVAL, run_id)


def _failures(
    asked: Mapping[str, PendingTask],
    awaited: Callable[[str], bool],
    check: Callable[[str, pb.SecaggEntry | None], None] | None,
) -> Mapping[str, FederationError]:
    """Wait for the answers of all that are awaited, after the first refusal not much longer.

    Raises RunInterrupted when the run was.
    """
    failures, answered, until = dict[str, FederationError](), set[str](), math.inf
    while left := [name for name in asked if name not in answered]:
        now = time.monotonic()
        over = now >= until or not any(awaited(name) for name in left)
        for name in left:
            pending = asked[name]
            if over or now >= pending.task.due:
                pending.settle(no_answer())
            if not pending.settled:
                continue
            answered.add(name)
            try:
                pending.wait()
                if check is not None:
                    check(name, pending.entry)
            except FederationError as error:
                failures[name] = error
                until = min(until, now + GRACE_S)
        if len(answered) < len(asked):
            time.sleep(_LOOK_S)
    return failures


def _combined_error(failures: Mapping[str, FederationError], silos: int, run_id: str) -> FederationError:
    """Make one error of all, with a line for each silo and what comes next on the last."""
    silent = sorted(name for name, error in failures.items() if error.code == _NO_ANSWER)
    unanswered = f"no answer yet from {', '.join(silent)}" if silent else ""
    refused = [f"{name}: {_shortened(error)}" for name, error in failures.items() if name not in silent]
    remedy = f"no round was begun and nothing charged; have it put right, then: coordinator resume {run_id}"
    if not refused:
        return UnavailableError(
            "E-RUN-37", f"expected all {silos} silos to say that they are ready, found {unanswered}: {remedy}"
        )
    lines = [f"expected all {silos} silos to be ready, found {len(refused)} not", *sorted(refused)]
    lines += [unanswered] if unanswered else []
    explained = "what a hospital does about its code says `coordinator explain CODE`"
    return RefusedError("E-RUN-36", "\n  ".join([*lines, f"{explained}; {remedy}"]))


def _shortened(error: FederationError) -> str:
    return textwrap.shorten(str(error), _REASON_CHARS, placeholder=" ...")
