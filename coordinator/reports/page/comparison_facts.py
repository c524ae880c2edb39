"""What the page that compares runs shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.reports.comparison import ComparedRun, Comparison, score_rows
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
    """Runs side by side. scores: (measure, a text for each run)   over: what these are means of."""

    headline: str
    columns: tuple[Column, ...]
    differences: Mapping[str, tuple[str | None, ...]]
    scores: tuple[tuple[str, tuple[str, ...]], ...]
    over: str
    charts: tuple[Chart, ...]
    classes: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]


def comparison_facts(found: Comparison) -> ComparisonFacts:
    return ComparisonFacts(
        headline=found.standing.headline(dict(zip((run.id for run in found.runs), LETTERS, strict=False))),
        columns=tuple(map(_column, LETTERS, found.runs)),
        differences=found.differences,
        scores=tuple((TITLES.get(measure, measure), texts) for measure, texts in score_rows(found)),
        over=found.standing.over,
        charts=tuple(_charts(found)),
        classes=tuple(
            (name, tuple(run.by_class.get(name, NOTHING).text() for run in found.runs)) for name in found.classes
        ),
        notes=tuple(f"{note[:1].upper()}{note[1:]}." for note in found.notes),
    )


def _column(letter: str, run: ComparedRun) -> Column:
    info = run.info
    rounds = f"{info.closed} of {info.rounds}"
    state, hospitals = run_state(info.state), len(run.members)
    return Column(letter, run.id, state, info.method, info.data, rounds, hospitals, info.bytes_up)


def _charts(found: Comparison) -> list[Chart]:
    charts = []
    for measure in found.measures[:3]:
        of_runs = zip(LETTERS, found.runs, strict=False)
        curves = {letter: run.curves[measure] for letter, run in of_runs if measure in run.curves}
        name = TITLES[measure]
        if (drawn := chart_of(f"{name[:1].upper()}{name[1:]}", curves)) is not None:
            charts.append(drawn)
    return charts
