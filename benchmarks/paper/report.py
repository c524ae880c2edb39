"""A table written out: Markdown in the paper's layout, our numbers beside the printed ones, and CSV of every run."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from benchmarks import run_store
from benchmarks.paper.measures import MEASURES
from benchmarks.paper.study import Grid
from benchmarks.paper.tables import Setting, Table
from benchmarks.run_store import Run


@dataclass(frozen=True, slots=True)
class Results:
    """A table's runs: the grid that says which belong to a cell, and what each found, by key."""

    table: Table
    grid: Grid
    runs: Mapping[str, Run]

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of all cells."""
        return sorted({seed for cell in self.grid.values() for seed in cell})

    def values(self, method: str, setting: Setting, measure: str) -> dict[int, float]:
        """Return a cell's number per seed: the mean over the cell's runs; NaN where one has none."""
        cell, baseline = self.grid.get((method, setting.name), {}), self.grid.get(("FedAvg", setting.name), {})
        read, found = MEASURES[measure].read, {}
        for seed, points in cell.items():
            beside = baseline.get(seed, ())
            numbers = [
                read(self.runs[p.key], self.runs[beside[i].key] if i < len(beside) else None, setting.at)
                for i, p in enumerate(points)
            ]
            found[seed] = mean(numbers)
        return found

    def gain(self, over: str, setting: Setting, measure: str) -> tuple[float, float]:
        """Return the paper's method minus another, paired by seed: mean and standard error (NaN for one seed)."""
        ours, theirs = (self.values(m, setting, measure) for m in (self.table.own, over))
        apart = [ours[s] - theirs[s] for s in ours if s in theirs and not math.isnan(ours[s] - theirs[s])]
        if not apart:
            return math.nan, math.nan
        return mean(apart), stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan


def cell_text(results: Results, method: str, setting: Setting) -> str:
    """Write "ours ± std (paper's)", measure by measure."""
    written = []
    for measure, printed in zip(results.table.measures, results.table.printed_cell(method, setting), strict=True):
        values = list(results.values(method, setting, measure).values())
        kind = MEASURES[measure]
        known = [v for v in values if not math.isnan(v)]
        if len(known) < len(values) and known:
            ours = f"{kind.text(mean(known))} in {len(known)} of {len(values)} seeds"
        elif known:
            ours = kind.text(mean(known), stdev(known) if len(known) > 1 else 0.0)
        else:
            ours = kind.text(math.nan) if values else "not run"
        if 0 < len(values) < len(results.seeds):
            ours += f" ({len(values)} seeds)"
        written.append(f"{ours} ({printed})")
    return " / ".join(written)


def markdown(results: Results) -> str:
    table, seeds = results.table, results.seeds
    methods = list(table.methods)
    settings = [s for s in table.settings if any(name == s.name for _, name in results.grid)]
    said = " / ".join(MEASURES[m].label for m in table.measures)
    trained = f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}"
    seeded = "computed, nothing trained" if table.measures == ("numbers",) else trained
    lines = [f"# {table.name}, scale={table.scale}", "", f"{table.paper}.", ""]
    lines += [f"{said}; {seeded}; the paper's number in brackets, - where it is not known.", ""]
    if table.across == "methods":
        lines += _rows(["", *methods], [[_name(s), *(cell_text(results, m, s) for m in methods)] for s in settings])
    else:
        lines += _rows(
            ["", *map(_name, settings)], [[m, *(cell_text(results, m, s) for s in settings)] for m in methods]
        )
    if table.own in table.methods and len(methods) > 1 and any(MEASURES[m].better for m in table.measures):
        lines += ["", *_gains(results, settings)]
    if table.measures != ("numbers",):
        lines += ["", run_store.outcomes_text(_by_method(results))]
    lines += ["", f"`python -m benchmarks.paper table={table.name} scale={table.scale}`; {run_store.machine()}.", ""]
    return "\n".join(lines)


def _by_method(results: Results) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for (method, _), seeds in results.grid.items():
        found.setdefault(method, []).extend(results.runs[p.key] for points in seeds.values() for p in points)
    return found


def _gains(results: Results, settings: Sequence[Setting]) -> list[str]:
    table = results.table
    others = [m for m in table.methods if m != table.own and any(method == m for method, _ in results.grid)]
    lines = [f"{table.own} minus another method, paired by seed (standard error):", ""]
    rows = []
    for measure in table.measures:
        for setting in settings:
            cells = []
            for other in others:
                gain, error = results.gain(other, setting, measure)
                scale = 100 if MEASURES[measure].percent else 1
                cells.append(
                    "-"
                    if math.isnan(gain)
                    else f"{scale * gain:+.1f}" + ("" if math.isnan(error) else f" ({scale * error:.1f})")
                )
            rows.append([f"{setting.name}, {MEASURES[measure].label.split(',')[0]}", *cells])
    return [*lines, *_rows(["", *others], rows)]


def _name(setting: Setting) -> str:
    return f"{setting.name} ({setting.beside})" if setting.beside else setting.name


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def write_csv(results: Results, file: Path) -> None:
    """Write one line per run and measure, with the printed number of its cell."""
    with file.open("w", newline="") as out:
        lines = csv.writer(out, lineterminator="\n")
        table, head = results.table, ("table", "scale", "setting", "method", "seed", "measure")
        lines.writerow([*head, "value", "printed", "manifest", "key"])
        for (method, name), cell in results.grid.items():
            setting = next(s for s in table.settings if s.name == name)
            for measure, printed in zip(table.measures, table.printed_cell(method, setting), strict=True):
                for seed, value in results.values(method, setting, measure).items():
                    keys = [p.key for p in cell[seed]]
                    manifests = [str(results.runs[k].get("manifest", ""))[:16] for k in keys]
                    number = "" if math.isnan(value) else f"{value:.6g}"
                    row = [table.name, table.scale, name, method, seed, measure]
                    lines.writerow([*row, number, printed, " ".join(manifests), " ".join(keys)])
