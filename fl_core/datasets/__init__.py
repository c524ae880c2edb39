"""Data by reference: parse it, check it, load it, or return its schema without the data.

sources/    one reader per source
decoding/   from an image file's bytes to its pixels
partition/  how examples are divided among silos

`image_loader` decodes with all cores and caches the results; `references` has the names of all sources, `catalogue`
describes the public ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fl_core.datasets.catalogue import PUBLISHED
from fl_core.datasets.checks import CheckProblem, CheckReport, SourceIndex, problem
from fl_core.datasets.decoding.dicom import Window
from fl_core.datasets.examples import ArrayExamples, SiloDataset, TensorExamples
from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.datasets.image_loader import ImageLoader
from fl_core.datasets.partition.federations import Partitioner, SiloIndices, federation_text, parse_federation
from fl_core.datasets.references import SOURCES, DataRef, federation, parse
from fl_core.datasets.sources import (
    arrays,
    class_folders,
    csv_manifest,
    digits,
    image_folders,
    isic2019,
    table,
    torchvision,
)
from fl_core.errors import ConfigError, DataError
from fl_core.errors.extras import load as load_by_name
from fl_core.extensions import registry, user_data
from fl_core.text import composed
from fl_core.types.columns import Column, check_columns, width
from fl_core.types.records import Schema

__all__ = [
    "ANY",
    "DATA_ROOT",
    "SOURCES",
    "ArrayExamples",
    "CheckProblem",
    "CheckReport",
    "DataRef",
    "DataRequest",
    "ImageExamples",
    "ImageLoader",
    "SiloDataset",
    "TensorExamples",
    "check",
    "check_all",
    "federation",
    "federation_text",
    "load",
    "load_all",
    "parse",
    "parse_federation",
    "schema_of",
]

DATA_ROOT = "CONSILIUM_DATA_ROOT"
SIZES = range(8, 2049)


def _of_papers(module: str) -> arrays.Reader:
    """Return a reader of `consilium` for data sets that only papers need; the core does not import it."""
    return lambda name, root: load_by_name(f"consilium.research.datasets.{module}:read", name)(name, root)


_LEAF = _of_papers("leaf")
READERS: Mapping[str, arrays.Reader] = {
    "spiral": _of_papers("spiral"),
    "femnist": _LEAF,
    "shakespeare": _LEAF,
    **dict.fromkeys(torchvision.MARKS, torchvision.read),
}
FIXED: Mapping[str, Schema] = {
    "digits": Schema(digits.SHAPE, digits.CLASSES),
    "spiral": Schema((2,), tuple("01234")),
    **{name: Schema(published.shape, published.classes) for name, published in PUBLISHED.items()},
}
"""The data sets whose examples have one shape."""


@dataclass(frozen=True, slots=True)
class DataRequest:
    """A run's requirements on data from any source.

    classes: the label space, in order; None takes the data set's own   image_size: pixels; None takes its default
    window: (centre, width) of DICOM's grey values; None takes each file's own
    """

    classes: Sequence[str] | None = None
    image_size: int | None = None
    window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.classes is not None and not isinstance(self.classes, str):
            object.__setattr__(self, "classes", tuple(map(composed, self.classes)))

    @property
    def grey_values(self) -> Window | None:
        return None if self.window is None else Window(*self.window)


ANY = DataRequest()


def load(
    reference: str, request: DataRequest = ANY, *, data_root: Path | None = None, loader: ImageLoader | None = None
) -> SiloDataset:
    """Load a silo's data, images lazily; existence and labels of all of them are checked first.

    data_root: folder of named data sets; None takes the environment variable CONSILIUM_DATA_ROOT
    loader: decodes and caches images; None takes `image_loader.shared_loader`
    Raises ConfigError (E-CFG-01, E-CFG-23) on an invalid request, one DataError (E-DATA-..) for all faults of the data.
    """
    return load_all([reference], request, data_root=data_root, loader=loader)[0]


def load_all(
    references: Sequence[str],
    request: DataRequest = ANY,
    *,
    data_root: Path | None = None,
    loader: ImageLoader | None = None,
) -> list[SiloDataset]:
    """Load the data of many silos as `load`; a shared folder or table is read and decoded only once."""
    scans, loaded = _Scans(), []
    for reference in references:
        index = _find(reference, data_root, request, scans)
        if isinstance(index, SourceIndex):
            loaded.append(index.dataset(_transform(parse(reference).source, request), loader))
        else:
            loaded.append(index.dataset())
    return loaded


def check(
    reference: str, request: DataRequest = ANY, *, data_root: Path | None = None, deep: bool = False
) -> CheckReport:
    """Check a silo's data without training; the same settings as `load`.

    deep: decode every image completely, and compare all of them. Raises if there is nothing to check (E-DATA-02,
    E-DATA-07); all other faults are in the report's `problems`, including a label space of one class.
    """
    return check_all([reference], request, data_root=data_root, deep=deep)[0]


def check_all(
    references: Sequence[str], request: DataRequest = ANY, *, data_root: Path | None = None, deep: bool = False
) -> list[CheckReport]:
    """Check the data of many silos as `check`; a shared folder or table is read only once."""
    scans, reports = _Scans(), []
    few = list(request.classes) if request.classes is not None and len(request.classes) == 1 else []
    remedy = "Name all classes of the run"
    lonely = problem("E-CFG-23", "classes: expected at least two different names, found one", few, remedy)
    for reference in references:
        index = _find(reference, data_root, request, scans, fewest=1)
        report = index.deep_report(request.grey_values) if deep and isinstance(index, SourceIndex) else index.report()
        reports.append(replace(report, problems=(*lonely, *report.problems)))
    return reports


def schema_of(
    data: str, request: DataRequest = ANY, columns: Sequence[Column] = (), multi_label: bool = False
) -> Schema:
    """Return the schema of a data set by its name (digits, cifar10, isic2019, folder, table, ...), without the data.

    Raises ConfigError: E-CFG-01 for an unknown name, E-CFG-23 for a hospital's own data without `classes`, or a table
    without `columns`.
    """
    fixed = _fixed(data)
    if data not in SOURCES and fixed is None:
        raise registry.unknown("data", data, SOURCES)
    _check_settings(data, request)
    published = fixed.classes if fixed else isic2019.CLASSES if data == "isic2019" else None
    space = tuple(request.classes) if request.classes else published
    if data == "table":
        if not columns:
            raise ConfigError(
                "E-CFG-23", "table: expected the schema that all hospitals' tables follow: data.schema=FILE.toml"
            )
        check_columns(columns)
    elif multi_label and data not in ("folder", "manifest"):
        raise ConfigError(
            "E-CFG-23",
            f"{data}: expected one class for each record, found data.multi_label: use data=manifest or data=table",
        )
    elif columns:
        raise ConfigError("E-CFG-23", f"{data}: only tables have columns: use data=table")
    if space is None:
        raise ConfigError(
            "E-CFG-23", f"{data}: `classes` is missing (the label space of the run): list every class by name"
        )
    if data == "table":
        return Schema((width(columns),), space, tuple(columns), multi_label=multi_label)
    if fixed:
        return Schema(fixed.shape, space)
    size = _transform(data, request).size
    return Schema((3, size, size), space, window=request.window, multi_label=multi_label)


def _fixed(source: str) -> Schema | None:
    """Return the schema of a data set whose examples have one shape, built in or loaded."""
    return FIXED.get(source) or user_data.schema(source)


def _check_settings(source: str, request: DataRequest, fewest: int = 2) -> None:
    """Refuse impossible settings. fewest: minimum of classes."""
    classes, image_size, window = request.classes, request.image_size, request.window
    if classes is not None and (isinstance(classes, str) or not fewest <= len(classes) == len(set(classes))):
        raise ConfigError("E-CFG-23", f"classes: expected at least two different names, found {classes!r}: correct it")
    if window is not None and (source not in ("folder", "manifest") or not _is_window(window)):
        raise ConfigError(
            "E-CFG-23",
            f"{source}: expected a window of finite centre and width >= 1, for DICOM in a folder or a manifest, found "
            f"{window!r}: correct data.window",
        )
    if image_size is None:
        return
    if source == "table":
        raise ConfigError("E-CFG-23", "table: a table has no images: leave image_size out")
    sizes = SIZES
    if fixed := _fixed(source):
        side = fixed.shape[-1]
        sizes = range(side, side + 1)
    if image_size not in sizes:
        raise ConfigError(
            "E-CFG-23",
            f"{source}: expected image_size {sizes[0]} to {sizes[-1]} or null, found {image_size}: change it",
        )


def _is_window(window: Sequence[float]) -> bool:
    return len(window) == 2 and all(abs(v) < 1e9 for v in window) and window[1] >= 1  # NaN is in no range


def _transform(source: str, request: DataRequest) -> ImageTransform:
    if source in FIXED:
        return image_folders.transform(source)
    if source == "isic2019":
        return isic2019.transform(request.image_size)
    return class_folders.transform(request.image_size, request.grey_values)


def _place(ref: DataRef) -> tuple[Partitioner, int]:
    assert ref.federation is not None
    assert ref.silo is not None
    return ref.federation, ref.silo


def _reader(source: str, root: Path | None) -> arrays.Reader | None:
    """Choose how a data set is read into memory; None for files that are decoded when first read.

    CIFAR10 may be stored in either form; the published arrays win, and are named if neither exists.
    """
    if source == "cifar10" and root and not torchvision.located("cifar10", root):
        return None if image_folders.located("cifar10", root) else torchvision.read
    return READERS.get(source)


class _Scans:
    """Cached scans for one call of `load_all`: hospitals' own folders and tables, and their partitions."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Path | None], SourceIndex | table.TableIndex] = {}
        self._sound: dict[tuple[str, Path | None], bool] = {}
        self._shares: dict[tuple[str, Path | None, str], list[SiloIndices]] = {}

    def find(self, ref: DataRef, classes: Sequence[str] | None) -> SourceIndex | table.TableIndex:
        assert ref.path is not None
        scans: Mapping[str, Callable[[Path, Sequence[str] | None], SourceIndex | table.TableIndex]] = {
            "folder": class_folders.scan,
            "manifest": csv_manifest.scan,
            "table": table.scan,
        }
        key = ref.source, ref.path
        if key not in self._found:
            self._found[key] = scans[ref.source](ref.path, classes)
        index = self._found[key]
        if ref.federation is None or ref.silo is None:
            return index
        if key not in self._sound:
            self._sound[key] = not index.has_problems()
        if not self._sound[key]:
            return replace(index, origin=str(ref))
        shares = self._shares.get((*key, ref.federation.text))
        if shares is None:
            shares = self._shares[*key, ref.federation.text] = index.shares(ref.federation)
        return index.subset(shares[ref.silo], str(ref))


def _find(
    reference: str, data_root: Path | None, request: DataRequest, scans: _Scans, fewest: int = 2
) -> SourceIndex | arrays.ArrayShare | digits.DigitShare | table.TableIndex:
    ref, classes = parse(reference), request.classes
    _check_settings(ref.source, request, fewest)
    if ref.source == "digits":
        return digits.share(*_place(ref), classes)
    if user_data.is_own(ref.source):
        root = data_root or (Path(os.environ[DATA_ROOT]) if DATA_ROOT in os.environ else None)
        if ref.federation is None:
            return user_data.load_whole(ref.source, root, classes)
        return arrays.ArrayShare.of(user_data.read, ref.source, root, *_place(ref), classes)
    if ref.path is not None:
        return scans.find(ref, classes)
    root = None if ref.source == "spiral" else _root(data_root)
    if reader := _reader(ref.source, root):
        return arrays.ArrayShare.of(reader, ref.source, root, *_place(ref), classes)
    return _scan(ref, root, classes)


def _scan(ref: DataRef, root: Path | None, classes: Sequence[str] | None) -> SourceIndex:
    assert root is not None
    if ref.source in FIXED:
        return image_folders.take(ref.source, root, *_place(ref), classes)
    assert ref.silo is not None
    if not ref.clients:
        return isic2019.scan(root, ref.silo, classes)
    center, place, count = isic2019.center_of(ref.clients, ref.silo)
    return isic2019.split_center(isic2019.scan(root, center, classes), place, count, ref.seed, str(ref))


def _root(data_root: Path | None) -> Path:
    if data_root is not None:
        return data_root
    if named := os.environ.get(DATA_ROOT):
        return Path(named)
    raise DataError(
        "E-DATA-02",
        f"the folder of the data sets is not set: use --data-root or the environment variable {DATA_ROOT}",
    )
