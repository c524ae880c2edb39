"""Reading CSV files that people and spreadsheets write."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_core.errors import DataError

Row = Mapping[str, str]


def read_table(file: Path, required: Sequence[str]) -> list[Row]:
    """Read a comma-separated UTF-8 file (a byte-order mark is allowed) with at least these columns.

    Cells are stripped. Raises DataError: E-DATA-02 no such file, E-DATA-07 not such a table (with line numbers).
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            lines = list(csv.reader(stream, strict=True))
        if any("\0" in cell for cells in lines for cell in cells):
            raise csv.Error("a NUL, which no text or path has")
    except FileNotFoundError as error:
        raise DataError("E-DATA-02", f"expected a CSV file at {file}, found none: check the path") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            "E-DATA-07", f"expected a CSV file in UTF-8 at {file}, found: {error}. Export it again"
        ) from error
    header = [name.strip() for name in lines[0]] if lines else []
    if lacking := [name for name in required if name not in header]:
        raise DataError(
            "E-DATA-07",
            f"expected the columns {', '.join(required)} separated by commas in {file}, found the header "
            f"{','.join(header)!r} without {', '.join(lacking)}: export it again",
        )
    body = [(number, cells) for number, cells in enumerate(lines[1:], start=2) if any(cell.strip() for cell in cells)]
    if ragged := [str(number) for number, cells in body if len(cells) != len(header)]:
        raise DataError(
            "E-DATA-07",
            f"expected {len(header)} cells in every row of {file}, found {len(ragged)} rows with more or fewer (lines "
            f"{', '.join(ragged[:5])}): quote cells that hold a comma",
        )
    return [dict(zip(header, (cell.strip() for cell in cells), strict=True)) for _, cells in body]


def read_lines(file: Path) -> list[str]:
    """Read a UTF-8 text file; raises DataError: E-DATA-02 no such file, E-DATA-07 no such text."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError("E-DATA-02", f"expected a text file at {file}, found none: check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("E-DATA-07", f"expected UTF-8 text at {file}, found: {error}. Restore it") from error
