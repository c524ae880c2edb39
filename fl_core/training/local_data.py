"""Access to a silo's examples without differential privacy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

from fl_core import rng
from fl_core.errors import ConfigError, DataError, RefusedError
from fl_core.survey.answers import exact_answers, fully_withheld
from fl_core.survey.facts import surveyed
from fl_core.tensors import TORCH, Tensor, nn, torch
from fl_core.training import schedule
from fl_core.training.devices import cudnn_benchmark
from fl_core.types.enums import Split
from fl_core.types.interfaces import Gradients, LocalData, RoundData, StepPart
from fl_core.types.records import TrainConfig
from fl_core.types.targets import class_counts, has_class, is_multi_label, trained_classes
from fl_core.types.values import (
    AS_SCHEDULED,
    BatchSums,
    ClassSums,
    Examples,
    ExampleSums,
    LossFn,
    MomentSums,
    PenaltyFn,
    Query,
    SgdOptions,
    SurveySums,
    Tensors,
)

if TORCH:  # without it there are sums, and no steps
    from fl_core.training import optimizers
    from fl_core.training.compilation import compiled

EVAL_BATCH = 512
EVAL_NUMBERS = EVAL_BATCH * 3 * 64 * 64
"""Numbers in a batch of examples for a sum. Batches of images above 64 pixels have fewer than `EVAL_BATCH` images."""

NO_MICRO_BATCH = (
    "expected train.micro_batch=0, because the loss of a batch is not the sum over its parts; lower train.batch_size"
)


NOTHING_TO_TRAIN = (
    "the method would train no part of this model: add a trained layer between frozen features and head "
    "(model.adapter=linear), or use method=analytic, which trains nothing"
)


class _EmptyExamples(Examples):
    """An empty set of examples with the shape of others."""

    def __init__(self, like: Examples) -> None:
        self.labels = like.labels[:0]
        self._like = like

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self._like.batch(index, augment)


class PlainLocalData:
    """`LocalData` over one silo's examples, for one round.

    Every call of `sgd` draws its batches from a separate stream, so an extra pass of a method does not change the
    batches of the others (a method with its extra term at 0 stays bit-identical to FedAvg).
    """

    def __init__(self, data: RoundData) -> None:
        self.lr = data.config.lr * data.config.lr_decay**data.context.round
        self.batch_size = data.config.batch_size
        self._examples = {
            Split.TRAIN: data.train,
            Split.TEST: data.test,
            Split.GLOBAL: data.public or _EmptyExamples(data.test),
        }
        self._config, self._context = data.config, data.context
        self._device = data.device or torch.device("cpu")
        self._progress = data.progress or (lambda *_: None)
        self._team = data.team
        self._ahead = 2 if self._device.type == "cuda" else 0
        self._calls = 0
        self._counts: Tensor | None = None

    def planned_steps(self, epochs: float | None = None) -> int:
        """Return the optimiser steps of an `sgd` call, at most `max_steps`; the last batch of an epoch may be short."""
        n, size = len(self._examples[Split.TRAIN]), self._config.batch_size
        whole = n // size if self._config.drop_last else -(-n // size)
        steps = round((self._config.epochs if epochs is None else epochs) * whole)
        return min(steps, self._config.max_steps) if self._config.max_steps else steps

    def effective_steps(self, steps: int, mu: float = 0.0) -> float:
        return schedule.effective_steps(self._config, steps, self.lr * mu)

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        """Train `model` in place and return the steps taken.

        Momentum starts at zero in every call. A batch of one example is skipped if the model has BatchNorm, which has
        no variance to normalise it by, and is not counted. Raises ConfigError (E-CFG-08) without a trainable parameter;
        as `draw_batches`; RefusedError (E-RUN-52) if every batch is skipped.
        """
        path = ("round", self._context.round, "silo", self._context.silo, "sgd", self._calls)
        self._calls += 1
        order, augment = rng.stream(self._context.seed, *path, "order"), None
        if self._config.augment:
            augment = rng.stream(self._context.seed, *path, "augment")
        named = {name: p for name, p in model.named_parameters() if options.only is None or options.only(name)}
        if not (moved := [p for p in named.values() if p.requires_grad]):
            raise ConfigError("E-CFG-08", NOTHING_TO_TRAIN)
        model.train()
        if self._config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        lr = options.lr_scale * self.lr
        descent = optimizers.GradientDescent(named, lr, self._config, options.no_momentum, self._device.type)
        taken = 0
        with ExitStack() as stack:
            stack.enter_context(rng.torch_scope(self._context.seed, *path, "dropout"))
            stack.enter_context(cudnn_benchmark(self._config.cudnn_benchmark))
            stack.enter_context(compiled(model, self._config.compile))
            batches = self._batches(
                order, self.planned_steps(options.epochs) if options.steps is None else options.steps
            )
            smallest = 2 if any(len(i) == 1 for i in batches) and has_batch_norm(model) else 1
            used = [(done, i) for done, i in enumerate(batches, start=1) if len(i) >= smallest]
            if batches and not used:
                self._refuse(no_step_error("only batches of one example"))
            for (done, _), (x, y) in zip(used, self._stream([i for _, i in used], augment), strict=True):
                descent.clear()
                parts = self._parts(x, y, descent.scale, (*path, "dropout", taken))
                descent.backward(self._objectives(model, loss, parts, options.penalty, moved))
                optimizers.correct_gradient(named, self._config.clip_norm, options)
                descent.step()
                taken += 1
                self._progress(done, len(batches))
            descent.clear()  # the update is created next and is as large as the gradient
        self._team.finish(moved)
        if self._config.channels_last:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return taken

    def _refuse(self, error: RefusedError) -> None:
        """Handle a training without a step. Silo-level privacy overrides this, since the error reveals the data."""
        raise error

    def _parts(self, x: Tensor, y: Tensor, scale: float, path: Sequence[str | int]) -> list[StepPart]:
        """Divide a batch into micro-batches. Any process may compute each one, with the same bits.

        For this, the draws of a micro-batch follow from its position, and it has its own memory: matrix kernels sum in
        an order that depends on the alignment of rows to 64 bytes.
        scale: of the objectives   path: of the step's draws.
        """
        if not (size := self._config.micro_batch):
            return [StepPart((x, y), (1.0, scale))]
        pairs = zip(torch.split(x, size), torch.split(y, size), strict=True)
        return [
            StepPart((a.clone(), b), (len(a) / len(x), scale), rng.derive(self._context.seed, *path, number))
            for number, (a, b) in enumerate(pairs)
        ]

    def _objectives(
        self,
        model: nn.Module,
        loss: LossFn,
        parts: Sequence[StepPart],
        penalty: PenaltyFn | None,
        params: Sequence[nn.Parameter],
    ) -> Iterator[Tensor]:
        """Yield the objectives of a step: one, or one for each micro-batch. Their sum is minimised.

        While this process computes one, helpers compute the following ones; their gradients are added after it.
        Raises as `part_objective`.
        """
        for number in range(0, len(parts), self._team.size):
            self._team.deal(params, parts[number + 1 : number + self._team.size])
            objective = part_objective(model, loss, parts[number], self._config, self._device)
            if penalty is not None and number == 0:
                objective = objective + penalty(model)
            yield objective
            for gradients in self._team.collect():
                _add_gradients(params, gradients)

    def _stream(self, batches: Sequence[Tensor], augment: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Read training batches in order; on a GPU one thread reads ahead into pinned memory.

        One thread reads and one thread finishes at a time, so augmentation draws in the same order with the same bits.
        """
        examples = self._examples[Split.TRAIN]
        on_device = augment if self._config.augment_on_device else None

        def read(index: Tensor) -> tuple[Tensor, Tensor]:
            if on_device is not None:
                return examples.stored(index), examples.labels[index]
            return examples.batch(index, augment)

        def finished(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x, y = self._to_device(x, y)
            if on_device is not None:
                x = examples.prepared(x, on_device)
            return to_memory_format(x, self._config), y

        if not self._ahead:
            for index in batches:
                yield finished(*read(index))
            return
        with ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
            waiting: deque[Future[tuple[Tensor, Tensor]]] = deque()
            for index in batches:
                waiting.append(reader.submit(read, index))
                if len(waiting) > self._ahead:
                    yield finished(*waiting.popleft().result())
            while waiting:
                yield finished(*waiting.popleft().result())

    def _to_device(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self._device.type == "cuda" and x.device.type == "cpu":
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)

    def _batches(self, order: torch.Generator, steps: int) -> list[Tensor]:
        config = self._config
        return draw_batches(
            len(self._examples[Split.TRAIN]), config.batch_size, order, steps, drop_last=config.drop_last
        )

    def _read(self, split: Split, index: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self._examples[split].batch(index)
        return x.to(self._device), y.to(self._device)

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:  # noqa: ARG002
        """Sum a query over one split, without augmentation; `bound` is for private data and has no effect here.

        A survey is over both splits; its noisy form is suppressed as a whole, since no noise is added here. If a query
        needs classes, records with coarse labels are left out.
        """
        if isinstance(query, SurveySums) and query.private:
            return fully_withheld(query)
        if isinstance(query, SurveySums):
            train, test = self._examples[Split.TRAIN], self._examples[Split.TEST]
            return exact_answers(query, surveyed(query.questions, train, test, query.n_classes, self._progress))
        total: dict[str, Tensor] = {}
        with torch.no_grad():
            batches = torch.split(torch.arange(len(self._examples[split])), self._read_at_once(split))
            for done, index in enumerate(batches, start=1):
                x, y = _of_one_class(query, *self._read(split, index))
                for name, value in sum_batch(query, x, y).items():
                    total[name] = total[name] + value if name in total else value
                self._progress(done, len(batches))
        return {name: value.cpu() for name, value in total.items()}

    def _read_at_once(self, split: Split) -> int:
        return eval_batch(self._examples[split].batch(torch.zeros(0, dtype=torch.long))[0].shape[1:])

    def size(self) -> float:
        return float(self._context.units or len(self._examples[Split.TRAIN]))

    def class_counts(self) -> Tensor:
        if self._counts is None:
            labels = self._examples[Split.TRAIN].labels
            self._counts = class_counts(labels, self._context.n_classes).float()
        return self._counts

    def contributes(self) -> Tensor:
        return trained_classes(self._examples[Split.TRAIN].labels, self._context.n_classes)

    @property
    def multi_label(self) -> bool:
        return is_multi_label(self._examples[Split.TEST].labels)


def part_objective(model: nn.Module, loss: LossFn, part: StepPart, config: TrainConfig, device: torch.device) -> Tensor:
    """Return the objective of a part of a step, weighted by its share of the examples.

    Raises ConfigError (E-CFG-08) if a loss mixes the examples of a batch that is divided.
    """
    (x, y), (share, _) = part.tensors, part.numbers
    if part.seed is not None:
        rng.seed_torch(part.seed)
    amp = nullcontext() if config.amp == "off" else torch.autocast(device.type, optimizers.AMP[config.amp])
    with amp:
        losses = loss(model, x, y)
        if share < 1 and losses.coupled is not None:
            raise ConfigError("E-CFG-08", f"a loss that mixes the examples of a batch: {NO_MICRO_BATCH}")
        objective = losses.objective()
    return objective * share if share < 1 else objective


def _add_gradients(params: Sequence[nn.Parameter], gradients: Gradients) -> None:
    for p, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            p.grad = gradient.to(p.device, copy=True) if p.grad is None else p.grad.add_(gradient.to(p.device))


def to_memory_format(x: Tensor, config: TrainConfig) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if config.channels_last and x.dim() == 4 else x


def _of_one_class(query: Query, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out records whose class is unknown; a query about each single example does not need classes."""
    if is_multi_label(y):
        if isinstance(query, ClassSums | MomentSums):
            raise ConfigError(
                "E-CFG-08", "sums by class need one class for each record, and these are multi-label data"
            )
        return x, y
    labelled = has_class(y)
    return (x, y) if isinstance(query, ExampleSums) or bool(labelled.all()) else (x[labelled], y[labelled])


def eval_batch(shape: Sequence[int]) -> int:
    """Return the batch size for sums over examples of this shape."""
    return max(1, min(EVAL_BATCH, EVAL_NUMBERS // max(1, math.prod(shape))))


def draw_batches(n: int, size: int, order: torch.Generator, steps: int, *, drop_last: bool = False) -> list[Tensor]:
    """Draw the batches of `steps` steps over n examples.

    Raises DataError (E-DATA-08) if there are no examples; RefusedError (E-RUN-52) if drop_last leaves no batch.
    """
    if n == 0:
        raise DataError("E-DATA-08", "this silo has no training example")
    if drop_last and n < size:
        raise RefusedError(
            "E-RUN-52",
            f"expected a whole batch of {size} training examples with train.drop_last=true, found fewer examples: "
            "lower train.batch_size, or leave drop_last out",
        )
    batches: list[Tensor] = []
    while len(batches) < steps:
        batches += torch.split(torch.randperm(n, generator=order)[: n - n % size if drop_last else n], size)
    return batches[:steps]


def no_step_error(batches: str) -> RefusedError:
    """Create the error of a training whose batches are all left out; `batches` describes them."""
    return RefusedError(
        "E-RUN-52",
        f"expected a training step, found {batches}, which batch norm cannot normalise: set train.batch_size to 2 or "
        "more, take a model without batch norm (model.norm=group), or leave out hospitals with a single example",
    )


class LocalDataWrapper:
    """Delegates everything to other local data; a subclass overrides some methods."""

    def __init__(self, data: LocalData) -> None:
        self.lr, self.batch_size = data.lr, data.batch_size
        self._data = data

    def planned_steps(self, epochs: float | None = None) -> int:
        return self._data.planned_steps(epochs)

    def effective_steps(self, steps: int, mu: float = 0.0) -> float:
        return self._data.effective_steps(steps, mu)

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        return self._data.sgd(model, loss, options)

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        return self._data.sum(query, bound=bound, split=split)

    def size(self) -> float:
        return self._data.size()

    def class_counts(self) -> Tensor:
        return self._data.class_counts()

    def contributes(self) -> Tensor:
        return self._data.contributes()

    @property
    def multi_label(self) -> bool:
        return self._data.multi_label


def sum_batch(query: Query, x: Tensor, y: Tensor) -> Tensors:
    """Sum a query over one batch; raises TypeError on a survey, which needs all records."""
    if isinstance(query, SurveySums):
        raise TypeError("a survey covers all records, and a batch query was expected")
    if isinstance(query, BatchSums):
        return query.sums(x, y)
    if isinstance(query, ExampleSums):
        return {name: rows.sum(0) for name, rows in query.rows(x, y).items()}
    if isinstance(query, MomentSums):
        u, row = query.vectors(x, y).double(), torch.zeros_like(y) if query.joint else y
        one_hot = nn.functional.one_hot(row, query.n_classes).double()
        a = u.T @ u if query.second else u.new_zeros(query.width, query.width)
        return {"a": a, "b": one_hot.T @ u, "variance": u.new_zeros(())}
    vectors = query.vectors(x, y)
    total = vectors.new_zeros(query.n_classes, vectors.shape[1]).index_add_(0, y, vectors)
    return {"sum": total, "count": torch.bincount(y, minlength=query.n_classes).to(vectors.dtype)}


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
