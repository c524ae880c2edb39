"""Compare methods on the same frozen features.

    python -m benchmarks.frozen.extract --data-root ROOT --weights FILE --out FEATURES.npz
    python -m benchmarks.frozen --features LITE0.npz --out runs/frozen   computes what is missing there
    python -m benchmarks.frozen --stored                                 writes the tables of stored runs

Runs are kept in isic2019.jsonl and costs.jsonl, the tables are in isic2019.md; with `--setting isic2019_gcv` in files
of that name. They are computed outside this package, since a run names the digest of all files of the package that
its data set comes from, and copied here when whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

from benchmarks import run_store
from benchmarks.comparison import report, settings, study
from benchmarks.comparison.run import stored_runs
from benchmarks.comparison.settings import Comparison
from benchmarks.comparison.study import Trial, Tuned
from benchmarks.frozen import isic
from benchmarks.run_store import Run
from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from fl_core.errors import FederationError
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import round_layout
from fl_core.types.enums import TaskKind

FOLDER = Path(__file__).parent
NAME = "isic2019"
SETTINGS = (NAME, "isic2019_gcv")


@dataclass(frozen=True, slots=True)
class Cost:
    """One run whose time and bytes are measured: as long as it has something to exchange."""

    trial: Trial

    @property
    def key(self) -> str:
        return f"cost-{self.trial.key}"

    def __str__(self) -> str:
        return f"what {self.trial} costs"


def measure_cost(cost: Cost) -> Run:
    """Return rounds, CPU seconds of the whole simulation, and the bytes that one silo sends in all rounds."""
    spec = study.spec_of(cost.trial)
    method = RunSetup.of(runner.build_simulation(spec)[0]).method
    spec = replace(spec, rounds=method.exchanges or spec.rounds)
    start = time.process_time()
    result = runner.run(spec, None, engine=SimulationEngine(workers=1))
    seconds = time.process_time() - start
    sent = round_layout(method, result.manifest.layout, TaskKind.TRAIN).values()
    numbers = sum(prod(shape) for part in sent for shape in (*part.shapes.values(), part.weight_shape))
    return {
        "key": cost.key,
        "rounds": spec.rounds,
        "cpu_seconds": round(seconds, 2),
        "bytes_up": spec.rounds * numbers * (8 if method.exact else 4),
    }


def costs(asked: Comparison, found: dict[str, Tuned]) -> dict[str, Cost]:
    """Choose the run of each method at its rate and the first seed of the table."""
    chosen = {}
    for method, tuned in found.items():
        words = (*asked.words, *tuned.words)
        (trial,) = study.trials(method, words, [tuned.lr], asked.seeds[:1], None)
        chosen[method] = Cost(trial)
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frozen", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, nargs="+", help="what benchmarks.frozen.extract wrote")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of stores and tables")
    parser.add_argument("--stored", action="store_true", help="compute nothing: fail where a run is missing")
    parser.add_argument("--setting", choices=SETTINGS, default=NAME)
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time, one core each; 0: one per core")
    given = parser.parse_args(argv)
    if given.features is None and not given.stored:
        parser.error("expected --features FILE ..., as benchmarks.frozen.extract writes them, or --stored")
    if not given.stored and FOLDER.parent in given.out.absolute().parents:
        parser.error(f"expected --out FOLDER outside {FOLDER.parent}, whose files must not change during a run")
    if given.features is not None:
        isic.use(given.features)
    try:
        print(compare(given.jobs, stored=given.stored, folder=given.out, name=given.setting))
    except FederationError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def compare(jobs: int, *, stored: bool, folder: Path = FOLDER, name: str = NAME) -> str:
    """Compute what a folder lacks, write the tables there and return them.

    Raises DataError (E-DATA-02) where nothing may be computed and a run is missing.
    """
    asked, store = settings.load(name, FOLDER), folder / f"{name}.jsonl"
    computed = partial(run_store.complete, file=store, work=study.measure, jobs=jobs)
    found = study.compared(asked, stored_runs(store) if stored else computed, None)
    text = report.markdown(asked, found, command="benchmarks.frozen")
    if name == NAME:
        text += _costs(costs(asked, found), folder / "costs.jsonl", jobs, stored=stored)
    (folder / f"{name}.md").write_text(text)
    return text


def _costs(wanted: dict[str, Cost], store: Path, jobs: int, *, stored: bool) -> str:
    complete = run_store.complete
    measured = run_store.read(store) if stored else complete(list(wanted.values()), store, measure_cost, jobs)
    rows = []
    for method, cost in wanted.items():
        one = measured[cost.key]
        size = float(str(one["bytes_up"])) / 2**20
        rows.append([method, str(one["rounds"]), f"{size:.1f}", f"{float(str(one['cpu_seconds'])):.1f}"])
    head = ["method", "rounds", "MiB that one silo sends in all", "CPU seconds of the whole simulation"]
    return "\n".join(["", "**Costs** (the first seed; features are made before)", "", *report.table(head, rows), ""])
