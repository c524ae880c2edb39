"""Templates that escape values, show invisible characters and refuse missing names; also gauges and formats."""

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
"""Maximum length of a text. Longer texts from others are cut, with three dots."""


@cache
def make_environment(folder: Path) -> Environment:
    r"""Create a page's template environment: its own folder first, then `consilium.web`. Cached for the process.

    Guarantees: no text adds markup or invisible characters to a page; control characters and marks of writing direction
    are shown as escapes (`\x1b`). A name that a template misses is an error, never empty.
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
    """Prepare a value for the page. Markup comes only from our macros, whose values were prepared before."""
    if isinstance(value, Markup):
        return value
    text = "–" if value is None else str(value)
    return printable(text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "...")


def stacked(table: Markup) -> Markup:
    """Add the column names to all cells and mark empty cells, so that narrow screens can show rows without a head."""
    head, body = str(table).split("<tbody>")
    names = re.findall(r"<th\b[^>]*>(.*?)</th>", head)
    body = re.sub(r"(<td[^>]*)>([–-]?)</td>", r"\1 data-empty>\2</td>", body)
    rows = [_labelled(row, names) for row in body.split("<tr")]
    return Markup(f"{head}<tbody>{'<tr'.join(rows)}")  # noqa: S704 - from markup whose values are escaped


def _labelled(row: str, names: Sequence[str]) -> str:
    left = iter(names)
    return re.sub(r"<t[hd](?=[ >])", lambda cell: f'{cell[0]} data-label="{next(left)}"', row)


def moment(unix: float | None) -> str:
    """Format a local time to the minute; a dash for None, 0 and times outside the calendar."""
    try:
        return local_time(unix)[:-3] if unix else "–"
    except (ValueError, OverflowError, OSError):
        return "–"


def iso(unix: float) -> str:
    return datetime.fromtimestamp(unix).astimezone().isoformat(timespec="seconds")


def size(bytes: float) -> str:
    """Format a number of bytes; 1000 bytes are 1 kB."""
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
    """A gauge: percentages of its width. text: the same in words, for screen readers   full: used is 1 or more."""

    used: float
    more: float
    text: str
    full: bool


def draw(used: float, more: float = 0.0) -> GaugeDrawing:
    """Draw a share `used` of 1, and `more` on top. Raises ValueError on a negative number or NaN."""
    if math.isnan(used) or math.isnan(more) or used < 0 or more < 0:
        raise ValueError(f"expected shares of at least 0, found {used} and {more}")
    shown = min(used, 1.0)
    text = f"{100 * min(used, 99):.0f} percent used"
    if more:
        text += f", would use {100 * min(more, 99):.0f} percent more"
    return GaugeDrawing(round(100 * shown, 2), round(100 * min(more, 1.0 - shown), 2), text, used >= 1)
