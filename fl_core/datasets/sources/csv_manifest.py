"""A CSV file with one image per row; a description next to it (`images.csv`, `images.toml`) defines its columns.

path = "Image Index"                    # the column of the files; default: path
folder = "images"                       # optional: where they lie; default: beside the list
suffix = ".jpg"                         # optional: what each path lacks
label = "Finding Labels"                # the column of the class; default: label
separator = "|"                         # optional: what separates the labels of an image that may have several
labels = ["Edema", "Effusion"]          # in its place: a column for each label of an image that may have several
one_hot = ["MEL", "NV"]                 # in its place: a column for each class, one of which is 1
group = "Patient ID"                    # optional: the privacy unit; no group may be in both splits
split = "split"                         # optional: train or test; without one a fifth is held out
unknown = ["", "-1", "-1.0"]            # cells that say nothing of a label; these by default

Without a description it has the header path,label,group,split, and paths are relative to the file. group: the privacy
unit (patient, lesion), for every image or for none; no group may have images in both splits. split: train or test.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_core.csv_reader import Row, half_of, read_rows
from fl_core.datasets.checks import Item, SourceIndex, groups_in_both_splits, problem
from fl_core.datasets.label_dictionary import Translator, read_dictionary
from fl_core.datasets.sources.label_columns import read_label, translated_columns
from fl_core.datasets.table_schema import read_description, schema_path
from fl_core.errors import ConfigError
from fl_core.text import composed
from fl_core.types.enums import Split
from fl_core.types.targets import FOUND, NOT_FOUND, UNKNOWN

_MARKS = {FOUND: "1", NOT_FOUND: "0", UNKNOWN: "?"}


@dataclass(frozen=True, slots=True)
class ListSchema:
    """The meaning of a list's columns; raises ConfigError (E-CFG-02) on a contradiction."""

    path: str = "path"
    folder: str = ""
    suffix: str = ""
    label: str = ""
    separator: str = ""
    labels: tuple[str, ...] = ()
    one_hot: tuple[str, ...] = ()
    group: str = ""
    split: str = ""
    unknown: tuple[str, ...] = ("", "-1", "-1.0")

    def __post_init__(self) -> None:
        ways = [name for name in ("label", "labels", "one_hot") if getattr(self, name)]
        if len(ways) != 1:
            raise ConfigError(
                "E-CFG-02",
                f"expected exactly one of label, labels and one_hot, found {' and '.join(ways) or 'none'}: keep one",
            )
        if self.separator and not self.label:
            raise ConfigError("E-CFG-02", "expected a separator only with one label column (label): remove it")
        if len(set(self.columns)) != len(self.columns) or not all(self.columns):
            raise ConfigError("E-CFG-02", f"expected a separate column for each role, found {self.columns}: correct it")

    @property
    def columns(self) -> Sequence[str]:
        """The columns that the list must have."""
        roles = (self.path, *([self.label] if self.label else ()), *self.labels, *self.one_hot)
        return (*roles, *(name for name in (self.group, self.split) if name))

    @property
    def several(self) -> bool:
        """Whether an image may have several labels."""
        return bool(self.labels or self.separator)


DEFAULT = ListSchema(label="label", group="group", split="split")


def read_list_schema(list_file: Path) -> ListSchema:
    """Read the description beside a list, or the default; raises DataError (E-DATA-07) on an invalid one."""
    file = schema_path(list_file)
    if not file.exists():
        return DEFAULT
    return read_description(file, ListSchema, _with_default_label)


def _with_default_label(raw: dict[str, Any]) -> dict[str, Any]:
    named = {"label", "labels", "one_hot"} & set(raw)
    return raw if named else {**raw, "label": "label"}


def scan(file: Path, classes: Sequence[str] | None) -> SourceIndex:
    """Read a manifest; raises DataError (E-DATA-02, E-DATA-07) when it is no such table."""
    schema = read_list_schema(file)
    table = read_rows(file, schema.columns)
    labels = Translator(read_dictionary(file.parent))
    rows = _Rows(file, schema, labels)
    for line, row in table.rows:
        rows.add(line, row)
    wrong = [*rows.faults, *((line, "more or fewer cells than the header has") for line in table.ragged)]
    items = rows.items()
    lost = [item.name for item in items if not _is_file(item.path)]
    remedy = f"Restore these files below {file.parent}, or remove their rows"
    if any("\\" in name or name[1:3] == ":/" for name in lost):
        remedy = f"Windows paths (backslashes, drive letters): write them relative to {file.parent}, with /"
    times = Counter(item.path.resolve() for item in items)
    twice = sorted({item.name for item in items if times[item.path.resolve()] > 1})
    problems = (
        *problem(
            "E-DATA-07",
            f"rows of {file.name} that are malformed",
            [f"line {line}: {fault}" for line, fault in sorted(wrong)],
            "Correct these rows, and quote cells that hold a comma",
        ),
        *problem(
            "E-DATA-07",
            f"columns of {file.name} without any label",
            [schema.label] if schema.several and not rows.names else [],
            "Add a label in at least one row, or choose another column",
        ),
        *problem("E-DATA-07", "images listed more than once", twice, "Keep one row per image"),
        *problem(
            "E-DATA-04",
            f"images listed in {file.name} that do not exist",
            lost,
            remedy,
            records=True,
        ),
        *problem(
            "E-DATA-07",
            "groups with images in both train and test",
            groups_in_both_splits(items),
            "Move all images of a group into one split: otherwise the test measures memorisation",
        ),
    )
    space = tuple(classes or (dict.fromkeys(rows.names) if schema.several else labels.space(rows.own)))
    return SourceIndex(f"manifest:{file}", space, items, problems, labels=labels, label_names=rows.names)


class _Rows:
    """Collects the rows of a list: items of the valid ones, faults of the others."""

    def __init__(self, file: Path, schema: ListSchema, labels: Translator) -> None:
        self._folder, self._schema, self._labels = file.parent / schema.folder, schema, labels
        self._unknown = frozenset(schema.unknown)
        columns = zip(schema.labels, translated_columns(schema.labels, labels), strict=True)
        self._columns = {own: name for own, name in columns if name is not None}
        self.names: tuple[str, ...] = ()
        """The label of each answer."""
        self.own: set[str] = set()
        """The hospital's own labels."""
        self.faults: list[tuple[int, str]] = []
        self._rows: list[tuple[str, Split, str | None, str]] = []
        self._answers: list[tuple[int, ...] | frozenset[str] | None] = []

    def add(self, line: int, row: Row) -> None:
        try:
            self._add(row)
        except ValueError as error:
            self.faults.append((line, str(error)))

    def _add(self, row: Row) -> None:
        schema = self._schema
        name = row[schema.path] and row[schema.path] + schema.suffix
        if not name:
            raise ValueError("no path")
        split = row[schema.split] if schema.split else ""
        if schema.split and split not in ("train", "test"):
            raise ValueError(f"split {split[:40]!r}, which is neither train nor test")
        group = row[schema.group] if schema.group else ""
        half = Split(split) if split else half_of(group or name)
        if schema.several:
            self._answers.append(self._several(row))
            label: str | None = ""
        else:
            label = self._one_hot(row) if schema.one_hot else row[schema.label]
            if not label:
                raise ValueError("no label")
            self.own.add(own := composed(label))
            label = self._labels(own, half)
        if label is not None:
            self._rows.append((name, half, group or None, label))

    def _one_hot(self, row: Row) -> str:
        answers = {name: read_label(row[name], self._unknown) for name in self._schema.one_hot}
        right = [name for name, answer in answers.items() if answer == FOUND]
        if len(right) != 1:
            raise ValueError(f"{len(right)} class columns are 1, expected exactly one")
        return right[0]

    def _several(self, row: Row) -> tuple[int, ...] | frozenset[str] | None:
        """Return the answer for each column, or the labels of a joined cell; None: not examined."""
        if not self._schema.separator:
            return tuple(read_label(row[own], self._unknown) for own in self._columns)
        cell = row[self._schema.label]
        if cell in self._unknown:
            return None
        parts = [composed(part.strip()) for part in cell.split(self._schema.separator)]
        if not all(parts):
            raise ValueError("an empty label between two separators")
        self.own |= set(parts)
        return frozenset(parts)

    def items(self) -> tuple[Item, ...]:
        if self._schema.separator:
            own = sorted(self.own)
            columns = zip(own, translated_columns(own, self._labels), strict=True)
            self._columns = {label: name for label, name in columns if name is not None}
        self.names = tuple(self._columns.values())
        answers = map(self._answered, self._answers) if self._schema.several else [()] * len(self._rows)
        return tuple(
            Item(_located(self._folder, name), name, label or self._text(of), split, group, answers=of)
            for (name, split, group, label), of in zip(self._rows, answers, strict=True)
        )

    def _answered(self, row: tuple[int, ...] | frozenset[str] | None) -> tuple[int, ...]:
        if isinstance(row, tuple):
            return row
        return tuple(UNKNOWN if row is None else FOUND if own in row else NOT_FOUND for own in self._columns)

    def _text(self, answers: tuple[int, ...]) -> str:
        return ", ".join(f"{name}={_MARKS[answer]}" for name, answer in zip(self.names, answers, strict=True))


def _located(folder: Path, text: str) -> Path:
    """Find a file as the list names it, else with the separators of Windows or in another Unicode form."""
    ways = (text, text.replace("\\", "/"))
    paths = [folder / unicodedata.normalize(form, way) for way in ways for form in ("NFC", "NFD")]
    return next((path for path in (folder / text, *paths) if _is_file(path)), folder / text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file
        return False
