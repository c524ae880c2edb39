"""Run the silos of a round in several processes on this machine, bit for bit as in one.

Each worker is a `ProcessPoolExecutor` with one process, so a silo usually stays where its files are decoded, and it is
known which silo a process was training when it ended. An idle worker takes over another's silos. Silos' states stay
with the caller. The examples' tensors are in a file that all workers memory-map, so they are in memory once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Self, cast

import torch

from consilium.research.engines import worker as child
from consilium.research.engines.in_process import (
    InProcessSilo,
    ResumePoint,
    SiloShare,
    StateStore,
    local_ports,
    public_test,
    run_rounds,
    thread_count,
)
from fl_core import rng
from fl_core.errors import ConfigError, FederationError
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.engine import Observer, Replies
from fl_core.rounds.run_setup import RunSetup
from fl_core.training import memory
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData, SiloPort
from fl_core.types.values import Bundle, Examples, RoundContext, State

_AHEAD = 2
"""Tasks in a worker's queue, so that it never waits for the next one."""
_FEW_STEPS = 200
_REPLY_SECONDS, _START_SECONDS = 2e-3, 5.0
"""Duration of a silo's round below which its reply costs as much; least time that workers must save."""
_PROCESS_BYTES, _COPIES = 300 << 20, 10
"""A worker's memory: torch, and copies of the model (2 x weights, gradients, momentum, messages, activations)."""


class WorkerError(FederationError):
    """A worker process ended unexpectedly: the simulation stops."""


@dataclass(eq=False, slots=True)
class _Worker:
    executor: ProcessPoolExecutor
    process: BaseProcess
    ready: Future[None]
    assigned: deque[InProcessSilo] = field(default_factory=deque)
    running: deque[tuple[InProcessSilo, Future[child.Pickled]]] = field(default_factory=deque)
    knows: child.Pickled | None = None


class WorkerPool:
    """Worker processes for one run that is not private.

    number: of processes   threads: CPU threads of a silo's round, in each process
    Guarantees: the same bits as one process with as many threads; if a worker ends, an error with an explanation is
    raised at once; no process is left after the pool is closed or this process is killed.
    """

    def __init__(self, run: RunSetup, shares: Sequence[SiloShare], number: int, threads: int) -> None:
        self._run, self._shares, self._number, self._threads = run, shares, number, threads
        self._workers: list[_Worker] = []

    def start(self) -> Self:
        """Start the processes; raises ConfigError (E-CFG-08) if they cannot import the examples, model or method."""
        try:
            with tempfile.TemporaryDirectory(prefix="consilium-") as folder:
                start_file = self._write(Path(folder) / "start")
                for _ in range(self._number):
                    self._workers.append(_start(self._run.manifest.to_json(), start_file, self._threads))
                for worker in self._workers:
                    try:
                        worker.ready.result()
                    except BrokenExecutor as error:
                        raise _ended(worker, None) from error
                    except Exception as error:
                        raise ConfigError(
                            "E-CFG-08",
                            "other processes cannot import the data, model or method "
                            f"({str(error).strip().splitlines()[-1]}): put them into a module, or use --workers 1",
                        ) from error
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self if self._workers else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers, even if they are busy."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.executor.shutdown()
        self._workers.clear()

    def simulate(
        self, observer: Observer, states: StateStore | None = None, resume: ResumePoint | None = None
    ) -> State:
        """Run the federation, from the resume point if given, and return the final server state.

        Guarantees: equals `in_process.simulate` with as many threads bit for bit.
        """
        with thread_count(self._threads):
            ports = local_ports(self._run, self._shares, None, states)
            loop = self._run.round_loop(ports, parallel=1, exchange=self.exchange)
            return run_rounds(loop, self._run, observer, resume)

    def exchange(self, ports: Sequence[SiloPort], msg: State, context: RoundContext, kind: TaskKind) -> Replies:
        """Run the round of a cohort, several silos at a time; see `RoundLoop`.

        Raises WorkerError if a worker ends. Leaving a round before its end closes the pool.
        """
        for port in ports:
            assert isinstance(port, InProcessSilo)
            self._workers[port.index % len(self._workers)].assigned.append(port)
        message = child.dumps(msg)
        try:
            while busy := [w for w in self._workers if self._fill(w, message, context, kind)]:
                wait([w.running[0][1] for w in busy], return_when=FIRST_COMPLETED)
                for worker in busy:
                    while worker.running and worker.running[0][1].done():
                        port, reply = self._reply(worker)
                        self._fill(worker, message, context, kind)
                        yield port.name, reply
        except BaseException:
            self.close()
            raise

    def _fill(self, worker: _Worker, message: child.Pickled, context: RoundContext, kind: TaskKind) -> bool:
        """Fill a worker's queue with waiting silos; return whether it has work."""
        while len(worker.running) < _AHEAD and (port := self._next(worker)):
            new = None if worker.knows is message else message
            task = child.dumps((port.index, context, kind, port.state))
            try:
                worker.running.append((port, worker.executor.submit(child.run, new, task)))
            except BrokenExecutor as error:
                raise _ended(worker, worker.running[0][0] if worker.running else port) from error
            worker.knows = message
        return bool(worker.running)

    def _next(self, worker: _Worker) -> InProcessSilo | None:
        if worker.assigned:
            return worker.assigned.popleft()
        longest = max(self._workers, key=lambda w: len(w.assigned))
        return longest.assigned.pop() if longest.assigned else None

    def _reply(self, worker: _Worker) -> tuple[InProcessSilo, Future[Bundle]]:
        (port, task), reply = worker.running.popleft(), Future[Bundle]()
        try:
            bundle, state = cast("child.Reply", child.loads(task.result()))
        except BrokenExecutor as error:
            raise _ended(worker, port) from error
        except FederationError as error:
            reply.set_exception(error)
        except RuntimeError as error:
            raise RuntimeError(f"the round of {port.name} failed in its process:\n{error}") from None
        else:
            if state is not None:
                port.states.stage(port.index, state)
            reply.set_result(bundle)
        return port, reply

    def _write(self, file: Path) -> Path:
        """Write the silos' examples and the weights into a file, which all workers memory-map."""
        public = public_test(self._shares) if self._run.manifest.personal else None
        try:
            torch.save((self._run.weights, list(self._shares), public), file)
        except OSError:
            raise
        except Exception as error:  # the caller's classes may raise anything when pickled
            raise ConfigError(
                "E-CFG-08",
                f"some examples cannot be pickled for other processes ({error}): make their class importable, or use "
                "--workers 1",
            ) from error
        return file


def cores() -> int:
    """Return how many processors this process may use; 1 in a child process of multiprocessing."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(manifest_json: str, start_file: Path, threads: int) -> _Worker:
    executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with _without_caller():
        ready = executor.submit(child.begin, manifest_json, start_file, threads)
    [process] = executor._processes.values()
    # If a process ends while it sends, its pipe must end, too. Otherwise the executor waits forever for the rest.
    executor._result_queue._writer.close()  # type: ignore[attr-defined]
    return _Worker(executor, process, ready)


@contextmanager
def _without_caller() -> Iterator[None]:
    """Start processes that do not run the caller's script again, and ignore Ctrl-C: this process ends them.

    `multiprocessing` imports the script in each child. A script without `if __name__ == "__main__"` would start again.
    """
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        sys.modules["__main__"] = script
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _ended(worker: _Worker, port: InProcessSilo | None) -> WorkerError:
    worker.executor.shutdown()  # waits for the process, so that its exit code is known
    code = worker.process.exitcode
    name = signal.Signals(-code).name if code is not None and -code in {*signal.Signals} else f"status {code}"
    when = f"in the round of {port.name}" if port else "before its first silo"
    if code == -signal.SIGKILL:
        return WorkerError(
            "E-RUN-38",
            f"a worker process was killed by {name} {when}, probably because memory ran out: free memory, or use "
            "fewer --workers; with --out, the same command resumes the simulation",
        )
    return WorkerError(
        "E-RUN-99",
        f"a worker process ended ({name}) {when}: see its output above, or use --workers 1",
    )


def worthwhile(run: RunSetup, shares: Sequence[SiloShare], number: int, threads: int, rounds_left: int) -> bool:
    """Estimate whether workers save more time than they take to start, by timing two steps of the run's model.

    They do not if silos are few or tiny: each reply costs the caller a millisecond, and the start some seconds.
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
    """Time a step of plain cross entropy on a copy of the model, after one step to warm up."""
    model, took = run.new_model().train(), 0.0
    with thread_count(threads), rng.torch_scope(run.manifest.seed, "probe"):
        x, y = examples.batch(torch.arange(min(run.manifest.train.batch_size, len(examples))))
        if len(y) < 2:  # batch norm needs two examples for a variance
            return 0.0
        for _ in range(2):
            began = time.perf_counter()
            FedAvg.loss(model, x, y).objective().backward()  # type: ignore[no-untyped-call]
            took = time.perf_counter() - began
    return took


def most_by_memory(run: RunSetup) -> int:
    """Estimate conservatively how many workers fit into free memory, at least 1."""
    free = memory.free_memory(memory.CPU)
    tensors = tensor_maps.named_tensors(run.model).values()
    need = _PROCESS_BYTES + _COPIES * sum(v.numel() * v.element_size() for v in tensors)
    return 1 if free is None else max(1, free // need)
