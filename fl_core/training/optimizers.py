"""The local optimizer, created anew for every call of `sgd`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, Optimizer

from fl_core.types.records import TrainConfig
from fl_core.types.values import SgdOptions

AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of losses in training, by name."""


class _NeverCompiled(Optimizer):
    """The methods of torch's optimizers, without the wrapper that excludes them from compilation.

    The wrapper imports the compiler, which takes a second: a third of a short run. It is not needed, since only
    features are compiled here.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        inspect.unwrap(Optimizer.zero_grad)(self, set_to_none)


class _Sgd(_NeverCompiled, SGD):
    step = torch.no_grad()(inspect.unwrap(SGD.step))


class _Adam(_NeverCompiled, Adam):
    step = torch.no_grad()(inspect.unwrap(Adam.step))


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float, config: TrainConfig) -> Optimizer:
    """Make an optimizer with empty buffers."""
    if config.optimizer == "adam":
        return _Adam(parameters, lr, weight_decay=config.weight_decay)
    return _Sgd(parameters, lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov)


def split_by_momentum(
    named: Mapping[str, nn.Parameter], no_momentum: Callable[[str], bool] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters: those that follow the schedule, and those of `no_momentum`, without momentum or decay."""
    if no_momentum is None:
        return list(named.values()), []
    plain = {name for name in named if no_momentum(name)}
    return [p for name, p in named.items() if name not in plain], [p for name, p in named.items() if name in plain]


def make_optimizers(
    named: Mapping[str, nn.Parameter], lr: float, config: TrainConfig, no_momentum: Callable[[str], bool] | None = None
) -> list[Optimizer]:
    """Make the optimizers of a pass: the schedule's, and plain SGD for parameters that `no_momentum` selects."""
    scheduled, plain = split_by_momentum(named, no_momentum)
    return ([make_optimizer(scheduled, lr, config)] if scheduled else []) + ([_Sgd(plain, lr)] if plain else [])


def correct_gradient(named: Mapping[str, nn.Parameter], clip_norm: float, options: SgdOptions) -> None:
    """Clip the gradient of a step to a norm (0: no clipping), then add the shift; for plain and private data.

    | term                                                  | clipped |
    |-------------------------------------------------------|---------|
    | loss (in private data: after its clip and noise)      | yes     |
    | penalty, which is added to the loss                   | yes     |
    | shift: a correction of the step                       | no      |
    | weight decay, momentum of the optimizer               | no      |
    | all terms of parameters in `no_momentum`              | no      |
    """
    if clip_norm:
        scheduled, _ = split_by_momentum(named, options.no_momentum)
        torch.nn.utils.clip_grad_norm_(scheduled, clip_norm)
    for name, value in (options.shift or {}).items():
        if name in named and (grad := named[name].grad) is not None:
            grad.add_(value.to(grad))


class GradientDescent:
    """The steps of one pass over named parameters: gradients of an objective, then a step of every optimizer.

    In float16, gradients are scaled during the computation, so that small ones do not become 0.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        lr: float,
        config: TrainConfig,
        no_momentum: Callable[[str], bool] | None = None,
        device: str = "cpu",
    ) -> None:
        self._optimizers = make_optimizers(named, lr, config, no_momentum)
        self._scaler = GradScaler(device, enabled=config.amp == "fp16")

    @property
    def scale(self) -> float:
        """Factor on objectives in float16; otherwise 1."""
        return float(self._scaler.get_scale())

    def clear(self) -> None:
        """Free the last gradient before a forward pass needs its memory."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def backward(self, objectives: Iterable[Tensor]) -> None:
        """Add up the gradients of objectives; each is computed after the previous one is freed."""
        for objective in objectives:
            self._scaler.scale(objective).backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)

    def step(self) -> None:
        """Take a step along the present `grad`; skip it if float16 overflowed."""
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
