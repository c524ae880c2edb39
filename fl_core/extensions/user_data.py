"""Data sets of users: subclasses of `ArrayData` in another distribution or a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fl_core.datasets.augmentation import Augmentation
from fl_core.datasets.partition.federations import SiloIndices
from fl_core.datasets.sources import arrays
from fl_core.datasets.sources.arrays import FullDataset, SplitArrays
from fl_core.errors import ConfigError, DataError
from fl_core.extensions import registry
from fl_core.tensors import Tensor, torch
from fl_core.types.records import Schema

Split = tuple[Tensor | ArrayLike, Tensor | ArrayLike]
"""x (n, *shape), bytes or floats, and y (n,), positions in the classes."""


class ArrayData(ABC):
    """A data set that fits in memory.

    Attributes:
        shape: of one example; (channels, height, width) of an image
        classes: the label space, in order
        augmentation: of training images, if `train.augment` is on
        mean, std: per channel, of images in [0, 1]
        model: the default model

    `read` is called once per process. Images are uint8, everything else float32. A hospital reads its own examples; a
    simulation divides the examples among its silos.
    """

    shape: ClassVar[tuple[int, ...]]
    classes: ClassVar[tuple[str, ...]]
    augmentation: ClassVar[Augmentation] = Augmentation()
    mean: ClassVar[tuple[float, ...]] = ()
    std: ClassVar[tuple[float, ...]] = ()
    model: ClassVar[str] = ""

    @abstractmethod
    def read(self, root: Path | None) -> tuple[Split, Split]:
        """Return train and test; root: the folder of --data-root or CONSILIUM_DATA_ROOT, None without one."""


def require(name: str, value: object) -> None:
    """Raise ConfigError (E-CFG-02) if a value is no valid data set, without reading its examples."""
    kind = value if isinstance(value, type) else type(value)
    if not issubclass(kind, ArrayData):
        raise ConfigError("E-CFG-02", f"{name}: expected a class below ArrayData, found {kind.__name__}")
    schema = schema_of(value)
    sound = all(type(side) is int and 0 < side < 2**31 for side in schema.shape) and schema.shape
    if not sound or len(set(schema.classes)) < 2 or len(set(schema.classes)) < len(schema.classes):
        raise ConfigError(
            "E-CFG-02",
            f"{name}: expected a shape of whole numbers > 0 and at least 2 different classes, found {schema}",
        )


def schema_of(value: object) -> Schema:
    shape, classes = getattr(value, "shape", ()), getattr(value, "classes", ())
    return Schema(tuple(shape), tuple(map(str, classes)))


def is_own(name: str) -> bool:
    return registry.loaded("data", name) is not None


def schema(name: str) -> Schema | None:
    """Return the schema of a loaded data set; None if there is none of this name."""
    dataset = registry.loaded("data", name)
    return None if dataset is None else schema_of(dataset)


def clear_cache() -> None:
    """Clear the cache, since another data set or partition may get the same name."""
    arrays.clear_cache()


def read(name: str, root: Path | None) -> FullDataset:
    """Read a loaded data set; raises DataError (E-DATA-05, E-DATA-07) if its arrays do not match its class."""
    dataset = registry.loaded("data", name)
    made = dataset() if isinstance(dataset, type) else dataset
    assert isinstance(made, ArrayData)
    expected = schema_of(made)
    try:
        train, test = made.read(root)
        halves = _split(name, expected, "train", *train), _split(name, expected, "test", *test)
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            "E-DATA-07", f"{name}: expected ((x, y), (x, y)) of train and test, found {type(error).__name__}: {error}"
        ) from error
    return FullDataset(name, expected.classes, *halves, made.augmentation, made.mean, made.std)


def _split(name: str, expected: Schema, split: str, x: object, y: object) -> SplitArrays:
    values, labels = torch.as_tensor(x), torch.as_tensor(y)
    if values.dtype != torch.uint8:
        values = values.float()
    if tuple(values.shape[1:]) != expected.shape or labels.shape != values.shape[:1]:
        raise DataError(
            "E-DATA-07",
            f"{name}, {split}: expected x (n, {', '.join(map(str, expected.shape))}) and y (n,), found "
            f"{tuple(values.shape)} and {tuple(labels.shape)}",
        )
    if values.dtype == torch.float32 and not bool(torch.isfinite(values).all()):
        raise DataError("E-DATA-07", f"{name}, {split}: expected finite numbers, found NaN or infinity: clean the data")
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise DataError("E-DATA-05", f"{name}, {split}: expected whole labels, found fractions: round or correct them")
    whole = labels.to(torch.int64)
    if len(whole) and not 0 <= int(whole.min()) <= int(whole.max()) < len(expected.classes):
        raise DataError(
            "E-DATA-05",
            f"{name}, {split}: expected labels from 0 to {len(expected.classes) - 1}, found {int(whole.min())} to "
            f"{int(whole.max())}: correct them or name the classes",
        )
    return SplitArrays(values.contiguous().cpu(), whole.cpu().numpy().astype(np.int64))


def load_whole(name: str, root: Path | None, classes: Sequence[str] | None) -> arrays.ArrayShare:
    """Return a whole data set as the data of one hospital."""
    whole = arrays.cached(read, name, root)
    indices = SiloIndices(np.arange(len(whole.train.y)), np.arange(len(whole.test.y)))
    return arrays.ArrayShare(whole, indices, tuple(classes or whole.classes), name)
