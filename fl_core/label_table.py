"""A hospital's table of labels, joined to images by an identifier from the images' source.

The key is the column with a name in `KEYS` (the most specific one if there are several), or a declared column. If
`PatientID` is not the key, it names the patient. `split` is train or test. Imports no torch, since a service reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from fl_core.csv_reader import lines_of, read_table
from fl_core.errors import DataError
from fl_core.text import composed

PATIENT = "PatientID"
KEYS = ("SeriesInstanceUID", "StudyInstanceUID", "AccessionNumber", PATIENT)
_SPLIT = "split"


class LabelRow(NamedTuple):
    """An image's row of the table. patient, split: empty without such a column."""

    label: str
    patient: str = ""
    split: str = ""


@dataclass(frozen=True, slots=True)
class LabelTable:
    """The rows with a label, by key.

    met: keys that were found for an image   source: of the labels, "table:" or "query:" and a digest.
    """

    key: str
    rows: Mapping[str, LabelRow]
    met: set[str] = field(default_factory=set)
    source: str = ""

    @classmethod
    def read(cls, file: Path, column: str, keys: Sequence[str] = KEYS) -> LabelTable:
        """Read a CSV file; raises DataError (E-DATA-02, E-DATA-07) as `read_table`, and on contradictory rows."""
        _, header = next(lines_of(file), (0, []))
        used = [name for name in (column, *keys, PATIENT, _SPLIT) if name == column or name in header]
        rows = read_table(file, list(dict.fromkeys(used)))
        made = cls.of(header, rows, column, str(file), keys=keys)
        hasher = blake3(made.key.encode())
        for key, row in sorted(made.rows.items()):
            hasher.update(repr((key, *row)).encode())
        return replace(made, source=f"table:{hasher.hexdigest()[:16]}")

    @classmethod
    def of(
        cls,
        header: Sequence[str],
        rows: Iterable[Mapping[str, str]],
        column: str,
        where: str,
        source: str = "",
        keys: Sequence[str] = KEYS,
    ) -> LabelTable:
        """Index rows by their key; raises DataError (E-DATA-07) as `read`. where: the source in error messages."""
        if (key := next((name for name in keys if name in header), None)) is None:
            raise DataError(
                "E-DATA-07", f"expected one of the columns {', '.join(keys)} in {where}, found none: export one of them"
            )
        labels, wrong = dict[str, LabelRow](), list[str]()
        for row in rows:
            entry = LabelRow(composed(row[column]), row.get(PATIENT, ""), row.get(_SPLIT, ""))
            if not (row[key] and entry.label):
                continue
            if labels.setdefault(row[key], entry) != entry or (
                _SPLIT in header and entry.split not in ("train", "test")
            ):
                wrong.append(row[key])
        if wrong:
            raise DataError(
                "E-DATA-07",
                f"expected one label, one patient and a split of train or test for each {key} in {where}, found "
                f"{len(wrong)} rows with another ({', '.join(wrong[:5])}): correct them",
            )
        return cls(key, labels, source=source)

    def find(self, facts: Mapping[str, str]) -> LabelRow | None:
        """Return the row of an image; None if there is none. facts: the image's identifiers, by name of the key."""
        row = self.rows.get(facts.get(self.key, ""))
        if row is not None:
            self.met.add(facts[self.key])
        return row
