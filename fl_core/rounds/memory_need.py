"""The memory that a run needs.

A lower bound is computed from the run's description, before anything is built or fetched. An estimate is measured in a
step on a few blank examples, once the model is built.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from fl_core.errors import RefusedError
from fl_core.methods import build_written
from fl_core.models import describe
from fl_core.models.split_model import body_rows
from fl_core.rounds.manifest import NamedOptions
from fl_core.rounds.silo_round import SiloRuntime, measure_global
from fl_core.tensors import TORCH, Tensor, nn, torch
from fl_core.training import memory
from fl_core.training.local_data import LocalDataWrapper
from fl_core.types.interfaces import LocalData
from fl_core.types.records import FEATURES, Schema, TrainConfig
from fl_core.types.values import AS_SCHEDULED, Examples, LossFn, RoundContext, SgdOptions, State

if TORCH:
    from fl_core.rounds.live_memory import LiveTensors

_FLOAT = 4
OVERHEAD: Mapping[str, float] = {"cpu": 2.0, "cuda": 1.0}
"""Factor on the bytes of a step's tensors, by kind of device. On a CPU convolutions copy their inputs and outputs, and
freed memory is not returned at once: processes grew by 1.5 to 1.9 times their tensors. A GPU that runs out of memory
fails one task and not the service, so there only the tensors count."""


def require_memory(
    method: NamedOptions,
    model: NamedOptions,
    schema: Schema,
    train: TrainConfig,
    device: torch.device = memory.CPU,
    disclose: bool = False,
) -> None:
    """Raise RefusedError (E-RUN-38) if a model certainly cannot be trained on a device; ConfigError as `describe`.

    A lower bound: weights with buffers, gradients, optimizer state, received and sent tensors, and the method's
    additional tensors. Activations, the data and torch itself need more. If the model trains on a GPU, received and
    sent tensors are in the machine's memory. Nothing is allocated.
    """
    facts = describe(model.name, schema, model.options)
    gradients = _FLOAT * facts.parameters if train.freeze != FEATURES else 0  # a head has few
    kept = {"adam": 2 * gradients}.get(train.optimizer, gradients if train.momentum else 0)
    built = build_written(method.name, method.options)
    method_bytes = _FLOAT * built.own_numbers(len(schema.classes), facts.feature_dim)
    sent = 0 if train.freeze == FEATURES else 2 * facts.state_bytes
    training, carried = facts.state_bytes + gradients + kept, sent + method_bytes
    on = {device: training, memory.CPU: carried} if device.type == "cuda" else {memory.CPU: training + carried}
    what = f"{model.name} with {facts.parameters:,} parameters, trained by {method.name} (without data and activations)"
    for place, need in on.items():
        memory.require(
            need, place, what, "choose a smaller model or smaller options of it, or free memory there", disclose
        )


class MadeUpExamples(Examples):
    """Blank examples of a schema, all zeros, of its first two classes."""

    def __init__(self, schema: Schema, number: int) -> None:
        self.labels = torch.arange(number) % 2
        self._shape = schema.shape

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        del augment
        return torch.zeros(len(index), *self._shape), self.labels[index]

    def stored(self, index: Tensor) -> Tensor:
        return self.batch(index)[0]

    def prepared(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:
        del augment
        return x


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The additional memory of a silo's round on a device.

    few, more: bytes of tensors after each operation, with the two numbers of examples in `memory.FEW`
    trained: whether the operation is part of training; its memory grows with the examples of a step, that of all other
    operations with the examples that are read at once for a sum.
    """

    device: torch.device
    few: tuple[int, ...]
    more: tuple[int, ...]
    trained: tuple[bool, ...]

    def need(self, training: int, evaluating: int) -> int:
        """Return the bytes that a round needs. training, evaluating: examples in memory at once."""
        fewer, many = memory.FEW
        if len(self.few) != len(self.more):  # the operations differ: assume that all grow
            widest = max(self.more) * max(1.0, max(training, evaluating) / many)
        else:
            sizes = (training if trained else evaluating for trained in self.trained)
            lines = zip(self.few, self.more, sizes, strict=True)
            widest = max(a + (b - a) * (size - fewer) / (many - fewer) for a, b, size in lines)
        return int(OVERHEAD.get(self.device.type, 1.0) * widest)

    def fitting(self, free: int, training: int, evaluating: int) -> int:
        """Return the largest power of two of examples per step, below `training`, that fits; otherwise 0."""
        size = 1 << max(0, training - 1).bit_length()
        while size and (size >= training or self.need(size, evaluating) > free):
            size //= 2
        return size


def measure_step(
    runtime: SiloRuntime,
    msg: State,
    open_data: Callable[[int], LocalData],
    context: RoundContext,
    device: torch.device,
    trains: bool = True,
) -> StepMemory:
    """Measure the memory of a silo's round on a few blank examples, with one step for each of its trainings.

    msg: as in the first round   open_data: opens this many examples, for one step   context: of the first round
    trains: whether the run has a training round.
    Raises RefusedError (E-RUN-38) before more than half of the free memory is used, and errors of the method.
    Guarantees: reads no record; does not change torch's global generator.
    """
    free = memory.free_memory(device)
    taken = [LiveTensors(device, None if free is None else free // 2) for _ in memory.FEW]
    for live, number in zip(taken, memory.FEW, strict=True):
        with live:
            _two_rounds(runtime, msg, partial(_opened, open_data, number, live), context, trains)
    few, more = taken
    return StepMemory(device, tuple(few.after), tuple(more.after), tuple(few.in_training))


def measure_pass(body: nn.Module, shape: Sequence[int], device: torch.device) -> StepMemory:
    """Measure the memory of passing blank examples through a frozen body, moved to the device.

    Raises and guarantees as `measure_step`.
    """
    free, body = memory.free_memory(device), body.to(device)
    few, more = (LiveTensors(device, None if free is None else free // 2) for _ in memory.FEW)
    for live, number in zip((few, more), memory.FEW, strict=True):
        with live:
            body_rows(body, torch.zeros(number, *shape, device=device))
    return StepMemory(device, tuple(few.after), tuple(more.after), tuple(few.in_training))


def _two_rounds(
    runtime: SiloRuntime, msg: State, open_data: Callable[[], LocalData], context: RoundContext, trains: bool
) -> None:
    """Run a first round, and a second one with the silo's state after the first (a model, a control variate)."""
    method, state = runtime.method, None
    received = {group: {name: v.clone() for name, v in values.items()} for group, values in msg.items()}
    for _ in range(2):
        data = open_data()
        state = method.init_silo(runtime.reset_model(), context) if state is None else state
        measure_global(method, runtime.reset_model(), received, data, context.n_classes, runtime.layout)
        if not trains:
            return
        bundle, state = method.local(runtime.reset_model(), received, state, data, context)
        del bundle


def _opened(open_data: Callable[[int], LocalData], number: int, live: LiveTensors) -> LocalData:
    return _Watched(open_data(number), live)


class _Watched(LocalDataWrapper):
    """Records when a method trains."""

    def __init__(self, data: LocalData, live: LiveTensors) -> None:
        super().__init__(data)
        self._live = live

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        self._live.training = True
        try:
            return super().sgd(model, loss, options)
        finally:
            self._live.training = False


class TracedMemory:
    """Measures, without torch, the peak of allocated bytes inside the block, as Python and NumPy report it.

    Raises RefusedError (E-RUN-38) above a limit.
    """

    def __init__(self, device: torch.device, most: int | None) -> None:
        self._device, self._most = device, most
        self.training = False
        self.after: list[int] = []
        self.in_training: list[bool] = []

    def __enter__(self) -> Self:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.after.append(peak)
        self.in_training.append(self.training)
        if self._most is not None and peak > self._most:
            raise RefusedError(
                "E-RUN-38",
                f"not enough free memory on {self._device} for {memory.FEW[-1]} examples: choose a smaller model or "
                "smaller images",
            )


if not TORCH:
    LiveTensors = TracedMemory  # type: ignore[misc, assignment]
