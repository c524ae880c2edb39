"""Cells of a table: read from CSV or Parquet, and what each becomes by its declared column."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fl_core.datasets.sources.csv_reader import MOST_BYTES, lines_of
from fl_core.errors import DataError
from fl_core.types.columns import Column

MOST_ROWS = 20_000_000
_PARQUET = (".parquet", ".pq")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_TRUTH = {"true": 1.0, "yes": 1.0, "1": 1.0, "1.0": 1.0, "false": -1.0, "no": -1.0, "0": -1.0, "0.0": -1.0}
Cells = Sequence[str]
Parse = Callable[[str], tuple[list[float], str]]


def read_cells(file: Path, wanted: Sequence[str]) -> tuple[list[str], Iterator[tuple[int, Cells]]]:
    """Return a table's header, and its rows as they come, with their lines; raises DataError on no such file."""
    return _parquet(file, wanted) if file.suffix.lower() in _PARQUET else _csv(file)


def cell_parser(column: Column, missing: frozenset[str]) -> Parse:
    """Make the function from a cell to its numbers and its canonical text; it raises ValueError without the cell."""
    empty = [0.0] * (column.width - 1) + [1.0]
    present = [0.0] * (column.missing == "indicator")
    one_hot = {c: [float(c == other) for other in column.categories] + present for c in column.categories}
    low, high = column.min or 0.0, column.max or 0.0
    middle, half = low + (high - low) / 2, (high - low) / 2

    def parse(cell: str) -> tuple[list[float], str]:
        if cell in missing:
            if column.missing == "refuse":
                raise ValueError("no value")
            return empty, ""
        if column.type == "category":
            if cell not in one_hot:
                raise ValueError("none of the declared categories")
            return one_hot[cell], cell
        if column.type == "boolean":
            if (truth := _TRUTH.get(cell.lower())) is None:
                raise ValueError("neither true nor false")
            return [truth, *present], str(truth)
        if not _NUMBER.fullmatch(cell) or not math.isfinite(value := float(cell)):
            raise ValueError("no number")
        if column.type == "integer" and not value.is_integer():
            raise ValueError("no whole number")
        if not low <= value <= high and column.outside == "refuse":
            raise ValueError(f"outside {low:g} to {high:g}")
        place = (min(max(value, low), high) - middle) / half
        return [min(max(place, -1.0), 1.0), *present], repr(value + 0.0)

    return parse


def _csv(file: Path) -> tuple[list[str], Iterator[tuple[int, Cells]]]:
    lines = lines_of(file)
    _, header = next(lines, (0, []))
    return header, lines


def _parquet(file: Path, wanted: Sequence[str]) -> tuple[list[str], Iterator[tuple[int, Cells]]]:
    """Read the wanted columns of a Parquet file, as a CSV file would have their cells; a line is a row, from 1."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            "E-DATA-02", "expected pyarrow, which reads Parquet, found none: pip install 'consilium-fl[tables]'"
        ) from error
    try:
        opened = ParquetFile(file)
        rows, names = opened.metadata.num_rows, list(opened.schema_arrow.names)
        size = sum(opened.metadata.row_group(k).total_byte_size for k in range(opened.metadata.num_row_groups))
    except FileNotFoundError as error:
        raise DataError("E-DATA-02", f"expected a Parquet file at {file}, found none: check the path") from error
    except (OSError, ValueError, ArrowException) as error:
        raise DataError("E-DATA-07", f"expected a Parquet file at {file}, found another: export it again") from error
    if rows > MOST_ROWS or size > MOST_BYTES:
        raise DataError("E-DATA-07", f"expected at most {MOST_ROWS} rows and {MOST_BYTES} bytes in {file}: divide it")
    read = [name for name in wanted if name in names]

    def body() -> Iterator[tuple[int, Cells]]:
        line = 0
        gap = [""] * (len(names) - len(read))
        try:
            for batch in opened.iter_batches(4096, columns=read):
                for row in zip(*(batch.column(name).to_pylist() for name in read), strict=True):
                    line += 1
                    yield line, [*map(_text, row), *gap]
        except (OSError, ValueError, ArrowException) as error:
            raise DataError("E-DATA-07", f"expected a whole Parquet file at {file}: export it again") from error

    return [*read, *(name for name in names if name not in read)], body()


def _text(value: object) -> str:
    """Write a cell of Parquet as CSV has it: nothing for null and NaN, whole numbers without a point."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value).strip()
