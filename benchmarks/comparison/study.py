"""The runs of a comparison: a method's variants at every rate on the tuning seeds, then the best on the table's.

A score is the mean, over the tuning seeds, of the mean of the last five rounds of the first measure; the highest wins,
of equal ones the first variant and the smallest rate. The budget is the same for every method: variants times rates
times tuning seeds.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import run_store
from benchmarks.comparison.settings import Comparison, Words
from benchmarks.paper import images, paper_metrics
from benchmarks.paper.study import runtime_and_tests, whole
from benchmarks.run_store import Run
from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from consilium.research.simulate.results import Result
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.run_spec import RunSpec
from fl_core.errors import DataError, FederationError
from fl_core.rounds.engine import Observer
from fl_core.training.devices import choose_device
from fl_core.types.clinical import CLINICAL
from fl_core.types.records import PERSONAL_SCORES, RoundRecord
from fl_core.types.values import State
from privacy.accounting.uncertainty import LAST

DEAD = 0.0
"""The score of a run that ended in an error, such as updates that are no longer finite: it has no model."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a comparison; also: what its key has beside what it computes, and its line in the store."""

    key: str
    method: str
    lr: float
    seed: int
    words: tuple[str, ...]
    data_root: Path | None = None
    diagnostics: tuple[str, ...] = ()
    device: str = "cpu"
    also: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method}, lr {self.lr:g}, seed {self.seed}"


def trials(
    method: str,
    words: Sequence[str],
    lrs: Sequence[float],
    seeds: Sequence[int],
    data_root: Path | None,
    diagnostics: Sequence[str] = (),
    device: str = "cpu",
    also: Mapping[str, object] | None = None,
) -> list[Trial]:
    """Compose the runs of one variant of a method, once for all of them; raises ConfigError where it does not.

    also: hits asks which test images the last rounds answer right; all of it is part of the key
    """
    also = also or {}
    keyed = {**also, **({"diagnostics": list(diagnostics)} if diagnostics else {})}
    cut, found = next((w for w in words if w.startswith("images=")), ""), list[Trial]()
    spec = _composed(tuple(images.resolved(tuple(words), data_root, cut=False)))  # a stored table needs no images
    for lr in lrs:
        written, at = (*words, f"train.lr={lr:g}"), replace(spec, train=replace(spec.train, lr=lr))
        for seed in seeds:
            key = run_store.key_of(run_store.seeded(at, seed), cut, **keyed)
            found.append(Trial(key, method, lr, seed, written, data_root, tuple(diagnostics), device, also))
    return found


def spec_of(trial: Trial) -> RunSpec:
    return run_store.seeded(_composed(tuple(images.resolved(trial.words, trial.data_root))), trial.seed)


@cache
def _composed(words: tuple[str, ...]) -> RunSpec:
    """Compose once for all seeds: it takes as long as a fifth of a small run."""
    return compose_simulation(words)


def measure(trial: Trial) -> Run:
    """Simulate one run; one that the round loop itself ends is kept with its reason."""
    start, spec, root = time.process_time(), spec_of(trial), images.root_of(trial.words, trial.data_root)
    found: dict[str, object] = {"key": trial.key, "seed": trial.seed, "words": list(trial.words)}
    found |= {**trial.also, "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"} if trial.also else {}
    hits = TestHits(spec, root) if found.pop("hits", False) else None
    try:
        engine = SimulationEngine(device=trial.device, workers=1)  # runs are what is computed side by side
        result = runner.run(spec, root, hits, engine=engine)
    except FederationError as error:
        if error.code != "E-RUN-03":  # too few updates that are finite and useful: what training came to
            raise
        return {
            **found,
            "aggregator": spec.aggregator["name"],
            "failed": str(error),
            "cpu_seconds": round(time.process_time() - start, 2),
        }
    return {
        **found,
        **measured(spec, result),
        **(_diagnosed(spec, result, root, trial.device) if trial.diagnostics else {}),
        **(hits.facts() if hits else {}),
        "device": run_store.machine(trial.device),
        "cpu_seconds": round(time.process_time() - start, 2),
    }


class TestHits(Observer):
    """Counts how often the global model of the last rounds answers each test image right.

    Images are ordered by a digest of theirs, so that runs which deal them otherwise to silos say it of the same ones.
    """

    __test__ = False

    def __init__(self, spec: RunSpec, root: Path | None) -> None:
        self._runtime, tests = runtime_and_tests(spec, root)
        self._rounds = range(spec.rounds - LAST, spec.rounds)  # the state after a round; one more record has none
        x, y = tests.batch(whole(tests))[0], tests.labels
        digests = [hashlib.sha256(image.numpy().tobytes()).digest() for image in x]
        order = torch.tensor(sorted(range(len(y)), key=lambda i: (digests[i], int(y[i]))))
        self._x, self._y = x[order], y[order]
        self._counts = torch.zeros(len(y), dtype=torch.uint8)

    def closed(self, record: RoundRecord, server: State) -> None:
        method = self._runtime.method
        if record.round in self._rounds and method.has_global_model:
            model = method.global_model(self._runtime.reset_model(), method.broadcast(server)).eval()
            with torch.no_grad():
                chosen = torch.cat([model(part).argmax(dim=1) for part in self._x.split(1000)])
            self._counts += (chosen == self._y).to(torch.uint8)

    def facts(self) -> dict[str, object]:
        counts = base64.b64encode(zlib.compress(self._counts.numpy().tobytes(), 9)).decode()
        return {"test_images": len(self._y), **({"hits": counts} if self._runtime.method.has_global_model else {})}


def hits_of(run: Run) -> npt.NDArray[np.float64] | None:
    """Read each test image's share of the last rounds; None where a run did not count, one zero where it failed."""
    if "failed" in run:
        return np.zeros(1)
    text = run.get("hits")
    return np.frombuffer(zlib.decompress(base64.b64decode(str(text))), np.uint8) / LAST if text else None


def measured(spec: RunSpec, result: Result) -> Run:
    """Say what a run came to after 0, 1, ..., T rounds, and what its rule of averaging changed."""
    records = result.measured or result.records
    personal = {name: [r.personal[name] for r in records if name in r.personal] for name in PERSONAL_SCORES}
    return {
        "ga": _rounded([e.point for e in result.estimates]),
        "balanced": _rounded([r.balanced_accuracy for r in records]),
        **({"auc": _rounded([_auc(r) for r in records])} if spec.metrics == CLINICAL else {}),
        **{name: [None, *_rounded(values)] for name, values in personal.items() if values},
        **run_store.judged(result),
        "model": result.model_digest[:16],
    }


def _diagnosed(spec: RunSpec, result: Result, root: Path | None, device: str) -> dict[str, float]:
    """Say how the final global model's features of all test images lie."""
    runtime, tests = runtime_and_tests(spec, root)
    model = runtime.method.global_model(runtime.reset_model(), runtime.method.broadcast(result.server)).eval()
    place = choose_device(device)
    model = model.to(place)
    with torch.no_grad():
        z = torch.cat([model.features(tests.batch(part)[0].to(place)).cpu() for part in whole(tests).split(1000)])
    y, d = tests.labels, z.shape[1]
    own = [paper_metrics.correlation_eigenvalues(z[y == c]) for c in y.unique().tolist()]  # type: ignore[no-untyped-call]
    return {
        "correlation": round(fmean(float((v.square().sum() - v.sum()) / (d * (d - 1))) for v in own), 5),
        "eigenvalues": round(fmean(paper_metrics.eigenvalue_variance(v) for v in own), 3),
        "angle": round(paper_metrics.feature_angle(z, y, len(result.manifest.schema.classes)), 3),
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
    """Return a measure's mean over the last rounds; DEAD for a run that failed, DataError (E-DATA-07) without any."""
    if "failed" not in run and name not in run:
        raise DataError(
            "E-DATA-07", f"expected {name!r} in run {run.get('key')}, found {sorted(run)}: compute it again"
        )
    return fmean(curve(run, name)[-LAST:] or [DEAD])


def best(run: Run, name: str) -> float:
    return max(curve(run, name), default=DEAD)


def rounds_to(run: Run, name: str, target: float) -> float:
    """Return the number of the first round that reaches a target, infinity where none does."""
    return next((float(t) for t, v in enumerate(curve(run, name), start=1) if v >= target), math.inf)


def score(runs: Sequence[Run], name: str) -> float:
    return fmean(mean_of_last(run, name) for run in runs)


def rank(runs: Sequence[Run], name: str) -> float:
    """Return the score, minus infinity where it is no number, so that no comparison is won by it."""
    return -math.inf if math.isnan(found := score(runs, name)) else found


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was chosen for a method on the tuning seeds, and its runs by seed.

    words: of the chosen variant   scores: of every rate, by variant, on the tuning seeds (the grid's order)
    """

    lr: float
    words: Words
    scores: Mapping[Words, Mapping[float, float]]
    tuning: Sequence[Run]
    runs: Mapping[int, Run]

    @property
    def on_the_edge(self) -> bool:
        rates = self.scores[self.words]
        return len(rates) > 1 and self.lr in (min(rates), max(rates))


Complete = Callable[[Sequence[Trial]], Mapping[str, Run]]
"""Computes trials, or finds them, and returns the runs by key."""


def compared(asked: Comparison, complete: Complete, data_root: Path | None) -> dict[str, Tuned]:
    """Tune each method's variant and rate on the tuning seeds, then run that on the table's seeds."""

    def composed(method: str, words: Words, lrs: Sequence[float], seeds: Sequence[int]) -> list[Trial]:
        return trials(method, (*asked.words, *words), lrs, seeds, data_root, asked.diagnostics, asked.device)

    grids = {
        method: {words: composed(method, words, asked.lrs, asked.tuning_seeds) for words in variants}
        for method, variants in asked.methods.items()
    }
    known = complete([trial for grid in grids.values() for part in grid.values() for trial in part])
    found = {
        method: {
            words: {lr: [known[t.key] for t in part if t.lr == lr] for lr in asked.lrs} for words, part in grid.items()
        }
        for method, grid in grids.items()
    }
    scores = {
        m: {w: {lr: score(runs, asked.measures[0]) for lr, runs in by_lr.items()} for w, by_lr in grid.items()}
        for m, grid in found.items()
    }
    chosen = {
        m: max(((w, lr) for w, by_lr in grid.items() for lr in sorted(by_lr)), key=lambda at: grid[at[0]][at[1]])
        for m, grid in scores.items()
    }
    final = {m: composed(m, words, [lr], asked.seeds) for m, (words, lr) in chosen.items()}
    runs = complete([trial for part in final.values() for trial in part])
    return {
        m: Tuned(lr, words, scores[m], found[m][words][lr], {t.seed: runs[t.key] for t in final[m]})
        for m, (words, lr) in chosen.items()
    }
