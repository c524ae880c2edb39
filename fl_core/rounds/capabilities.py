"""Refuses impossible combinations before round 0."""

from __future__ import annotations

from collections.abc import Collection

from fl_core.errors import ConfigError
from fl_core.tensors import nn
from fl_core.training.local_data import NO_MICRO_BATCH, has_batch_norm, no_step_error
from fl_core.types.enums import ANY_TARGET, Capability, Coupling
from fl_core.types.interfaces import Method
from fl_core.types.records import TrainConfig


def required_capabilities(train: TrainConfig, silos: int, cohort: int, quorum: int) -> set[Capability]:
    required = set[Capability]()
    if train.optimizer != "sgd":
        required.add(Capability.ADAPTIVE_OPTIMIZER)
    if 0 < cohort < silos or 0 < quorum < silos:
        required.add(Capability.PARTIAL_PARTICIPATION)
    return required


def check_multi_label(method: Method) -> None:
    """Raise ConfigError (E-CFG-08) on a method that cannot learn several labels at once, or only without prototypes."""
    check_supported(method, {Capability.MULTI_LABEL})
    if "prototypes" in getattr(method, "sends", ()):
        raise ConfigError(
            "E-CFG-08",
            f"method {method.name} cannot be used with {Capability.MULTI_LABEL.value}: prototypes need one class for "
            "each record; set method.prototypes=off",
        )


def check_supported(method: Method, required: Collection[Capability]) -> None:
    """Raise ConfigError (E-CFG-08) that names the method, the missing capability and the remedy."""
    for capability in sorted(required, key=lambda c: c.value):
        remedy = method.unsupported.get(capability)
        if capability in ANY_TARGET and capability not in getattr(method, "targets", ()):  # it may be another package's
            remedy = (
                remedy or "its loss needs one class for each record; choose fedavg, fedprox or scaffold, for instance"
            )
        if remedy and capability is Capability.SECURE_AGGREGATION:  # which is the default of runs
            remedy += "; or set secagg=off"
        if remedy:
            raise ConfigError("E-CFG-08", f"method {method.name} cannot be used with {capability.value}: {remedy}")


def check_batches(method: Method, model: nn.Module, train: TrainConfig) -> None:
    """Raise ConfigError (E-CFG-08) if a batch cannot be divided into micro-batches.

    Raises RefusedError (E-RUN-52) if no batch of the schedule can be a training step, for any data.
    """
    if train.batch_size == 1 and not method.exchanges and has_batch_norm(model):
        raise no_step_error("train.batch_size=1, batches of one example")
    if not train.micro_batch:
        return
    if method.coupling is Coupling.BATCH:
        raise ConfigError("E-CFG-08", f"method {method.name} has a loss that mixes examples: {NO_MICRO_BATCH}")
    if has_batch_norm(model):
        raise ConfigError(
            "E-CFG-08", f"the model has batch norm, which mixes examples: {NO_MICRO_BATCH}, or set model.norm=group"
        )
