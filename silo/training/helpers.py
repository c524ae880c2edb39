"""Helper processes of a worker, which compute parts of its training steps: `fl_core.training.team`. Linux only.

The worker forks them in its cage while it has one thread. They have the same walls, no records and no line to the
service. Tensors lie in shared memory; other messages go over a pair of connected sockets. So the cage needs no further
opening. All end together: a helper ends with the process that forked it, and if a helper ends, that process ends like a
killed worker.
"""

from __future__ import annotations

import io
import logging
import math
import mmap
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, NamedTuple, NoReturn

from fl_core.errors import ConfigError
from fl_core.rounds.silo_round import SiloRuntime, run_silo_round
from fl_core.tensors import Tensor, nn, torch
from fl_core.training.devices import choose_device
from fl_core.training.local_data import has_batch_norm
from fl_core.training.team import HelperData, LeaderData
from fl_core.types.enums import Coupling, TaskKind
from fl_core.types.interfaces import Gradients, LocalData, StepPart, Team
from fl_core.types.records import TrainConfig
from fl_core.types.values import RoundContext, State
from privacy.compiled_run import CompiledRun
from silo.worker.cage import end_with_parent

MOST = 64
_ALIGNED = 64
"""Alignment of tensors in shared memory, in bytes."""


class HelpersRound(NamedTuple):
    """A helper's copy of a silo's round.

    private: with record-level privacy   grouped: the units of privacy are groups of records   threads: of the CPU; 0:
    the default.
    """

    runtime: SiloRuntime
    message: State
    state: State | None
    config: TrainConfig
    context: RoundContext
    kind: TaskKind
    threads: int
    private: bool
    grouped: bool


def undivided(run: CompiledRun, at_once: int) -> str:
    """Explain why helpers cannot share a run's training steps; empty if they can.

    A helper may compute a part of a step only if the part follows from its examples and the parameters alone: otherwise
    the update would depend on the number of processes. So the method must be in the form that it has in private runs.
    at_once: examples that are computed at once.
    """
    method, train = run.method, run.manifest.train
    if method.exchanges:
        return f"method {method.name} takes no training steps"
    if wanted := " and ".join(f"method.{option}={value}" for option, value in method.private_form.items()):
        return f"the loss of {method.name} depends on the whole batch. The lead can set {wanted}"
    if method.coupling is Coupling.BATCH:
        return f"the loss of {method.name} mixes the examples of a batch"
    if has_batch_norm(run.model):
        return "the model has batch norm, which mixes the examples of a batch; the lead can set model.norm=group"
    if at_once >= train.batch_size:
        key = "privacy.physical_batch" if run.profile.private_form else "train.micro_batch"
        return (
            f"each step is computed in one piece; the lead can set {key} to a part of "
            f"train.batch_size={train.batch_size}"
        )
    if train.compile:
        return "train.compile=true computes parts of other sizes by other kernels"
    return ""


class Helpers(Team):
    """A worker's helpers, seen from its first process."""

    def __init__(self, lines: Sequence[_Line], params: _SharedMemory) -> None:
        self.size = 1 + len(lines)
        self._lines, self._params, self._owing = lines, params, list[_Line]()

    @classmethod
    def fork(cls, processes: int, device: str, line_to_service: Iterable[IO[bytes]] = ()) -> Helpers | None:
        """Fork helpers, so that there are `processes` in total; return None for 1.

        Call it while this process has one thread. device: as for `choose_device`; helpers use the GPUs that follow it.
        Raises ConfigError (E-CFG-02) if `processes` is not from 1 to `MOST`, or above 1 on another system than Linux.
        """
        if not 1 <= processes <= MOST or (processes > 1 and sys.platform != "linux"):
            raise ConfigError(
                "E-CFG-02",
                f"expected --processes from 1 to {MOST} on Linux and 1 elsewhere, found {processes}: change it",
            )
        if processes == 1:
            return None
        params, lines, forked = _SharedMemory(), list[_Line](), list[int]()
        for number in range(1, processes):
            ours, theirs = Pipe()
            line = _Line(ours, _SharedMemory(), _SharedMemory())
            forked.append(os.fork())
            if not forked[-1]:
                others: list[IO[bytes] | Connection] = [*line_to_service, ours, *(other.connection for other in lines)]
                _help(_Leader(replace(line, connection=theirs), params), number, device, others)
            theirs.close()
            lines.append(line)
        for helper in forked:
            threading.Thread(target=_end_with, args=(helper,), name="helper", daemon=True).start()
        return cls(lines, params)

    def require_gpus(self, first: torch.device) -> None:
        """Raise ConfigError (E-CFG-02) if the first process uses a GPU and not every helper can have its own."""
        if first.type == "cuda" and (first.index or 0) + self.size > torch.cuda.device_count():
            raise ConfigError(
                "E-CFG-02",
                f"expected at most one process for each GPU from {first} on, found --processes {self.size} and "
                f"{torch.cuda.device_count()} GPUs: lower it",
            )

    def begin(self, data: LocalData, round: HelpersRound) -> LocalData:
        """Start a round in all helpers, which abandon any other round; return the data for this process's round."""
        while self._owing:
            self._receive()
        written = io.BytesIO()
        torch.save((round, data.lr, data.batch_size), written)
        self._send(round=written.getvalue())
        return LeaderData(data, lambda answer: self._send(answer=answer))

    def deal(self, params: Sequence[nn.Parameter], parts: Sequence[StepPart]) -> None:
        if not parts:
            return
        now = self._put(params)
        for line, part in zip(self._lines, parts, strict=False):
            line.send(places=line.parts.put(part.tensors), part=part._replace(tensors=()), params=now)
            self._owing.append(line)

    def collect(self) -> Iterator[Gradients]:
        while self._owing:
            line, message = self._receive()
            yield line.gradients.get(message["gradients"])

    def finish(self, params: Sequence[nn.Parameter]) -> None:
        self._send(params=self._put(params))
        self._owing = [*self._lines]  # wait until all have read the parameters before writing again
        while self._owing:
            self._receive()

    def _put(self, params: Sequence[nn.Parameter]) -> list[_Place | None]:
        return self._params.put([p.detach() for p in params])

    def _send(self, **message: object) -> None:
        for line in self._lines:
            line.send(**message)

    def _receive(self) -> tuple[_Line, dict[str, Any]]:
        line = self._owing.pop(0)
        return line, line.receive()


class _Place(NamedTuple):
    """The place of a tensor in shared memory. at: offset in bytes."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.at + math.prod(self.shape) * self.dtype.itemsize


class _SharedMemory:
    """Anonymous memory for tensors: one process writes, and processes forked with it read."""

    def __init__(self) -> None:
        self._file = os.memfd_create("consilium")
        self._mapped = torch.empty(0, dtype=torch.uint8)

    def put(self, tensors: Sequence[Tensor | None]) -> list[_Place | None]:
        places, at = list[_Place | None](), 0
        for tensor in tensors:
            place = None if tensor is None else _Place(at, tensor.dtype, tuple(tensor.shape))
            places.append(place)
            at = -(-(place.end if place else at) // _ALIGNED) * _ALIGNED
        if os.fstat(self._file).st_size < at:
            os.ftruncate(self._file, at)
        for tensor, copy in zip(tensors, self.get(places), strict=True):
            if tensor is not None and copy is not None:
                copy.copy_(tensor)
        return places

    def get(self, places: Sequence[_Place | None]) -> list[Tensor | None]:
        """Return the tensors at these places, as views that are valid until the next `put`."""
        if max((place.end for place in places if place), default=0) > len(self._mapped):
            size = os.fstat(self._file).st_size
            self._mapped = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        return [place and self._mapped[place.at : place.end].view(place.dtype).view(place.shape) for place in places]


@dataclass(frozen=True, slots=True)
class _Line:
    """One end of the line between a worker's first process and a helper.

    parts: written by the first process   gradients: written by the helper.
    """

    connection: Connection
    parts: _SharedMemory
    gradients: _SharedMemory

    def send(self, **message: object) -> None:
        try:  # not `Connection.send`, for which torch would put tensors into files of /dev/shm
            self.connection.send_bytes(pickle.dumps(message))
        except OSError:
            os._exit(1)

    def receive(self) -> dict[str, Any]:
        """Return the next message; if the other process has ended, end this one."""
        try:
            message: dict[str, Any] = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - of the same worker
        except (OSError, EOFError):
            os._exit(1)
        return message


def _end_with(helper: int) -> None:
    os.waitpid(helper, 0)
    os._exit(1)


# ---- in a helper -----------------------------------------------------------------------------------------------------


class _GivenUpError(Exception):
    """Abandon this round: the worker has started another one."""


@dataclass(slots=True)
class _Leader:
    """A worker's first process, seen from a helper."""

    line: _Line
    params: _SharedMemory
    _next: dict[str, Any] | None = field(default=None, init=False)

    def round(self) -> tuple[HelpersRound, float, int]:
        """Return the next round with its learning rate and batch size; skip leftover messages of the previous one."""
        while True:
            message, self._next = self._next or self.line.receive(), None
            if "round" in message:
                read: tuple[HelpersRound, float, int] = torch.load(
                    io.BytesIO(message["round"]), map_location="cpu", weights_only=False
                )
                return read

    def answer(self) -> Any:  # noqa: ANN401
        return self._receive()["answer"]

    def parts(self, params: Sequence[nn.Parameter]) -> Iterator[StepPart]:
        while True:
            message = self._receive()
            with torch.no_grad():
                for p, value in zip(params, self.params.get(message["params"]), strict=True):
                    assert value is not None
                    p.copy_(value)
            if "part" not in message:
                self.line.send(finished=True)
                return
            tensors = (t for t in self.line.parts.get(message["places"]) if t is not None)
            yield message["part"]._replace(tensors=tuple(tensors))

    def send(self, gradients: Gradients) -> None:
        self.line.send(gradients=self.line.gradients.put(gradients))

    def _receive(self) -> dict[str, Any]:
        message = self.line.receive()
        if "round" in message:
            self._next = message
            raise _GivenUpError
        return message


def _help(leader: _Leader, number: int, device_name: str, others: Iterable[IO[bytes] | Connection]) -> NoReturn:
    """Run a helper until this process is killed or its line ends. others: ends of other lines, to be closed."""
    try:
        end_with_parent(signal.SIGKILL)
        for end in others:
            end.close()
        logging.disable()  # the first process logs the same
        by_default = torch.get_num_threads()
        while True:
            round, lr, batch_size = leader.round()
            device = choose_device(device_name)
            if device.type == "cuda":
                device = torch.device("cuda", (device.index or 0) + number)
            torch.set_num_threads(round.threads or by_default)
            round.runtime.model.to(device)
            data = HelperData(leader, round.config, lr, batch_size, device)
            if round.private:
                from privacy.mechanisms.record.private_data import PrivateHelperData

                data = PrivateHelperData(leader, round.config, lr, batch_size, device, grouped=round.grouped)
            with suppress(_GivenUpError):
                run_silo_round(round.runtime, round.message, round.state, data, round.context, round.kind)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
