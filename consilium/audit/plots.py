"""Plots of the audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from consilium.audit.attacks import TracingResult
from consilium.audit.canaries import CanaryResult
from consilium.audit.epsilon_bounds import Floats, auc
from consilium.audit.step_checks import NoiseScale, SensitivityCheck
from fl_core.errors.extras import require
from service_core.storage.private_files import png, replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure, with size in inches; raises ConfigError (E-CFG-08) without matplotlib."""
    figure: Figure = require("matplotlib.figure", "audit", "pictures").Figure(
        figsize=(width, height), layout="constrained"
    )
    require("matplotlib.backends.backend_agg", "audit", "pictures").FigureCanvasAgg(figure)
    return figure


def bounds(found: Mapping[str, Sequence[CanaryResult]], claimed: Mapping[str, float], file: Path) -> None:
    figure, axis = _new(len(found) * 1.4 + 1.8)
    for place, (name, runs) in enumerate(found.items()):
        beside = np.linspace(-0.15, 0.15, len(runs)) if len(runs) > 1 else np.zeros(1)
        refuted = [f.guesses.epsilon for f in runs]
        axis.plot(place + beside, refuted, "o", color="C0", label="" if place else "refuted, one dot per seed")
        if name in claimed:
            label = "claimed" if name == next(iter(claimed)) else ""
            axis.plot([place - 0.3, place + 0.3], [claimed[name]] * 2, color="C3", label=label)
    axis.set_xticks(range(len(found)), list(found))
    axis.set_ylim(bottom=-0.2)
    axis.set_ylabel("lower bound on epsilon")
    _save(figure, axis, file)


def curves(pairs: Mapping[str, tuple[Floats, Floats]], file: Path) -> None:
    figure, axis = _new(4.6, 4.2)
    for name, (inside, outside) in pairs.items():
        thresholds = np.sort(np.concatenate((inside, outside)))[::-1]
        right = [(inside >= t).mean() for t in thresholds]
        wrong = [(outside >= t).mean() for t in thresholds]
        axis.plot([0, *wrong], [0, *right], label=f"{name}: AUC {auc(inside, outside):.3f}")
    axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    axis.set_xlabel("false positive rate")
    axis.set_ylabel("true positive rate")
    _save(figure, axis, file)


def presence(update_aucs: Mapping[str, Sequence[float]], sum_aucs: Mapping[str, Sequence[float]], file: Path) -> None:
    figure, axis = _new(len(update_aucs) * 1.4 + 1.8)
    for shift, label, of in ((-0.2, "each update seen", update_aucs), (0.2, "only the sum seen", sum_aucs)):
        axis.bar([p + shift for p in range(len(of))], [fmean(values) for values in of.values()], 0.4, label=label)
    _chance(axis)
    axis.set_xticks(range(len(update_aucs)), list(update_aucs))
    axis.set_ylim(0, 1.4)
    axis.set_yticks(np.linspace(0, 1, 6))
    axis.set_ylabel("AUC of class presence")
    _save(figure, axis, file)


def tracing(runs: Sequence[Sequence[TracingResult]], file: Path) -> None:
    cases = list(zip(*runs, strict=True))
    figure, axis = _new(len(cases) * 1.1 + 2)
    places = range(len(cases))
    traced, inverted = ([fmean(getattr(f, of) for f in case) for case in cases] for of in ("tracing", "inversion"))
    axis.bar([p - 0.2 for p in places], traced, 0.4, label="tracing, AUC")
    axis.bar([p + 0.2 for p in places], inverted, 0.4, label="inversion, share found (top 1)")
    for place, (f, *_) in zip(places, cases, strict=True):
        named = "" if place else "inversion by guessing"
        axis.plot([place, place + 0.4], [f.chance] * 2, color="C3", linewidth=1.5, label=named)
    _chance(axis)
    axis.set_xticks(places, [case[0].case.replace(", ", "\n") for case in cases], fontsize="small")
    axis.set_ylim(0, 1.5)
    axis.set_yticks(np.linspace(0, 1, 6))
    _save(figure, axis, file)


def refuted(found: Mapping[str, tuple[float, float, float]], file: Path) -> None:
    figure, axis = _new(len(found) * 0.9 + 2)
    places = range(len(found))
    for k, (label, style) in enumerate((("claimed", "_"), ("lower bound, any mechanism", "o"), ("Gaussian", "x"))):
        axis.plot(places, [values[k] for values in found.values()], style, markersize=14 if k == 0 else 6, label=label)
    axis.set_xticks(places, list(found), rotation=30, ha="right", fontsize="small")
    axis.set_ylabel("epsilon")
    axis.set_ylim(bottom=-0.1)
    _save(figure, axis, file)


def steps(
    scales: Mapping[str, NoiseScale],
    moved: Mapping[str, SensitivityCheck],
    refuted: Mapping[str, Sequence[float]],
    file: Path,
) -> None:
    figure = new_figure(11, 3.4)
    axes = figure.subplots(1, 3, sharey=True)
    axes[0].bar(list(scales), [s.ratio for s in scales.values()], color="C0")
    axes[0].set_title("AU-1: noise / claimed", fontsize="medium")
    axes[1].bar([name.replace(", ", "\n") for name in moved], [m.furthest for m in moved.values()], color="C0")
    axes[1].set_title("AU-2: largest effect / sensitivity", fontsize="medium")
    for place, values in enumerate(refuted.values()):
        axes[2].plot(place + np.linspace(-0.15, 0.15, len(values)), values, "o", color="C0")
    axes[2].set_xticks(range(len(refuted)), list(refuted))
    axes[2].set_title("AU-3: lower bound on mu / claimed", fontsize="medium")
    for axis in axes:
        axis.axhline(1, color="C3", linewidth=1)
        axis.tick_params(labelsize="small")
    axes[0].set_ylim(0, 1.2)
    replace_file(file, png(figure), 0o600)


def _chance(axis: Axes) -> None:
    axis.axhline(0.5, color="0.4", linewidth=1, linestyle="--", label="AUC of guessing")


def _save(figure: Figure, axis: Axes, file: Path) -> None:
    axis.legend(fontsize="small")
    replace_file(file, png(figure), 0o600)


def _new(width: float, height: float = 3.4) -> tuple[Figure, Axes]:
    figure = new_figure(max(width, 4.2), height)
    return figure, figure.add_subplot()
