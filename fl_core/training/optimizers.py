"""The local optimizer, made anew for every call of `sgd`, and how far its steps reach.

The update rules are torch's, by their functions. Its optimizer classes do the same around them, but the first object
of one in a process imports the compiler TorchDynamo, which training does not use: 879 modules, three quarters of the
time that `import torch` takes, in each silo and each simulation (ADR 0014).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fl_core.errors import ConfigError
from fl_core.types.records import TrainConfig

OPTIMIZERS = ("sgd", "adam")
AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of losses in training, by name."""


class Stepper(ABC):
    """An update rule over some parameters; one without a gradient is left out of a step.

    Raises ConfigError (E-CFG-41) on a negative rate, decay or momentum, and on Nesterov's without momentum.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        _require_range(lr=lr, weight_decay=weight_decay)
        self.parameters = list(parameters)
        self.lr = lr
        self.weight_decay = weight_decay

    def step(self) -> None:
        """Move the parameters along their gradients."""
        with torch.no_grad():
            self._move([i for i, p in enumerate(self.parameters) if p.grad is not None])

    @property
    def param_groups(self) -> list[dict[str, list[Tensor]]]:
        """Give the parameters as a `GradScaler` asks an optimizer for them."""
        return [{"params": self.parameters}]

    @abstractmethod
    def _move(self, having: list[int]) -> None:
        """Move the parameters of these places, which have a gradient."""

    def _chosen(self, having: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        chosen = [self.parameters[i] for i in having]
        return chosen, [p.grad for p in chosen if p.grad is not None]


class SGD(Stepper):
    """Stochastic gradient descent; equals `torch.optim.SGD` bit for bit."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(parameters, lr, weight_decay)
        _require_range(momentum=momentum)
        if nesterov and not momentum:
            raise ConfigError("E-CFG-41", "nesterov needs momentum > 0, found 0")
        self.momentum = momentum
        self.nesterov = nesterov
        self._buffers: list[Tensor | None] = [None] * len(self.parameters)

    def _move(self, having: list[int]) -> None:
        parameters, gradients = self._chosen(having)
        buffers = [self._buffers[i] for i in having] if self.momentum else []
        sgd(
            parameters, gradients, buffers, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay,
            nesterov=self.nesterov, dampening=0.0, maximize=False,
        )  # fmt: skip
        for i, buffer in zip(having, buffers, strict=False):  # none are kept without momentum
            self._buffers[i] = buffer


class Adam(Stepper):
    """Adam; equals `torch.optim.Adam` bit for bit, with its betas and epsilon.

    first, second: the moments of each parameter, taken over as they are and updated in place; None: zeros.
    steps: how many they have seen.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, *, weight_decay: float = 0.0,
        first: Iterable[Tensor] | None = None, second: Iterable[Tensor] | None = None, steps: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(parameters, lr, weight_decay)
        self.first = self._zeros() if first is None else list(first)
        self.second = self._zeros() if second is None else list(second)
        self.steps = [torch.tensor(float(steps)) for _ in self.parameters]

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p, memory_format=torch.preserve_format).detach() for p in self.parameters]

    def _move(self, having: list[int]) -> None:
        parameters, gradients = self._chosen(having)
        first, second, steps = ([kept[i] for i in having] for kept in (self.first, self.second, self.steps))
        adam(
            parameters, gradients, first, second, [], steps, lr=self.lr, weight_decay=self.weight_decay,
            beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


def _require_range(**settings: float) -> None:
    for name, value in settings.items():
        if not value >= 0:
            raise ConfigError("E-CFG-41", f"expected {name} >= 0, found {value}")


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float, config: TrainConfig) -> Stepper:
    """Make an optimizer with empty buffers; raises ConfigError (E-CFG-41) on a name that is none."""
    check(config)
    if config.optimizer == "adam":
        return Adam(parameters, lr, weight_decay=config.weight_decay)
    return SGD(parameters, lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov)


def split(
    named: Mapping[str, nn.Parameter], plain: Callable[[str], bool] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Tell the parameters that follow the schedule from those that take bare steps, without momentum or decay."""
    if plain is None:
        return list(named.values()), []
    return [p for name, p in named.items() if not plain(name)], [p for name, p in named.items() if plain(name)]


def make_steppers(
    named: Mapping[str, nn.Parameter], lr: float, config: TrainConfig, plain: Callable[[str], bool] | None = None
) -> list[Stepper]:
    """Make the optimizers of a pass: the schedule's, and bare steps (no momentum or decay) for what `plain` selects."""
    full, bare = split(named, plain)
    return ([make_optimizer(full, lr, config)] if full else []) + ([SGD(bare, lr)] if bare else [])


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
        self._steppers = make_steppers(named, lr, config, plain)
        self._scaler = GradScaler(device) if config.amp == "fp16" else None

    def clear(self) -> None:
        """Forget the last gradient, before a forward pass needs its memory."""
        for p in self._parameters:
            p.grad = None

    def backward(self, objective: Tensor) -> None:
        """Add the gradient of a scalar to `grad` of every parameter."""
        if self._scaler is None:
            objective.backward()  # type: ignore[no-untyped-call]
            return
        self._scaler.scale(objective).backward()  # type: ignore[no-untyped-call]
        for stepper in self._steppers:
            self._scaler.unscale_(cast(torch.optim.Optimizer, stepper))

    def step(self) -> None:
        """Take a step along what `grad` holds now; none where float16 overflowed."""
        if self._scaler is None:
            for stepper in self._steppers:
                stepper.step()
            return
        for stepper in self._steppers:
            self._scaler.step(cast(torch.optim.Optimizer, stepper))
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
