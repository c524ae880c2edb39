"""Output of both command lines: JSON for machines, tables and times for people.

Text from the other side (names, reasons, class names, errors) passes through `printable` before it is shown or logged.
So it cannot move the cursor, change the writing direction or start a new line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


def printable(text: str, keep: str = "") -> str:
    r"""Escape invisible characters as `\x1b`: control characters, line separators, writing directions.

    keep: characters that are not escaped
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def error_text(error: object) -> str:
    """Format an error for a terminal. Further lines are indented, so none looks like another message."""
    return re.sub(r"\n(?! )", "\n  ", printable(str(error), keep="\n"))


class PrintableConsole(Console):
    """A console that escapes invisible characters other than tabs. Make tables with `make_table`."""

    def print(self, *objects: Any, **how: Any) -> None:  # noqa: ANN401
        super().print(*(printable(o, keep="\t") if isinstance(o, str) else o for o in objects), **how)


class PrintableFormatter(logging.Formatter):
    """Formats a message as one line and indents tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: ANN401, N802
        return "  " + error_text(super().formatException(ei))


def plain_console(*, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> Console:
    """Make a console without emoji, markup and highlighting: fingerprints contain ":AB:", paths "[...]"."""
    return PrintableConsole(highlight=False, markup=False, emoji=False, stderr=stderr, width=width, soft_wrap=soft_wrap)


def json_line(value: object) -> str:
    """Return a JSON value as one line of printable ASCII."""
    return json.dumps(value, sort_keys=True)


def print_json(value: object) -> None:
    sys.stdout.write(json_line(value) + "\n")
    sys.stdout.flush()


OUT = plain_console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 160)
ERR = plain_console(stderr=True)
_KEPT_WHOLE = 40


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def wrap_parts(parts: Iterable[str], width: int, indent: str = "  ") -> list[str]:
    """Fill lines of `width` columns with parts, two spaces apart; further lines are indented.

    A part longer than a line is broken between words; words are never broken.
    """
    lines: list[str] = []
    for part in parts:
        used = cell_len(lines[-1]) + cell_len(indent) * (len(lines) > 1) if lines else width
        if used + 2 + cell_len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    broken = TextWrapper(width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
    wrapped: list[str] = []
    for line in lines:
        broken.initial_indent = indent if wrapped else ""
        wrapped += broken.wrap(line)
    return wrapped


def print_parts(console: Console, *parts: str) -> None:
    """Print parts two spaces apart, wrapped on a terminal."""
    shown = [printable(part, keep="\t") for part in parts]
    for line in wrap_parts(shown, console.width) if console.is_terminal else ["  ".join(shown)]:
        console.print(line, soft_wrap=True)


class FittingTable(Table):
    """A table that becomes a list if the terminal is too narrow for the longest word of each column.

    In the list the first cell of a row is a line, followed by "column: cell" lines; cells that are empty or "-" are
    left out.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = [[str(column.header), *map(str, column.cells)] for column in self.columns]
        whole = [max(map(cell_len, column)) for column in texts]
        least = [max((cell_len(word) for text in column for word in text.split()), default=0) for column in texts]
        if self.columns and self.columns[0].no_wrap:
            least[0] = whole[0]
        spare = options.max_width - (3 * len(texts) + 1) - sum(least)
        if spare >= 0:
            for n, k in enumerate(sorted(range(len(texts)), key=lambda k: whole[k] - least[k])):
                more = min(whole[k] - least[k], spare // (len(texts) - n))  # narrow columns first
                self.columns[k].width, spare = least[k] + more, spare - more
            yield from super().__rich_console__(console, options)
            return
        lines = [str(self.title)] if self.title else []
        heads = [head for head, *_ in texts]
        for first, *rest in zip(*(cells for _, *cells in texts), strict=True):
            filled = [(head, text) for head, text in zip(heads[1:], rest, strict=True) if text not in ("", "-")]
            named = wrap_parts([f"{head}: {text}" for head, text in filled], options.max_width - 2, "")
            lines += [*wrap_parts([first], options.max_width), *(f"  {line}" for line in named)]
        for line in lines:
            yield Text(line, overflow="fold")


def make_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table that folds long cells and never truncates; short first cells stay on one line."""
    table = FittingTable(*map(printable, head), title=printable(title), title_justify="left")
    shown = [tuple(map(printable, row)) for row in rows]
    for column in table.columns:
        column.overflow = "fold"
    if table.columns:
        table.columns[0].no_wrap = all(len(row[0]) <= _KEPT_WHOLE for row in shown if row)
    for row in shown:
        table.add_row(*row)
    return table


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Names and values, one pair per line; separated by a tab when the output is not a terminal."""

    facts: Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table on a terminal, else tab-separated lines, which begin with the head (headings) and the title (titled)."""

    title: str
    head: Sequence[str]
    rows: Iterable[Sequence[str]]
    headings: bool = False
    titled: bool = False


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        value: the JSON output
        shown: the output for people, evaluated when printed
        notes: for people, printed last, on standard error
        status: the exit status
    """

    value: object
    shown: Iterable[str | Table | KeyValues | TextTable] = ()
    notes: Iterable[str] = ()
    status: int = 0


def show_reply(reply: CommandResult, as_json: bool) -> None:
    """Print a reply, as JSON or for people."""
    if as_json:
        print_json(reply.value)
        return
    for item in reply.shown:
        show(item)
    for note in reply.notes:
        ERR.print(note, soft_wrap=True)


def show(item: str | Table | KeyValues | TextTable) -> None:
    """Print one item for people. The terminal wraps text."""
    if isinstance(item, Table):
        OUT.print(item)
    elif isinstance(item, str):
        OUT.print(item, soft_wrap=True)
    elif isinstance(item, KeyValues):
        for name, value in ((printable(name), printable(value)) for name, value in item.facts):
            OUT.print(f"{name + ':':<14} {value}" if OUT.is_terminal else f"{name}\t{value}", soft_wrap=True)
    elif OUT.is_terminal:
        OUT.print(make_table(item.title, item.head, item.rows))
    else:
        lines = ([[item.title]] * item.titled) + [item.head] * item.headings
        for row in (*lines, *item.rows):
            OUT.print("\t".join(map(printable, row)), soft_wrap=True)


def pluralize(number: int, word: str) -> str:
    """Return a number with its noun: "1 silo", "2 silos"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def local_time(unix: float | None) -> str:
    """Format a Unix time in local time; "-" for None or 0."""
    return datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M:%S") if unix else "-"


def format_duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def open_file(file: Path) -> None:
    """Open a file in the browser if there is a display. Never a secret URL: other users see process arguments."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        import webbrowser

        webbrowser.open(file.absolute().as_uri())
