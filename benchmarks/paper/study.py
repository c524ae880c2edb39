"""The runs of a table: composed, told apart by what they compute (`benchmarks.run_store`), and measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import run_store
from benchmarks.paper import images, paper_metrics, probes
from benchmarks.paper.tables import Setting, Table
from benchmarks.run_store import Run, seeded
from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.manifest_builder import manifest_from, schema_of
from coordinator.config.run_spec import RunSpec
from fl_core import datasets, rng
from fl_core.datasets.partition.federations import HELD_OUT
from fl_core.methods import build_method, method_class
from fl_core.models import describe
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import SiloRuntime
from fl_core.training.evaluation import ConcatExamples
from fl_core.types.records import RoundRecord
from fl_core.types.values import State

MEASURED = 2
"""Raised where a number that is kept changes its meaning: of runs that it concerns no older line is found any more.

2: personal scores are over all silos, each with its newest model; GA of a method whose model is personal is that of
its models; global accuracies of partitions that hold out tests are on the official test set.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One run: what a table or a figure asks of it, its words, and where its data lie (which is not part of its key).

    probe: what else is looked at (`probes.PROBES`)
    """

    key: str
    method: str
    setting: str
    seed: int
    words: tuple[str, ...]
    fine_tune: int = 0
    eigenvalues: bool = False
    numbers: bool = False
    probe: str = ""
    data_root: Path | None = None
    how: SimulationEngine = SimulationEngine()  # noqa: RUF009

    def __str__(self) -> str:
        return f"{self.setting}, {self.method}, seed {self.seed}"


Grid = Mapping[tuple[str, str], Mapping[int, tuple[Point, ...]]]
"""The runs behind each cell: by (method, setting), by seed."""


def grid(table: Table, seeds: Sequence[int], data_root: Path | None, how: SimulationEngine | None = None) -> Grid:
    """Compose all runs of a table; raises ConfigError where one does not compose."""
    drawn, found = seeds[:1] if table.measures == ("numbers",) else seeds, {}
    for setting in table.settings:
        for method, own in table.methods.items():
            if own is not None:
                runs = [
                    point_of(table, method, (*w, *own), drawn, data_root, how or SimulationEngine(), setting)
                    for w in setting.runs
                ]
                found[method, setting.name] = {seed: tuple(run[seed] for run in runs) for seed in drawn}
    return found


def only(grid: Grid, kept: Mapping[str, Run]) -> Grid:
    """Keep the seeds of cells whose runs are all stored, and the cells that have any."""
    found = {
        cell: {seed: runs for seed, runs in seeds.items() if all(p.key in kept for p in runs)}
        for cell, seeds in grid.items()
    }
    return {cell: seeds for cell, seeds in found.items() if seeds}


def points(grid: Grid) -> list[Point]:
    """List the runs of a grid, each once, seed by seed, so that an interrupted study has whole seeds."""
    every = [p for cell in grid.values() for seed in cell.values() for p in seed]
    return sorted({p.key: p for p in every}.values(), key=lambda p: p.seed)


def point_of(
    table: Table,
    method: str,
    words: Sequence[str],
    seeds: Sequence[int],
    data_root: Path | None,
    how: SimulationEngine,
    setting: Setting,
) -> dict[int, Point]:
    """Compose one run of a cell, at every seed."""
    asked = Point(
        key="",
        method=method,
        setting=setting.name,
        seed=0,
        words=(f"experiment={table.experiment}", f"scale={table.scale}", *words),
        fine_tune=table.fine_tune.get(method, 0),
        eigenvalues="eigenvalues" in table.measures,
        numbers=table.measures == ("numbers",),
        data_root=data_root,
        how=how,
    )
    return at_seeds(asked, seeds)


def at_seeds(asked: Point, seeds: Sequence[int]) -> dict[int, Point]:
    """Compose a run at every seed, each with its key; that of `asked` does not matter."""
    spec = compose_simulation(
        images.resolved(asked.words, asked.data_root, cut=False)
    )  # what is stored needs no images
    cut = next((w for w in asked.words if w.startswith("images=")), "")
    also: dict[str, object] = {
        "fine_tune": asked.fine_tune,
        "eigenvalues": asked.eigenvalues,
        "numbers": asked.numbers,
    }
    also |= {"measured": MEASURED} if _concerned(spec) and not asked.numbers else {}
    also |= {"probe": asked.probe} if asked.probe else {}
    keys = {seed: run_store.key_of(seeded(spec, seed), cut, **also) for seed in seeds}
    return {seed: replace(asked, key=key, seed=seed) for seed, key in keys.items()}


def _concerned(spec: RunSpec) -> bool:
    """Tell whether `MEASURED` is about a run: its personal scores, its GA or its test set."""
    return (
        spec.personal
        or method_class(str(spec.method["name"])).ga_is_personal
        or spec.federation.get("name") in {kind.value for kind in HELD_OUT}
    )


class NewestState(Observer):
    """Keeps the newest server state."""

    server: State | None = None

    def closed(self, record: RoundRecord, server: State) -> None:  # noqa: ARG002
        self.server = server


def runtime_and_tests(spec: RunSpec, data_root: Path | None) -> tuple[SiloRuntime, ConcatExamples]:
    """Build what a silo trains with, and the global test set: the official one, or the union of the silos' own."""
    sets = runner.read_silos(spec, data_root, datasets.load_all)
    tests = [sets[0].public] if sets[0].public is not None else [s.test for s in sets]
    manifest = manifest_from(spec, [f"hospital{k}" for k in range(len(sets))])
    return RunSetup.of(manifest).silo_runtime(), ConcatExamples(tests)


def whole(examples: ConcatExamples) -> torch.Tensor:
    return torch.arange(len(examples.labels))


def measure(point: Point) -> dict[str, object]:
    start = time.process_time()
    spec = seeded(compose_simulation(images.resolved(point.words, point.data_root)), point.seed)
    root = images.root_of(point.words, point.data_root)
    found: dict[str, object] = {"key": point.key, "seed": point.seed, "words": list(point.words)}
    if point.numbers:
        return {**found, "numbers": _numbers(spec)}
    observer = probes.PROBES[point.probe](spec, root) if point.probe else NewestState()
    kept = point.how.checkpoints
    how = replace(point.how, checkpoints=kept and kept.of(point.key))
    result = runner.run(spec, root, observer, how, point.fine_tune)
    said = result.summary()
    scores = [dict(s) for s in said.get("personal_by_round", [])]  # type: ignore[attr-defined]
    accuracies = list(said["accuracy_by_round"])  # type: ignore[call-overload]
    found |= {
        "manifest": result.manifest.digest(),
        **run_store.judged(result),
        "model": result.model_digest[:16],
        "by_round": [None if a is None else round(a, 5) for a in accuracies],
        "balanced": said["balanced_accuracy"],
        "ga_of": "personal" if method_class(result.manifest.method.name).ga_is_personal else "global",
        "personal": {name: [round(s[name], 5) for s in scores] for name in (scores[-1] if scores else ())},
        "pa_fine_tuned": said.get("pa_fine_tuned"),
    }
    if isinstance(observer, probes.Probe):
        found |= observer.found
    elif point.eigenvalues and observer.server is not None:
        found["eigenvalues"] = _eigenvalues(spec, observer.server, root)
    return {**found, "cpu_seconds": round(time.process_time() - start, 2)}


def _eigenvalues(spec: RunSpec, server: State, data_root: Path | None) -> float:
    """Return Table 7's number for the final model, on one batch of 128 test examples."""
    runtime, tests = runtime_and_tests(spec, data_root)
    order = torch.from_numpy(rng.numpy_stream(spec.seed, "paper", "eigenvalues").permutation(len(tests.labels)))
    model = runtime.method.global_model(runtime.reset_model(), runtime.method.broadcast(server)).eval()
    with torch.no_grad():
        z = model.features(tests.batch(order[: paper_metrics.BATCH])[0])
    return round(
        paper_metrics.eigenvalue_variance(paper_metrics.correlation_eigenvalues(z), min(paper_metrics.BATCH, len(z))), 3
    )


def _numbers(spec: RunSpec) -> float:
    """Count the model's numbers with all buffers, and prototypes where the method sends them, in millions."""
    schema = schema_of(spec)
    facts = describe(str(spec.model["name"]), schema, {k: v for k, v in spec.model.items() if k != "name"})
    method = build_method(str(spec.method["name"]), {k: v for k, v in spec.method.items() if k != "name"})
    extra = len(schema.classes) * facts.feature_dim if "prototypes" in method.sends else 0
    return (facts.total_with_buffers + extra) / 1e6
