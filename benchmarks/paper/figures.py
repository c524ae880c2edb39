"""Figures of the papers at a small scale, and the list of what the papers show beside the tables: figures.yaml.

A figure is some runs, and numbers of theirs in a drawing. Runs are kept in results/figures/runs.jsonl, where figures
share them; results/figures/NAME.png is drawn from there, and docs/paper-figures.md has the list and all numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev

import yaml

from benchmarks import run_store
from benchmarks.comparison.report import table as rows_of_table
from benchmarks.paper import study, variants
from benchmarks.paper.drawn import DRAWN
from benchmarks.paper.frame import replaced
from benchmarks.paper.measures import MEASURES
from benchmarks.paper.probes import PROBES
from benchmarks.run_store import Run
from consilium.research.simulate.engine import SimulationEngine
from fl_core.errors import ConfigError, DataError, FederationError
from fl_core.suggest import suggest

FILE = Path(__file__).with_name("figures.yaml")
PAGE = Path(__file__).parents[2] / "docs/paper-figures.md"
STORE = "runs.jsonl"
DRAWINGS = ("bars", "sweep", "curves", "points", "matrix")
UNTOUCHED = (
    "Updates were aggregated with aggregator=mean. Over all runs of the table: updates refused 0; updates cut 0; rows "
    "of prototypes cut 0; values clipped by the fixed-point grid 0."
)
"""What the head of the page says of all figures."""
BEGIN, END = "<!-- python -m benchmarks.paper figure=all run=false -->", "<!-- end -->"

Cell = tuple[str, str, str]
"""A label, and of a sweep the word that is varied and its value ("" of what is not varied)."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: words of its runs by label, what of them is drawn, and how.

    varied: a word -> its values; every run of `runs` is made with each, those of `level` once, as a level line
    measures: names of MEASURES: a panel each   panels: title -> series of the probe, of curves
    models: whose points are drawn, of what the probe kept: global, silo 0, silo 1
    """

    name: str
    paper: str
    shows: str
    scale: str
    words: str
    draw: str
    runs: Mapping[str, str]
    level: Mapping[str, str] = field(default_factory=dict)
    varied: Mapping[str, Sequence[object]] = field(default_factory=dict)
    measures: Sequence[str] = ()
    panels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    models: Sequence[str] = ()
    seeds: Sequence[int] = (0, 1, 2)
    probe: str = ""

    @property
    def setting(self) -> str:
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else "one seed"
        one_drawn = self.draw in ("points", "matrix") and len(self.seeds) > 1
        drawn = f", picture of seed {self.seeds[0]}" if one_drawn else ""
        return f"{self.scale}, {seeds}{drawn}"

    @property
    def title(self) -> str:
        return f"{self.paper}, {self.shows}: {self.setting}"

    @property
    def caption(self) -> str:
        command = f"`python -m benchmarks.paper figure={self.name}`"
        return f"{self.paper}, {self.shows}. Setting: {self.setting}. Command: {command}"

    def cells(self) -> Iterator[tuple[Cell, tuple[str, ...]]]:
        """Yield what the figure compares, and the words of each."""
        shared = self.words.split()
        for label, own in {**self.runs, **self.level}.items():
            words = replaced(shared, own.split())
            if label in self.level or not self.varied:
                yield (label, "", ""), tuple(words)
                continue
            for word, values in self.varied.items():
                for value in values:
                    yield (
                        (label, word, f"{value:g}" if isinstance(value, float) else str(value)),
                        tuple(replaced(words, [f"{word}={value}"])),
                    )

    def points(self, data_root: Path | None = None) -> dict[Cell, dict[int, study.Point]]:
        """Compose every run of the figure, at every seed; raises ConfigError where one does not compose."""
        found = {}
        for cell, words in self.cells():
            label = " ".join(filter(None, (cell[0], f"{cell[1]}={cell[2]}" if cell[1] else "")))
            asked = study.Point(
                key="",
                method=label,
                setting=self.name,
                seed=0,
                words=words,
                probe=self.probe,
                data_root=data_root,
                how=SimulationEngine(workers=1),  # runs are what is computed side by side
            )
            with variants.known():
                found[cell] = study.at_seeds(asked, self.seeds)
        return found


@dataclass(frozen=True, slots=True)
class Item:
    """A table or figure of a paper. why: what of it is not made, or differs, and why; empty where all is stored."""

    paper: str
    item: str
    figures: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    comparisons: tuple[str, ...] = ()
    why: str = ""

    @property
    def state(self) -> str:
        if not (self.figures or self.tables or self.comparisons):
            return "not made"
        return "partly" if self.why else "stored"


def load(file: Path = FILE) -> tuple[dict[str, Figure], list[Item]]:
    """Read figures and the list; raises ConfigError (E-CFG-01) on a key, figure or measure that there is not."""
    raw = yaml.safe_load(file.read_text())
    figures = {name: _figure(name, value, file.name) for name, value in raw["figures"].items()}
    items = [Item(**{k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}) for item in raw["items"]]
    for item in items:
        for name in item.figures:
            if name not in (valid := [*figures, *DRAWN]):
                raise ConfigError("E-CFG-01", f"{file.name}: there is no figure {name!r}: {suggest(name, valid)}")
        if item.state == "not made" and not item.why:
            raise ConfigError("E-CFG-02", f"{file.name}: expected figures, tables or why of {item.item!r}, found none")
    return figures, items


def _figure(name: str, raw: Mapping[str, object], where: str) -> Figure:
    known = {f.name for f in fields(Figure)} - {"name"}
    for key in raw:
        if key not in known:
            raise ConfigError("E-CFG-01", f"{where}, {name}: there is no key {key!r}: {suggest(key, known)}")
    found = Figure(name=name, **raw)  # type: ignore[arg-type]
    for kind, valid, named in (
        ("drawing", DRAWINGS, [found.draw]),
        ("probe", PROBES, [found.probe] if found.probe else []),
        ("measure", MEASURES, found.measures),
    ):
        for one in named:
            if one not in valid:
                raise ConfigError("E-CFG-01", f"{where}, {name}: there is no {kind} {one!r}: {suggest(one, valid)}")
    return found


def chosen(names: str, valid: Sequence[str]) -> list[str]:
    """Return the names with commas between, or all; raises ConfigError (E-CFG-01) on an unknown one."""
    listed = list(valid) if names == "all" else [name for name in names.split(",") if name]
    for name in listed:
        if name not in valid:
            raise ConfigError("E-CFG-01", f"there is no figure={name}: {suggest(name, valid)}")
    return listed


def compute(figure: Figure, out: Path, jobs: int, data_root: Path | None = None) -> None:
    """Compute what the store lacks of a figure."""
    asked = [point for cell in figure.points(data_root).values() for point in cell.values()]
    run_store.complete(asked, out / STORE, measured, jobs, lambda text: print(text, flush=True))


def measured(point: study.Point) -> Run:
    """Measure a run; one that the round loop itself ends is kept with its reason, as in benchmarks/comparison."""
    try:
        with variants.known():
            return study.measure(point)
    except FederationError as error:
        if error.code != "E-RUN-03":  # too few updates that are finite: what training came to
            raise
        found = {"key": point.key, "seed": point.seed, "words": list(point.words), "failed": str(error)}
        return {**found, "aggregator": "mean"}


@dataclass(frozen=True, slots=True)
class Found:
    """A figure with its runs, by cell and seed."""

    figure: Figure
    runs: Mapping[Cell, Mapping[int, Run]]

    def values(self, cell: Cell, measure: str) -> list[float]:
        """Return a measure's known values over the seeds, in its own unit (percent, seconds, ...)."""
        kind, baseline = MEASURES[measure], self.runs.get(("FedAvg", "", ""), {})
        read = [kind.read(run, baseline.get(seed), 0) for seed, run in self.runs[cell].items() if "failed" not in run]
        return [v * (100 if kind.percent else 1) for v in read if not math.isnan(v)]

    def series(self, cell: Cell, name: str) -> list[list[float]]:
        """Return a series of the probe, per seed; NaN where a round has none."""
        runs = [run for run in self.runs[cell].values() if "failed" not in run]
        return [[math.nan if v is None else float(v) for v in run.get(name, [])] for run in runs]  # type: ignore[attr-defined]


def stored(figure: Figure, out: Path) -> Found:
    """Read a figure's runs; raises DataError (E-DATA-02) where one is missing."""
    kept, points = run_store.read(out / STORE), figure.points()
    missing = [p for cell in points.values() for p in cell.values() if p.key not in kept]
    if missing:
        raise DataError(
            "E-DATA-02",
            f"expected all runs of {figure.name} in {out / STORE}, found none of {missing[0]}: leave out run=false to "
            f"compute them (python -m benchmarks.paper figure={figure.name})",
        )
    return Found(figure, {cell: {s: kept[p.key] for s, p in seeds.items()} for cell, seeds in points.items()})


def numbers(found: Found) -> list[str]:
    """Write a figure's numbers: mean and standard deviation over seeds, of curves after the last round."""
    figure = found.figure
    series = list(itertools.chain.from_iterable(figure.panels.values()))
    head = [MEASURES[m].label for m in figure.measures] + [s.replace("_", " ") for s in series]
    rows = []
    for cell in found.runs:
        label, word, value = cell
        asked = [(found.values(cell, m), MEASURES[m].digits) for m in figure.measures]
        asked += [([s[-1] for s in found.series(cell, name) if s and not math.isnan(s[-1])], 2) for name in series]
        rows.append([f"{label}, {word}={value}" if word else label, *(_text(*one, len(figure.seeds)) for one in asked)])
    return rows_of_table(["", *head], rows)


def _text(values: Sequence[float], digits: int, seeds: int) -> str:
    if not values:
        return "-"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}" + (f" ({len(values)} of {seeds} seeds)" if len(values) < seeds else "")


def section(found: Found) -> str:
    """Write a figure's part of the page: its caption, picture and numbers, and its updates unless all are untouched."""
    figure, by_label = found.figure, dict[str, list[Run]]()
    for (label, *_), runs in found.runs.items():
        by_label.setdefault(label, []).extend(runs.values())
    picture = f"![{figure.paper}, {figure.shows}](../benchmarks/paper/results/figures/{figure.name}.png)"
    outcomes = run_store.outcomes_text(by_label)
    updates = [] if outcomes == UNTOUCHED else [outcomes, ""]
    return "\n".join([f"## {figure.name}", "", figure.caption, "", picture, "", *numbers(found), "", *updates])


def listed(items: Sequence[Item]) -> str:
    """Write the list of all items as a table."""
    return "\n".join(
        rows_of_table(
            ["paper", "table or figure", "state", "where it is, and what differs or is missing"],
            [[i.paper, i.item, i.state, _where(i)] for i in items],
        )
    )


def _where(item: Item) -> str:
    made = [f"[{name}](#{name})" for name in item.figures]
    made += [f"`table={name} scale=small`" for name in item.tables]
    made += [f"[{name}](../benchmarks/comparison/results/{name}.md)" for name in item.comparisons]
    return ": ".join(filter(None, (", ".join(made), item.why)))


def written(text: str, out: Path) -> str:
    """Put the list and all figures between the marks of a page; raises as `stored` where a run is missing."""
    figures, items = load()
    parts = [listed(items), "", *(section(stored(figure, out)) for figure in figures.values())]
    parts += [make().section(name) for name, make in DRAWN.items()]
    before, _, rest = text.partition(BEGIN)
    return "\n".join([f"{before}{BEGIN}", *parts, f"{END}{rest.partition(END)[2]}"])
