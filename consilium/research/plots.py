"""Plots of runs' curves and of survey answers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from consilium.report.comparison import MAX_RUNS
from consilium.report.curves import Curve, curves
from fl_core.errors import ConfigError
from fl_core.errors.extras import require
from privacy.accounting import measures
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import printable
from service_core.storage.private_files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from coordinator.lead.survey_answers import SurveyAnswers
    from fl_core.types.survey import SurveyAnswer

FORMATS = ("png", "svg")
LINES = (("#0072b2", "-"), ("#c44a00", "--"), ("#00785a", ":"), ("#7b4f9d", "-."))
"""Colours that colour-blind readers can distinguish, each with its own line style."""
_NAME_CHARS = 60


def plot(details: Sequence[pb.RunDetail], measures: Sequence[str], out: Path) -> list[str]:
    """Draw a panel for each measure with a curve for each run, and return the measures that were drawn.

    measures: empty for accuracy and balanced accuracy   out: a .png or .svg file.
    A curve has a gap at values hidden by noise; other noisy values have a band for their interval.
    Raises ConfigError (E-CFG-02) on another kind of file, repeated or too many runs, or a measure that no run has.
    """
    kind = require_file(out, "--out")
    if len({detail.info.run_id for detail in details}) < len(details) or len(details) > MAX_RUNS:
        raise ConfigError("E-CFG-02", f"expected at most {MAX_RUNS} runs, each once, found {len(details)}: name fewer")
    by_run = [curves(detail.rounds) for detail in details]
    drawn = [m for m in (measures or ("accuracy", "balanced_accuracy")) if any(m in each for each in by_run)]
    if not drawn or (measures and set(drawn) != set(measures)):
        measured = sorted({name for each in by_run for name in each})
        raise ConfigError(
            "E-CFG-02",
            f"expected measures that one of these runs has, found {', '.join(measures) or 'none'}: "
            + (f"choose from {', '.join(measured)}" if measured else "wait until a round is closed"),
        )
    names = [_name(detail.info) for detail in details]
    replace_file(out, picture(drawn, names, by_run, kind), 0o600)
    return drawn


def require_file(out: Path, option: str) -> str:
    """Return png or svg; raises ConfigError (E-CFG-02) on another kind of file, or if its folder does not exist."""
    kind = out.suffix.lower().lstrip(".")
    if kind not in FORMATS or not out.parent.is_dir():
        raise ConfigError(
            "E-CFG-02",
            f"{option}: expected a .png or .svg file in an existing folder, found {out}: choose another file",
        )
    return kind


def _name(info: pb.RunInfo) -> str:
    text = printable(f"{info.run_id} ({info.method})")
    return text if len(text) <= _NAME_CHARS else f"{text[:_NAME_CHARS]}..."


def picture(measures: Sequence[str], names: Sequence[str], found: Sequence[dict[str, Curve]], kind: str) -> bytes:
    """Draw a panel for each measure. names, found: name and curves of each run   kind: png or svg."""
    require("matplotlib", "research", "pictures of runs")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 5.5 * len(measures), 4.2), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False, sharey=True)[0]
    for axes, measure in zip(panels, measures, strict=True):
        for number, (name, of_run) in enumerate(zip(names, found, strict=True)):
            if measure in of_run:
                _draw(axes, of_run[measure], name, number)
        _dress(axes, measure)
    return _bytes_of(figure, kind)


def _draw(axes: Axes, curve: Curve, name: str, number: int) -> None:
    colour, dash = LINES[number % len(LINES)][0], LINES[number % len(LINES)][1]
    low, middle, high = (
        [math.nan if (v := getattr(value, end)) is None else 100 * v for value in curve.values]
        for end in ("low", "point", "high")
    )
    label = f"{name}: {curve.measure.text(curve.scores.final)} at the end"
    axes.plot(curve.rounds, middle, dash, color=colour, linewidth=2, label=label, marker="." if len(low) < 2 else "")
    if any(not value.exact for value in curve.values):
        axes.fill_between(curve.rounds, low, high, color=colour, alpha=0.15, linewidth=0)


def survey_drawing(out: Path) -> Callable[[SurveyAnswers], None]:
    """Return a function that draws a survey's answers into a file with mode 0600; raises as `require_file`."""
    kind = require_file(out, "--picture")
    return lambda answers: replace_file(out, survey_picture(answers, kind), 0o600)


def survey_picture(found: SurveyAnswers, kind: str) -> bytes:
    """Draw a panel for each question of a survey. kind: png or svg.

    Counts that some hospitals suppressed are hatched. Counts that all suppressed have an x and no bar, so that neither
    looks like a small number. Noisy counts have error bars for their interval.
    """
    require("matplotlib", "research", "pictures of surveys")
    from matplotlib.figure import Figure

    columns = min(3, len(found.answers))
    rows = math.ceil(len(found.answers) / columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 0.8 + 4.0 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, answer in zip(panels, found.answers, strict=False):
        _draw_answer(axes, answer, noisy=found.epsilon is not None)
    for axes in panels[len(found.answers) :]:
        figure.delaxes(axes)
    hospitals = f"{found.hospitals} hospitals" if found.hospitals != 1 else "1 hospital"
    noise = "" if found.epsilon is None else f", with noise (epsilon {found.epsilon:g})"
    figure.suptitle(f"Answers of {hospitals}{noise}; hatched: some suppressed, x: all suppressed", fontsize="medium")
    return _bytes_of(figure, kind)


def _draw_answer(axes: Axes, answer: SurveyAnswer, noisy: bool) -> None:
    cells = [cell for cell in answer.cells if cell.held or cell.patients or cell.images or not answer.unit]
    patients = [0.0 if cell.patients is None else cell.patients for cell in cells]
    hatches = ["///" if cell.held and cell.patients is not None else "" for cell in cells]
    places = list(range(len(cells)))
    axes.bar(places, patients, color=LINES[0][0], alpha=0.75, hatch=hatches, edgecolor="white", linewidth=0.5)
    if noisy:
        widths = [cell.half_width if cell.patients is not None else 0.0 for cell in cells]
        axes.errorbar(places, patients, yerr=widths, fmt="none", ecolor="#333333", capsize=2, linewidth=1)
    unanswered = [place for place, cell in zip(places, cells, strict=True) if cell.patients is None]
    if unanswered:
        axes.plot(unanswered, [0.0] * len(unanswered), "x", color=LINES[1][0])
    axes.set_xticks(places, [printable(cell.name)[:20] for cell in cells], rotation=45, ha="right", fontsize="small")
    for label in axes.get_xticklabels():
        label.set_parse_math(False)  # do not read names as formulas
    axes.set_title(f"{answer.title}, {answer.unit}" if answer.unit else answer.title)
    axes.set_ylabel(answer.counts)
    axes.spines[["top", "right"]].set_visible(False)


def _bytes_of(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _dress(axes: Axes, measure: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="rounds of training", ylabel="%", ylim=(0, 100))
    axes.set_title(measures.named(measure).title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)
    legend = axes.legend(loc="lower right", frameon=False, fontsize="small")
    for entry in legend.get_texts():
        entry.set_parse_math(False)  # do not read names as formulas
