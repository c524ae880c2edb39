"""The local optimizer, made anew for every call of `sgd`, and how far its steps reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from fl_core.errors import ConfigError
from fl_core.records import TrainConfig
from fl_core.rows import RowOptimizer, lay

OPTIMIZERS = ("sgd", "adam")


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float, config: TrainConfig) -> torch.optim.Optimizer:
    """Make an optimizer with empty buffers; raises ConfigError (E-CFG-41) on a name that is none."""
    check(config)
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters, lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov
    )


AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of losses in training, by name."""


class Stepper(Protocol):
    """What takes a step along the gradients of its parameters."""

    def step(self) -> object:
        """Take one."""
        ...


def split(
    named: Mapping[str, nn.Parameter], plain: Callable[[str], bool] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Tell the parameters that follow the schedule from those that take bare steps, without momentum or decay."""
    if plain is None:
        return list(named.values()), []
    return [p for name, p in named.items() if not plain(name)], [p for name, p in named.items() if plain(name)]


def make_optimizers(
    named: Mapping[str, nn.Parameter], lr: float, config: TrainConfig, plain: Callable[[str], bool] | None = None
) -> list[torch.optim.Optimizer]:
    """Make the optimizers of a pass: the schedule's, and bare steps (no momentum or decay) for what `plain` selects."""
    full, bare = split(named, plain)
    return ([make_optimizer(full, lr, config)] if full else []) + ([torch.optim.SGD(bare, lr)] if bare else [])


def make_steppers(
    named: Mapping[str, nn.Parameter], lr: float, config: TrainConfig, plain: Callable[[str], bool] | None = None
) -> list[Stepper]:
    """Equal `make_optimizers` in every step, bit for bit; few numbers in many tensors are laid in a row for it."""

    def scheduled(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(parameters, lr, config)

    def bare(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr)

    both = zip(split(named, plain), (scheduled, bare), strict=True)
    return [_stepper(parameters, make) for parameters, make in both if parameters]


def _stepper(
    parameters: list[nn.Parameter], make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
) -> Stepper:
    row = lay(parameters)
    return make(parameters) if row is None else RowOptimizer(parameters, row, make)


def check(config: TrainConfig) -> None:
    """Raise ConfigError (E-CFG-41) on an optimizer that does not exist or options that do not go together."""
    if config.optimizer not in OPTIMIZERS:
        raise ConfigError("E-CFG-41", f"expected train.optimizer of {OPTIMIZERS}, found {config.optimizer!r}")
    if config.amp not in AMP:
        raise ConfigError("E-CFG-41", f"expected train.amp of {tuple(AMP)}, found {config.amp!r}")
    if config.nesterov and (config.momentum <= 0 or config.optimizer != "sgd"):
        raise ConfigError("E-CFG-41", "train.nesterov needs train.optimizer=sgd and train.momentum > 0")


class Descent:
    """The steps of one pass over named parameters: gradients of an objective, then a step of every optimizer.

    In float16, gradients are scaled while they are computed, so that small ones do not become 0.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        lr: float,
        config: TrainConfig,
        plain: Callable[[str], bool] | None = None,
        device: str = "cpu",
    ) -> None:
        self._parameters = tuple(named.values())
        self._scaler: GradScaler | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._steppers: list[Stepper] = []
        if config.amp == "fp16":
            self._scaler = GradScaler(device)
            self._optimizers = make_optimizers(named, lr, config, plain)
        else:
            self._steppers = make_steppers(named, lr, config, plain)

    def backward(self, objective: Tensor) -> None:
        """Put the gradient of a scalar into `grad` of every parameter, in place of the last one."""
        for p in self._parameters:
            p.grad = None
        if self._scaler is None:
            objective.backward()  # type: ignore[no-untyped-call]
            return
        self._scaler.scale(objective).backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)

    def step(self) -> None:
        """Take a step along what `grad` holds now; none where float16 overflowed."""
        for stepper in self._steppers:
            stepper.step()
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.step(optimizer)
            self._scaler.update()


def effective_steps(config: TrainConfig, steps: int, pull: float = 0.0) -> float:
    """Return A: how far `steps` steps move a scalar under the constant gradient 1, in units of -lr.

    Found by running the optimizer's own recursion, so it covers heavy-ball and Nesterov momentum; weight decay is part
    of the objective and left out. pull: lr * mu of a proximal term, whose gradient enters like the loss's.
    SGD gives A = K; momentum rho gives (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho); a pull without momentum gives
    (1 - (1 - pull)^K) / pull. Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in
    Heterogeneous Federated Optimization", NeurIPS 2020, section 4.
    Raises ConfigError (E-CFG-08) for an adaptive optimizer, which has no such number.
    """
    if config.optimizer != "sgd":
        raise ConfigError(
            "E-CFG-08", f"expected train.optimizer=sgd, found {config.optimizer!r}: its steps have no common length"
        )
    moved = buffer = 0.0
    for _ in range(steps):
        gradient = 1.0 - pull * moved
        buffer = config.momentum * buffer + gradient
        moved += gradient + config.momentum * buffer if config.nesterov else buffer
    return moved
