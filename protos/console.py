"""Output of both command lines: JSON for machines, tables and times for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table


def plain_console(*, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> Console:
    """Make a console that prints text as it is: ":AB:" in a fingerprint is no emoji, "[...]" in a path no markup."""
    return Console(highlight=False, markup=False, emoji=False, stderr=stderr, width=width, soft_wrap=soft_wrap)


def print_json(value: object) -> None:
    """Print one JSON value on one line."""
    sys.stdout.write(json.dumps(value, sort_keys=True) + "\n")
    sys.stdout.flush()


def make_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*head, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def local_time(unix: float | None) -> str:
    """Format a time, or a dash for none (None or 0)."""
    return datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M:%S") if unix else "-"
