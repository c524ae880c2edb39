"""Lists that display as tables in a terminal, as HTML in a notebook, and convert to pandas."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table

from fl_core.errors.extras import require
from service_core.console import printable

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
_WIDTH = 160


class Listing(list[T]):
    """A list that displays as a table or as sentences: `print(lead.runs())`.

    `to_frame()` returns a pandas data frame with the same names as `--json`.
    """

    def __init__(self, items: Iterable[T], parts: Sequence[str | Table], rows: Sequence[Mapping[str, object]]) -> None:
        super().__init__(items)
        self._parts, self._rows = parts, rows

    def to_frame(self) -> pd.DataFrame:
        """Return one row per item; raises ConfigError (E-CFG-08) without pandas."""
        return frame(self._rows)

    def __repr__(self) -> str:
        return text(self._parts)

    def _repr_html_(self) -> str:
        return html(self._parts)


def frame(rows: Sequence[Mapping[str, object]]) -> Any:  # noqa: ANN401 - pandas has no types of its own
    """Build a data frame; raises ConfigError (E-CFG-08) without pandas."""
    return require("pandas", "tables", "data frames").DataFrame(list(rows))


def text(parts: Iterable[str | Table]) -> str:
    """Render sentences and tables as lines for a terminal."""
    return rendered(parts, shutil.get_terminal_size((_WIDTH, 0)).columns)


def rendered(parts: Iterable[RenderableType], width: int) -> str:
    """Render sentences, tables and other parts as lines of at most `width` columns. Sentences are not wrapped."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_jupyter=False, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(printable(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def html(parts: Iterable[str | Table]) -> str:
    """Render sentences and tables as HTML, with all texts escaped."""
    return "\n".join(f"<p>{_safe(part)}</p>" if isinstance(part, str) else _html_table(part) for part in parts)


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_safe(column.header)}</th>" for column in table.columns)
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in row)}</tr>" for row in rows)
    caption = f"<caption>{_safe(table.title)}</caption>" if table.title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _safe(value: object) -> str:
    return escape(printable(str(value)))
