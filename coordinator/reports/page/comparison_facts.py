"""What the page that compares runs shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.reports.comparison import ComparedRun, Comparison
from coordinator.reports.curves import Scores, text
from coordinator.reports.page.overview import State, run_state
from coordinator.reports.page.run_record import TITLES, chart_of
from privacy.reports.uncertainty import NOTHING
from web.chart import Chart

LETTERS = "ABCD"


@dataclass(frozen=True, slots=True)
class Column:
    """One of the runs. letter: its name in charts and tables."""

    letter: str
    id: str
    state: State
    method: str
    data: str
    rounds: str
    hospitals: int
    bytes_up: int


@dataclass(frozen=True, slots=True)
class ComparisonFacts:
    """Runs side by side. scores: (measure, which, a text for each run)."""

    headline: str
    columns: tuple[Column, ...]
    differences: Mapping[str, tuple[str | None, ...]]
    scores: tuple[tuple[str, str, tuple[str, ...]], ...]
    charts: tuple[Chart, ...]
    classes: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]


def comparison_facts(found: Comparison) -> ComparisonFacts:
    return ComparisonFacts(
        headline=_headline(found),
        columns=tuple(map(_column, LETTERS, found.runs)),
        differences=found.differences,
        scores=tuple(_scores(found)),
        charts=tuple(_charts(found)),
        classes=tuple(
            (name, tuple(run.by_class.get(name, NOTHING).text() for run in found.runs)) for name in found.classes
        ),
        notes=tuple(f"{note[:1].upper()}{note[1:]}." for note in found.notes),
    )


def _headline(found: Comparison) -> str:
    """Name the run whose last rounds were best in balanced accuracy, where all have it without noise."""
    last = [
        run.curves["balanced_accuracy"].scores.last if "balanced_accuracy" in run.curves else NOTHING
        for run in found.runs
    ]
    known = sorted(zip((e.point for e in last if e.exact and e.point is not None), LETTERS, strict=False), reverse=True)
    if len(known) < len(found.runs):
        return f"{len(found.runs)} runs side by side"
    (best, letter), (second, _) = known[:2]
    if best - second < 0.0005:
        return "In balanced accuracy the best two end alike"
    return f"{letter} ends {100 * (best - second):.1f} points of balanced accuracy ahead"


def _column(letter: str, run: ComparedRun) -> Column:
    info = run.info
    rounds = f"{info.closed} of {info.rounds}"
    state, hospitals = run_state(info.state), len(run.members)
    return Column(letter, run.id, state, info.method, info.data, rounds, hospitals, info.bytes_up)


def _scores(found: Comparison) -> list[tuple[str, str, tuple[str, ...]]]:
    rows = []
    for measure in found.measures:
        scores = [run.curves[measure].scores if measure in run.curves else Scores() for run in found.runs]
        name = TITLES[measure]
        rows.append((name, "final", tuple(text(measure, s.final) for s in scores)))
        rows.append((name, "best", tuple(text(measure, s.best) for s in scores)))
        rows.append((name, "mean of the last 5", tuple(text(measure, s.last) for s in scores)))
    return rows


def _charts(found: Comparison) -> list[Chart]:
    charts = []
    for measure in found.measures[:3]:
        of_runs = zip(LETTERS, found.runs, strict=False)
        curves = {letter: run.curves[measure] for letter, run in of_runs if measure in run.curves}
        name = TITLES[measure]
        if (drawn := chart_of(f"{name[:1].upper()}{name[1:]}", curves)) is not None:
            charts.append(drawn)
    return charts
