"""`python -m benchmarks.epsilon_picture` draws docs/privacy/epsilon.png; `--out FILE` another file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.epsilon_picture.limits import gaussian_picked, gaussian_right, right

ROOT = Path(__file__).parents[2]
AUDIT, PICTURE = ROOT / "benchmarks/audit/audit.json", ROOT / "docs/privacy/epsilon.png"
DELTA = 1e-5
MIN_EPSILON, MAX_EPSILON, WITHOUT = 0.1, 20.0, 45.0
"""The axis of epsilon, and where what has no privacy stands on it."""
PLACES = {"epsilon 1": 1.0, "epsilon 8": 8.0, "no privacy": WITHOUT}
TICKS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Attack:
    """What one attack found: per training the AUC of each seed."""

    name: str
    marker: str
    auc: dict[str, list[float]]


def attacks(audit: dict[str, Any]) -> list[Attack]:
    def planted(name: str) -> dict[str, list[float]]:
        return {training: [f["auc"] for f in seeds] for training, seeds in audit[name]["bounds"].items()}

    return [
        Attack("attack on planted records, all steps seen", "^", planted("white-box")),
        Attack("attack on planted images, only the model seen", "s", planted("black-box")),
        Attack("attack on ordinary images, only the model seen", "o", audit["membership"]["auc"]),
    ]


def draw(found: Sequence[Attack], file: Path, points: int = 200) -> None:
    """Draw the limits and what the attacks found, in percent; dots are means over seeds, lines their range."""
    figure = Figure(figsize=(9.2, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    epsilons = np.geomspace(MIN_EPSILON, MAX_EPSILON, points)
    most = [100 * right(e, DELTA) for e in epsilons]
    picked = [100 * gaussian_picked(e, DELTA) for e in epsilons]
    noise = [100 * gaussian_right(e, DELTA) for e in epsilons]
    axis.fill_between(epsilons, most, 101.5, color="0.88", linewidth=0)
    axis.text(0.125, 88, "impossible, whatever the attack:\nepsilon rules it out", color="0.35")
    limit = "limit of Gaussian noise in one release, "
    axis.plot(epsilons, most, color="C0", linewidth=2, label="limit that epsilon sets, for either question")
    axis.plot(epsilons, noise, color="C0", linewidth=2, linestyle="--", label=limit + "yes or no")
    axis.plot(epsilons, picked, color="C0", linewidth=1.5, linestyle=":", label=limit + "one of two")
    for number, attack in enumerate(found):
        _dots(axis, attack, 1.09 ** (number - 1), f"C{number + 1}")
    axis.axhline(50, color="0.6", linewidth=1)
    axis.text(0.125, 49.4, "tossing a coin", color="0.35", fontsize="small", va="top")
    axis.axvline(29, color="0.7", linewidth=1)
    _axes(axis)
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=2,
        fontsize="small",
        frameon=False,
        title='Lines: limits for any attacker, who answers "was it used?" or "which of two was used?".\n'
        "Marks: attacks that were run, which pick the used one of two; mean and range of five repetitions.",
        title_fontsize="small",
    )
    figure.savefig(file, dpi=130)


def _dots(axis: Axes, attack: Attack, shift: float, colour: str) -> None:
    for number, (training, values) in enumerate(attack.auc.items()):
        percent = [100 * v for v in values]
        middle = fmean(percent)
        axis.errorbar(
            PLACES[training] * shift,
            middle,
            [[middle - min(percent)], [max(percent) - middle]],
            fmt=attack.marker,
            color=colour,
            markersize=7,
            capsize=3,
            label="" if number else attack.name,
        )


def _axes(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.set_xlim(MIN_EPSILON, 70)
    axis.set_xticks([*TICKS, WITHOUT], [*(f"{t:g}" for t in TICKS), "no\nprivacy"])
    axis.minorticks_off()
    axis.set_ylim(44, 101.5)
    axis.set_yticks(range(50, 101, 10), [f"{p} %" for p in range(50, 101, 10)])
    axis.set_xlabel("epsilon, at delta = 0.00001 (smaller is more private)")
    axis.set_ylabel("how often an attacker who guesses\nwhether one image was used can be right")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epsilon_picture")
    parser.add_argument("--out", type=Path, default=PICTURE)
    draw(attacks(json.loads(AUDIT.read_text())), parser.parse_args(words).out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
