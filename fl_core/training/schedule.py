"""Properties of a schedule: its effective number of steps, and its options that only plain training supports."""

from __future__ import annotations

from fl_core.errors import ConfigError
from fl_core.types.records import TrainConfig


def of_plain_training(config: TrainConfig) -> tuple[str, str] | None:
    """Return the first configuration key that only plain training supports: its default and its value."""
    off = TrainConfig()
    for name in ("amp", "channels_last", "cudnn_benchmark", "compile", "augment_on_device", "micro_batch"):
        wanted, setting = (f"train.{name}={str(getattr(c, name)).lower()}" for c in (off, config))
        if setting != wanted:
            return wanted, setting
    return None


def effective_steps(config: TrainConfig, steps: int, proximal: float = 0.0) -> float:
    """Return A, the effective number of steps: how far they move a scalar of constant gradient 1, in units of -lr.

    It is computed by the optimizer's own recursion, so it covers heavy-ball and Nesterov momentum. Weight decay is part
    of the objective and left out. proximal: lr * mu of a proximal term, whose gradient is added to the loss's.
    SGD gives A = K; momentum rho gives (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho); a proximal term p without
    momentum gives (1 - (1 - p)^K) / p. Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem
    in Heterogeneous Federated Optimization", NeurIPS 2020, section 4.
    Raises ConfigError (E-CFG-08) for an adaptive optimizer, which has no such number.
    """
    if config.optimizer != "sgd":
        raise ConfigError(
            "E-CFG-08", f"expected train.optimizer=sgd, found {config.optimizer!r}: its steps have no common length"
        )
    moved = buffer = 0.0
    for _ in range(steps):
        gradient = 1.0 - proximal * moved
        buffer = config.momentum * buffer + gradient
        moved += gradient + config.momentum * buffer if config.nesterov else buffer
    return moved
