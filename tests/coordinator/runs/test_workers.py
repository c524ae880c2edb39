"""Who computes for a run, and how many of them are started."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from coordinator.runs.exchange import Place
from coordinator.runs.workers import RunWorkers
from service_core.storage.object_store import ObjectStore


class Idle:
    """A worker that computes nothing, and leaves a file behind."""

    def __init__(self, place: Place) -> None:
        self.service, self.lives = None, True
        Path(f"{place.written}left.part").touch()

    def take(self, setup: object) -> None:
        pass

    def end(self) -> None:
        self.lives = False


def test_a_run_has_at_most_one_worker_and_what_that_wrote_is_deleted(tmp_path: Path) -> None:
    runs = SimpleNamespace(get=lambda _: SimpleNamespace(manifest="{}"), declared_sizes=lambda _: [])
    started, together = list[Idle](), threading.Barrier(8)

    def start(place: Place) -> Idle:
        started.append(Idle(place))
        return started[-1]

    workers = RunWorkers(SimpleNamespace(runs=runs), ObjectStore(tmp_path), start)  # type: ignore[arg-type]

    def use(_: int) -> object:
        with workers.of("run") as worker:
            together.wait(60)
            return worker

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(use, range(8))) == {started[0]}
    assert len(started) == 1
    assert not list(tmp_path.glob(".worker-*"))
    with workers.of("another") as worker:
        assert worker is started[0]  # it was kept
    workers.close()
    assert not started[0].lives
