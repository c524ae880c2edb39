"""The processes that compute the steps of one silo: a leader, which has the records, and its helpers.

A step is divided as in one process: into the micro-batches of a batch, or the chunks of units of a private step. The
leader reads all parts, distributes them in turn, and adds the gradients in the order of the parts. So on a CPU the
result has the same bits for any number of processes, and a simulation gets them with one process.

A helper runs the same method on the same message and state. It has no records: its `LocalData` repeats the leader's
answers. It computes only in `sgd`: the gradients of its parts, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from fl_core import rng
from fl_core.tensors import nn, torch
from fl_core.training.devices import cudnn_benchmark
from fl_core.training.local_data import LocalDataWrapper, part_objective, to_memory_format
from fl_core.types.interfaces import Gradients, LocalData, StepPart
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, LossFn, SgdOptions

_ANSWERS = ("planned_steps", "effective_steps", "sum", "size", "class_counts", "contributes")
"""The methods of `LocalData` except `sgd`; `multi_label` is a property."""


class LeaderData(LocalDataWrapper):
    """The leader's local data. tell: sends each answer to the helpers, which make the same calls in the same order."""

    def __init__(self, data: LocalData, tell: Callable[[object], None]) -> None:
        super().__init__(data)
        self._tell = tell
        for name in (*_ANSWERS, "sgd"):
            setattr(self, name, partial(self._answer, getattr(data, name)))

    def _answer(self, ask: Callable[..., object], *words: object, **options: object) -> object:
        answer = ask(*words, **options)
        self._tell(answer)
        return answer

    @property
    def multi_label(self) -> bool:
        return bool(self._answer(lambda: self._data.multi_label))


class Leader(Protocol):
    """A helper's end of the line to its leader."""

    def answer(self) -> Any:  # noqa: ANN401
        """Return the next answer of the leader's data."""

    def parts(self, params: Sequence[nn.Parameter]) -> Iterator[StepPart]:
        """Yield the parts of one call of `sgd`; `params` are set to those of the step before each part.

        At the end, `params` are the trained ones.
        """

    def send(self, gradients: Gradients) -> None:
        """Send the gradients of the last part."""


class HelperData(LocalDataWrapper):
    """`LocalData` of a helper in a run without record-level privacy."""

    def __init__(
        self, leader: Leader, config: TrainConfig, lr: float, batch_size: int, device: torch.device | None = None
    ) -> None:
        self.lr, self.batch_size = lr, batch_size
        self._leader, self._config = leader, config
        self.device = device or torch.device("cpu")
        for name in _ANSWERS:
            setattr(self, name, lambda *_, **__: leader.answer())

    @property
    def multi_label(self) -> bool:
        return bool(self._leader.answer())

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        named = model.named_parameters()
        params = [p for name, p in named if p.requires_grad and (options.only is None or options.only(name))]
        with self.computing(model, loss, params) as gradients:
            for part in self._leader.parts(params):
                self._leader.send(gradients(part))
        return int(self._leader.answer())

    @contextmanager
    def computing(
        self, model: nn.Module, loss: LossFn, params: Sequence[nn.Parameter]
    ) -> Iterator[Callable[[StepPart], Gradients]]:
        """Yield the function that computes the gradients of a part, during one call of `sgd`."""

        def gradients(part: StepPart) -> Gradients:
            x, y = (t.to(self.device) for t in part.tensors)
            for p in params:
                p.grad = None
            part = part._replace(tensors=(to_memory_format(x, self._config), y))
            objective, scale = part_objective(model, loss, part, self._config, self.device), part.numbers[1]
            if scale != 1.0:
                objective = objective * torch.tensor(scale, device=objective.device)
            objective.backward()  # type: ignore[no-untyped-call]
            return [p.grad for p in params]

        with ExitStack() as stack:
            model.train()
            stack.enter_context(rng.torch_scope(0))  # each part has its own seed
            stack.enter_context(cudnn_benchmark(self._config.cudnn_benchmark))
            if self._config.channels_last:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                stack.callback(lambda: model.to(memory_format=torch.contiguous_format))  # type: ignore[call-overload]
            yield gradients
        for p in params:
            p.grad = None
