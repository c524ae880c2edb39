"""Inputs to classify: image files, rows of a table, or data by reference. Each example has a name.

Inputs of a kind that the model does not take are refused before anything is read. A single unusable file or row is
reported with its problem, and the others are classified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from consilium.model.model_file import ModelFileFacts
from fl_core import datasets
from fl_core.csv_reader import require_commas
from fl_core.datasets import DataRequest
from fl_core.datasets.decoding.dicom import is_dicom
from fl_core.datasets.decoding.pixels import SUFFIXES
from fl_core.datasets.examples import TensorExamples
from fl_core.datasets.image_files import ImageExamples
from fl_core.datasets.image_loader import ImageLoader
from fl_core.datasets.references import FILES
from fl_core.datasets.sources import class_folders
from fl_core.datasets.sources.table import cell_parser, read_cells
from fl_core.datasets.table_schema import read_schema, schema_path
from fl_core.errors import ConfigError, DataError, SchemaError
from fl_core.text import composed
from fl_core.training.evaluation import ConcatExamples
from fl_core.types.columns import Column, difference, width
from fl_core.types.enums import Split
from fl_core.types.values import Examples

MAX_FILES = 1_000_000
_TABLES = (".csv", ".parquet", ".pq")
_ALL = "all"


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """Named examples, and unusable inputs with their problem.

    files: of the examples, if they are image files   labelled: whether the examples' labels are known
    fingerprint: of data by reference, and its split; otherwise empty
    """

    names: tuple[str, ...]
    examples: Examples
    problems: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    labelled: bool = False
    fingerprint: str = ""


@dataclass(slots=True)
class _Found:
    files: list[Path] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    unread: int = 0


def from_paths(paths: Sequence[Path], facts: ModelFileFacts, loader: ImageLoader) -> Inputs:
    """Find image files (also in folders, at any depth), or read one table if the model takes columns.

    Raises ConfigError (E-CFG-23) on inputs that the model does not take; DataError (E-DATA-02) if nothing is found.
    """
    missing = [path for path in paths if not path.exists()]
    if missing or not paths:
        problem = f"nothing at {missing[0]}" if missing else "none"
        raise DataError("E-DATA-02", f"expected image files, folders or a table, found {problem}: check the path")
    if facts.columns:
        if len(paths) > 1 or paths[0].is_dir() or paths[0].suffix.lower() not in _TABLES:
            raise ConfigError(
                "E-CFG-23",
                f"expected one table (CSV or Parquet) for a model of {len(facts.columns)} columns, found "
                f"{', '.join(map(str, paths[:3]))}: name one table",
            )
        return _rows(paths[0], facts.columns)
    if not facts.preprocessing.takes_images:
        raise ConfigError(
            "E-CFG-23",
            f"expected data by reference, since this model takes examples of the shape {list(facts.shape)}, found "
            f"files: use --data {facts.data}/...",
        )
    images = _images(paths)
    if not images.files and not images.problems:
        raise DataError(
            "E-DATA-02",
            f"there is no image in {paths[0]}: name files or folders with DICOM or {', '.join(sorted(SUFFIXES))}",
        )
    notes = (f"{images.unread} other files were not read",) if images.unread else ()
    names = tuple(map(str, images.files))
    return Inputs(
        names, facts.preprocessing.examples(images.files, loader), tuple(images.problems), notes, tuple(images.files)
    )


def _images(paths: Sequence[Path]) -> _Found:
    collected, seen = _Found(), set[Path]()
    for path in paths:
        if path.is_dir():
            below = class_folders.list_images(path)
            wanted = below.images
            collected.unread += len(below.unread)
            collected.problems += [(name, problem.what) for problem in below.problems for name in problem.first]
        elif path.suffix.lower() in SUFFIXES or is_dicom(path):
            wanted = [path]
        else:
            collected.problems.append((str(path), f"not an image: expected DICOM, or {', '.join(sorted(SUFFIXES))}"))
            continue
        collected.files += [file for file in wanted if file not in seen]
        seen.update(wanted)
    if len(collected.files) > MAX_FILES:
        raise DataError("E-DATA-02", f"expected at most {MAX_FILES} images at once, found more: split them")
    return collected


def _rows(file: Path, columns: Sequence[Column]) -> Inputs:
    """Read the model's columns from a table. A row with an invalid cell becomes a problem."""
    missing = frozenset(read_schema(schema_path(file)).missing if schema_path(file).exists() else ("",))
    wanted = [composed(column.name) for column in columns]
    header, body = read_cells(file, wanted)
    lacking = [name for name in wanted if list(header).count(name) != 1]
    if lacking:
        require_commas(file, header)
        raise DataError(
            "E-DATA-07",
            f"expected each of the model's {len(wanted)} columns once in {file}, found {', '.join(lacking[:10])} "
            "missing or twice: export the table again",
        )
    parsers = [
        (name, cell_parser(column, missing), header.index(name)) for name, column in zip(wanted, columns, strict=True)
    ]
    names: list[str] = []
    numbers: list[list[float]] = []
    problems: list[tuple[str, str]] = []
    for line, cells in body:
        name = f"{file}:{line}"
        if len(cells) != len(header):
            problems.append((name, "more or fewer cells than the header"))
            continue
        row: list[float] = []
        for column, parse, place in parsers:
            try:
                row += parse(cells[place])[0]
            except ValueError as error:
                problems.append((name, f"{column}: {error}"))
                break
        else:
            names.append(name)
            numbers.append(row)
        if len(names) > MAX_FILES:
            raise DataError("E-DATA-07", f"expected at most {MAX_FILES} rows at once, found more: split the table")
    x = torch.tensor(numbers, dtype=torch.float32).view(len(numbers), width(columns))
    return Inputs(tuple(names), TensorExamples(x, torch.full((len(x),), -1)), tuple(problems))


def from_reference(
    reference: str, split: str, facts: ModelFileFacts, data_root: Path | None, loader: ImageLoader
) -> Inputs:
    """Load data by reference as a silo does. split: train, test or all.

    Raises as `datasets.load`; SchemaError (E-DATA-05) if shape, columns or kind of labels differ from the model's;
    ConfigError (E-CFG-02) on another split.
    """
    source = reference.partition(":")[0]
    by_side = source in FILES[:2] or reference.startswith("isic2019")
    request = DataRequest(facts.classes, facts.shape[-1] if by_side else None, facts.window)
    data = datasets.load(reference, request, data_root=data_root, loader=loader)
    if data.schema.shape != facts.shape or (facts.columns and data.schema.columns != facts.columns):
        differs = difference(facts.columns, data.schema.columns) if facts.columns else ""
        raise SchemaError(
            "E-DATA-05",
            f"expected data of shape {list(facts.shape)} for this model, found {list(data.schema.shape)}"
            f"{differs and f' ({differs})'}: use other data or another model",
        )
    if data.schema.multi_label != facts.multi_label:
        raise SchemaError(
            "E-DATA-05",
            f"expected data with {facts.schema.kind} for this model, found {data.schema.kind}: use other data",
        )
    halves = {Split.TRAIN.value: data.train, Split.TEST.value: data.test}
    chosen = list(halves) if split == _ALL else [split]
    if not set(chosen) <= set(halves):
        raise ConfigError("E-CFG-02", f"expected --split train, test or all, found {split!r}: correct it")
    parts = [(half, halves[half]) for half in chosen]
    names = [name for half, examples in parts for name in _names(half, examples)]
    whole = parts[0][1] if len(parts) == 1 else ConcatExamples([examples for _, examples in parts])
    return Inputs(tuple(names), whole, labelled=True, fingerprint=f"{data.fingerprint} {split}")


def _names(half: str, examples: Examples) -> list[str]:
    if isinstance(examples, ImageExamples):
        return [str(path) for path in examples.paths]
    return [f"{half} {k + 1}" for k in range(len(examples))]
