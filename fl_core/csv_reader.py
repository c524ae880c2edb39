"""Read CSV files written by people and spreadsheets."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fl_core import text
from fl_core.errors import DataError
from fl_core.types.enums import Split

Row = Mapping[str, str]
TEST_SHARE = 0.2
MAX_BYTES = 4 << 30
"""Size limit of one table."""


class CsvTable(NamedTuple):
    """A CSV file: its rows with their last lines, and the lines of rows whose length differs from the header's."""

    header: tuple[str, ...]
    rows: list[tuple[int, Row]]
    ragged: list[int]


def read_table(file: Path, required: Sequence[str]) -> list[Row]:
    """Read a comma-separated UTF-8 file (a byte-order mark is allowed) with at least these columns.

    Cells are stripped. Raises DataError: E-DATA-02 no such file, E-DATA-07 not such a table (with line numbers).
    """
    table = read_rows(file, required)
    if table.ragged:
        raise DataError(
            "E-DATA-07",
            f"expected {len(table.header)} cells in every row of {file}, found {len(table.ragged)} rows with more or "
            f"fewer (lines {', '.join(map(str, table.ragged[:5]))}): quote cells that contain a comma",
        )
    return [row for _, row in table.rows]


def read_rows(file: Path, required: Sequence[str]) -> CsvTable:
    """Read as `read_table`, but return the lines of rows with another length instead of refusing the file."""
    header: list[str] = []
    rows: list[tuple[int, Row]] = []
    ragged: list[int] = []
    for line, cells in lines_of(file):
        if not header:
            header = cells
            _check_header(file, header, required)
        elif len(cells) != len(header):
            ragged.append(line)
        else:
            rows.append((line, dict(zip(header, cells, strict=True))))
    if not header:
        _check_header(file, [], required)
    return CsvTable(tuple(header), rows, ragged)


def _check_header(file: Path, header: Sequence[str], required: Sequence[str]) -> None:
    if missing := [name for name in required if name not in header]:
        require_commas(file, header)
        raise DataError(
            "E-DATA-07",
            f"expected the columns {', '.join(required)} separated by commas in {file}, found the header "
            f"{','.join(header)[:200]!r} without {', '.join(missing)}: export it again",
        )
    if twice := sorted({name for name in header if header.count(name) > 1 and name in required}):
        raise DataError(
            "E-DATA-07", f"expected each column once in {file}, found {', '.join(twice)} twice: export it again"
        )


_DELIMITERS = {";": "semicolons (;)", "\t": "tabs", "|": "vertical bars (|)"}


def require_commas(file: Path, header: Sequence[str]) -> None:
    """Raise DataError (E-DATA-07) if the header was read as one cell, since its separators are not commas."""
    if other := next((name for sign, name in _DELIMITERS.items() if len(header) == 1 and sign in header[0]), ""):
        raise DataError(
            "E-DATA-07",
            f"expected cells separated by commas in {file}, found {other}: export it again with commas, or replace "
            "the separators if no cell contains a comma",
        )


def lines_of(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield a CSV file's non-empty rows, with stripped cells and their last line."""
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            raise DataError("E-DATA-07", f"expected at most {MAX_BYTES} bytes in {file}, found {size}: split it")
        with text.opened(file) as stream:
            reader = csv.reader(stream, strict=True)
            for cells in reader:
                if any("\0" in cell for cell in cells):
                    raise csv.Error("a NUL character, which is invalid in text and paths")
                if reader.line_num == 1 and cells == ["sep=", ""]:  # a line that tells Excel the separator
                    continue
                if any(cell.strip() for cell in cells):
                    yield reader.line_num, [cell.strip() for cell in cells]
    except FileNotFoundError as error:
        raise DataError("E-DATA-02", f"expected a CSV file at {file}, found none: check the path") from error
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            "E-DATA-07", f"expected a CSV file in UTF-8 at {file}, found: {error}. Export it again"
        ) from error


def half_of(name: str) -> Split:
    """Choose a record's split by a hash of its name, or of its group's: a fifth is test, the same on every machine."""
    drawn = int.from_bytes(hashlib.sha256(f"split {name}".encode()).digest()[:8])
    return Split.TEST if drawn < TEST_SHARE * 2**64 else Split.TRAIN


def read_lines(file: Path) -> list[str]:
    """Read a UTF-8 text file; raises DataError: E-DATA-02 no such file, E-DATA-07 no such text."""
    try:
        return text.read_text(file).splitlines()
    except FileNotFoundError as error:
        raise DataError("E-DATA-02", f"expected a text file at {file}, found none: check the path") from error
    except (OSError, ValueError) as error:
        raise DataError("E-DATA-07", f"expected UTF-8 text at {file}, found: {error}. Restore it") from error
