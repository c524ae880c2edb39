"""Workers, which compute for runs: separate processes. Tests and benchmarks may compute in the service's process."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coordinator.runs.exchange import (
    ERRORS,
    Opened,
    OpenRequest,
    Place,
    Rounds,
    RunService,
    Setup,
    Update,
    Written,
    opened_of_json,
    seeds_as_json,
)
from coordinator.storage.records import Contribution
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ProtocolError, UnavailableError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage.object_store import ObjectStore
from service_core.workers.calls import Calls, Later, OtherSideEndedError
from service_core.workers.child import ChildProcess, Launch, launch, worker_words

if TYPE_CHECKING:
    from coordinator.worker.work import RunWork

IDLE_S = 60.0
"""Seconds after which an unused worker is ended."""
START_S = 120.0
"""Seconds that a worker has to load torch and extensions."""


class RunWorker(Protocol):
    """Opens runs, then computes for one run.

    Every method waits until the worker has loaded torch and extensions. Each may raise ConfigError (E-CFG-01) if an
    extension cannot be loaded, and UnavailableError (E-RUN-56) if the worker has ended.
    """

    service: RunService | None
    """The service that it calls while it runs rounds."""

    @property
    def extensions(self) -> Sequence[str]:
        """Descriptions of the extensions that it has loaded."""

    def build(self, spec: str, silos: Sequence[str]) -> str:
        """Freeze a lead's configuration as a manifest. silos: messages SiloInfo in hex; raises as `build_manifest`."""

    def open(self, asked: OpenRequest) -> Opened:
        """Open a run; raises as `opening.opened`."""

    def require_quorum(self, manifest: str, quorum: int) -> None:
        """Raise ConfigError (E-CFG-02, E-CFG-08) on a quorum that a run cannot have."""

    def take(self, setup: Setup) -> None:
        """Set the run to compute for."""

    def check(self, update: Update) -> None:
        """Raise ProtocolError unless an update is valid for its round; called by any thread."""

    def initial(self) -> Written:
        """Write the server's state of round 0."""

    def census(self, quorum: int) -> list[float]:
        """Hold the census; return how many hospitals each class has. quorum: as in `Rounds`."""

    def run(self, left: Rounds) -> None:
        """Run the remaining rounds; raises as `RoundLoop.run`, and the errors of the service's methods."""

    @property
    def lives(self) -> bool:
        """Whether it can compute."""

    def settle(self) -> None:
        """Wait until the service has finished all calls of a worker that has ended."""

    def end(self) -> None:
        """End the worker, also in the middle of its work; called by any thread."""


Start = Callable[[Place], RunWorker]


def in_this_process(place: Place) -> RunWork:
    """Return a worker that computes in the threads that call it."""
    from coordinator.worker.work import RunWork  # loads torch

    return RunWork(place)


launch_here: Launch = partial(launch, worker_words("coordinator.worker"))


class ProcessWorker:
    """A `RunWorker` in a process of its own."""

    def __init__(self, place: Place) -> None:
        """Launch the process, without waiting until it is ready; raises UnavailableError (E-RUN-56)."""
        self.service: RunService | None = None
        try:
            self._child = ChildProcess(launch_here)
        except OSError as error:
            raise _unavailable(f"it did not start ({error})") from error
        self._first = Future[Mapping[str, Any] | None]()
        self._checks: dict[str, str] = {}
        self._calls = Calls(self._child.line, self._answers(), ERRORS)
        name = f"worker-{self._child.pid}"
        try:
            threading.Thread(target=self._listen, args=(place,), name=name, daemon=True).start()
        except BaseException:
            self.end()
            raise

    def _listen(self, place: Place) -> None:
        first = None
        try:
            with suppress(OSError, ValueError), self._child.within(START_S, f"it was not ready within {START_S:g} s"):
                self._child.line.send(**place._asdict())
                first = self._child.line.read()
        finally:
            self._first.set_result(first)
        self._calls.listen()

    @property
    def lives(self) -> bool:
        return self._child.lives

    @property
    def extensions(self) -> Sequence[str]:
        return self._loaded()

    def _loaded(self) -> Sequence[str]:
        first = self._first.result()
        if first is None:
            raise self._ended()
        if "failed" in first:
            self.end()
            raise ERRORS.read(first["failed"])
        loaded: Sequence[str] = first["ready"]
        return loaded

    def build(self, spec: str, silos: Sequence[str]) -> str:
        return str(self._call("build", spec, silos))

    def open(self, asked: OpenRequest) -> Opened:
        return opened_of_json(self._call("open", *asked))

    def require_quorum(self, manifest: str, quorum: int) -> None:
        self._call("require_quorum", manifest, quorum)

    def take(self, setup: Setup) -> None:
        self._call("take", *setup)

    def check(self, update: Update) -> None:
        self._checks[update.id] = update.silo
        try:
            self._call("check", *update)
        finally:
            if self.lives:  # else it ended with this check
                self._checks.pop(update.id, None)

    def initial(self) -> Written:
        return Written(*self._call("initial"))

    def census(self, quorum: int) -> list[float]:
        counted: list[float] = self._call("census", quorum)
        return counted

    def run(self, left: Rounds) -> None:
        self._call("run", *left)

    def settle(self) -> None:
        self._calls.settle()

    def end(self) -> None:
        self._child.end()
        self._calls.close()

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - as `Calls.call`
        self._loaded()
        try:
            return self._calls.call(name, *arguments)
        except OtherSideEndedError as error:
            raise self._ended() from error

    def _ended(self) -> UnavailableError:
        silos = ", ".join(sorted({*self._checks.values()}))
        return _unavailable(self._child.ending() + (f" while it checked updates of {silos}" if silos else ""))

    def _answers(self) -> dict[str, Callable[..., object]]:
        """Return the methods that the worker may call, by name: each calls the present `service`."""

        def service() -> RunService:
            assert self.service is not None
            return self.service

        def context(raw: list[Any]) -> RoundContext:
            return RoundContext(*raw)

        def written(raw: list[Any] | None) -> Written | None:
            return None if raw is None else Written(*raw)

        def ask(silo: str, about: list[Any], kind: str) -> Later[list[str]]:
            update = service().ask(silo, context(about), TaskKind(kind))
            return Later(update.event, lambda: list(map(str, update.read())))

        return {
            "opened": lambda about, kind, *rest: service().opened(context(about), TaskKind(kind), *rest),
            "broadcast": lambda round, raw: service().broadcast(round, written(raw)),
            "ask": ask,
            "arrived": lambda silo, classes: service().arrived(silo, classes),
            "refused": lambda silo, why: service().refused(silo, why),
            "unmask": lambda round, kind, *rest: seeds_as_json(service().unmask(round, TaskKind(kind), *rest)),
            "counted": lambda hospitals: service().counted(hospitals),
            "closed": lambda record, raw, model: service().closed(RoundRecord.of(record), written(raw), model),
        }


def _unavailable(what: str) -> UnavailableError:
    return UnavailableError(
        "E-RUN-56",
        f"the worker process that computes the run failed: {what}. If the machine ran out of memory, free some or "
        "give the service more; then resume the run if it has paused, otherwise run the command again",
    )


class _Started:
    """A worker, and the files that it writes."""

    def __init__(self, objects: Path, start: Start, extensions: Sequence[str]) -> None:
        self._objects, self._written = objects, f".worker-{secrets.token_hex(8)}-"
        self.worker = start(Place(str(objects), str(objects / self._written), extensions))

    def delete_files(self) -> None:
        """Delete its files, except those that the service has taken over."""
        for file in self._objects.glob(f"{self._written}*"):
            file.unlink(missing_ok=True)


@dataclass(slots=True)
class _OfRun:
    """A run's worker. users: blocks of `RunWorkers.of` that use it   lock: held while it is launched and set up."""

    users: int = 0
    failed: bool = False
    started: _Started | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class RunWorkers:
    """The workers of a coordinator: one for each running run, and at most one spare, kept for the next user.

    Guarantees: a run has at most one worker, plus one that checks the updates of a suspect silo. Files that a worker
    wrote and the service did not take over are deleted. `interrupt` and `close` also end a worker that is loading.
    """

    def __init__(
        self, store: CoordinatorStore, objects: ObjectStore, start: Start, extensions: Sequence[str] = ()
    ) -> None:
        """Begin without a worker. extensions: as in `Place`."""
        self._store = store
        self._start = partial(_Started, objects.folder, start, extensions)
        self._lock = threading.Lock()
        self._all: list[_Started] = []
        self._runs: dict[tuple[str, str], _OfRun] = {}
        self._suspects, self._one_suspect = set[tuple[str, str]](), threading.Lock()
        self._spare: tuple[_Started, float] | None = None
        self._closed = False

    @contextmanager
    def opening(self) -> Iterator[RunWorker]:
        """Use a worker without a run inside the block; then it is kept as the spare one for `IDLE_S`."""
        started = self._idle_one()
        try:
            yield started.worker
        finally:
            self._keep(started)

    @contextmanager
    def of(self, run_id: str, wanted: Callable[[], None] = lambda: None, apart: str = "") -> Iterator[RunWorker]:
        """Use a run's worker inside the block; several threads may use it at once.

        wanted: called once `interrupt` can end the worker; raises if the run no longer needs one
        apart: a silo whose updates are checked in a separate worker.
        """
        with self._lock:
            entry = self._runs.setdefault((run_id, apart), _OfRun())
            entry.users += 1
        try:
            with entry.lock:
                if entry.started is not None and not entry.started.worker.lives:  # others may not have left it yet
                    self._end(entry.started)
                    entry.started = None
                anew = entry.started is None
                try:
                    started = entry.started = entry.started or self._idle_one()
                    wanted()
                    if anew:
                        self._take(started, run_id)
                except BaseException:
                    if anew and entry.started is not None:
                        self._end(entry.started)
                        entry.started = None
                    raise
            yield started.worker
        except BaseException:
            entry.failed = True
            raise
        finally:
            with self._lock:
                entry.users -= 1
                if last := not entry.users:
                    del self._runs[run_id, apart]
            if last and entry.started is not None:
                (self._end if entry.failed else self._keep)(entry.started)

    def interrupt(self, run_id: str) -> None:
        """End a run's workers, also in the middle of their work; their calls raise UnavailableError (E-RUN-56)."""
        with self._lock:
            entries = [entry for (run, _), entry in self._runs.items() if run == run_id]
        for entry in entries:
            if (started := entry.started) is not None:
                started.worker.end()

    def check(self, update: Contribution, file: Path) -> None:
        """Raise ProtocolError (E-WIRE-05, E-WIRE-06, E-RUN-43, E-RUN-47) unless an update is valid for its round.

        If the worker ends during a check, its run pauses (UnavailableError, E-RUN-56), and the silo becomes suspect:
        its updates are checked in a separate worker, one at a time. If this worker ends too, the update is refused
        (ProtocolError, E-RUN-56). An update that passes ends the suspicion.
        """
        who = update.run_id, update.silo
        suspect = who in self._suspects
        with self._one_suspect if suspect else nullcontext():
            with self.of(update.run_id, apart=update.silo if suspect else "") as worker:
                try:
                    worker.check(Update(update.id, update.silo, update.round, update.kind.value, str(file)))
                except UnavailableError as error:
                    if error.code != "E-RUN-56" or self._closed:
                        raise
                    self._suspects.add(who)
                    if not suspect:
                        raise
                    raise ProtocolError(
                        "E-RUN-56",
                        f"two processes ended while they checked the update of {update.silo}: the coordinator's log "
                        "has their last messages. Exclude the hospital, or give the service more memory; then "
                        "resume the run if it has paused",
                    ) from error
            self._suspects.discard(who)

    def build(self, spec: str, silos: Sequence[pb.SiloInfo]) -> RunManifest:
        """Freeze a lead's configuration; raises as `build_manifest`."""
        with self.opening() as worker:
            return RunManifest.from_json(worker.build(spec, [silo.SerializeToString().hex() for silo in silos]))

    def rest(self) -> None:
        """End the spare worker after `IDLE_S` without use."""
        if self._spare is not None and time.monotonic() - self._spare[1] >= IDLE_S:
            self._end_spare()

    def close(self) -> None:
        """End all workers, also in the middle of their work; from now on none can be used."""
        with self._lock:
            self._closed, in_use = True, list(self._all)
        self._end_spare()
        for started in in_use:
            started.worker.end()  # its user deletes its files

    def _end_spare(self) -> None:
        if (spare := self._taken_spare()) is not None:
            self._end(spare)

    def _end(self, started: _Started) -> None:
        started.worker.end()
        started.delete_files()
        with self._lock, suppress(ValueError):  # others may have ended it too
            self._all.remove(started)

    def _keep(self, started: _Started) -> None:
        """Keep a worker as the spare one; end it if there is a spare one already."""
        started.worker.service = None  # before another run has it
        started.delete_files()
        with self._lock:
            kept = self._spare is None and started.worker.lives and not self._closed
            if kept:
                self._spare = started, time.monotonic()
        if not kept:
            self._end(started)

    def _taken_spare(self) -> _Started | None:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and not spare[0].worker.lives:
            self._end(spare[0])
            return None
        return None if spare is None else spare[0]

    def _idle_one(self) -> _Started:
        """Take the spare worker, or launch one."""
        if (spare := self._taken_spare()) is not None:
            return spare
        started = self._start()
        with self._lock:
            if not self._closed:
                self._all.append(started)
                return started
        self._end(started)
        raise UnavailableError("E-RUN-56", "the service is stopping: try again later")

    def _take(self, started: _Started, run_id: str) -> None:
        runs = self._store.runs
        started.worker.take(Setup(runs.get(run_id).manifest, runs.declared_sizes(run_id)))
