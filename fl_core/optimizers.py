"""The local optimizer, made anew for every call of `sgd`, and how far its steps reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from fl_core.errors import ConfigError
from fl_core.records import TrainConfig

OPTIMIZERS = ("sgd", "adam")


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float, config: TrainConfig) -> torch.optim.Optimizer:
    """Make an optimizer with empty buffers; raises ConfigError (E-CFG-41) on a name that is none."""
    check(config)
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters, lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov
    )


def make_steppers(
    named: Mapping[str, nn.Parameter], lr: float, config: TrainConfig, plain: Callable[[str], bool] | None = None
) -> list[torch.optim.Optimizer]:
    """Make the optimizers of a pass: the schedule's, and bare steps (no momentum or decay) for what `plain` selects."""
    bare = [p for name, p in named.items() if plain is not None and plain(name)]
    full = [p for name, p in named.items() if plain is None or not plain(name)]
    steppers = [make_optimizer(full, lr, config)] if full else []
    return [*steppers, torch.optim.SGD(bare, lr)] if bare else steppers


AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of losses in training, by name."""


def check(config: TrainConfig) -> None:
    """Raise ConfigError (E-CFG-41) on an optimizer that does not exist or options that do not go together."""
    if config.optimizer not in OPTIMIZERS:
        raise ConfigError("E-CFG-41", f"expected train.optimizer of {OPTIMIZERS}, found {config.optimizer!r}")
    if config.amp not in AMP:
        raise ConfigError("E-CFG-41", f"expected train.amp of {tuple(AMP)}, found {config.amp!r}")
    if config.nesterov and (config.momentum <= 0 or config.optimizer != "sgd"):
        raise ConfigError("E-CFG-41", "train.nesterov needs train.optimizer=sgd and train.momentum > 0")


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
