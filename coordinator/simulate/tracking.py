"""TensorBoard and MLflow as readers of a simulation, each round as it is closed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from coordinator.lead import trackers
from coordinator.lead.trackers import Tracking
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State
from privacy import profiles

MakeObserver = Callable[[RunManifest], Observer]


def run_id(manifest: RunManifest) -> str:
    """Name a simulation in trackers: the same manifest is the same run, also when it goes on after a kill."""
    method = re.sub(r"[^a-z0-9]+", "-", manifest.method.name.lower()).strip("-")[:40]
    return f"simulation-{method}-{manifest.digest()[:16]}"


@contextmanager
def tracked(
    where: Sequence[str], observer: MakeObserver | None, warn: Callable[[str], object]
) -> Iterator[MakeObserver | None]:
    """Give what observes a simulation and also writes its rounds to trackers, which end with the block.

    where: `tensorboard:DIR` or `mlflow:URI`   observer: makes the one that is called first
    Raises as `trackers.open_tracker`: on a wrong form at once, else before the first round.
    """
    for place in where:
        trackers.parsed(place)
    begun: list[Tracking] = []

    def make(manifest: RunManifest) -> Observer:
        about = {
            "name": manifest.name,
            "method": manifest.method.name,
            "data": manifest.data,
            "manifest": manifest.digest(),
        }
        opened = [trackers.open_tracker(place, run_id(manifest), about) for place in where]
        begun.append(Tracking(opened, warn, "simulate again with --tracker"))
        return _Tracked(begun[-1], manifest, observer(manifest) if observer else Observer())

    state = "failed"
    try:
        yield make if where else observer
        state = "finished"
    except KeyboardInterrupt:
        state = "aborted"
        raise
    finally:
        for tracking in begun:
            tracking.end(state)


class _Tracked(Observer):
    """Calls another observer, then writes what was measured in the round, as the displays show it."""

    def __init__(self, tracking: Tracking, manifest: RunManifest, first: Observer) -> None:
        self._tracking, self._first = tracking, first
        self._noise = profiles.result_noise(manifest)

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        self._first.opened(context, kind, names)

    def closed(self, record: RoundRecord, server: State) -> None:
        self._first.closed(record, server)
        sums = record.correct, record.examples, self._noise.of(record.included)
        hidden = self._noise.scores & set(record.personal)
        values, tags = trackers.values_from(len(record.included), sums, record.clinical, record.personal, hidden)
        self._tracking.log(record.round, values, tags)
