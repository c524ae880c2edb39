"""The description beside a list of images (`images.csv`, `images.toml`): which column says what.

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

Without this file a list has the columns path, label, group and split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_core.datasets.table_schema import read_description, schema_path
from fl_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ListSchema:
    """What the columns of a list are; raises ConfigError (E-CFG-02) on a contradiction."""

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
                "E-CFG-02", f"expected one of label, labels and one_hot, found {' and '.join(ways) or 'none'}: name one"
            )
        if self.separator and not self.label:
            raise ConfigError("E-CFG-02", "expected a separator of the labels in one column (label): take it out")
        if len(set(self.columns)) != len(self.columns) or not all(self.columns):
            raise ConfigError(
                "E-CFG-02", f"expected a column of its own for each role, found {self.columns}: correct it"
            )

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
