"""Figures of the papers that need no run of their own: geometry in the plane, and curves of runs that are stored."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from benchmarks.comparison import protocol, study
from benchmarks.comparison import run as comparison
from benchmarks.comparison.report import table
from benchmarks.paper.variants import UnevenClasses
from consilium.research.datasets import spiral
from fl_core.methods.shared import class_vectors

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Points = NDArray[np.float64]
Draw = Callable[[Axes], None]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a figure came to; panels: by title."""

    title: str
    rows: Sequence[str]
    panels: Mapping[str, Draw]

    def save(self, file: Path) -> None:
        figure, axes = plt.subplots(
            1, len(self.panels), figsize=(max(4.4 * len(self.panels), 6), 3.8), squeeze=False, layout="constrained"
        )
        for axis, (title, draw) in zip(axes.flat, self.panels.items(), strict=True):
            draw(axis)
            axis.set_title(title, fontsize=8)
            axis.tick_params(labelsize=7)
        figure.suptitle(textwrap.fill(self.title, int(figure.get_size_inches()[0] * 14)), fontsize=9)
        figure.savefig(file, dpi=80, metadata={"Software": None})
        plt.close(figure)

    def section(self, name: str) -> str:
        """Write the figure's part of the page."""
        command = f"{self.title}. Command: `python -m benchmarks.paper figure={name}`"
        picture = f"![{self.title}](../benchmarks/paper/results/figures/{name}.png)"
        return "\n".join([f"## {name}", "", command, "", picture, "", *self.rows, ""])


# ---- FedMR, Figure 2 -------------------------------------------------------------------------------------------------

CENTRES, RADIUS, PER_CLASS = np.array([[1.0, 0.0], [0.0, 3**0.5], [0.0, -(3**0.5)]]), 0.5, 400
ALL, PAIRS = (0, 1, 2), ((0, 1), (0, 2), (1, 2))
IN_PAPER = {
    "one silo with all classes": np.array([[1, 0], [-(3**0.5) / 2, 0.5], [-(3**0.5) / 2, -0.5]]),
    "mean of three silos with two each": np.array(
        [[1 / 3, 0], [-1 / 6, (3**0.5 + 2) / 6], [-1 / 6, -(3**0.5 + 2) / 6]]
    ),
}
"""Optimal weights as the paper gives them (section 3.2)."""


def discs() -> tuple[Points, NDArray[np.int64]]:
    """Draw points of three classes, uniform in discs."""
    random, y = np.random.default_rng(0), np.repeat(ALL, PER_CLASS)
    angle, far = random.uniform(0, 2 * np.pi, len(y)), RADIUS * np.sqrt(random.uniform(size=len(y)))
    return CENTRES[y] + far[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1), y


def weights(x: Points, y: NDArray[np.int64], c: float = 1.0) -> Points:
    """Fit a softmax without bias; return a weight per class (3, 2), zero where the class has no points.

    c: the inverse of the weight decay
    """
    classes = np.unique(y)
    fitted = LogisticRegression(fit_intercept=False, C=c, max_iter=5000, tol=1e-8).fit(x, y).coef_
    found = np.zeros((3, 2))
    found[classes] = np.concatenate([-fitted, fitted]) / 2 if len(classes) == 2 else fitted
    return found


def shift(ours: Points, theirs: Points) -> float:
    """Return the angle in degrees between the weights of the second class."""
    a, b = ours[1], theirs[1]
    return float(np.degrees(np.arccos(np.clip(a @ b / np.linalg.norm(a) / np.linalg.norm(b), -1, 1))))


def averaged(x: Points, y: NDArray[np.int64], c: float, *, centres: bool) -> Points:
    """Average what silos of two classes each fit; centres: with as many points at the centre of the missing class."""
    found = list[Points]()
    for pair in PAIRS:
        (missing,) = set(ALL) - set(pair)
        held, more = np.isin(y, pair), PER_CLASS if centres else 0
        points = np.concatenate([x[held], np.repeat(CENTRES[[missing]], more, axis=0)])
        found.append(weights(points, np.append(y[held], np.full(more, missing)), c))
    return np.asarray(np.mean(found, axis=0))


def circles() -> Drawn:
    x, y = discs()
    decays = (0.01, 1.0, 100.0)
    rows = [["the paper's weights", *[f"{shift(*IN_PAPER.values()):.1f}"] * len(decays)]]
    for what, centres in (("mean of the silos", False), ("the same, with the missing class's centre", True)):
        shifts = [shift(weights(x, y, c), averaged(x, y, c, centres=centres)) for c in decays]
        rows.append([what, *(f"{angle:.1f}" for angle in shifts)])

    def draw(axis: Axes) -> None:
        axis.scatter(*x.T, c=[f"C{c}" for c in y], s=2, alpha=0.3)
        kinds = (weights(x, y), averaged(x, y, 1.0, centres=False), averaged(x, y, 1.0, centres=True))
        for vectors, style in zip(kinds, ("-", "--", ":"), strict=True):
            for c, vector in enumerate(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)):
                axis.plot([0, vector[0]], [0, vector[1]], style, color=f"C{c}")
        axis.set_aspect("equal")

    return Drawn(
        "FedMR, Figure 2, the shift of the optimum on three circles: a softmax without bias, two classes at each silo",
        [
            *table(["shift of the second class's weights, degrees", *(f"weight decay 1/{c:g}" for c in decays)], rows),
            "",
            "The 45 degrees follow from the weights that the paper prints. A softmax trained on all classes has "
            "other weights for the second class, and the shift is smaller.",
        ],
        {"directions of the weights (-: all classes, --: mean of silos, :: with centres)": draw},
    )


# ---- FedGELA, Figure 3c ----------------------------------------------------------------------------------------------

COUNTS = ((100, 100, 100), (100, 100, 0), (160, 40, 0), (100, 60, 20))


def regions(counts: Sequence[int], adapt: bool) -> NDArray[np.int64]:
    """Return the class that a silo's classifier gives each of 36,000 directions of features in the plane."""
    phi = class_vectors.adaptation(torch.tensor(counts, dtype=torch.float64)) if adapt else torch.ones(3)
    angles = torch.arange(36_000, dtype=torch.float64) / 36_000 * 2 * torch.pi
    logits = torch.stack([angles.cos(), angles.sin()], 1) @ class_vectors.etf(3, 2, 0).T * phi.double()
    return np.asarray(logits.argmax(1))


def boundaries() -> Drawn:
    def panel(counts: Sequence[int], adapt: bool) -> Draw:
        def draw(axis: Axes) -> None:
            classes = regions(counts, adapt)[::100]
            angles = np.arange(len(classes)) / len(classes) * 2 * np.pi
            axis.scatter(np.cos(angles), np.sin(angles), c=[f"C{c}" for c in classes], s=12)
            for c, row in enumerate(class_vectors.etf(3, 2, 0).numpy()):
                axis.plot([0, row[0]], [0, row[1]], color=f"C{c}", ls="-" if counts[c] else ":")
            axis.set_aspect("equal")

        return draw

    rows = []
    for counts in COUNTS:
        shares = [np.bincount(regions(counts, adapt), minlength=3) / 360 for adapt in (False, True)]
        rows.append([", ".join(map(str, counts)), *(", ".join(f"{s:.1f}" for s in share) for share in shares)])
    return Drawn(
        "FedGELA, Figure 3c, decision regions of one silo: three classes, features of length 1 in the plane",
        table(
            ["images of each class", "the frame (FedGE): % of directions", "adapted (FedGELA): % of directions"], rows
        ),
        {
            "the frame": panel(COUNTS[2], adapt=False),
            **{f"adapted, {counts} images": panel(counts, adapt=True) for counts in COUNTS[1:3]},
        },
    )


# ---- FedNH, Figure 5, and FedCD, Figure 3 ----------------------------------------------------------------------------


def arms() -> Drawn:
    data = spiral.read("spiral", None)
    x, y = np.asarray(data.train.x), data.train.y
    ((kept, _),) = UnevenClasses().partition(y, data.test.y, len(data.classes), 0)

    def panel(x: Points, y: NDArray[np.int64]) -> Draw:
        return lambda axis: axis.scatter(*x.T, c=[f"C{c}" for c in y], s=3) and None

    sets = {
        "training, equal arms": (x, y),
        "training, uneven arms": (x[kept], y[kept]),
        "test": (np.asarray(data.test.x), data.test.y),
    }
    rows = [[name, ", ".join(map(str, np.bincount(labels)))] for name, (_, labels) in sets.items()]
    return Drawn(
        "FedNH, Figure 5, the spiral's points: five arms in place of six, 400 points in place of 3,000",
        table(["set", "points of each arm"], rows),
        {name: panel(*of) for name, of in sets.items()},
    )


def learning_curves(name: str = "fmnist_dir05_claims") -> Drawn:
    """Draw the runs that a protocol's table has; raises DataError (E-DATA-02) where they are not all stored."""
    fixed = protocol.load(name)
    found = comparison.protocol_rows(fixed, comparison.RESULTS / f"{name}.jsonl")
    lines = {
        method: 100 * np.array([study.curve(run, "ga") for run in row.table.values() if "failed" not in run])
        for method, row in found.items()
    }
    marks = (1, 5, 10, 20, 50)
    rows = [[method, *(f"{fmean(values[:, t - 1]):.1f}" for t in marks)] for method, values in lines.items()]

    def draw(axis: Axes) -> None:
        for number, (method, values) in enumerate(lines.items()):
            rounds = np.arange(1, values.shape[1] + 1)
            axis.plot(rounds, values.mean(0), color=f"C{number}", label=method)
        axis.set_xlabel("round", fontsize=8)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)

    return Drawn(
        "FedCD, Figure 3a, learning curves, Dir(0.5): the table's runs of fmnist_dir05_claims, means of ten seeds",
        table(["method", *(f"round {t}, %" for t in marks)], rows),
        {"global accuracy, %": draw},
    )


DRAWN: Mapping[str, Callable[[], Drawn]] = {
    "fedmr_circles": circles,
    "fedgela_boundaries": boundaries,
    "fednh_arms": arms,
    "fedcd_curves": learning_curves,
}
