"""Hospitals whose worker is a process in its cage, forked from the one that has imported all."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_core.rounds.manifest import RunManifest
from service_core.storage import digests
from silo.service import launchers
from silo.service.workers import CagedWorker, CagedWorkers
from tests.support.fake_coordinator import Hospital
from tests.support.warm import WarmWorker

Serving = Callable[..., Hospital]


def programmed(monkeypatch: pytest.MonkeyPatch, before: str = "") -> None:
    """Have workers started that run Python before they begin, outside of the cage."""
    monkeypatch.setattr(launchers, "launch_here", lambda: WarmWorker("silo.worker", textwrap.dedent(before)))


@contextmanager
def started_in(folder: Path) -> Iterator[Serving]:
    """Give what starts a hospital with such a worker, in a home of its own below a folder; all end with the block."""
    started: list[Hospital] = []

    def serve(
        run: RunManifest | None = None, home: Path | None = None, *, caged: bool = True, **settings: object
    ) -> Hospital:
        worker = {"run_round": None} if caged else {}
        started.append(hospital := Hospital(home or folder / f"home{len(started)}", run, **worker, **settings))
        hospital.start()
        return hospital

    try:
        yield serve
    finally:
        for hospital in started:
            hospital.end()


def worker_of(hospital: Hospital) -> CagedWorker:
    worker = hospital.service._runner.worker
    assert isinstance(worker, CagedWorkers)
    return list(worker._workers.values())[-1]


def pid_of(hospital: Hospital) -> int:
    pid = worker_of(hospital).pid
    assert pid is not None
    return pid


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def uploaded(hospital: Hospital) -> list[str]:
    return [digests.digest(bytes(data)) for data in hospital.transfer.uploads.values()]
