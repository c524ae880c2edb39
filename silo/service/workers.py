"""Run a hospital's tasks in a sandboxed worker process, or in a service thread (only in tests and benchmarks).

A worker reads records and the ledger, and has no network. The service has network access, and computes nothing.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fl_core.errors import FederationError, ProtocolError, StateError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey, contribution_id
from service_core.storage.private_files import private_folder
from service_core.storage.shared_folder import await_file, held_locks
from service_core.version import software
from service_core.workers.child import END_S, ChildProcess
from silo.cancellation import CancelledError, CancelToken
from silo.events import EmitEvent, SiloEvent, event
from silo.service.launchers import Launcher
from silo.settings import SiloSettings
from silo.storage.outbox import PendingEntry, read_manifest
from silo.storage.tasks import Attestation, OutboxEntry
from silo.worker.cage import NO_CAGE, Walls, Whereabouts, machine
from silo.worker.exchange import ERRORS, Description, PreflightReadiness, ServiceSide

if TYPE_CHECKING:
    from silo.worker.tasks import TaskWork

T = TypeVar("T")
START_S = 1800.0
"""Timeout for a worker to load torch and the hospital's data."""
ENTER_S = 600.0
"""Timeout for a worker to write an update to disk."""
QUEUE_FIRST_S, QUEUE_S = 1.0, 30.0
"""Seconds before the first check why a worker is queued, and between later checks."""
IDLE_S = 60.0
"""Seconds after which a worker without an active run ends."""
MOST_WORKERS = 2
"""Limited because each holds torch, a model and its data in memory."""
_NAME = re.compile(r"[\w.-]{0,80}", re.ASCII)
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
log = logging.getLogger(__name__)


class WorkerEndedError(Exception):
    """The worker's process ended in the middle of a task."""


class Worker(Protocol):
    """Runs one task at a time. Called by one thread only."""

    def describe(self, stop: CancelToken) -> Description:
        """Load the data, and describe them; raises ConfigError or DataError as `DataSource.load`."""

    def announce(self) -> None:
        """Emit an event that describes the process's isolation."""

    def begin(self, run_id: str, stop: CancelToken) -> Walls:
        """Prepare for a task of a run; return the isolation of the process that will run it."""

    def preflight(self, request: pb.Preflight, service: ServiceSide) -> PreflightReadiness:
        """Answer a preflight, as `TaskWork.preflight`; raises WorkerEndedError too."""

    def train(self, offer: pb.Offer, service: ServiceSide) -> PendingEntry:
        """Run a task, as `TaskWork.train`; raises WorkerEndedError too."""

    def rest(self, state_of: Callable[[str], str]) -> None:
        """End idle processes. Called while no task runs. state_of: returns a run's state in the store."""

    def end(self) -> None:
        """End all its processes."""


class ThreadWorker:
    """Computes in the calling thread, so that tests and benchmarks can replace the computation."""

    def __init__(self, work: TaskWork) -> None:
        self._work = work

    def describe(self, stop: CancelToken) -> Description:
        del stop
        return self._work.describe()

    def announce(self) -> None:
        pass

    def begin(self, run_id: str, stop: CancelToken) -> Walls:
        del run_id, stop
        return NO_CAGE

    def preflight(self, request: pb.Preflight, service: ServiceSide) -> PreflightReadiness:
        return self._work.preflight(request, service)

    def train(self, offer: pb.Offer, service: ServiceSide) -> PendingEntry:
        return self._work.train(offer, service)

    def rest(self, state_of: Callable[[str], str]) -> None:
        pass

    def end(self) -> None:
        pass


class CagedWorkers:
    """A pool of at most `MOST_WORKERS` processes, one per run, so that alternating runs need no restart.

    When the pool is full, a new run evicts the least recently used process. A finished run's process is reused, since a
    start takes seconds, unless that run loaded extension code. Arguments as for `CagedWorker`.
    """

    def __init__(
        self,
        settings: SiloSettings,
        launcher: Launcher,
        silo: str,
        emit: EmitEvent,
        computed: Callable[[TaskKind, float], None],
        data_of: Callable[[str], str],
    ) -> None:
        rmtree(settings.home.scratch, ignore_errors=True)
        self._make = partial(CagedWorker, settings, launcher, silo, emit, computed, data_of)
        self._workers: dict[str, CagedWorker] = {}
        """By run id, least recently used first; "" for a process without a run."""
        self._state_of: Callable[[str], str] = lambda _: ""

    def of(self, run_id: str) -> CagedWorker:
        """Return the worker of a run."""
        worker = self._workers.pop(run_id, None) or self._free() or self._make()
        while len(self._workers) >= MOST_WORKERS:
            self._workers.pop(next(iter(self._workers))).end()
        self._workers[run_id] = worker
        return worker

    def _free(self) -> CagedWorker | None:
        """Remove and return a worker that no run needs."""
        for run_id, worker in self._workers.items():
            if not run_id or (worker.without_extensions and self._state_of(run_id) == "finished"):
                return self._workers.pop(run_id)
        return None

    def describe(self, stop: CancelToken) -> Description:
        return self.of("").describe(stop)

    def announce(self) -> None:
        self.of("").announce()

    def begin(self, run_id: str, stop: CancelToken) -> Walls:
        return self.of(run_id).begin(run_id, stop)

    def preflight(self, request: pb.Preflight, service: ServiceSide) -> PreflightReadiness:
        return self.of(request.run_id).preflight(request, service)

    def train(self, offer: pb.Offer, service: ServiceSide) -> PendingEntry:
        return self.of(offer.run_id).train(offer, service)

    def rest(self, state_of: Callable[[str], str]) -> None:
        self._state_of = state_of
        for run_id, worker in list(self._workers.items()):
            worker.rest(state_of)
            if worker.pid is None:
                del self._workers[run_id]

    def end(self) -> None:
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()


class CagedWorker:
    """A sandboxed process (`silo.worker.cage`) for one run.

    It stays while its run is active, ends a minute after the run finishes, and at once if the run is aborted.
    A cancelled task ends within `END_S`: by itself, or killed with all its processes.

    silo: this hospital's name   computed: called with a round's seconds   data_of: returns a run's data reference.
    """

    def __init__(
        self,
        settings: SiloSettings,
        launcher: Launcher,
        silo: str,
        emit: EmitEvent,
        computed: Callable[[TaskKind, float], None],
        data_of: Callable[[str], str],
    ) -> None:
        self._settings, self._launcher, self._silo = settings, launcher, silo
        self._emit, self._computed, self._data_of, self._data = emit, computed, data_of, ""
        self._child: ChildProcess | None = None
        self._run_id, self._since = "", time.monotonic()
        self._manifest, self._named = "", set[str]()
        self.without_extensions = True
        self._busy = False

    @property
    def pid(self) -> int | None:
        """Return the id of the process if it is running."""
        return self._child.pid if self._child is not None and self._child.lives else None

    def describe(self, stop: CancelToken) -> Description:
        self.begin("", stop)
        return self._about

    def announce(self) -> None:
        where = self._launcher.place(self._place.host, self._place.job)
        text = f"a worker has started {where}: it {', it '.join(self._walls.sentences())}"
        facts = {"launcher": self._launcher.kind, "host": self._place.host, "where": where}
        self._emit(event("worker", text, facts={"walls": self._walls.holding, **self._walls._asdict(), **facts}))

    def begin(self, run_id: str, stop: CancelToken) -> Walls:
        """Prepare for a task of a run; raises StateError (E-RUN-55) if no worker starts, and the worker's own error."""
        self._run_id = run_id
        if self.pid is None or self._data != self._data_of(run_id):
            self.end()
            self._start(stop)
        return self._walls

    def preflight(self, request: pb.Preflight, service: ServiceSide) -> PreflightReadiness:
        self._name_objects(request.manifest_digest)
        with self._cancelled_by(service.stop):
            self._ask(preflight=request.SerializeToString().hex())
            return self._until("readiness", lambda facts: PreflightReadiness(*facts), service)

    def train(self, offer: pb.Offer, service: ServiceSide) -> PendingEntry:
        self._name_objects(
            offer.manifest_digest, offer.base_digest, offer.secagg_keys_digest, offer.secagg_census_digest
        )
        with self._cancelled_by(service.stop):
            self._ask(offer=offer.SerializeToString().hex())
            entry = self._until("staged", partial(self._entry, offer), service, over=False)
        if _DIGEST.fullmatch(entry.object_digest):
            await_file(self._settings.home.objects / entry.object_digest)
        entered: Future[None] = Future()

        def wait() -> None:
            if not entered.done():
                late = f"it wrote no update to the disk within {ENTER_S:g} s"
                try:
                    with self._cancelled_by(service.stop), self._running.within(ENTER_S, late):
                        self._until("entered", bool, service)
                    entered.set_result(None)
                except Exception as error:
                    entered.set_exception(error)
            entered.result()

        return PendingEntry(entry, wait)

    def rest(self, state_of: Callable[[str], str]) -> None:
        if self.pid is None:
            self.end()
            return
        state = state_of(self._run_id)
        patience = math.inf if state == "running" else IDLE_S if state in ("", "asked", "finished") else 0.0
        if time.monotonic() - self._since >= patience:
            self.end()

    def end(self) -> None:
        if self._child is None:
            return
        self._child.end()
        self._child.line.incoming.close()
        self._child = None
        rmtree(self._scratch, ignore_errors=True)

    # ---- the process -----------------------------------------------------------------------------------------------

    @property
    def _running(self) -> ChildProcess:
        assert self._child is not None
        return self._child

    def _start(self, stop: CancelToken) -> None:
        self._data = self._data_of(self._run_id)
        home, self._scratch = self._settings.home, self._settings.home.scratch.absolute() / secrets.token_hex(4)
        private_folder(self._scratch)
        start, local = self._launcher.start(), self._launcher.local
        try:
            self._child = ChildProcess(start.launch, start.kill)
            late = f"it was not ready within {START_S:g} s"
            with self._cancelled_by(stop):
                with self._child.within(START_S, late) if start.waits is None else self._reporting_wait(start.waits):
                    self._place = self._until("began", _whereabouts, None)
                if home.shares_ledger and self._place.machine != machine():
                    raise StateError(
                        "E-RUN-55",
                        "the worker is on another machine, so only this home may use its ledger, but "
                        f"{home.ledger} may be shared: services that share a ledger must run on one "
                        "machine, with their workers",
                    )
                folders = home.path, home.ledger.parent, home.ledger_key.parent
                with (
                    nullcontext("") if local else held_locks(self._scratch) as locks,
                    self._child.within(START_S, late),
                ):
                    self._ask(
                        settings=replace(self._settings, data=self._data).as_json(),
                        service=os.getpid() if local else 0,
                        scratch=str(self._scratch),
                        locks=locks,
                        software=software(),
                        folder=str(Path.cwd()),
                        environment={name: os.environ[name] for name in os.environ if name.startswith("CONSILIUM_")},
                        writable=sorted({str(folder.absolute()) for folder in folders}),
                        log_level=logging.getLogger().getEffectiveLevel(),
                    )
                    self._about, self._walls = self._until("ready", _description, None)
        except BaseException as error:
            self.end()
            rmtree(self._scratch, ignore_errors=True)
            if isinstance(error, (WorkerEndedError, OSError)):
                raise StateError("E-RUN-55", f"the worker did not start: {error}") from error
            raise
        self._since = time.monotonic()
        if self._run_id:
            self.announce()

    @contextmanager
    def _reporting_wait(self, waits: Callable[[], str]) -> Iterator[None]:
        """Emit events inside the block about why the process is still queued."""
        over, lock, told = threading.Event(), threading.Lock(), ""

        def tell(why: str) -> None:
            nonlocal told
            if why != told:
                told = why
                self._emit(event("queue", f"a worker {why or 'has left the queue'}", facts={"waits": why}))

        def look() -> None:
            pause = QUEUE_FIRST_S
            while not over.wait(pause):
                pause, why = QUEUE_S, waits()
                with lock:
                    if why and not over.is_set():
                        tell(why)

        threading.Thread(target=look, name="queue", daemon=True).start()
        try:
            yield
        finally:
            with lock:
                over.set()
                tell("")

    @contextmanager
    def _cancelled_by(self, stop: CancelToken) -> Iterator[None]:
        """Cancel the worker's task when `stop` is cancelled. Errors that follow count as the cancellation."""
        child = self._running
        killing = threading.Timer(END_S, child.kill)
        killing.daemon = True

        def give_up() -> None:
            with suppress(RuntimeError):  # the timer runs already
                killing.start()
            with suppress(OSError, ValueError):
                child.line.send(cancel=stop.reason)  # blocks if the worker does not read, until it is killed

        try:
            with stop.on_cancel(give_up):
                yield
        except (WorkerEndedError, StateError, CancelledError):
            stop.raise_if_cancelled()  # reports the reason given to `stop`
            raise
        finally:
            killing.cancel()
            self._since = time.monotonic()
            if self._busy and sys.exc_info()[0] is not None:
                child.kill()  # nobody waits for its result any more

    # ---- what is said ----------------------------------------------------------------------------------------------

    def _name_objects(self, manifest: str, *others: str) -> None:
        """Record a task's objects. The worker may fetch no others: requested names could leak data to the server."""
        self._manifest, self._named = manifest, {manifest, *others}

    def _ask(self, **message: object) -> None:
        self._busy = True
        with suppress(OSError, ValueError):  # if it has ended, reading its answer reports that
            self._running.line.send(**message)

    def _until(self, last: str, read: Callable[[Any], T], service: ServiceSide | None, over: bool = True) -> T:
        """Serve the worker's requests until it sends `last`; return its parsed content. over: this ends the task.

        Raises the worker's own error, and WorkerEndedError if the worker ends or sends an invalid message.
        """
        while True:
            try:
                if (message := self._running.line.read()) is None:
                    raise self._ended()
                if last in message:
                    said, self._busy = read(message[last]), not over
                    return said
                if "failed" not in message:
                    self._do(message, service)
                    continue
                failure = ERRORS.read(message["failed"])
                if isinstance(failure, CancelledError) and (service is None or not service.stop.is_cancelled):
                    raise ValueError("it cancelled a task that was not cancelled")
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise self._ended(f"it sent an invalid message ({error})") from error
            self._busy = False
            raise failure

    def _ended(self, why: str = "") -> WorkerEndedError:
        self._running.kill(why)
        return WorkerEndedError(self._running.ending())

    def _entry(self, offer: pb.Offer, facts: Sequence[Any]) -> OutboxEntry:
        digest, size, state, mirrored, attested = facts
        key = TaskKey.of(offer)
        return OutboxEntry(
            key,
            offer.manifest_digest,
            offer.base_digest,
            contribution_id(key.run_id, key.round, key.kind, self._silo, offer.base_digest),
            str(digest),
            int(size),
            state,
            mirrored=mirrored,
            attested=Attestation(*attested),
            coordinator=offer.incarnation,
        )

    def _do(self, message: Mapping[str, Any], service: ServiceSide | None) -> None:
        ((what, facts),) = message.items()
        if what == "log":
            logging.getLogger(facts[0]).log(facts[1], "%s", facts[2])
        elif what == "computed":
            self._computed(TaskKind(facts[0]), facts[1])
        elif service is None:
            raise ValueError(f"expected the messages of a start, found {what!r}")
        elif what == "fetch":
            self._fetch(service, *facts)
        elif what == "event":
            service.emit(SiloEvent(*facts))
        elif what == "progress":
            service.progress(*facts)
        elif what == "accept":
            service.accept()
        elif what == "tell":
            error = ERRORS.read(facts)
            if not isinstance(error, FederationError) or isinstance(error, CancelledError):
                raise ValueError(f"found {error!r} instead of an error to report")
            service.tell(error)
        elif what == "begin":
            service.training_begins(facts)
        else:
            raise ValueError(f"expected a message of a worker, found {what!r}")

    def _fetch(self, service: ServiceSide, digest: str, size: int, most: int) -> None:
        try:
            if digest not in self._named:
                raise ProtocolError("E-WIRE-06", f"expected an object that the task names, found {digest[:16]!r}")
            path = service.fetch(digest, size, most)
            if digest == self._manifest:
                text = path.read_text(encoding="utf-8", errors="replace")
                self._named.update(_DIGEST.findall(text))
                self.without_extensions &= not read_manifest(path, digest).extensions
        except Exception as error:
            if not isinstance(error, FederationError):
                log.exception("an object could not be fetched")
            self._running.line.send(failed=ERRORS.write(error))
        else:
            self._running.line.send(fetched=str(path))


def _whereabouts(facts: Sequence[Any]) -> Whereabouts:
    """Parse a worker's location. Replaces anything but a short name by "?", because it is shown and logged."""
    return Whereabouts(*(text if _NAME.fullmatch(text) else "?" for text in facts))


def _description(facts: Mapping[str, Any]) -> tuple[Description, Walls]:
    data = pb.DataOffer.FromString(bytes.fromhex(facts["data"]))
    return Description(data, facts["device"], facts["cache"]), Walls(*facts["walls"])
