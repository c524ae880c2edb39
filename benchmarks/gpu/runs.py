"""The papers' runs at their own settings, a few rounds of each in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.paper import images
from coordinator.config.hydra_config import compose_simulation
from coordinator.simulate import runner
from coordinator.simulate.checkpoints import Checkpoints
from coordinator.simulate.engine import SimulationEngine
from fl_core import datasets
from fl_core.rounds.engine import Observer
from fl_core.training.devices import choose_device
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State

TURN = 5
"""Rounds of a run before the next one has its turn."""
FAST = ("train.amp=bf16", "train.channels_last=true", "train.cudnn_benchmark=true")
AUGMENTED = "train.augment_on_device=true"
METHODS: Mapping[str, tuple[str, ...]] = {
    "FedAvg": ("method=fedavg",),
    "FedMR code": ("method=fedmr", "method.intra=code", "method.mu1=0.01", "method.mu2=0"),
    "FedMR code mu2": ("method=fedmr", "method.intra=code", "method.mu1=0.01", "method.mu2=0.1"),
    "FedMR paper": ("method=fedmr", "method.intra=paper", "method.mu1=1e-5", "method.mu2=0.1"),
    "FedMR paper without mu2": ("method=fedmr", "method.intra=paper", "method.mu1=1e-5", "method.mu2=0"),
    "FedGELA": ("method=fedgela",),
    "FedProx": ("method=fedprox",),
    "MOON": ("method=moon",),
}
SETTINGS = ("p5c2", "p10c3")


class TimeUpError(Exception):
    """A turn or the visit is over; what was done is in the checkpoint."""


class Place(Protocol):
    """Where runs are kept, and how long they may take: a visit."""

    @property
    def out(self) -> Path: ...
    @property
    def device(self) -> str: ...
    @property
    def left(self) -> float: ...
    @property
    def data_root(self) -> Path | None: ...

    def note(self, file: str, line: Mapping[str, object]) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One run. name: of its folder and in the results."""

    name: str
    words: tuple[str, ...]


def listed(small: bool, data: str) -> list[Run]:
    """List all runs, FedAvg first; data: the word for CIFAR10's images."""
    if small:
        tiny = ("scale=small", "rounds=2", "train.max_steps=2")
        return [Run(f"{n} {s}", (*w, f"federation={s}", *tiny)) for s in SETTINGS for n, w in METHODS.items()]
    return [Run(f"{n} {s}", (*w, data, f"federation={s}")) for s in SETTINGS for n, w in METHODS.items()]


def go_on(asked: Sequence[Run], place: Place) -> dict[str, object]:
    """Take turns until all runs are over or the time is; return the rounds that each has come to."""
    done = {run.name: 0 for run in asked}
    over: set[str] = set()
    for run in asked:
        done[run.name] = _rounds(place.out / "checkpoints" / _folder(run))
    while place.left > 0 and (waiting := [r for r in asked if r.name not in over]):
        run = min(waiting, key=lambda r: done[r.name])
        try:
            said = _turn(run, place)
            over.add(run.name)
            place.note("rounds.jsonl", {"run": run.name, "summary": said})
        except TimeUpError:
            pass
        done[run.name] = _rounds(place.out / "checkpoints" / _folder(run))
    return {"complete": len(over) == len(asked), "rounds": done}


def require_data(run: Run, place: Place) -> None:
    """Raise DataError or ConfigError where a run has no images, before a minute is spent on anything else."""
    words = _words(run, choose_device("cpu"))
    spec = compose_simulation(images.resolved(words, place.data_root))
    for report in runner.read_silos(spec, images.root_of(words, place.data_root), datasets.check_all)[:1]:
        report.require_sound()


def _words(run: Run, device: torch.device) -> list[str]:
    words = ["experiment=fedmr_1", *run.words]
    if device.type != "cuda":
        return words
    augmented = compose_simulation(images.resolved(words, None, cut=False)).train.augment
    return [*words, *FAST, *([AUGMENTED] if augmented else [])]


def _turn(run: Run, place: Place) -> Mapping[str, object]:
    words = _words(run, choose_device(place.device))
    kept = Checkpoints(place.out / "checkpoints" / _folder(run), 1)
    watch = _Watch(run.name, place, TURN)
    spec = compose_simulation(images.resolved(words, place.data_root))
    engine = SimulationEngine(device=place.device, checkpoints=kept)
    return runner.run(spec, images.root_of(words, place.data_root), watch, engine).summary()


class _Watch(Observer):
    """Notes every round, and ends a turn between two rounds, when the one before is kept.

    A round is not begun where less time is left than the turn's longest one took: it would be lost.
    """

    def __init__(self, name: str, place: Place, rounds: int) -> None:
        self._name, self._place, self._left = name, place, rounds
        self._before, self._longest = place.left, 0.0

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:  # noqa: ARG002
        if self._left <= 0 or self._place.left <= self._longest:
            raise TimeUpError
        self._left -= 1
        self._before = self._place.left

    def closed(self, record: RoundRecord, server: State) -> None:  # noqa: ARG002
        took = self._before - self._place.left
        self._longest = max(self._longest, took)
        line = {"run": self._name, "after": record.round, "accuracy": record.accuracy, "seconds": round(took, 1)}
        self._place.note("rounds.jsonl", line)


def _folder(run: Run) -> str:
    return run.name.replace(" ", "-")


def _rounds(folder: Path) -> int:
    """Return the rounds of the newest checkpoint by its name."""
    return max((int(p.name.partition("-")[2]) for p in folder.glob("round-*")), default=0)
