"""The columns of a table that a model uses. They are declared in public and equal at every hospital of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fl_core.errors import ConfigError

MAX_COLUMNS, MAX_CATEGORIES, MAX_CHARS = 4096, 1024, 200


@dataclass(frozen=True, slots=True)
class Column:
    """One input column and the numbers of its cells; nothing is estimated from records.

    | type            | a cell is                                | becomes                                         |
    |-----------------|------------------------------------------|-------------------------------------------------|
    | number, integer | a number from `min` to `max`             | its position in that range, from -1 to 1        |
    | boolean         | true, false, yes, no, 1 or 0             | 1 or -1                                         |
    | category        | one of `categories`, spelt like that     | one number per category: 1 for this one, else 0 |

    missing: "refuse" such rows, or "indicator": all numbers are 0, and one more number is 1, which is 0 in other rows
    outside: a number outside its range: "refuse" such rows, or "clip" to the nearest end
    Raises ConfigError (E-CFG-02) on contradictory options.
    """

    name: str
    type: Literal["number", "integer", "boolean", "category"]
    min: float | None = None
    max: float | None = None
    categories: tuple[str, ...] = ()
    missing: Literal["refuse", "indicator"] = "refuse"
    outside: Literal["refuse", "clip"] = "refuse"

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= MAX_CHARS or not self.name.isprintable() or self.name != self.name.strip():
            raise ConfigError("E-CFG-02", f"expected a visible name of a column, found {self.name[:40]!r}: rename it")
        if self.numeric != (self.min is not None) or self.numeric != (self.max is not None):
            raise self._wrong("min and max for numbers and integers, and for them alone")
        if self.min is not None and self.max is not None:
            width = (self.max - self.min) / 2
            if not (math.isfinite(self.min) and math.isfinite(self.max) and 0 < width < math.inf):
                raise self._wrong("finite numbers, min below max")
        if (self.type == "category") != bool(self.categories):
            raise self._wrong("categories for a category, and for it alone")
        if len(set(self.categories)) != len(self.categories) or len(self.categories) > MAX_CATEGORIES:
            raise self._wrong(f"at most {MAX_CATEGORIES} categories, each once")
        if not all(1 <= len(c) <= MAX_CHARS and c.isprintable() and c == c.strip() for c in self.categories):
            raise self._wrong("categories of visible text, without spaces around")

    @property
    def numeric(self) -> bool:
        return self.type in ("number", "integer")

    @property
    def width(self) -> int:
        return (len(self.categories) or 1) + (self.missing == "indicator")

    def _wrong(self, wanted: str) -> ConfigError:
        return ConfigError("E-CFG-02", f"column {self.name!r}: expected {wanted}, found something else: correct it")


def check_columns(columns: Sequence[Column]) -> None:
    """Raise ConfigError (E-CFG-02) if there are no columns, too many, or two with the same name."""
    names = [column.name for column in columns]
    if not 1 <= len(names) <= MAX_COLUMNS or len(set(names)) != len(names):
        raise ConfigError("E-CFG-02", f"expected 1 to {MAX_COLUMNS} columns of different names: correct the schema")


def width(columns: Sequence[Column]) -> int:
    """Return the number of inputs that a row is converted to."""
    return sum(column.width for column in columns)


def difference(run: Sequence[Column], local: Sequence[Column]) -> str:
    """Describe the differences of two schemas, in the order of the run's; empty if equal. It is about schemas only."""
    theirs, ours = ({column.name: column for column in columns} for columns in (run, local))
    differences = [f"{name!r} is not here" for name in theirs if name not in ours]
    differences += [f"{name!r} differs from the run's" for name in ours if name not in theirs]
    for name in (name for name in theirs if name in ours):
        pairs = ((key, getattr(theirs[name], key), getattr(ours[name], key)) for key in Column.__slots__)
        differences += [
            f"{name!r} has {key} {_short(a)} in the run and {_short(b)} here" for key, a, b in pairs if a != b
        ]
    if not differences and list(theirs) != list(ours):
        differences = ["the columns are in another order"]
    return "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")


def _short(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:60]}..."
