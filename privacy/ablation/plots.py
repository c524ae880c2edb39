"""Accuracy versus epsilon: one panel per share, a line per variant, bands of the 95 % interval over seeds."""

from __future__ import annotations

import math
from pathlib import Path

from fl_core.errors.extras import require
from privacy.ablation.checks import Accuracy, estimate
from privacy.ablation.grid import VARIANTS, Grid

_APART = 0.04
"""How far variants stand beside each other; a factor 2 of epsilon is 1."""


def draw(accuracy: Accuracy, grid: Grid, file: Path, title: str) -> None:
    """Draw into a file; epsilon on a log scale, "inf" a tick of its own; variants stand a little beside each other."""
    finite = sorted(e for e in grid.epsilons if not math.isinf(e))
    places = {e: math.log2(e) for e in finite}
    if math.inf in grid.epsilons:
        places[math.inf] = (max(places.values()) if places else 0.0) + 1.5
    figure = require("matplotlib.figure", "plots", "pictures").Figure(
        figsize=(3.6 * len(grid.shares) + 1.8, 3.8), layout="constrained"
    )
    require("matplotlib.backends.backend_agg", "plots", "pictures").FigureCanvasAgg(figure)
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
            beside = _APART * (number - (len(grid.variants) - 1) / 2)
            x, mean = [p + beside for p, _ in points], [100 * f.mean for _, f in points]
            half = [0.0 if math.isnan(f.half) else 100 * f.half for _, f in points]
            panel.plot(x, mean, marker="o", markersize=4, linewidth=1.4, color=f"C{number}", label=variant)
            low = [m - h for m, h in zip(mean, half, strict=True)]
            high = [m + h for m, h in zip(mean, half, strict=True)]
            panel.fill_between(x, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
        panel.set_xticks(list(places.values()), ["inf" if math.isinf(e) else f"{e:g}" for e in places])
        panel.set_title(f"{100 * share:g} % submit prototypes")
        panel.set_xlabel("epsilon")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("final accuracy (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"{title}; bands: 95 % interval over {len(grid.seeds)} seeds")
    figure.savefig(file, dpi=120)
