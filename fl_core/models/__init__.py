"""The models by name: frozen dataclasses of options, built from the schema of the run's examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from fl_core import rng
from fl_core.errors import ConfigError
from fl_core.models.digits_cnn import DigitsCnn
from fl_core.models.efficientnet import EfficientNetB0
from fl_core.models.resnet import ResNet18
from fl_core.models.simple_cnn import SimpleCnn
from fl_core.models.split import SplitModel
from fl_core.options import from_mapping
from fl_core.types import Schema
from fl_core.words import nearest

__all__ = ["MODELS", "ModelFacts", "ModelOptions", "SplitModel", "build_model", "describe", "model_options"]

MODELS: Mapping[str, type[DigitsCnn] | type[SimpleCnn] | type[ResNet18] | type[EfficientNetB0]] = {
    "digits_cnn": DigitsCnn,
    "simple_cnn": SimpleCnn,
    "resnet18": ResNet18,
    "efficientnet_b0": EfficientNetB0,
}


class ModelOptions(Protocol):
    """A frozen dataclass of one architecture's options."""

    def build(self, schema: Schema) -> SplitModel:
        """Make the model with fresh weights from torch's global generator."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a person wants to know of a model before a run.

    parameters counts trainable numbers; total_with_buffers adds every buffer, BatchNorm's counters included.
    """

    name: str
    feature_dim: int
    parameters: int
    total_with_buffers: int


def model_options(name: str, options: Mapping[str, object]) -> ModelOptions:
    """Check a model's name and options; raises ConfigError (E-CFG-20, E-CFG-21, E-CFG-22) with the nearest name."""
    if name not in MODELS:
        raise ConfigError("E-CFG-20", f"there is no model {name!r}: {nearest(name, MODELS)}")
    return from_mapping(MODELS[name], name, options)


def build_model(name: str, options: Mapping[str, object], schema: Schema, seed: int) -> SplitModel:
    """Build a model with the initial weights of this seed; raises ConfigError (E-CFG-20 to E-CFG-24).

    Guarantees: equal seeds give equal weights; torch's global generator is as before.
    """
    chosen = model_options(name, options)
    with rng.torch_scope(seed, "model"):
        return chosen.build(schema)


def describe(name: str, schema: Schema, options: Mapping[str, object] | None = None) -> ModelFacts:
    """Count a model's numbers."""
    model = build_model(name, options or {}, schema, seed=0)
    return ModelFacts(name, model.feature_dim, *_counts(model))


def _counts(model: nn.Module) -> tuple[int, int]:
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return parameters, sum(v.numel() for v in model.state_dict().values())
