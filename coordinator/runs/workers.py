"""Who computes for a run: a process of its own; in tests and benchmarks that replace the arithmetic, the service's."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, Protocol

from coordinator.runs.exchange import ERRORS, Rounds, RunService, Setup, Update, Written, seeds_as_json
from coordinator.storage.records import Contribution
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import UnavailableError
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext
from service_core.storage.object_store import ObjectStore
from service_core.workers.calls import Calls, OtherSideEndedError
from service_core.workers.lines import Line

if TYPE_CHECKING:
    from coordinator.worker.work import RunWork

_END_S = 1.0
"""Seconds that a worker has to end by itself."""


class RunWorker(Protocol):
    """Computes for one run. Every method may raise UnavailableError (E-RUN-56): the process has ended."""

    service: RunService | None
    """Whom it asks while it runs rounds."""

    def check(self, update: Update) -> None:
        """Raise ProtocolError unless an update is valid for its round; called by any thread."""

    def initial(self) -> Written:
        """Write the server's state of round 0."""

    def census(self) -> list[float]:
        """Hold the census; return how many hospitals each class has."""

    def run(self, left: Rounds) -> None:
        """Run the rounds that are left; raises as `RoundLoop.run`, and what the service raises."""

    def end(self) -> None:
        """End what is left of it."""


Start = Callable[[Setup], RunWorker]


def in_this_process(setup: Setup) -> RunWork:
    """Compute in the threads that ask."""
    from coordinator.worker.work import RunWork  # loads torch

    return RunWork(setup)


class ProcessWorker:
    """A process for one run. Raises what the run is refused with, and UnavailableError (E-RUN-56)."""

    def __init__(self, setup: Setup) -> None:
        self.service: RunService | None = None
        words = [sys.executable, "-P", "-m", "coordinator.worker"]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our module
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = Line(self._process.stdout, self._process.stdin)
        self._line, self._calls = line, Calls(line, self._answers(), ERRORS)
        with suppress(OSError):
            line.send(**setup._asdict())
        begun = line.read()
        if begun is None:
            raise self._ended()
        if "failed" in begun:
            self.end()
            raise ERRORS.read(begun["failed"])
        threading.Thread(target=self._calls.listen, name=f"worker-{self._process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self, update: Update) -> None:
        self._call("check", *update)

    def initial(self) -> Written:
        return Written(*self._call("initial"))

    def census(self) -> list[float]:
        counted: list[float] = self._call("census")
        return counted

    def run(self, left: Rounds) -> None:
        self._call("run", *left)

    def end(self) -> None:
        with suppress(OSError, ValueError):
            self._line.outgoing.close()  # it ends with its pipe
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._line.incoming.close()

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - as `Calls.call`
        try:
            return self._calls.call(name, *arguments)
        except OtherSideEndedError as error:
            raise self._ended() from error

    def _ended(self) -> UnavailableError:
        self.end()
        status = self._process.returncode
        how = f"killed by {Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return UnavailableError(
            "E-RUN-56",
            f"expected the process that computes for this run to answer, found it {how}: if the machine ran out of "
            "memory, free some or give the service more; then resume the run",
        )

    def _answers(self) -> dict[str, Callable[..., object]]:
        """Return what the worker may ask: each is put to the service that there is then."""

        def service() -> RunService:
            assert self.service is not None
            return self.service

        def context(raw: list[Any]) -> RoundContext:
            return RoundContext(*raw)

        def written(raw: list[Any] | None) -> Written | None:
            return None if raw is None else Written(*raw)

        def ask(silo: str, about: list[Any], kind: str) -> tuple[str, str]:
            update_id, path = service().ask(silo, context(about), TaskKind(kind))
            return update_id, str(path)

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


@dataclass(slots=True)
class _Entry:
    written: str
    users: int = 0
    worker: RunWorker | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class RunWorkers:
    """The workers of all runs: each is started when something of its run is to be computed, and ended after that.

    Guarantees: at most one worker for each run; files that it wrote and nobody took over are deleted with it.
    """

    def __init__(
        self,
        store: CoordinatorStore,
        objects: ObjectStore,
        start: Start = ProcessWorker,
        extensions: Sequence[str] = (),
    ) -> None:
        """Begin without a worker. extensions: as in `Setup`."""
        self._store, self._objects, self._start, self._extensions = store, objects, start, extensions
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    @contextmanager
    def of(self, run_id: str) -> Iterator[RunWorker]:
        """Use a run's worker inside the block, also beside others who do."""
        with self._lock:
            entry = self._entries.setdefault(run_id, _Entry(f".{run_id}-{secrets.token_hex(4)}-"))
            entry.users += 1
        try:
            with entry.lock:
                if entry.worker is None:
                    entry.worker = self._start(self._setup(run_id, entry.written))
            yield entry.worker
        finally:
            with self._lock:
                entry.users -= 1
                if last := not entry.users:
                    del self._entries[run_id]
            if last:
                if entry.worker is not None:
                    entry.worker.end()
                for file in self._objects.folder.glob(f"{entry.written}*"):
                    file.unlink(missing_ok=True)

    def check(self, update: Contribution, file: Path) -> None:
        """Raise ProtocolError (E-WIRE-05, E-WIRE-06, E-RUN-43, E-RUN-47) unless an update is valid for its round."""
        with self.of(update.run_id) as worker:
            worker.check(Update(update.id, update.silo, update.round, update.kind.value, str(file)))

    def _setup(self, run_id: str, written: str) -> Setup:
        runs = self._store.runs
        place = str(self._objects.folder / written)
        return Setup(runs.get(run_id).manifest, runs.declared_sizes(run_id), place, self._extensions)
