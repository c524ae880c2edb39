"""The columns of a table that state for each label whether it was found, and their meaning for a run's labels.

A cell is 1, true or yes if the label was found, 0, false or no if it was examined and not found, and empty if it was
not examined. A label of the run without a column here is unknown in every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_core.datasets.label_dictionary import Translator
from fl_core.errors import DataError
from fl_core.tensors import Tensor, torch
from fl_core.types.targets import FOUND, NOT_FOUND, UNKNOWN

TRUTH: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "1", "1.0"), True),
    **dict.fromkeys(("false", "no", "0", "0.0"), False),
}
"""Valid cells of yes or no, in lower case."""


def read_label(cell: str, missing: frozenset[str]) -> int:
    """Return the meaning of a cell; raises ValueError, without the cell, on anything else."""
    if cell in missing:
        return UNKNOWN
    if (truth := TRUTH.get(cell.lower())) is None:
        raise ValueError("neither found (1), nor not found (0), nor empty")
    return FOUND if truth else NOT_FOUND


@dataclass(frozen=True, slots=True)
class LabelColumns:
    """The columns that were read. names: labels that the columns are translated to; rows: (N, columns) int64."""

    names: tuple[str, ...]
    rows: Tensor

    def targets(self, classes: Sequence[str]) -> Tensor:
        """Return (N, L) of a run's labels. With several columns for a label, it was found if any column found it.

        Otherwise it is unknown if any column is empty, since the label may have been there.
        """
        targets = torch.full((len(self.rows), len(classes)), UNKNOWN, dtype=torch.int64)
        for k, label in enumerate(classes):
            columns = self.rows[:, [i for i, name in enumerate(self.names) if name == label]]
            if columns.shape[1]:
                otherwise = torch.where((columns == UNKNOWN).any(1), UNKNOWN, NOT_FOUND)
                targets[:, k] = torch.where((columns == FOUND).any(1), FOUND, otherwise)
        return targets

    def at(self, kept: Sequence[int]) -> LabelColumns:
        return LabelColumns(self.names, self.rows[torch.tensor(kept, dtype=torch.int64)])

    def notes(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Describe how often each label was examined."""
        targets = self.targets(classes)
        looked = (targets != UNKNOWN).sum(0).tolist()
        none = [name for name, n in zip(classes, looked, strict=True) if not n]
        each = ", ".join(f"{name}: {n}" for name, n in zip(classes, looked, strict=True) if n)
        empty = int((targets == UNKNOWN).all(1).sum())
        return (
            f"records (of {len(targets)}) examined for each label: {each or 'none'}; records in which it was found "
            "count as its examples",
            *(
                [f"labels that no record here was examined for: {', '.join(none)}; they are unknown, not absent"]
                if none
                else []
            ),
            *(
                [f"records that were not examined for any label: {empty}; they are not used for training"]
                if empty
                else []
            ),
        )


def translated_columns(names: Sequence[str], labels: Translator) -> tuple[str | None, ...]:
    """Return each column's label in runs, None if it is not used; raises DataError (E-DATA-07) on a coarse label."""
    labels.counted = "columns"
    translated = tuple(labels(name) for name in names)
    if coarse := [text for text in translated if text in labels.coarse]:
        raise DataError(
            "E-DATA-07",
            f"labels.toml maps a column to {coarse[0]!r}, but coarse labels need records with one class: map the "
            "column to one label, or to [] if it is not used",
        )
    return translated
