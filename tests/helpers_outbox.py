"""The silo's outbox by hand: rounds, updates that are staged, and the state that is kept."""

from __future__ import annotations

from pathlib import Path

import torch

from fl_core.types.values import Part, TaskKind
from protos.storage.object_store import ContributionStore
from protos.wire.tasks import TaskKey
from silo.storage.outbox import Outbox, TrainingResult
from silo.storage.store import Store
from silo.storage.tasks import Evaluation

FACTS = Evaluation(("a", "b"), (1.0, 0.0), (2.0, 0.0))
M, B = "a" * 64, "b" * 64


def key(round=0, run="run-1", kind=TaskKind.TRAIN):
    return TaskKey(run, round, kind)


def finished(value: float, mirrored: bool = True) -> TrainingResult:
    bundle = {
        "metrics": Part({"correct": torch.ones(2)}, torch.ones(2)),
        "delta": Part.of({"w": torch.ones(3) * value}),
    }
    return TrainingResult(bundle, {"own": {"w": torch.full((2,), value)}}, FACTS, mirrored)


def opened(home: Path) -> Outbox:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Outbox(Store(home / "silo.db"), ContributionStore(home / "objects"), "center1")


def value(outbox: Outbox, run="run-1") -> float | None:
    state = outbox.state(run)
    return None if state is None else float(state["own"]["w"][0])


def stage(outbox: Outbox, round=0, value=1.0, base=B, kind=TaskKind.TRAIN):
    return outbox.stage(key(round, kind=kind), M, base, finished(value))
