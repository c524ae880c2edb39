"""The runs of a comparison: every method at every rate on the tuning seeds, then at its best rate on the table's.

A rate's score is the mean, over the tuning seeds, of the mean of the last five rounds of the first measure; the highest
wins, the smaller rate of two. The budget is the same for every method: rates times tuning seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from benchmarks import run_store
from benchmarks.comparison.settings import Comparison
from benchmarks.paper import images
from benchmarks.run_store import Run
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.run_spec import RunSpec
from coordinator.simulate import runner
from coordinator.simulate.engine import SimulationEngine
from fl_core.errors import FederationError
from fl_core.types.clinical import CLINICAL
from fl_core.types.records import RoundRecord
from privacy.accounting.uncertainty import LAST

DEAD = 0.0
"""The score of a run that ended in an error, such as updates that are no longer finite: it has no model."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a comparison."""

    key: str
    method: str
    lr: float
    seed: int
    words: tuple[str, ...]
    data_root: Path | None = None

    def __str__(self) -> str:
        return f"{self.method}, lr {self.lr:g}, seed {self.seed}"


def trials(
    method: str, words: Sequence[str], lrs: Sequence[float], seeds: Sequence[int], data_root: Path | None
) -> list[Trial]:
    """Compose the runs of one method, once for all of them; raises ConfigError where that does not compose."""
    cut, found = next((w for w in words if w.startswith("images=")), ""), list[Trial]()
    spec = _composed(tuple(images.resolved(tuple(words), data_root, cut=False)))  # a stored table needs no images
    for lr in lrs:
        written, at = (*words, f"train.lr={lr:g}"), replace(spec, train=replace(spec.train, lr=lr))
        for seed in seeds:
            found.append(Trial(run_store.key_of(run_store.seeded(at, seed), cut), method, lr, seed, written, data_root))
    return found


def spec_of(trial: Trial) -> RunSpec:
    return run_store.seeded(_composed(tuple(images.resolved(trial.words, trial.data_root))), trial.seed)


@cache
def _composed(words: tuple[str, ...]) -> RunSpec:
    """Compose once for all seeds: it takes as long as a fifth of a small run."""
    return compose_simulation(words)


def measure(trial: Trial) -> Run:
    """Simulate one run; one that the round loop itself ends is kept with its reason."""
    start, spec = time.process_time(), spec_of(trial)
    found: dict[str, object] = {"key": trial.key, "seed": trial.seed, "words": list(trial.words)}
    try:
        engine = SimulationEngine(workers=1)  # runs are what is computed side by side
        result = runner.run(spec, images.root_of(trial.words, trial.data_root), engine=engine)
    except FederationError as error:
        if error.code != "E-RUN-03":  # too few updates that are finite and useful: what training came to
            raise
        return {
            **found,
            "aggregator": spec.aggregator["name"],
            "failed": str(error),
            "cpu_seconds": round(time.process_time() - start, 2),
        }
    records = result.measured or result.records
    scores = [r.personal["pa"] for r in records if "pa" in r.personal]
    return {
        **found,
        "ga": _rounded([e.point for e in result.estimates]),
        "balanced": _rounded([r.balanced_accuracy for r in records]),
        **({"auc": _rounded([_auc(r) for r in records])} if spec.metrics == CLINICAL else {}),
        **({"pa": [None, *_rounded(scores)]} if scores else {}),
        **run_store.judged(result),
        "model": result.model_digest[:16],
        "cpu_seconds": round(time.process_time() - start, 2),
    }


def _auc(record: RoundRecord) -> float | None:
    found = record.clinical and record.clinical.macro_auc
    return found.middle if found else None


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if v is None else round(v, 5) for v in values]


def curve(run: Run, name: str) -> list[float]:
    """Return a measure after 1, ..., T rounds; empty for a run that failed."""
    found = run.get(name)
    if "failed" in run or not isinstance(found, list):
        return []
    return [math.nan if v is None else float(v) for v in found[1:]]


def mean_of_last(run: Run, name: str) -> float:
    return fmean(curve(run, name)[-LAST:] or [DEAD])


def best(run: Run, name: str) -> float:
    return max(curve(run, name), default=DEAD)


def rounds_to(run: Run, name: str, target: float) -> float:
    """Return the number of the first round that reaches a target, infinity where none does."""
    return next((float(t) for t, v in enumerate(curve(run, name), start=1) if v >= target), math.inf)


def score(runs: Sequence[Run], name: str) -> float:
    return fmean(mean_of_last(run, name) for run in runs)


@dataclass(frozen=True, slots=True)
class Tuned:
    """A method's rate, with the score of every rate on the tuning seeds (the grid's order), and its runs by seed."""

    lr: float
    scores: Mapping[float, float]
    tuning: Sequence[Run]
    runs: Mapping[int, Run]

    @property
    def on_the_edge(self) -> bool:
        return len(self.scores) > 1 and self.lr in (min(self.scores), max(self.scores))


Complete = Callable[[Sequence[Trial]], Mapping[str, Run]]
"""Computes trials, or finds them, and returns the runs by key."""


def compared(asked: Comparison, complete: Complete, data_root: Path | None) -> dict[str, Tuned]:
    """Tune each method's rate on the tuning seeds, then run it at that rate on the table's seeds."""

    def composed(method: str, lrs: Sequence[float], seeds: Sequence[int]) -> list[Trial]:
        return trials(method, (*asked.words, *asked.methods[method]), lrs, seeds, data_root)

    grids = {method: composed(method, asked.lrs, asked.tuning_seeds) for method in asked.methods}
    known = complete([trial for grid in grids.values() for trial in grid])
    by_lr = {m: {lr: [known[t.key] for t in grid if t.lr == lr] for lr in asked.lrs} for m, grid in grids.items()}
    scores = {m: {lr: score(runs, asked.measures[0]) for lr, runs in found.items()} for m, found in by_lr.items()}
    chosen = {m: max(found, key=lambda lr: (found[lr], -lr)) for m, found in scores.items()}
    final = {m: composed(m, [lr], asked.seeds) for m, lr in chosen.items()}
    runs = complete([trial for found in final.values() for trial in found])
    return {m: Tuned(lr, scores[m], by_lr[m][lr], {t.seed: runs[t.key] for t in final[m]}) for m, lr in chosen.items()}
