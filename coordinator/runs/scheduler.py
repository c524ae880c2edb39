"""Runs: submitted, run round after round, ended, resumed. The arithmetic is that of `fl_core.rounds.engine`."""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from coordinator.runs import preflight
from coordinator.runs.checkpointer import RunCheckpointer
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.grpc_port import BroadcastCache, GrpcPort, StoredObject
from coordinator.runs.tasks import RunInterrupted
from coordinator.storage.records import Run, RunState
from coordinator.storage.store import Store
from coordinator.storage.uploads import UploadRegistry
from fl_core.errors import ConfigError, FederationError, StateError
from fl_core.rounds.manifest import RunManifest
from fl_core.types import tensor_maps
from fl_core.types.values import State
from privacy.compiled_run import CompiledRun
from protos.storage.object_store import ObjectStore
from protos.wire.codec import read_state

log = logging.getLogger(__name__)
PARALLEL_RUNS = 4
_LIVE = (RunState.WAITING, RunState.RUNNING)


class RunScheduler:
    """All runs of a coordinator: each on a thread of its own, at most `parallel` at a time, the others queued.

    Guarantees: a run goes on after a restart at its last closed round; ending the process at any moment changes no
    bit of the final model.
    """

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        uploads: UploadRegistry,
        dispatcher: Dispatcher,
        parallel: int = PARALLEL_RUNS,
    ) -> None:
        self._store = store
        self._objects = objects
        self._uploads = uploads
        self._dispatcher = dispatcher
        self._parallel = parallel
        self.model_lock = threading.Lock()
        """Held while a model is built: initial weights come from torch's global generator, which all threads share."""
        self._lock = threading.RLock()
        self._queue: deque[str] = deque()
        self._active: dict[str, threading.Thread] = {}
        self._stopping = False
        self._cleanup = ThreadPoolExecutor(1, thread_name_prefix="cleanup")

    # ---- commands --------------------------------------------------------------------------------------------------

    def submit(self, manifest: RunManifest, spec: str, request_id: str) -> Run:
        """Take a run and queue it; a repeated submission with one request id is one run.

        Raises ConfigError: E-RUN-05 when a silo of the roster is no member, E-CFG-02 when the request id came with
        another configuration; RefusedError (E-PRIV-01) for a privacy profile that cannot be undone here.
        """
        CompiledRun.of(manifest)
        for member in manifest.members:
            if not self._store.members.is_member(member.name):
                raise ConfigError("E-RUN-05", f"expected members of the consortium, found {member.name!r}: invite it")
        text = manifest.to_json().encode()
        with self._objects.lock:
            digest = self._objects.put(text)
            run = self._store.runs.add(_new_run(manifest, digest, spec, request_id), len(text))
        self._dispatcher.changes.notify()
        self._enqueue(run)
        return run

    def abort(self, query: str, reason: str = "aborted by the lead") -> Run:
        """End a run for good, whatever state it is in; raises StateError (E-RUN-11) when it is over already."""
        run = self._store.runs.find(query)
        run = self._store.runs.end(run.id, RunState.ABORTED, reason, (*_LIVE, RunState.FAILED))
        self._dispatcher.interrupt(run.id)
        self._dispatcher.announce_end(run)
        with self._lock:
            if run.id not in self._active:
                self._schedule_cleanup(run.id)
        return run

    def resume(self, query: str) -> Run:
        """Let a failed run go on at its last closed round; raises StateError (E-RUN-11) when it has not failed."""
        run = self._store.runs.resume(self._store.runs.find(query).id)
        self._dispatcher.changes.notify()
        self._enqueue(run)
        return run

    def with_model_digest(self, run: Run) -> Run:
        """Return a run with the digest of its newest model, which is computed when it is first asked for."""
        if run.model_digest or not run.closed or run.state_object is None:
            return run
        try:
            model = tensor_maps.digest(read_state(self._objects.path(run.state_object))["w"])
        except (StateError, FileNotFoundError):  # rounds were closed meanwhile: there is a newer one
            newer = self._store.runs.get(run.id)
            if newer.state_object == run.state_object:
                raise
            return self.with_model_digest(newer)
        self._store.runs.note_model(run.id, run.state_object, model)
        return replace(run, model_digest=model)

    def resume_all(self) -> None:
        """Continue every run that has not ended; called when the service starts."""
        with self._objects.lock:
            self._objects.sweep(self._store.contributions.referenced_digests())
        self._drop_uploads()
        for run in self._store.runs.unfinished():
            self._enqueue(run)

    def stop(self, seconds: float = 10.0) -> None:
        """Interrupt every run; `resume_all` continues them."""
        with self._lock:
            self._stopping = True
            self._queue.clear()
            active = dict(self._active)
        for run_id in active:
            self._dispatcher.interrupt(run_id)
        for thread in active.values():
            thread.join(seconds)
        wait([self._cleanup.submit(lambda: None)], seconds)  # what is being deleted now needs the store

    # ---- threads ---------------------------------------------------------------------------------------------------

    def _enqueue(self, run: Run) -> None:
        with self._lock:
            if run.state.ended or run.id in self._active or run.id in self._queue:
                return
            self._dispatcher.allow(run.id)
            self._queue.append(run.id)
            self._start_queued()

    def _start_queued(self) -> None:
        with self._lock:
            while self._queue and len(self._active) < self._parallel and not self._stopping:
                run_id = self._queue.popleft()
                thread = threading.Thread(target=self._execute, args=(run_id,), name=f"run-{run_id}", daemon=True)
                self._active[run_id] = thread
                thread.start()

    def _execute(self, run_id: str) -> None:
        try:
            self._run(run_id)
        except RunInterrupted:
            log.info("run %s was interrupted", run_id)
        except FederationError as error:
            self._fail(run_id, str(error))
        except Exception as error:
            log.exception("run %s met an unforeseen error", run_id)
            self._fail(run_id, f"E-RUN-99: unforeseen error ({type(error).__name__}); the coordinator's log has it")
        finally:
            self._on_thread_exit(run_id)

    def _on_thread_exit(self, run_id: str) -> None:
        with self._lock:
            del self._active[run_id]
            if not self._stopping:
                self._schedule_cleanup(run_id)
                # A run that was resumed before this thread had left is waiting again.
                self._enqueue(self._store.runs.get(run_id))
                self._start_queued()

    def _run(self, run_id: str) -> None:
        run = self._store.runs.get(run_id)
        if run.state.ended:
            return
        manifest = RunManifest.from_json(run.manifest)
        with self.model_lock:
            compiled = CompiledRun.of(manifest)
        if preflight.is_due(run, compiled, self._store):
            preflight.ask(run, manifest, self._dispatcher)
        broadcasts = BroadcastCache(run_id, manifest.deadline_s, self._store, self._objects, self._schedule_cleanup)
        server = self._begin(run, compiled, broadcasts)
        ports = [
            GrpcPort(
                m.name,
                run_id,
                run.manifest_digest,
                compiled.dtypes,
                broadcasts,
                self._store,
                self._objects,
                self._dispatcher,
            )
            for m in manifest.members
        ]
        checkpointer = RunCheckpointer(run_id, broadcasts, self._store, self._objects, self._dispatcher)
        compiled.round_loop(ports, parallel=len(ports)).run(server, checkpointer, start=run.closed)

    def _begin(self, run: Run, compiled: CompiledRun, broadcasts: BroadcastCache) -> State:
        """Return the server state to go on from: the stored one, or that of round 0, which is stored first."""
        if run.state_object is None:
            with self.model_lock:
                state = compiled.initial_state()
            with self._objects.lock:
                base = StoredObject.stored(state, self._objects)
                self._store.runs.begin(run.id, base.digest, base.size)
        else:
            file = self._objects.path(run.state_object)
            state, base = read_state(file), StoredObject(run.state_object, file.stat().st_size)
            self._store.runs.begin(run.id, base.digest, base.size)
        broadcasts.remember(state, base)
        return state

    def _fail(self, run_id: str, reason: str) -> None:
        """End a run as failed. Silos get no message: it may be resumed, with what they have staged."""
        try:
            self._store.runs.end(run_id, RunState.FAILED, reason, _LIVE)
        except StateError as error:
            log.info("run %s had ended already: %s", run_id, error)
        self._dispatcher.changes.notify()

    def _schedule_cleanup(self, run_id: str) -> None:
        """Delete what the run no longer needs, in the background."""
        self._cleanup.submit(self._delete_unused, run_id)

    def _delete_unused(self, run_id: str) -> None:
        try:
            with self._objects.lock:
                self._store.contributions.delete_unreferenced(run_id, self._objects.remove)
            self._drop_uploads()
        except Exception:  # no run fails for it: what stays is deleted at the next round's end, or at the next start
            log.exception("what run %s no longer needs could not be deleted", run_id)

    def _drop_uploads(self) -> None:
        for silo, contribution in self._uploads.all():
            if not self._store.contributions.is_open(contribution):
                self._uploads.discard(silo, contribution)


def _new_run(manifest: RunManifest, digest: str, spec: str, request_id: str) -> Run:
    slug = re.sub(r"[^a-z0-9]+", "-", manifest.name.lower()).strip("-")[:40] or "run"
    return Run(
        id=f"{slug}-{secrets.token_hex(2)}",
        name=manifest.name,
        request_id=request_id,
        spec=spec,
        manifest=manifest.to_json(),
        manifest_digest=digest,
        method=manifest.method.name,
        data=manifest.data,
        rounds=manifest.rounds,
        members=tuple(m.name for m in manifest.members),
    )
