"""One run while it is under way: from its last closed round to its end, on the thread that calls `run`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from coordinator.runs import preflight
from coordinator.runs.checkpointer import RunCheckpointer
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.grpc_port import BroadcastCache, GrpcPort, StoredObject
from coordinator.runs.round_closer import RoundCloser, Waiting
from coordinator.runs.update_checks import UpdateChecks, declared_sizes
from coordinator.storage.records import Run
from coordinator.storage.store import Store
from fl_core.aggregation.options import NormClipped
from fl_core.aggregation.round_sum import FEWEST
from fl_core.rounds.manifest import RunManifest
from fl_core.types.values import State
from privacy.compiled_run import CompiledRun
from protos.storage.object_store import ObjectStore
from protos.wire.codec import read_state


@dataclass(slots=True, eq=False)
class RunExecution:
    """The rounds of one run. `waiting` and `steered` are called by other threads than `run`.

    model_lock: as in `RunScheduler`   delete_unused: called with the run's id when a broadcast is no longer needed.
    """

    run_id: str
    store: Store
    objects: ObjectStore
    dispatcher: Dispatcher
    checks: UpdateChecks
    model_lock: threading.Lock
    delete_unused: Callable[[str], None]
    _closer: RoundCloser | None = field(init=False, default=None)

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
        if preflight.is_due(run, self.store):
            preflight.ask(run, manifest, self.dispatcher, steering.excluded, all_answer=compiled.private)
        if len(run.members) < FEWEST and self.store.runs.round(run.id, 0) is None:
            may = "nothing bounds what one of them does to the model"
            if isinstance(compiled.aggregator, NormClipped):
                may = "one of them may move the model by several times the length of its initial weights in a round"
            text = f"fewer than {FEWEST} silos: {may}, and one update that is refused pauses the run"
            self.store.runs.event(run.id, "warning", text=text)
        broadcasts = BroadcastCache(run.id, manifest.deadline_s, self.store, self.objects, self.delete_unused)
        server = self._begin(run, compiled, broadcasts)
        with self._open_rounds(manifest) as closer:
            services = broadcasts, self.store, self.objects, self.dispatcher
            task = run.id, run.manifest_digest, compiled.dtypes, steering.attempt
            ports = [GrpcPort(m.name, *task, closer, self.checks, *services) for m in manifest.members]
            closed = [row.medians for row in self.store.runs.rounds(run.id)]
            loop = compiled.round_loop(ports, parallel=len(ports), sizes=declared_sizes(self.store, run.id))
            loop = replace(loop, schedule=replace(loop.schedule, quorum=steering.quorum or loop.schedule.quorum))
            checkpointer = RunCheckpointer(run.id, closer, loop.needed, *services)
            loop.run(server, checkpointer, start=run.closed, closed=closed)

    def waiting(self) -> Waiting | None:
        """Say whom the open round waits for; None where none is open."""
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
            self._closer = None

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
