"""The refusal of a combination that cannot work, before round 0."""

from __future__ import annotations

from collections.abc import Collection

from fl_core.errors import ConfigError
from fl_core.types.enums import Capability
from fl_core.types.interfaces import Method
from fl_core.types.records import TrainConfig


def required_capabilities(train: TrainConfig, silos: int, cohort: int, quorum: int) -> set[Capability]:
    asked = set[Capability]()
    if train.optimizer != "sgd":
        asked.add(Capability.ADAPTIVE_OPTIMIZER)
    if 0 < cohort < silos or 0 < quorum < silos:
        asked.add(Capability.PARTIAL_PARTICIPATION)
    return asked


def check_supported(method: Method, asked: Collection[Capability]) -> None:
    """Raise ConfigError (E-CFG-08) that names the method, what it lacks and the remedy."""
    for capability in sorted(asked, key=lambda c: c.value):
        if remedy := method.unsupported.get(capability):
            raise ConfigError("E-CFG-08", f"method {method.name} does not go with {capability.value}: {remedy}")
