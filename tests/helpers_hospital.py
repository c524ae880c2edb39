"""What tests of a whole hospital share: work that waits, reads that are counted, a round from offer to upload."""

from __future__ import annotations

import threading

from helpers_silo import until

from fl_core import datasets
from fl_core.methods import build_method
from fl_core.rounds.silo_round import run_silo_round
from fl_core.types.values import TaskKind
from protos.wire.tasks import TaskKey

TRAINED = TaskKey("run-1", 0, TaskKind.TRAIN)


class Slow:
    """A round's arithmetic that takes steps until it is let go, and counts how often it began."""

    def __init__(self):
        self.begun, self.held, self.fail = [], True, None
        self.started, self.free = threading.Event(), threading.Event()

    def __call__(self, bench, msg, state, data, context, kind):
        self.begun.append(context.round)
        self.started.set()
        while self.held and not self.free.wait(0.002):
            data._progress(1, 5)
        if self.fail is not None:
            raise self.fail
        return run_silo_round(bench, msg, state, data, context, kind)


class Watched:
    """Counts how often examples are read."""

    def __init__(self, monkeypatch) -> None:
        self.read = 0
        plain = datasets.TensorExamples.batch

        def batch(examples, index, augment=None):
            self.read += 1
            return plain(examples, index, augment)

        monkeypatch.setattr(datasets.TensorExamples, "batch", batch)


def first(hospital, times=1):
    """Let a hospital do a round."""
    method = build_method(hospital.manifest.method.name, hospital.manifest.method.options)
    hospital.offer(state=method.broadcast(hospital.server))
    until(lambda: hospital.events().count("sent") >= times or "refused" in hospital.events(), 60)
    assert "refused" not in hospital.events(), [n.text for n in hospital.notices]


def upload(hospital) -> bytes:
    return bytes(next(iter(hospital.transfer.uploads.values())))
