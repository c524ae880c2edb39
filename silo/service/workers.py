"""Who computes a hospital's tasks: a process of its own in a cage; in tests and benchmarks alone, the service's thread.

A worker reads records and the ledger, and has no network; the service has one, and computes nothing.
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
"""Seconds that a worker has to load torch and a hospital's data."""
ENTER_S = 600.0
"""Seconds that it has to write an update to the disk."""
QUEUE_FIRST_S, QUEUE_S = 1.0, 30.0
"""Seconds before it is asked why a worker waits in a queue, and between two of these questions."""
IDLE_S = 60.0
"""Seconds after which a worker without a run under way ends."""
MOST_WORKERS = 2
"""Each takes the memory of torch, a model and its data."""
_NAME = re.compile(r"[\w.-]{0,80}", re.ASCII)
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
log = logging.getLogger(__name__)


class WorkerEndedError(Exception):
    """The worker's process ended in the middle of a task."""


class Worker(Protocol):
    """Does one task after the other, called by one thread."""

    def describe(self, stop: CancelToken) -> Description:
        """Load the data, and describe them; raises ConfigError or DataError as `DataSource.load`."""

    def announce(self) -> None:
        """Tell what holds around the process that was started."""

    def begin(self, run_id: str, stop: CancelToken) -> Walls:
        """Be ready for a task of a run; return what holds around the process that will do it."""

    def preflight(self, request: pb.Preflight, service: ServiceSide) -> PreflightReadiness:
        """Answer a preflight, as `TaskWork.preflight`; raises WorkerEndedError too."""

    def train(self, offer: pb.Offer, service: ServiceSide) -> PendingEntry:
        """Do a task, as `TaskWork.train`; raises WorkerEndedError too."""

    def rest(self, state_of: Callable[[str], str]) -> None:
        """Take note that nothing is to be done. state_of: says how a run is, as its row in the store does."""

    def end(self) -> None:
        """End what is left of it."""


class ThreadWorker:
    """Computes in the thread that calls it: for tests that patch the arithmetic, and for benchmarks that replace it."""

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
    """Processes, each for one run, so that runs which take turns do not begin anew each time; at most `MOST_WORKERS`.

    The one whose run had no task for longest ends when another run needs one. One whose run is over does another's, for
    it takes seconds to start one, unless its run brought code of an extension. Arguments as of `CagedWorker`.
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
        """By run, the one that was used last at the end; one that has none yet is that of ""."""
        self._state_of: Callable[[str], str] = lambda _: ""

    def of(self, run_id: str) -> CagedWorker:
        """Return the worker of a run."""
        worker = self._workers.pop(run_id, None) or self._free() or self._make()
        while len(self._workers) >= MOST_WORKERS:
            self._workers.pop(next(iter(self._workers))).end()
        self._workers[run_id] = worker
        return worker

    def _free(self) -> CagedWorker | None:
        """Take a worker that no run needs."""
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
    """A process in a cage (`silo.worker.cage`), for one run.

    It stays while its run is under way, and ends a minute after that, and at once when its run was aborted. A task that
    is given up ends within `END_S`: by itself, or killed with all its processes.

    silo: this hospital's name   computed: called with the seconds that a round took   data_of: gives a run's data.
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
        """Return the process, where there is one."""
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
        """Be ready for a task of a run; raises StateError (E-RUN-55) where no worker starts, or what it refuses."""
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
                        f"expected a ledger of this home alone, since its worker is on another machine, found "
                        f"{home.ledger}: services that share a ledger must run on one machine, with their workers",
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
                raise StateError("E-RUN-55", f"expected a worker that starts, found that {error}") from error
            raise
        self._since = time.monotonic()
        if self._run_id:
            self.announce()

    @contextmanager
    def _reporting_wait(self, waits: Callable[[], str]) -> Iterator[None]:
        """Tell, as long as the block lasts, why the process has not begun."""
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
        """End what the worker does when that is given up: whatever became of it then, it is no failure."""
        child = self._running
        killing = threading.Timer(END_S, child.kill)
        killing.daemon = True

        def give_up() -> None:
            with suppress(RuntimeError):  # it was given up before
                killing.start()
            with suppress(OSError, ValueError):
                child.line.send(cancel=stop.reason)  # waits for one that reads nothing, until it is killed

        try:
            with stop.on_cancel(give_up):
                yield
        except (WorkerEndedError, StateError, CancelledError):
            stop.raise_if_cancelled()  # with the reason that is known here
            raise
        finally:
            killing.cancel()
            self._since = time.monotonic()
            if self._busy and sys.exc_info()[0] is not None:
                child.kill()  # it works on what nobody waits for any more

    # ---- what is said ----------------------------------------------------------------------------------------------

    def _name_objects(self, manifest: str, *others: str) -> None:
        """Note which objects a task names: the worker gets no others, since whom it asks for them reads their names."""
        self._manifest, self._named = manifest, {manifest, *others}

    def _ask(self, **message: object) -> None:
        self._busy = True
        with suppress(OSError, ValueError):  # it has ended, which is noticed where its answer is read
            self._running.line.send(**message)

    def _until(self, last: str, read: Callable[[Any], T], service: ServiceSide | None, over: bool = True) -> T:
        """Do what the worker asks until it says `last`, and return what that reads as. over: then it is done.

        Raises what the worker failed with, and WorkerEndedError where it ended, or says what nobody understands.
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
                    raise ValueError("it gave up what nobody else had")
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise self._ended(f"it said what nobody understands ({error})") from error
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
            raise ValueError(f"expected that it starts, found {what!r}")
        elif what == "fetch":
            self._fetch(service, *facts)
        elif what == "event":
            service.emit(SiloEvent(*facts))
        elif what == "progress":
            service.progress(*facts)
        elif what == "accept":
            service.accept()
        elif what == "tell":
            told = ERRORS.read(facts)
            if not isinstance(told, FederationError) or isinstance(told, CancelledError):
                raise ValueError(f"found {told!r} to be told")
            service.tell(told)
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
    """Read what is shown and logged: names, and nothing else that a worker may write."""
    return Whereabouts(*(text if _NAME.fullmatch(text) else "?" for text in facts))


def _description(facts: Mapping[str, Any]) -> tuple[Description, Walls]:
    data = pb.DataOffer.FromString(bytes.fromhex(facts["data"]))
    return Description(data, facts["device"], facts["cache"]), Walls(*facts["walls"])
