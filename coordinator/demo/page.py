"""The results of the demo as one file for a browser: no server behind it, nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from coordinator.demo.tables import ResultTable
from web.chart import Chart, Series
from web.rendering import make_environment

_FOLDER = Path(__file__).parent / "templates"
_STYLE = Path(__file__).parents[2] / "web/static/page.css"


def write_page(
    file: Path, headline: str, below: str, curves: Mapping[str, Sequence[float | None]], tables: Sequence[ResultTable]
) -> None:
    """Write the page. curves: a model's name -> its accuracy (0 to 1, None: withheld) before round 1 and after each."""
    rounds = max(map(len, curves.values()))
    drawn = Chart(
        "Test images classified correctly (%)",
        "rounds of training",
        range(rounds),
        [Series(name, [None if v is None else 100 * v for v in values]) for name, values in curves.items()],
        (0.0, 100.0),
    )
    template = make_environment([_FOLDER]).get_template("demo.html")
    style = Markup(_STYLE.read_text(encoding="utf-8"))  # noqa: S704 - our own file, in a style element
    file.write_text(
        template.render(headline=headline, below=below, curves=drawn, tables=tables, style=style), encoding="utf-8"
    )
