"""Every model at a small size, for their tests."""

from __future__ import annotations

from fl_core.models import MODELS, SplitModel, build_model
from fl_core.types.records import Schema

SHAPES = dict.fromkeys(MODELS, (3, 32, 32)) | {
    "digits_cnn": (1, 8, 8),
    "digits_mlp": (1, 8, 8),
    "digits_linear": (1, 8, 8),
    "lenet": (1, 28, 28),
    "mlp_net": (1, 28, 28),
    "wrn28_10": (3, 8, 8),
    "resnet50": (3, 16, 16),
    "resnet56": (3, 16, 16),
    "efficientnet_b0": (3, 64, 64),
    "char_lstm": (12,),
    "spiral_mlp": (2,),
}


def schema(shape: tuple[int, ...], classes: int = 10) -> Schema:
    return Schema(shape, tuple(map(str, range(classes))))


def small(name: str, seed: int = 0, **options: object) -> SplitModel:
    return build_model(name, options, schema(SHAPES[name]), seed)
