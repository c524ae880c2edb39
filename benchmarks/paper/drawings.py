"""How a figure's stored numbers are drawn: bars, sweeps, curves over rounds, features in the plane, similarities."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np

from benchmarks.paper.figures import Cell, Found
from benchmarks.paper.measures import MEASURES

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ACROSS, WIDE, HIGH = 4, 4.4, 3.4
Draw = Callable[[Axes], None]
"""Draws one panel into axes."""


def save(found: Found, file: Path) -> None:
    """Draw a figure into a file; equal numbers give equal bytes on one machine."""
    panels = KINDS[found.figure.draw](found)
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    size = (max(WIDE * across, 6.0), HIGH * down + 0.6)
    solid = found.figure.draw == "points" and _dimensions(found) == 3
    figure, axes = plt.subplots(
        down,
        across,
        figsize=size,
        squeeze=False,
        layout="constrained",
        subplot_kw={"projection": "3d"} if solid else None,
    )
    for axis, (title, draw) in itertools.zip_longest(axes.flat, panels.items(), fillvalue=("", None)):
        if draw is None:
            axis.axis("off")
            continue
        draw(axis)
        axis.set_title(textwrap.fill(title, 52), fontsize=8)
        axis.tick_params(labelsize=7)
    figure.suptitle(textwrap.fill(found.figure.title, int(size[0] * 15)), fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80, metadata={"Software": None})
    plt.close(figure)


def _bars(found: Found) -> dict[str, Draw]:
    def panel(measure: str) -> Draw:
        def draw(axis: Axes) -> None:
            labels = [label for label, _, _ in found.runs]
            for place, cell in enumerate(found.runs):
                values = found.values(cell, measure)
                if values:
                    axis.barh(place, fmean(values), color=f"C{place % 10}", alpha=0.6)
                    axis.plot(values, [place] * len(values), "k.", ms=3)
            axis.set_yticks(range(len(labels)), labels)
            axis.invert_yaxis()
            axis.grid(axis="x", alpha=0.3)

        return draw

    return {MEASURES[m].label: panel(m) for m in found.figure.measures}


def _sweep(found: Found) -> dict[str, Draw]:
    def panel(word: str, measure: str) -> Draw:
        def draw(axis: Axes) -> None:
            values = [str(v) for _, w, v in found.runs if w == word]
            places = {value: place for place, value in enumerate(dict.fromkeys(values))}
            for number, label in enumerate(found.figure.runs):
                cells = [cell for cell in found.runs if cell[:2] == (label, word)]
                seen = [(places[cell[2]], v) for cell in cells for v in found.values(cell, measure)]
                middle = [(places[cell[2]], fmean(v)) for cell in cells if (v := found.values(cell, measure))]
                axis.plot(*zip(*seen, strict=True) if seen else ((), ()), ".", color=f"C{number}", ms=3, alpha=0.6)
                axis.plot(*zip(*middle, strict=True) if middle else ((), ()), color=f"C{number}", label=label)
            for number, label in enumerate(found.figure.level, start=len(found.figure.runs)):
                if level := found.values((label, "", ""), measure):
                    axis.axhline(fmean(level), ls="--", lw=1, color=f"C{number}", label=label)
            axis.set_xticks(range(len(places)), places)
            axis.set_xlabel(word, fontsize=8)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)

        return draw

    pairs = itertools.product(found.figure.varied, found.figure.measures)
    return {f"{MEASURES[m].label} over {word}": panel(word, m) for word, m in pairs}


def _curves(found: Found) -> dict[str, Draw]:
    def panel(names: list[str]) -> Draw:
        def draw(axis: Axes) -> None:
            for number, (cell, name) in enumerate(itertools.product(found.runs, names)):
                lines = np.array(found.series(cell, name))
                if lines.size:
                    label = " ".join(filter(None, (cell[0], name.replace("_", " ") if len(names) > 1 else "")))
                    rounds = np.arange(1, lines.shape[1] + 1)
                    axis.plot(rounds, lines.mean(0), color=f"C{number % 10}", label=label)
                    axis.fill_between(rounds, lines.min(0), lines.max(0), color=f"C{number % 10}", alpha=0.12, lw=0)
            axis.set_xlabel("round", fontsize=8)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)

        return draw

    return {title: panel(list(names)) for title, names in found.figure.panels.items()}


def _first(found: Found, name: str) -> Mapping[Cell, Any]:
    """Return what the first seed's run of each cell kept under a name."""
    seed = found.figure.seeds[0]
    return {cell: runs[seed][name] for cell, runs in found.runs.items() if name in runs[seed]}


def _dimensions(found: Found) -> int:
    return max(len(row) for models in _first(found, "points").values() for of in models.values() for row in of["x"])


def _points(found: Found) -> dict[str, Draw]:
    """Features by class, and class vectors from the origin, as long as the farthest feature."""

    def panel(of: Mapping[str, Any]) -> Draw:
        def draw(axis: Axes) -> None:
            x, y, rows = np.array(of["x"]), np.array(of["y"]), np.array(of["rows"])
            axis.scatter(*x.T, c=[f"C{c % 10}" for c in y], s=8)
            if len(rows):
                far = np.linalg.norm(x, axis=1).max() / max(np.linalg.norm(rows, axis=1).max(), 1e-12)
                for c, row in enumerate(rows * far):
                    axis.plot(
                        *np.stack([np.zeros_like(row), row]).T, color=f"C{c % 10}", lw=1, ls="-" if c in y else ":"
                    )

        return draw

    found_points = _first(found, "points")
    shown = found.figure.models
    return {f"{cell[0]}: {who}": panel(models[who]) for cell, models in found_points.items() for who in shown}


def _matrix(found: Found) -> dict[str, Draw]:
    def panel(values: list[list[float]]) -> Draw:
        def draw(axis: Axes) -> None:
            image = axis.imshow(values, vmin=-1, vmax=1, cmap="RdBu_r")
            axis.figure.colorbar(image, ax=axis, shrink=0.8)

        return draw

    return {f"{cell[0]}: cosines of class vectors": panel(v) for cell, v in _first(found, "similarity").items()}


KINDS: Mapping[str, Callable[[Found], dict[str, Draw]]] = {
    "bars": _bars,
    "sweep": _sweep,
    "curves": _curves,
    "points": _points,
    "matrix": _matrix,
}
