"""Line charts, drawn by the server as SVG that scales to its card, with a legend and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_SERIES = 6
"""Maximum number of curves in a chart, each with its own colour and line style."""
MAX_POINTS = 400
TABLE_ROWS = 60
_MAX_VALUE = 1e30
"""Larger numbers are drawn as gaps, like NaN."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: a value for each x; None, infinity and NaN are gaps.

    colour: from 1 to `MAX_SERIES`. The same series should have the same colour in every chart.
    """

    name: str
    values: Sequence[float | None]
    colour: int


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over common, increasing x. limits: of y, if it has natural ones; None takes those of the values."""

    title: str
    x_name: str
    x: Sequence[float]
    series: Sequence[Series]
    limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        colours = [one.colour for one in self.series]
        if len(set(colours)) < len(colours) or not set(colours) <= set(range(1, MAX_SERIES + 1)):
            raise ValueError(f"expected curves with different colours from 1 to {MAX_SERIES}, found {colours}")
        for one in self.series:
            if len(one.values) != len(self.x):
                raise ValueError(f"{one.name}: expected {len(self.x)} values, found {len(one.values)}")
        if any(not b > a for a, b in pairwise(self.x)):
            raise ValueError(f"x: expected increasing numbers, found {list(self.x)[:10]}")


@dataclass(frozen=True, slots=True)
class CurvePath:
    """An SVG path in a field of 1000 by 1000 units, from the top left. last: the curve's last value."""

    name: str
    colour: int
    path: str
    last: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis. at: position in percent, from the left or the top."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class ChartDrawing:
    """A chart's data for a template. rows_left_out: number of earlier table rows that are not shown."""

    title: str
    x_name: str
    text: str
    curves: tuple[CurvePath, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    rows_left_out: int


def draw(chart: Chart) -> ChartDrawing:
    shown = [(s, [_drawable(v) for v in s.values]) for s in chart.series]
    low, high = chart.limits or _limits([v for _, values in shown for v in values if v is not None])
    first, last = (chart.x[0], chart.x[-1]) if chart.x else (0.0, 1.0)
    if last == first:
        first, last = first - 0.5, last + 0.5
    across = [1000 * (x - first) / (last - first) for x in chart.x]
    curves = []
    for series, values in shown:
        down = [None if v is None else 1000 * (high - min(max(v, low), high)) / (high - low) for v in values]
        if not (ends := [v for v in values if v is not None]):
            continue
        curves.append(CurvePath(series.name, series.colour, _path(across, down), _number(ends[-1])))
    whole = all(float(x).is_integer() for x in chart.x)
    rows = [(_number(x), *(_number(s.values[k]) for s in chart.series)) for k, x in enumerate(chart.x)]
    text = f"{chart.title} by {chart.x_name}. Last values: " + "; ".join(f"{c.name} {c.last}" for c in curves)
    return ChartDrawing(
        title=chart.title,
        x_name=chart.x_name,
        text=text if curves else f"{chart.title}: nothing to draw yet",
        curves=tuple(curves),
        x_ticks=tuple(
            Tick(100 * (t - first) / (last - first), _number(t))
            for t in _ticks(first, last, least=1.0 if whole else 0.0)
        ),
        y_ticks=tuple(Tick(100 * (high - t) / (high - low), _number(t)) for t in _ticks(low, high)),
        head=(chart.x_name, *(s.name for s in chart.series)),
        rows=tuple(rows[-TABLE_ROWS:]),
        rows_left_out=max(0, len(rows) - TABLE_ROWS),
    )


def _drawable(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and abs(value) <= _MAX_VALUE else None


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return limits around all values, 5 % wider on each side, and never of zero width."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = max((high - low) / 20, abs(high) * 1e-9, 1e-12)
    return low - margin, high + margin


def _path(across: Sequence[float], down: Sequence[float | None]) -> str:
    """Write the SVG path, with a new piece after each gap. A point between two gaps becomes a dot."""
    step = max(1, math.ceil(len(across) / MAX_POINTS))
    chosen = sorted({*range(0, len(across), step), len(across) - 1})
    path, open_ = "", False
    for k in chosen:
        y = down[k]
        if y is None:
            open_ = False
            continue
        path += f"{'L' if open_ else 'M'}{across[k]:.1f} {y:.1f}"
        path += "" if open_ else "h0"
        open_ = True
    return path


def _ticks(low: float, high: float, most: int = 5, least: float = 0.0) -> list[float]:
    """Return round numbers within the limits: multiples of 1, 2 or 5 times a power of ten, at least `least` apart."""
    raw = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    start = math.ceil(low / step - 1e-9)
    return [k * step for k in range(start, start + most + 1) if k * step <= high + step * 1e-9]


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"
