"""All runs: submission, the queue, changes by the lead, ends and resumptions. A running one is an `ActiveRun`.

Workers do the arithmetic (`coordinator.runs.workers`).
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from coordinator.runs import lineage
from coordinator.runs.exchange import Opened, OpenRequest, RunReference
from coordinator.runs.lineage import RunLineage
from coordinator.runs.open_round import Waiting
from coordinator.runs.run import ActiveRun, StoredObject
from coordinator.runs.run_facts import DerivedFacts
from coordinator.runs.services import Services
from coordinator.runs.tasks import RunInterrupted
from coordinator.runs.workers import RunWorkers
from coordinator.storage.records import RunState, StoredRun
from coordinator.storage.runs import require_state
from coordinator.storage.uploads import UploadRegistry
from fl_core import validate
from fl_core.errors import ConfigError, FederationError, StateError, UnavailableError
from fl_core.rounds.manifest import RunManifest
from protos.wire.codec import TensorFile
from service_core.console import pluralize

log = logging.getLogger(__name__)
PARALLEL_RUNS = 4
_NOT_NOTED_S = 1.0
"""Delay before a run is retried whose end could not be stored."""
_FOR_THE_LEAD = frozenset({"E-RUN-03", "E-RUN-36", "E-RUN-37", "E-RUN-45", "E-RUN-48", "E-RUN-56"})
"""Errors that pause a run: hospitals are missing or do not open a sum, or its worker ended; the lead decides."""
_MAX_HOURS = 24.0 * 365


class RunScheduler:
    """All runs of a coordinator: each on its own thread, at most `parallel` at a time, the others queued.

    Guarantees: a run continues after a restart at its last closed round; ending the process at any moment changes no
    bit of the final model.
    """

    def __init__(
        self, services: Services, uploads: UploadRegistry, workers: RunWorkers, parallel: int = PARALLEL_RUNS
    ) -> None:
        self.services, self.uploads, self.workers, self.parallel = services, uploads, workers, parallel
        self.store, self.objects, self.dispatcher = services.store, services.objects, services.dispatcher
        self._lock = threading.RLock()
        self._queue = deque[str]()
        self._active: dict[str, ActiveRun] = {}
        self._stopping = False
        self._cleanup = ThreadPoolExecutor(1, thread_name_prefix="cleanup")

    def submit(self, manifest: RunManifest, spec: str, request_id: str, start_from: str = "") -> StoredRun:
        """Accept a run and queue it; a repeated submission with one request id is one run.

        start_from: the id of a run whose last model this one starts from. A start that the manifest names only by its
        weights is completed like one from a run: see `coordinator.worker.start_point.resolve`.
        Raises ConfigError (E-RUN-05: a silo is no member, E-CFG-02: the request id came with another configuration,
        E-RUN-10: no such run to start from), RefusedError (E-PRIV-01: an unknown privacy profile), as
        `RunLineage.require_fits` and as `resolve`.
        """
        run = self._accept(manifest, spec, request_id, start_from)
        self.dispatcher.changes.notify()
        self._enqueue(run)
        return run

    def _accept(self, manifest: RunManifest, spec: str, request_id: str, start_from: str) -> StoredRun:
        """Store a waiting run and the objects that it starts from; arguments and errors as of `submit`."""
        runs, members = self.store.runs, self.store.members
        enrolled = members.member_names()
        for member in manifest.members:
            if member.name not in enrolled:
                raise ConfigError("E-RUN-05", f"expected members of the consortium, found {member.name!r}: invite it")
        never = members.validation_only() if manifest.kind.trains else set()
        if refused := sorted(never & {member.name for member in manifest.members}):
            raise ConfigError(
                "E-RUN-05",
                f"these hospitals only evaluate and never train: {', '.join(refused)}. Leave them out of "
                "silos=[...], and evaluate the model at them with coordinator evaluate",
            )
        offers = {silo.name: silo.data for silo in members.silos()}
        sizes = [(m.name, offers[m.name].train_examples, offers[m.name].test_examples) for m in manifest.members]
        beside = runs.get(manifest.evaluation.beside) if manifest.evaluation.beside else None
        parent = runs.get(start_from) if start_from else None
        RunLineage(runs).require_fits(parent, manifest)
        others = (None if other is None else RunReference.of(other) for other in (parent, beside))
        with self.workers.opening() as worker:
            opened = worker.open(OpenRequest(manifest.to_json(), sizes, *others))
            weights = None if manifest.start is None else manifest.start.weights
            text = opened.manifest.encode()
            with self.objects.lock:
                other = None if opened.other is None else StoredObject.adopt(opened.other, self.objects)
                filled = None if weights is None else StoredObject(weights.object, weights.size)
                if filled is not None:
                    self.objects.path(filled.digest)  # newer uploads may have replaced it
                new = _new_run(manifest, opened, self.objects.put(text), spec, request_id)
                start = None if opened.state is None else StoredObject.adopt(opened.state, self.objects)
                by_silo = {name: (train, test) for name, train, test in opened.sizes}
                return runs.add(new, len(text), by_silo, start, filled, other)

    def abort(self, query: str, reason: str = "aborted by the lead") -> StoredRun:
        """End a run for good, in any state; raises StateError (E-RUN-11) if it has ended already."""
        run = self.store.runs.find(query)
        run = self.store.runs.end(run.id, RunState.ABORTED, reason)
        with self._lock:
            if (active := self._active.get(run.id)) is None:
                self.schedule_cleanup(run.id)
            else:
                active.interrupt()
        self.workers.interrupt(run.id)  # its worker may be loading, or checking an update
        self.dispatcher.announce_end(run)
        return run

    def resume(self, query: str, quorum: int = 0) -> StoredRun:
        """Resume a paused or failed run after its last closed round; silos that refused are asked again.

        quorum: updates that close a round from now on; 0 keeps it. Raises StateError (E-RUN-11) in another state;
        ConfigError (E-CFG-02) on a quorum that the run cannot have.
        """
        run = self.store.runs.find(query)
        if quorum:
            validate.between("E-CFG-02", "", 1, len(run.members), quorum=quorum)
            with self.workers.opening() as worker:
                worker.require_quorum(run.manifest, quorum)
        run = self.store.runs.resume(run.id, quorum)
        self.dispatcher.changes.notify()
        self._enqueue(run)
        return run

    def exclude(self, query: str, silo: str, readmit: bool = False) -> StoredRun:
        """Exclude a silo from waiting and from further rounds; or, with `readmit`, ask it again from the next on.

        Its updates that have arrived count. Raises ConfigError: E-RUN-05 if the silo is no member of the run, E-CFG-02
        if fewer silos would be left than a sum needs (at least one); StateError (E-RUN-11) if the run is over.
        """
        run = require_state(self.store.runs.find(query), RunState.ABORTED.comes_from, "steered")
        if silo not in run.members:
            raise ConfigError(
                "E-RUN-05", f"expected one of {', '.join(run.members)}, found {silo[:60]!r}: correct the name"
            )
        remaining = set(run.members) - {*self.store.steering.of(run.id).excluded, silo}
        least = max(1, DerivedFacts.of(run).sums_of)
        if len(remaining) < least and not readmit:
            raise ConfigError(
                "E-CFG-02",
                f"expected {pluralize(least, 'hospital')} or more to stay, since no smaller sum is opened, found "
                f"{len(remaining)} without {silo!r}: abort the run instead",
            )
        if self.store.steering.exclude(run.id, silo, readmit):
            kind, text = ("readmitted", "asked again") if readmit else ("excluded", "excluded by the lead")
            self.store.runs.event(run.id, kind, run.closed, silo, text)
        self.dispatcher.changes.notify()
        return run

    def extend(self, query: str, hours: float) -> StoredRun:
        """Extend the time of all awaited silos in the open round.

        Raises ConfigError (E-CFG-02) on an invalid number; StateError (E-RUN-11) if no round is open.
        """
        validate.positive("E-CFG-02", "", hours=hours)
        validate.at_most("E-CFG-02", "", _MAX_HOURS, hours=hours)
        run = require_state(self.store.runs.find(query), (RunState.RUNNING,), "steered")
        self.store.steering.extend(run.id, self._open_round(run), 3600 * hours)
        self.store.runs.event(run.id, "extended", self._open_round(run), text=f"by {hours:g} h")
        self.dispatcher.changes.notify()
        return run

    def waiting(self, run_id: str) -> Waiting | None:
        """Return the silos that a run's open round waits for; None if none is open."""
        with self._lock:
            active = self._active.get(run_id)
        return None if active is None else active.waiting()

    def _open_round(self, run: StoredRun) -> int:
        row = self.store.runs.round(run.id, run.closed)
        if row is None or not row.is_open:
            raise StateError("E-RUN-11", f"{run.id} has no open round yet: wait for the next")
        return row.round

    def with_model_digest(self, run: StoredRun) -> StoredRun:
        """Return a run with the digest of its newest model, computed at the first request."""
        if run.model_digest or not run.closed or run.state_object is None:
            return run
        try:
            model = TensorFile(self.objects.verified(run.state_object)).digest("w")
        except (StateError, FileNotFoundError):  # rounds were closed in the meantime: there is a newer one
            newer = self.store.runs.get(run.id)
            if newer.state_object == run.state_object:
                raise
            return self.with_model_digest(newer)
        self.store.runs.note_model(run.id, run.state_object, model)
        return replace(run, model_digest=model)

    def resume_all(self) -> None:
        """Continue every unfinished run; called when the service starts."""
        with self.objects.lock:
            for run in self.store.runs.all():
                if run.state.ended and (
                    run.state_object is None or lineage.removes_sums(run)
                ):  # and the process ended right after
                    self.store.contributions.delete_unreferenced(run.id, self.objects.remove)
            self.objects.sweep(self.store.contributions.referenced_digests())
        self._drop_uploads()
        for run in self.store.runs.unfinished():
            self._enqueue(run)

    def stop(self, seconds: float = 10.0) -> None:
        """Interrupt every run; `resume_all` continues them."""
        with self._lock:
            self._stopping = True
            self._queue.clear()
            active = list(self._active.values())
        for run in active:
            run.interrupt()
        for run in active:
            run.thread.join(seconds)
        wait([self._cleanup.submit(lambda: None)], seconds)  # running deletions need the store
        self.workers.close()

    def lives(self) -> bool:
        """Tell whether every running run has a live thread, and no run is queued although a thread is free."""
        with self._lock:
            active = list(self._active.values())
            waiting = bool(self._queue) and len(active) < self.parallel
        return not self._stopping and not waiting and all(run.thread.is_alive() for run in active)

    def _enqueue(self, run: StoredRun) -> None:
        with self._lock:
            if run.state.ended or run.id in self._active or run.id in self._queue:
                return
            self._queue.append(run.id)
            self._start_queued()

    def _start_queued(self) -> None:
        with self._lock:
            while self._queue and len(self._active) < self.parallel and not self._stopping:
                run_id = self._queue.popleft()
                run = ActiveRun(run_id, self.services, self.workers, self.schedule_cleanup)
                run.thread = threading.Thread(target=self._execute, args=(run,), name=f"run-{run_id}", daemon=True)
                self._active[run_id] = run
                run.thread.start()

    def _execute(self, run: ActiveRun) -> None:
        try:
            run.execute()
        except RunInterrupted:
            log.info("run %s was interrupted", run.id)
        except FederationError as error:
            self._end(run.id, RunState.PAUSED if error.code in _FOR_THE_LEAD else RunState.FAILED, str(error))
        except Exception as error:
            log.exception("unexpected error in run %s", run.id)
            reason = f"E-RUN-99: unexpected error ({type(error).__name__}); see the coordinator's log"
            self._end(run.id, RunState.FAILED, reason)
        finally:
            run.interrupt()  # tasks may be open if a round ended early
            self._on_thread_exit(run.id)

    def _on_thread_exit(self, run_id: str) -> None:
        with self._lock:
            del self._active[run_id]
            self.dispatcher.remove_run(run_id)
            if not self._stopping:
                self.schedule_cleanup(run_id)
                # A run that was resumed before this thread had left is waiting again.
                try:
                    self._enqueue(self.store.runs.get(run_id))
                finally:
                    self._start_queued()

    def _end(self, run_id: str, state: RunState, reason: str) -> None:
        """End a run as paused or failed. Silos get no message: it may be resumed, with their staged updates."""
        try:
            self.store.runs.end(run_id, state, reason)
        except UnavailableError as error:  # for instance a full disk, which has no room for this either
            log.error("run %s ended, but its end cannot be stored: %s", run_id, error)
            time.sleep(_NOT_NOTED_S)
        except StateError as error:
            log.info("run %s has already ended: %s", run_id, error)
        self.dispatcher.changes.notify()

    def schedule_cleanup(self, run_id: str) -> None:
        """Delete a run's unneeded objects, soon."""
        self._cleanup.submit(self._delete_unused, run_id)

    def _delete_unused(self, run_id: str) -> None:
        try:
            with self.objects.lock:
                self.store.contributions.delete_unreferenced(run_id, self.objects.remove)
            self._drop_uploads()
        except Exception:  # no run fails for this: the rest is deleted at the next round's end, or at the next start
            log.exception("cannot delete what run %s no longer needs", run_id)

    def _drop_uploads(self) -> None:
        for silo, contribution in self.uploads.all():
            if not self.store.contributions.is_open(contribution):
                self.uploads.discard(silo, contribution)


def _new_run(asked: RunManifest, opened: Opened, digest: str, spec: str, request_id: str) -> StoredRun:
    slug = re.sub(r"[^a-z0-9]+", "-", asked.name.lower()).strip("-")[:40] or "run"
    return StoredRun(
        id=f"{slug}-{secrets.token_hex(2)}",
        name=asked.name,
        request_id=request_id,
        spec=spec,
        manifest=opened.manifest,
        manifest_digest=digest,
        method=asked.method.name,
        data=asked.data,
        rounds=asked.rounds,
        members=tuple(m.name for m in asked.members),
        facts=opened.facts,
    )
