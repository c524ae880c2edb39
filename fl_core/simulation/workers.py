"""Silos of a round in several processes of this machine, bit for bit as in one.

A worker takes silos one by one; one that has no silo of its own left takes another's. Silos' states stay with the
caller. The tensors of examples lie in a file that all workers map, so they are in memory once; it holds nothing that
runs code. The message of a round goes to each worker once, through a pipe: what 45 MB take there (some 40 ms, by
estimate) is nothing beside an epoch of a model of that size.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self

import torch

from fl_core import errors, rng
from fl_core.errors import ConfigError, FederationError
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.engine import Observer, Replies
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation import tensor_messages
from fl_core.simulation.in_process import (
    InProcessSilo,
    ResumePoint,
    SiloShare,
    StateStore,
    local_ports,
    public_test,
    run_rounds,
    thread_count,
)
from fl_core.simulation.worker import Broadcast, Done, Failed, Given, Ready, Setup, Task
from fl_core.training import memory
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData, SiloPort
from fl_core.types.values import Bundle, Examples, RoundContext, State

_AHEAD, _SMALL = 2, 1 << 14
"""Tasks that a worker holds, so that it never waits for the next one, where they are of so few bytes: a larger one sent
to a worker that is sending could block both sides."""


_FEW_STEPS = 200
_REPLY_SECONDS, _START_SECONDS = 1e-3, 5.0
"""Work of a silo's round below which its reply costs as much; seconds that workers must save."""
_PROCESS_BYTES, _COPIES = 300 << 20, 8
"""Of a worker: what torch takes, and how often the model: weights twice, gradients, momentum, messages, activations."""


class WorkerError(FederationError):
    """A worker process ended, or cannot take part: the simulation stops."""


@dataclass(eq=False, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    own: deque[InProcessSilo] = field(default_factory=deque)
    running: deque[InProcessSilo] = field(default_factory=deque)
    knows: State | None = None


class WorkerPool:
    """Worker processes for one run without guards of its own at the silos.

    number: of processes   threads: of a silo's round, in each of them
    Guarantees: the bits of one process with as many threads; a worker that ends is an error at once, with words; after
    the pool is closed no process is left, also where this one was killed.
    """

    def __init__(self, run: RunSetup, shares: Sequence[SiloShare], number: int, threads: int) -> None:
        self._run, self._shares, self._number, self._threads = run, shares, number, threads
        self._workers: list[_Worker] = []

    def start(self) -> Self:
        """Start the processes; raises ConfigError (E-CFG-08) where examples or method are known to this one alone."""
        try:
            with tempfile.TemporaryDirectory(prefix="consilium-") as folder:
                setup = self._setup(Path(folder) / "tensors")
                for _ in range(self._number):
                    self._workers.append(_start())
                for worker in self._workers:  # all have started: a pipe may hold less than this
                    with self._watched(worker, None):
                        worker.connection.send(setup)
                for worker in self._workers:
                    found = self._received(worker)[0]
                    if isinstance(found, Failed):
                        raise ConfigError(
                            "E-CFG-08",
                            "expected data, model and method that other processes can import, found some that they "
                            f"cannot ({found.text.strip().splitlines()[-1]}): put them into a module, or use "
                            "--workers 1",
                        )
                    assert isinstance(found, Ready)
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self if self._workers else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, whatever they do."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.wait()
        self._workers.clear()

    def simulate(
        self, observer: Observer, states: StateStore | None = None, resume: ResumePoint | None = None
    ) -> State:
        """Do the run, from where it goes on, and return the final server state.

        Guarantees: equals `in_process.simulate` with as many threads bit for bit.
        """
        with thread_count(self._threads):
            ports = local_ports(self._run, self._shares, None, states)
            loop = self._run.round_loop(ports, parallel=1, exchange=self.exchange)
            return run_rounds(loop, self._run, observer, resume)

    def exchange(self, ports: Sequence[SiloPort], msg: State, context: RoundContext, kind: TaskKind) -> Replies:
        """Ask a cohort, several silos at a time; see `RoundLoop`.

        Raises WorkerError where a worker ends. A round that is left before its end closes the pool.
        """
        for port in ports:
            assert isinstance(port, InProcessSilo)
            self._workers[port.index % len(self._workers)].own.append(port)
        try:
            busy = {w.connection: w for w in self._workers if self._fill(w, msg, context, kind)}
            while busy:
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    worker = busy[connection]
                    port, reply = self._reply(worker)
                    if not self._fill(worker, msg, context, kind):
                        del busy[connection]
                    yield port.name, reply
        except BaseException:
            self.close()
            raise

    def _fill(self, worker: _Worker, msg: State, context: RoundContext, kind: TaskKind) -> bool:
        """Give a worker what it may hold of the silos that wait; return whether it is at work."""
        most = _AHEAD
        while len(worker.running) < most and (port := self._next(worker)):
            state = port.state
            tensors = [] if state is None else tensor_messages.of_state(state)
            if tensor_messages.size(tensors) > _SMALL and worker.running:
                worker.own.appendleft(port)
                break
            with self._watched(worker, port):
                if worker.knows is not msg:
                    tensor_messages.send(worker.connection, Broadcast(), tensor_messages.of_state(msg))
                    worker.knows = msg
                tensor_messages.send(worker.connection, Task(port.index, context, kind, state is not None), tensors)
            worker.running.append(port)
        return bool(worker.running)

    def _next(self, worker: _Worker) -> InProcessSilo | None:
        if worker.own:
            return worker.own.popleft()
        longest = max(self._workers, key=lambda w: len(w.own))
        return longest.own.pop() if longest.own else None

    def _reply(self, worker: _Worker) -> tuple[InProcessSilo, Future[Bundle]]:
        port, reply = worker.running[0], Future[Bundle]()
        head, tensors = self._received(worker)
        worker.running.popleft()
        if isinstance(head, Failed):
            reply.set_exception(_error(head, port.name))
            return port, reply
        assert isinstance(head, Done)
        if head.has_state:
            port.states.stage(port.index, tensor_messages.to_state(tensor_messages.copied(tensors[head.bundle :])))
        reply.set_result(tensor_messages.to_bundle(tensors[: head.bundle]))
        return port, reply

    def _received(self, worker: _Worker) -> tuple[object, tensor_messages.Named]:
        with self._watched(worker, worker.running[0] if worker.running else None):
            return tensor_messages.receive(worker.connection)

    @contextmanager
    def _watched(self, worker: _Worker, port: InProcessSilo | None) -> Iterator[None]:
        """Raise WorkerError in place of what a worker that has ended makes of its pipe."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(10)
            raise _ended(worker.process.returncode, port) from error

    def _setup(self, file: Path) -> Setup:
        """Write the tensors of the examples into a file that all workers map, and return what each begins with."""
        public = public_test(self._shares) if self._run.manifest.personal else None
        given: Given = (list(self._shares), public, self._run.weights)
        try:
            examples, tensors = tensor_messages.taken_apart(given)
            torch.save(tensors, file)
        except OSError:
            raise
        except Exception as error:  # whatever a class of the caller's raises when it is written
            raise ConfigError(
                "E-CFG-08",
                f"expected examples that can be sent to other processes, found some that cannot ({error}): make their "
                "class importable, or use --workers 1",
            ) from error
        return Setup(self._run.manifest.to_json(), examples, file, self._threads)


def cores() -> int:
    """Return how many processors this process may use; 1 in a process that another pool has started."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start() -> _Worker:
    """Start a worker on its end of a pipe; it finds modules where this process does."""
    ours, theirs = Pipe()
    with theirs:
        descriptor = theirs.fileno()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
        program = f"from fl_core.simulation.worker import main; main({descriptor})"
        process = subprocess.Popen(  # noqa: S603 - this interpreter, and a number
            [sys.executable, "-c", program],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Linux shares a processor between sessions first, then between their processes
        )
    return _Worker(process, ours)


def _error(found: Failed, name: str) -> Exception:
    if found.kind:
        kind = getattr(errors, found.kind, FederationError)
        return kind(found.code, found.text)
    return RuntimeError(f"the round of {name} failed in its process:\n{found.text}")


def _ended(code: int | None, port: InProcessSilo | None) -> WorkerError:
    name = signal.Signals(-code).name if code is not None and -code in {*signal.Signals} else f"status {code}"
    when = f"in the round of {port.name}" if port else "before its first silo"
    if code == -signal.SIGKILL:
        return WorkerError(
            "E-RUN-38",
            f"a worker process was ended by {name} {when}, which the system does where memory is short: free some, or "
            "take fewer (--workers); with --out the same command goes on",
        )
    return WorkerError(
        "E-RUN-99", f"a worker process ended ({name}) {when}: its last words are above; --workers 1 does without"
    )


def worthwhile(run: RunSetup, shares: Sequence[SiloShare], number: int, threads: int, rounds_left: int) -> bool:
    """Estimate whether so many workers save more time than they take to start, by two steps of the run's model.

    They do not where silos are few or tiny: each reply costs the caller half a millisecond, and the start some seconds.
    """
    context, train = RoundContext(len(shares), len(run.manifest.schema.classes)), run.manifest.train
    steps = [PlainLocalData(RoundData(s.train, s.test, train, context)).planned_steps() for s in shares]
    cohort = run.manifest.cohort or len(shares)
    each = sum(steps) / len(steps)
    if number < 2 or cohort < 2 or each * cohort * rounds_left < _FEW_STEPS:
        return False
    seconds = _step_seconds(run, max((s.train for s in shares), key=len), threads)
    left = each * cohort * rounds_left * seconds
    return each * seconds >= _REPLY_SECONDS and left * (1 - 1 / min(number, cohort)) >= _START_SECONDS


def _step_seconds(run: RunSetup, examples: Examples, threads: int) -> float:
    """Time a step of plain cross entropy, on a copy of the model; the first one warms up."""
    model, took = run.new_model().train(), 0.0
    with thread_count(threads), rng.torch_scope(run.manifest.seed, "probe"):
        x, y = examples.batch(torch.arange(min(run.manifest.train.batch_size, len(examples))))
        if len(y) < 2:  # batch norm has no variance then
            return 0.0
        for _ in range(2):
            began = time.perf_counter()
            FedAvg.loss(model, x, y).objective().backward()  # type: ignore[no-untyped-call]
            took = time.perf_counter() - began
    return took


def most_by_memory(run: RunSetup) -> int:
    """Return how many workers the free memory holds at least; each has torch and what it trains with."""
    free = memory.free_memory(memory.CPU)
    tensors = tensor_maps.named_tensors(run.model).values()
    need = _PROCESS_BYTES + _COPIES * sum(v.numel() * v.element_size() for v in tensors)
    return 1 if free is None else max(1, free // need)
