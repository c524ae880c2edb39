"""Rows for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from protos.console import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_bytes(head: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """Write rows as CSV in UTF-8. A text that a spreadsheet would compute begins with an apostrophe; numbers stay."""
    out = io.StringIO()
    writer = csv.writer(out)
    for row in (head, *rows):
        writer.writerow([_cell(value) for value in row])
    return out.getvalue().encode("utf-8")


def _cell(value: object) -> object:
    if isinstance(value, int | float):
        return value
    text = "" if value is None else str(value)
    return printable(f"'{text}" if text.lstrip().startswith(_FORMULA) or text.startswith(_FORMULA) else text)
