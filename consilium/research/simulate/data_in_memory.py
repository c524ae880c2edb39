"""Data in memory as a data set: arrays, torch datasets, MONAI dictionaries, Hugging Face datasets.

Each split, train and test, is read once into one array. Needs none of these libraries: it uses only the length and the
index of a dataset.

| a split                                  | an example is                                                             |
|------------------------------------------|---------------------------------------------------------------------------|
| (x, y), two arrays                       | a row of each                                                             |
| a torch dataset                          | (image, label)                                                            |
| a MONAI dataset, a list of dictionaries  | {"image": ..., "label": ...}, with transforms applied                     |
| a Hugging Face dataset                   | the column with feature Image, and that with ClassLabel, which has names  |

An image is an array or tensor with channels first, or a PIL image. A label is the index of a class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from PIL import Image
from torch import Tensor

from fl_core.errors import ConfigError, DataError
from fl_core.extensions.user_data import ArrayData, Split
from fl_core.types.values import Examples

_IMAGES, _LABELS = ("image", "img", "images", "pixel_values"), ("label", "labels", "class", "target")
_MOST_CLASSES = 100_000


class DataInMemory(ArrayData):
    """Train and test data, read when created. Classes come from the data sets' names, or from the highest label.

    Raises ConfigError (E-CFG-02) on splits in another form than the table lists; DataError (E-DATA-07) on an invalid
    example, with its position.
    """

    def __init__(self, train: object, test: object) -> None:
        self._halves = _read("train", train), _read("test", test)
        names = [found for found in map(_class_names, (train, test)) if found]
        if any(other != names[0] for other in names):
            raise ConfigError(
                "E-CFG-02",
                f"data: expected the same classes in train and test, found {names[0]} and {names[1]}"[:300]
                + ": use one list of classes",
            )
        highest = max((int(y.max()) for _, y in self._halves if y.numel()), default=0)
        counted = tuple(map(str, range(max(2, min(highest, _MOST_CLASSES) + 1))))
        self.shape = tuple(self._halves[0][0].shape[1:])  # type: ignore[misc]
        self.classes = names[0] if names else counted  # type: ignore[misc]
        hasher = blake3()
        for values in (*self._halves[0], *self._halves[1]):
            hasher.update(f"{values.dtype} {tuple(values.shape)}".encode())
            hasher.update(values.detach().cpu().contiguous().numpy().tobytes())
        if names:
            hasher.update("\n".join(self.classes).encode())
        self.digest = hasher.hexdigest()

    def read(self, root: Path | None) -> tuple[Split, Split]:
        del root
        return self._halves


def halves_of(data: object) -> tuple[object, object] | None:
    """Return train and test data from a pair or a mapping such as Hugging Face's; None for anything else."""
    if isinstance(data, tuple) and len(data) == 2:
        return data
    if not isinstance(data, Mapping):
        return None
    tests = [name for name in ("test", "validation", "valid") if name in data]
    if "train" not in data or not tests:
        raise ConfigError(
            "E-CFG-02",
            f"data: expected the splits train and test, found {', '.join(map(str, data))[:200] or 'none'}: rename them",
        )
    return data["train"], data[tests[0]]


def _read(split: str, half: object) -> tuple[Tensor, Tensor]:
    if isinstance(half, Examples):
        half = half.batch(torch.arange(len(half)))
    if isinstance(half, tuple | list) and len(half) == 2 and not isinstance(half[0], Mapping):
        return _arrays(half[0], half[1])
    indexed = hasattr(half, "__getitem__") and hasattr(half, "__len__")
    if not indexed or isinstance(half, str | bytes | np.ndarray | Tensor):
        raise ConfigError(
            "E-CFG-02",
            "data: expected (x, y) for train and test, or datasets with a length and an index, found "
            f"{type(half).__name__}: convert it",
        )
    return _of_rows(split, half)


def _arrays(x: object, y: object) -> tuple[Tensor, Tensor]:
    try:
        return torch.as_tensor(x), torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("E-CFG-02", f"data: expected arrays (x, y), found {error}: convert them") from error


def _of_rows(split: str, rows: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - of any library
    if hasattr(rows, "features") and callable(getattr(rows, "with_format", None)):
        rows = rows.with_format(None)  # PIL images and plain numbers, whatever format the caller has set
    keys = _keys(split, rows)
    images, labels = list[Tensor](), list[int]()
    for k in range(len(rows)):
        image, label = _example(split, k, rows[k], keys)
        if images and (image.shape, image.dtype) != (images[0].shape, images[0].dtype):
            raise DataError(
                "E-DATA-07",
                f"data, {split}, example {k}: expected an image of shape {tuple(images[0].shape)} ({images[0].dtype}) "
                f"like the first, found {tuple(image.shape)} ({image.dtype}): resize all to one size in the dataset's "
                "transform",
            )
        images.append(image)
        labels.append(label)
    if not images:
        raise DataError("E-DATA-07", f"data, {split}: expected examples, found none: add some")
    return torch.stack(images), torch.tensor(labels)


def _keys(split: str, rows: Any) -> tuple[str, str] | None:  # noqa: ANN401
    """Return the columns of image and label from the declared features; None if there are no features."""
    features = getattr(rows, "features", None)
    if not isinstance(features, Mapping):
        return None
    kinds = {str(name): type(feature).__name__ for name, feature in features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    chosen = _only(images, _IMAGES, kinds), _only(labels, _LABELS, kinds)
    if chosen[0] is None or chosen[1] is None:
        raise DataError(
            "E-DATA-07",
            f"data, {split}: expected one feature Image and one ClassLabel, found {kinds}: choose them with "
            "select_columns, or name them image and label"[:600],
        )
    return chosen[0], chosen[1]


def _only(of_kind: Sequence[str], usual: Sequence[str], kinds: Mapping[str, str]) -> str | None:
    """Return the only column of a kind, or the one with a usual name."""
    named = [name for name in usual if name in (of_kind or kinds)]
    return of_kind[0] if len(of_kind) == 1 else named[0] if named else None


def _class_names(half: object) -> tuple[str, ...]:
    """Return the class names that a dataset declares; empty if it declares none."""
    features = getattr(half, "features", None)
    names: object = None
    if isinstance(features, Mapping):
        keys = _keys("train", half)
        names = getattr(features[keys[1]], "names", None) if keys else None
    elif not isinstance(half, tuple | list | Tensor | np.ndarray):
        names = getattr(half, "classes", None)  # torchvision's
    if not isinstance(names, list | tuple):
        return ()
    return tuple(map(str, names))


def _example(split: str, k: int, row: object, keys: tuple[str, str] | None) -> tuple[Tensor, int]:
    if isinstance(row, Mapping):
        names = keys or (_only((), _IMAGES, row), _only((), _LABELS, row))
        if names[0] not in row or names[1] not in row:
            keys_of_row = ", ".join(map(str, row))[:200]
            raise DataError(
                "E-DATA-07",
                f"data, {split}, example {k}: expected the keys image and label, found {keys_of_row}: rename them",
            )
        image, label = row[names[0]], row[names[1]]
    elif isinstance(row, tuple | list) and len(row) == 2:
        image, label = row
    else:
        raise DataError(
            "E-DATA-07",
            f"data, {split}, example {k}: expected (image, label) or {{'image': ..., 'label': ...}}, found "
            f"{type(row).__name__}: map the dataset to one of these forms",
        )
    try:
        return _image(image), _label(label)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            "E-DATA-07", f"data, {split}, example {k}: expected an image and a label, found {error}: correct it"
        ) from error


def _image(image: object) -> Tensor:
    if isinstance(image, Image.Image):
        pixels = np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        return torch.from_numpy(np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)))
    tensor = torch.as_tensor(image) if isinstance(image, Tensor) else torch.as_tensor(np.asarray(image))
    return tensor.as_subclass(Tensor).detach().cpu()  # MONAI's tensors carry metadata


def _label(label: object) -> int:
    value = np.asarray(label.detach().cpu() if isinstance(label, Tensor) else label)
    if value.size != 1 or value.dtype.kind not in "iufb" or float(value.reshape(())) != int(value.reshape(())):
        raise ValueError(f"a label that is not the index of a class, {label!r}"[:200])
    return int(value.reshape(()))
