"""Templates: everything that is written into one is escaped, visible, and there."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from consilium.web import chart
from service_core.console import local_time, printable

OWN = Path(__file__).parent / "templates"
STYLE = Path(__file__).parent / "static" / "page.css"
MAX_CHARS = 2_000
"""Characters of one text; what another side wrote may be longer, and is cut with three dots."""


@cache
def make_environment(folder: Path) -> Environment:
    r"""Make the templates of a page, those of `consilium.web` behind its own; each is compiled once in a process.

    Guarantees: no text brings markup into a page, or a character that is not visible: a control character or a mark of
    writing direction is shown as its escape (`\x1b`). A name that a template misses is an error, never nothing.
    """
    environment = Environment(
        loader=FileSystemLoader([folder, OWN]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": moment, "size": size, "percent": percent, "iso": iso, "stacked": stacked}
    environment.globals |= {"draw_chart": chart.draw, "draw_gauge": draw}
    return environment


def _visible(value: object) -> object:
    """Prepare a value for the page. Markup is what a macro of ours returned, whose values passed here before."""
    if isinstance(value, Markup):
        return value
    text = "–" if value is None else str(value)
    return printable(text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "...")


def stacked(table: Markup) -> Markup:
    """Write each column's name on its cells, and mark empty ones: on a narrow screen a row is read without the head."""
    head, body = str(table).split("<tbody>")
    names = re.findall(r"<th\b[^>]*>(.*?)</th>", head)
    body = re.sub(r"(<td[^>]*)>([–-]?)</td>", r"\1 data-empty>\2</td>", body)
    rows = [_labelled(row, names) for row in body.split("<tr")]
    return Markup(f"{head}<tbody>{'<tr'.join(rows)}")  # noqa: S704 - of markup, whose values are escaped


def _labelled(row: str, names: Sequence[str]) -> str:
    left = iter(names)
    return re.sub(r"<t[hd](?=[ >])", lambda cell: f'{cell[0]} data-label="{next(left)}"', row)


def moment(unix: float | None) -> str:
    """Write a local time to the minute, or a dash for none (None or 0), or for one that no calendar has."""
    try:
        return local_time(unix)[:-3] if unix else "–"
    except (ValueError, OverflowError, OSError):
        return "–"


def iso(unix: float) -> str:
    return datetime.fromtimestamp(unix).astimezone().isoformat(timespec="seconds")


def size(bytes: float) -> str:
    """Write a number of bytes for people: 1000 bytes are 1 kB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(bytes) < 999.5:
            return f"{bytes:.0f} {unit}" if unit == "bytes" or bytes >= 99.95 else f"{bytes:.1f} {unit}"
        bytes /= 1000
    return f"{bytes:.1f} TB"


def percent(share: Any) -> str:  # noqa: ANN401
    return f"{100 * share:.0f} %"


# ---- gauges ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GaugeDrawing:
    """Percentages of the width. text: the same in words, for whoever does not see it   full: used is 1 or more."""

    used: float
    more: float
    text: str
    full: bool


def draw(used: float, more: float = 0.0) -> GaugeDrawing:
    """Draw a share `used` of 1, and `more` on top. Raises ValueError on one that is negative or no number."""
    if math.isnan(used) or math.isnan(more) or used < 0 or more < 0:
        raise ValueError(f"expected shares of at least 0, found {used} and {more}")
    shown = min(used, 1.0)
    text = f"{100 * min(used, 99):.0f} percent used"
    if more:
        text += f", {100 * min(more, 99):.0f} percent more would be"
    return GaugeDrawing(round(100 * shown, 2), round(100 * min(more, 1.0 - shown), 2), text, used >= 1)
