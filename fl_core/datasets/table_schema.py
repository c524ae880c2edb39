"""The description next to a table (`patients.csv`, `patients.toml`): its input columns, and the other columns.

label = "diagnosis"                     # the column of the classes
classes = ["benign", "malignant"]       # the label space, in the order of the run
labels = ["edema", "effusion"]          # in their place where a record may have several: a column for each label
group = "patient"                       # optional: the privacy unit; no group may be in both splits
split = "split"                         # optional: train or test; without one a fifth is held out
record = "visit"                        # optional: what names a row for ever; without one its input cells do
missing = ["", "NA"]                    # cells that stand for a missing value; default: an empty one

[columns.age]                           # inputs, in this order; `Column` has the options
type = "integer"
min = 0
max = 120
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fl_core.converter import ConversionError, structure
from fl_core.errors import ConfigError, DataError
from fl_core.text import composed, read_text
from fl_core.types.columns import Column, check_columns

T = TypeVar("T")
SUFFIX = ".toml"
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The meaning of a table's columns. Raises ConfigError (E-CFG-02) on a contradiction.

    labels: columns of yes, no or nothing, one for each label, instead of `label` and `classes`.
    """

    columns: tuple[Column, ...]
    label: str = ""
    classes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    group: str = ""
    split: str = ""
    record: str = ""
    missing: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        check_columns(self.columns)
        roles = [name for name in (self.label, self.group, self.split, self.record) if name]
        inputs = {column.name for column in self.columns}
        if not self.label and not self.labels:
            raise ConfigError(
                "E-CFG-02",
                "the schema has neither a label with its classes nor labels with one column each: add one of them",
            )
        if self.labels:
            self._check_labels({*roles, *inputs})
        elif len(set(self.classes)) != len(self.classes) or len(self.classes) < 2 or not all(self.classes):
            raise ConfigError("E-CFG-02", "expected at least two classes of different names: correct the schema")
        if bool(self.label) == self.multi_label or self.label in inputs or {self.split, self.group} & inputs:
            raise ConfigError("E-CFG-02", "label, group and split cannot be inputs: remove them from the columns")
        if {self.label, self.split} & {self.group, self.record} - {""} or (self.label and self.label == self.split):
            raise ConfigError("E-CFG-02", f"expected a column for each role, found {roles}: correct the schema")

    @property
    def multi_label(self) -> bool:
        return bool(self.labels)

    @property
    def space(self) -> tuple[str, ...]:
        """The classes, or the labels, in the order of a run that is led with this schema."""
        return self.labels or self.classes

    def _check_labels(self, others: set[str]) -> None:
        if self.classes or len(set(self.labels)) != len(self.labels) or not all(self.labels) or others & {*self.labels}:
            raise ConfigError(
                "E-CFG-02",
                "labels need different names, cannot be inputs or have other roles, and exclude label and classes: "
                "correct the schema",
            )


def schema_path(table: Path) -> Path:
    return table.with_suffix(SUFFIX)


def read_schema(file: Path) -> TableSchema:
    """Read a table's description; raises as `read_description`."""
    return read_description(file, TableSchema, _with_named_columns)


def _with_named_columns(raw: dict[str, Any]) -> dict[str, Any]:
    columns = raw.get("columns")
    if isinstance(columns, Mapping):
        raw["columns"] = [
            {"name": name, **options} if isinstance(options, Mapping) else options for name, options in columns.items()
        ]
    return raw


def read_description(file: Path, form: type[T], completed: Callable[[dict[str, Any]], dict[str, Any]]) -> T:
    """Read a description in TOML; raises DataError: E-DATA-02 no such file, E-DATA-07 an invalid description.

    completed: converts the table of the file to the fields of `form`.
    """
    try:
        return structure(form, completed(tomllib.loads(composed(read_text(file, _MAX_BYTES)))), "")
    except FileNotFoundError as error:
        raise DataError(
            "E-DATA-02", f"expected the schema of a table in {file}, found none: write one (docs/data.md)"
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # also what TOML, UTF-8 and the schema itself refuse
        text = error.message if isinstance(error, ConfigError) else str(error)
        kind = "a schema" if isinstance(error, (ConfigError, ConversionError)) else "TOML in UTF-8"
        raise DataError("E-DATA-07", f"expected {kind} in {file}, found: {text[:300]}. Correct it") from error
