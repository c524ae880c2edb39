"""Models of a wanted size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import nn

from fl_core import datasets
from fl_core.models import build_model
from fl_core.types import tensor_maps
from fl_core.types.records import Schema

CLASSES = tuple(f"class{k}" for k in range(10))
RESNET18 = 11_183_582
"""Numbers in the state of ResNet-18 for 3x32x32 and 10 classes, with 20 counters of BatchNorm, which do not travel."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, and the configuration and data that go with it.

    params: numbers in the model's state; sent: those that travel, float32; data(folder, silos, k): silo k's reference.
    """

    params: int
    sent: int
    overrides: Sequence[str]
    data: Callable[[Path, int, int], str]


def workload(params: int) -> Workload:
    """Choose ResNet-18 for its own size, else the digits CNN with the projection that comes closest."""
    if params == RESNET18:
        names = ",".join(CLASSES)
        words: list[str] = ["data=folder", "model=resnet18", "data.image_size=32", f"data.classes=[{names}]"]
        model = build_model("resnet18", {}, Schema((3, 32, 32), CLASSES), 0)
        return _workload(model, words, _folder)
    schema = datasets.schema_of("digits")
    widths = [(), *((width,) for width in {max(1, _width(params, schema) + d) for d in (-1, 0, 1)})]
    models = {w: build_model("digits_cnn", {"projection": list(w)}, schema, 0) for w in widths}
    best = min(widths, key=lambda w: abs(_size(models[w]) - params))
    words = ["data=digits", "model=digits_cnn", f"model.projection=[{','.join(map(str, best))}]"]
    return _workload(models[best], words, _digits)


def _folder(folder: Path, silos: int, k: int) -> str:
    del silos, k
    return f"folder:{_images(folder / 'images')}"


def _digits(folder: Path, silos: int, k: int) -> str:
    del folder
    return f"digits/iid-{silos}/{k}"


def _workload(model: nn.Module, words: Sequence[str], data: Callable[[Path, int, int], str]) -> Workload:
    return Workload(_size(model), tensor_maps.count(tensor_maps.copy_state(model)), words, data)


def _size(model: nn.Module) -> int:
    return sum(v.numel() for v in model.state_dict().values())


def _width(params: int, schema: Schema) -> int:
    """Solve size(width) = params; the size is a linear function of the width."""
    one, two = (_size(build_model("digits_cnn", {"projection": [w]}, schema, 0)) for w in (1, 2))
    return round((params - one) / (two - one)) + 1


def _images(folder: Path) -> Path:
    """Write two tiny images per class, once."""
    for k, name in enumerate(CLASSES if not folder.exists() else ()):
        (folder / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (32, 32), (20 * k, 100, 100 * i)).save(folder / name / f"{i}.png")
    return folder
