"""Data by reference: parse it, check it, load it, or know its schema without having it.

sources/    one reader per source
partition/  how examples are divided among silos

`references` has the names of all sources, `catalogue` what is known of the public ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_core.datasets import own_data
from fl_core.datasets.catalogue import KNOWN
from fl_core.datasets.checks import CheckProblem, CheckReport, SourceIndex
from fl_core.datasets.examples import ArrayExamples, SiloDataset, TensorExamples
from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.datasets.partition.federations import Partitioner, federation_text, parse_federation
from fl_core.datasets.references import SOURCES, DataRef, federation, parse, resolved
from fl_core.datasets.sources import (
    arrays,
    class_folders,
    csv_manifest,
    digits,
    image_folders,
    isic2019,
    leaf,
    spiral,
    torchvision,
)
from fl_core.errors import ConfigError, DataError
from fl_core.rounds import extensions
from fl_core.types.records import Schema

__all__ = [
    "DATA_ROOT",
    "SOURCES",
    "ArrayExamples",
    "CheckProblem",
    "CheckReport",
    "DataRef",
    "ImageExamples",
    "SiloDataset",
    "TensorExamples",
    "check",
    "federation",
    "federation_text",
    "load",
    "parse",
    "parse_federation",
    "resolved",
    "schema_of",
]

DATA_ROOT = "CONSILIUM_DATA_ROOT"
SIZES = range(8, 2049)
READERS: Mapping[str, arrays.Reader] = {
    "spiral": spiral.read,
    "femnist": leaf.read,
    "shakespeare": leaf.read,
    **dict.fromkeys(torchvision.MARKS, torchvision.read),
}
FIXED: Mapping[str, Schema] = {
    "digits": Schema(digits.SHAPE, digits.CLASSES),
    "spiral": Schema(spiral.SHAPE, spiral.CLASSES),
    **{name: Schema(known.shape, known.classes) for name, known in KNOWN.items()},
}
"""The data sets whose examples have one shape."""


def load(
    reference: str,
    *,
    data_root: Path | None = None,
    classes: Sequence[str] | None = None,
    image_size: int | None = None,
) -> SiloDataset:
    """Load a silo's data, images lazily; existence and labels of all of them are verified first.

    data_root:  where named data sets lie; None takes the environment variable CONSILIUM_DATA_ROOT
    classes:    the run's label space, in order; None takes the data set's own
    image_size: pixels; None takes the data set's default
    Raises ConfigError (E-CFG-01, E-CFG-23) for what is asked, one DataError (E-DATA-..) for all that is wrong.
    """
    found = _find(reference, data_root, classes, image_size)
    if isinstance(found, SourceIndex):
        return found.dataset(_transform(parse(reference).source, image_size))
    return found.dataset()


def check(
    reference: str,
    *,
    data_root: Path | None = None,
    classes: Sequence[str] | None = None,
    image_size: int | None = None,
    deep: bool = False,
) -> CheckReport:
    """Look at a silo's data without training; the same settings as `load`.

    deep: decode every image to its end. Raises where there is nothing to look at (E-DATA-02, E-DATA-07); all other
    faults are in the report's `problems`.
    """
    found = _find(reference, data_root, classes, image_size)
    return found.deep_report() if deep and isinstance(found, SourceIndex) else found.report()


def schema_of(data: str, *, classes: Sequence[str] | None = None, image_size: int | None = None) -> Schema:
    """Give the schema of a data set by its name (digits, cifar10, isic2019, folder, ...), without the data.

    Raises ConfigError: E-CFG-01 for an unknown name, E-CFG-23 for a folder or manifest without `classes`.
    """
    fixed = _fixed(data)
    if data not in SOURCES and fixed is None:
        raise extensions.unknown("data", data, SOURCES)
    _check_settings(data, classes, image_size)
    own = fixed.classes if fixed else isic2019.CLASSES if data == "isic2019" else None
    space = tuple(classes) if classes else own
    if space is None:
        raise ConfigError(
            "E-CFG-23", f"{data}: expected `classes`, the label space of the run, found none: list every class by name"
        )
    if fixed:
        return Schema(fixed.shape, space)
    size = _transform(data, image_size).size
    return Schema((3, size, size), space)


def _fixed(source: str) -> Schema | None:
    """Return the schema of a data set whose examples have one shape, ours or a loaded one."""
    return FIXED.get(source) or own_data.schema(source)


def _check_settings(source: str, classes: Sequence[str] | None, image_size: int | None) -> None:
    if classes is not None and (isinstance(classes, str) or len(set(classes)) != len(classes) or len(classes) < 2):
        raise ConfigError("E-CFG-23", f"classes: expected at least two different names, found {classes!r}: correct it")
    if image_size is None:
        return
    sizes = SIZES
    if fixed := _fixed(source):
        side = fixed.shape[-1]
        sizes = range(side, side + 1)
    if image_size not in sizes:
        raise ConfigError(
            "E-CFG-23",
            f"{source}: expected image_size {sizes[0]} to {sizes[-1]} or null, found {image_size}: change it",
        )


def _transform(source: str, image_size: int | None) -> ImageTransform:
    if source in FIXED:
        return image_folders.transform(source)
    return isic2019.transform(image_size) if source == "isic2019" else class_folders.transform(image_size)


def _place(ref: DataRef) -> tuple[Partitioner, int]:
    assert ref.federation is not None
    assert ref.silo is not None
    return ref.federation, ref.silo


def _reader(source: str, root: Path | None) -> arrays.Reader | None:
    """Choose how a data set is read into memory; None for files that are decoded when first read.

    CIFAR10 may lie there in either form; the published arrays win, and name themselves when neither is there.
    """
    if source == "cifar10" and root and not torchvision.located("cifar10", root):
        return None if image_folders.located("cifar10", root) else torchvision.read
    return READERS.get(source)


def _find(
    reference: str, data_root: Path | None, classes: Sequence[str] | None, image_size: int | None
) -> SourceIndex | arrays.Share | digits.Share:
    ref = parse(reference)
    _check_settings(ref.source, classes, image_size)
    if ref.source == "digits":
        return digits.share(*_place(ref), classes)
    if own_data.is_own(ref.source):
        root = data_root or (Path(os.environ[DATA_ROOT]) if DATA_ROOT in os.environ else None)
        if ref.federation is None:
            return own_data.everything(ref.source, root, classes)
        return arrays.Share.of(own_data.read, ref.source, root, *_place(ref), classes)
    root = None if ref.source in ("spiral", "folder", "manifest") else _root(data_root)
    if reader := _reader(ref.source, root):
        return arrays.Share.of(reader, ref.source, root, *_place(ref), classes)
    return _scan(ref, root, classes)


def _scan(ref: DataRef, root: Path | None, classes: Sequence[str] | None) -> SourceIndex:
    if ref.source == "isic2019":
        assert ref.silo is not None
        assert root is not None
        if not ref.clients:
            return isic2019.scan(root, ref.silo, classes)
        center, place, count = isic2019.center_of(ref.clients, ref.silo)
        return isic2019.split_center(isic2019.scan(root, center, classes), place, count, ref.seed, str(ref))
    if ref.source in FIXED:
        assert root is not None
        return image_folders.take(ref.source, root, *_place(ref), classes)
    assert ref.path is not None
    found = class_folders.scan(ref.path, classes) if ref.source == "folder" else csv_manifest.scan(ref.path, classes)
    if ref.federation is None or ref.silo is None:
        return found
    return found.for_silo(ref.federation, ref.silo, str(ref))


def _root(given: Path | None) -> Path:
    if given is not None:
        return given
    if named := os.environ.get(DATA_ROOT):
        return Path(named)
    raise DataError(
        "E-DATA-02",
        f"expected the folder of the data sets, found neither a data root among the arguments (--data-root) nor the "
        f"environment variable {DATA_ROOT}: give one of them",
    )
