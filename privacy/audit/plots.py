"""The pictures of the audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from privacy.audit.attacks import Presence, Tracing
from privacy.audit.bounds import Floats, auc
from privacy.audit.canaries import Found


def bounds(found: Mapping[str, Sequence[Found]], claimed: Mapping[str, float], file: Path) -> None:
    """Draw the refuted epsilon of each training, one dot per seed, beside the claim where there is one."""
    figure, axis = _new(len(found) * 1.6 + 1.5)
    for place, (name, runs) in enumerate(found.items()):
        axis.plot(
            [place] * len(runs), [f.guesses.epsilon for f in runs], "o", color="C0", label="refuted" * (not place)
        )
        if name in claimed:
            axis.plot([place - 0.3, place + 0.3], [claimed[name]] * 2, color="C3", label="claimed" * (not place))
    axis.set_xticks(range(len(found)), list(found))
    axis.set_ylabel("lower bound on epsilon")
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def curves(pairs: Mapping[str, tuple[Floats, Floats]], file: Path) -> None:
    """Draw the ROC curve of an attack for each training: (scores of members, scores of others)."""
    figure, axis = _new(4.6)
    for name, (inside, outside) in pairs.items():
        thresholds = np.sort(np.concatenate((inside, outside)))[::-1]
        right = [(inside >= t).mean() for t in thresholds]
        wrong = [(outside >= t).mean() for t in thresholds]
        axis.plot([0, *wrong], [0, *right], label=f"{name}: AUC {auc(inside, outside):.3f}")
    axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    axis.set_xlabel("false positive rate")
    axis.set_ylabel("true positive rate")
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def presence(found: Mapping[str, Presence], file: Path) -> None:
    """Draw the AUC of the class-presence attack on single updates and through a masked sum."""
    figure, axis = _new(len(found) * 1.6 + 1.5)
    for shift, label, of in ((-0.2, "each update seen", "alone"), (0.2, "only the sum seen", "masked")):
        axis.bar([p + shift for p in range(len(found))], [getattr(f, of) for f in found.values()], 0.4, label=label)
    axis.axhline(0.5, color="0.4", linewidth=1)
    axis.set_xticks(range(len(found)), list(found))
    axis.set_ylabel("AUC of class presence")
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def tracing(found: Sequence[Tracing], chance: float, file: Path) -> None:
    """Draw how well prototypes trace their members, and how often an image made from one finds its own."""
    figure, axis = _new(len(found) * 1.1 + 2)
    places = range(len(found))
    axis.bar([p - 0.2 for p in places], [f.tracing for f in found], 0.4, label="tracing, AUC (chance 0.5)")
    axis.bar(
        [p + 0.2 for p in places], [f.inversion for f in found], 0.4, label=f"inversion, top-1 (chance {chance:.2f})"
    )
    axis.set_xticks(places, [f"{f.members} images\nnoise {f.noise:g}" for f in found], fontsize="small")
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def _new(width: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
