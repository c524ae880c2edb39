"""The schema of a table: read from the lead's file, so that columns travel, and no path does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from fl_core.datasets.table_schema import read_schema


def with_schema(data: Mapping[str, object]) -> Mapping[str, object]:
    """Put the columns that data.schema=FILE declares in the file's place, and its classes where none are named.

    Raises DataError (E-DATA-02, E-DATA-07) on a file that is none.
    """
    file = data.get("schema")
    if not isinstance(file, str):
        return data
    found = read_schema(Path(file).expanduser())
    return {
        **data,
        "classes": data.get("classes") or list(found.classes),
        "schema": [asdict(column) for column in found.columns],
    }
