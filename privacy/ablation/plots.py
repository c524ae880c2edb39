"""Accuracy versus epsilon: one panel per share, a line per variant, bands of the 95 % interval over seeds."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from privacy.ablation.checks import Accuracy, estimate
from privacy.ablation.grid import VARIANTS, Grid


def draw(accuracy: Accuracy, grid: Grid, file: Path, title: str) -> None:
    """Draw into a file, PNG or SVG by its name; epsilon is on a log scale, "inf" a tick of its own to the right."""
    finite = sorted(e for e in grid.epsilons if not math.isinf(e))
    places = {e: math.log2(e) for e in finite}
    if math.inf in grid.epsilons:
        places[math.inf] = (max(places.values()) if places else 0.0) + 1.5
    figure = Figure(figsize=(3.6 * len(grid.shares) + 1.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(grid.shares), sharey=True, squeeze=False)[0]
    for panel, share in zip(axes, grid.shares, strict=True):
        for number, variant in enumerate(grid.variants):
            at = share if VARIANTS[variant].uses_share else 1.0
            points = [
                (places[e], found)
                for e in sorted(grid.epsilons)
                if not (VARIANTS[variant].finite and math.isinf(e))
                if (found := estimate(accuracy, grid, variant, e, at)) is not None
            ]
            x, mean = [p for p, _ in points], [f.mean for _, f in points]
            half = [0.0 if math.isnan(f.half) else f.half for _, f in points]
            panel.plot(x, mean, marker="o", color=f"C{number}", label=variant)
            low = [m - h for m, h in zip(mean, half, strict=True)]
            high = [m + h for m, h in zip(mean, half, strict=True)]
            panel.fill_between(x, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
        panel.set_xticks(list(places.values()), ["inf" if math.isinf(e) else f"{e:g}" for e in places])
        panel.set_title(f"{100 * share:g} % submit prototypes")
        panel.set_xlabel("epsilon")
    axes[0].set_ylabel("final accuracy")
    axes[-1].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
