"""Learning curves of a table: one panel per setting, one line per method, a band of one standard deviation."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np

from benchmarks.paper.measures import curve
from benchmarks.paper.report import Results

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

WIDE = 3


def draw(results: Results, file: Path) -> bool:
    """Draw global accuracy against rounds, a method in one colour in all panels; return False where no run has any."""
    panels = [(s, _lines(results, s.name)) for s in results.table.settings]
    panels = [(s, lines) for s, lines in panels if lines]
    if not panels:
        return False
    across = min(WIDE, len(panels))
    down = math.ceil(len(panels) / across)
    places = {method: place for place, method in enumerate(results.table.methods)}
    named: dict[str, Line2D] = {}
    figure, axes = plt.subplots(down, across, figsize=(4.2 * across, 3.2 * down), squeeze=False, layout="constrained")
    for axis, (setting, lines) in zip(axes.flat, panels, strict=False):
        for method, values in lines.items():
            place = places[method]
            rounds, middle, spread = np.arange(values.shape[1]), values.mean(0), values.std(0)
            own = method == results.table.own
            (line,) = axis.plot(
                rounds,
                middle,
                label=method,
                lw=2.2 if own else 1.1,
                zorder=3 if own else 2,
                color=f"C{place % 10}",
                ls="-" if place < 10 else "--",
            )
            named[method] = line
            axis.fill_between(rounds, middle - spread, middle + spread, color=line.get_color(), alpha=0.12, lw=0)
        axis.set_title(setting.name, fontsize=9)
        axis.set_xlabel("round")
        axis.set_ylabel("global accuracy, %")
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    shown = [method for method in places if method in named]
    figure.legend([named[m] for m in shown], shown, loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=80, metadata={"Software": None})
    plt.close(figure)
    return True


def _lines(results: Results, setting: str) -> dict[str, np.ndarray]:
    """Return (seeds, rounds + 1) accuracies in percent by method; a cell of several runs is their mean."""
    found = {}
    for (method, name), cell in results.grid.items():
        if name != setting:
            continue
        seeds = [[curve(results.runs[p.key]) for p in points] for points in cell.values()]
        longest = max((len(c) for runs in seeds for c in runs), default=0)
        if longest > 1:
            padded = np.array([[c + [math.nan] * (longest - len(c)) for c in runs] for runs in seeds])
            found[method] = 100 * padded.mean(1)
    return found
