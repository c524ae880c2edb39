"""Analytic on random patch filters of images, in one round, at several sizes.

    python -m benchmarks.frozen.patches --data-root ROOT --out runs/patches [ROW ...]   computes what is missing there
    python -m benchmarks.frozen.patches                                                 the table of the stored runs

ROOT holds Fashion-MNIST and CIFAR-10 as `benchmarks.paper.images` reads them. Ten seeds of the filters and of the
division, of all images fewer; two classes at each of five silos. The division does not move the result, to the bit, and
lambda follows from the sums, so nothing is tuned on any image. Runs are kept in patches.jsonl, in the order of the
rows, and go on where they stopped; the table says how many seeds are there.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import run_store
from benchmarks.comparison import report, study
from benchmarks.comparison.study import Trial
from benchmarks.run_store import Run, TimeUpError

FOLDER = Path(__file__).parent
STORE, TABLE = "patches.jsonl", "patches.md"
SEEDS = range(10)
WORDS = ("method=analytic", "model=random_features", "federation=p5c2", "rounds=1", "threads=1")
ROWS: Mapping[str, tuple[str, ...]] = {
    "Fashion-MNIST, 64 images a class": ("images=fmnist-64-1000", "model.width=1152"),
    "CIFAR-10, 500 images a class": ("images=cifar10-500-1000", "model.width=2304"),
    "Fashion-MNIST, all 60,000": ("images=fmnist-6000-1000", "model.width=2304"),
    "CIFAR-10, all 50,000": ("images=cifar10-5000-1000", "model.width=2304"),
    "Fashion-MNIST, all 60,000, twice the filters": ("images=fmnist-6000-1000", "model.width=4608"),
    "Fashion-MNIST, 64 images a class, cosines": ("images=fmnist-64-1000", "model.kind=cosine", "model.width=1024"),
    "CIFAR-10, 500 images a class, cosines": ("images=cifar10-500-1000", "model.kind=cosine", "model.width=1024"),
}


def trials(data_root: Path | None) -> dict[str, list[Trial]]:
    return {row: study.trials(row, (*WORDS, *words), [0.1], SEEDS, data_root) for row, words in ROWS.items()}


def table(stored: Mapping[str, Run]) -> str:
    rows = []
    for row, wanted in trials(None).items():
        runs = [stored[trial.key] for trial in wanted if trial.key in stored]
        found = [100 * float(run["ga"][-1]) for run in runs]  # type: ignore[index]
        mean, spread = (f"{f(found):.1f}" if len(found) > k else "-" for k, f in enumerate(_MEAN_AND_SPREAD))
        cpu = f"{statistics.fmean(float(str(run['cpu_seconds'])) for run in runs):.0f}" if runs else "-"
        rows.append([row, str(wanted[0].words[-2].partition("=")[2]), mean, spread, str(len(found)), cpu])
    head = ["images", "features", "accuracy, %", "std over seeds", "seeds", "CPU seconds"]
    words = "`" + " ".join(WORDS) + "`"
    made = "[made by `python -m benchmarks.frozen.patches`]"
    return "\n".join(["# Random patch filters, one round", "", f"{words} {made}", "", *report.table(head, rows), ""])


_MEAN_AND_SPREAD = (statistics.fmean, statistics.stdev)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frozen.patches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="begin with these words; all rows without any")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the store and the table")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run later than after these")
    given = parser.parse_args()
    store, until = given.out / STORE, time.monotonic() + 60 * given.minutes
    if given.out != FOLDER:
        given.out.mkdir(parents=True, exist_ok=True)
        for row, wanted in trials(given.data_root).items():
            if not given.rows or any(row.startswith(begin) for begin in given.rows):
                try:
                    run_store.complete(wanted, store, study.measure, given.jobs, until=until)
                except TimeUpError as error:
                    print(f"{row}: {error}")
    text = table(run_store.read(store))
    (given.out / TABLE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
