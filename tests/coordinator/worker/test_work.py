"""An update is read once: the round takes what was measured before its receipt."""

from __future__ import annotations

import resource
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coordinator.runs.exchange import Place, Rounds, Setup, Update
from coordinator.runs.tasks import RunInterrupted
from coordinator.worker import work
from coordinator.worker.work import RunWork
from fl_core.aggregation.update_check import MeasuredUpdate
from fl_core.errors import ProtocolError, UnavailableError
from fl_core.types.enums import TaskKind
from protos.wire.codec import BundleFile
from service_core.workers.calls import Later
from tests.support import until
from tests.support.coordinator import DATA, update_bytes
from tests.support.federations import manifest


def test_a_round_takes_what_was_measured_before_the_receipt_once_and_bit_for_bit(tmp_path: Path) -> None:
    computing, update = begun(tmp_path), sent(tmp_path, DATA)
    computing.check(update)
    check, bundle = computing.checks[TaskKind.TRAIN], BundleFile(Path(update.path))
    measured = computing.measured(update.id)
    assert measured == check.check(bundle, update.silo)
    assert check.check(MeasuredUpdate(bundle, measured), update.silo) is measured
    assert computing.measured(update.id) is None, "it is kept until the round has it, and no longer"


def test_of_a_refused_update_nothing_is_remembered(tmp_path: Path) -> None:
    computing, update = begun(tmp_path), sent(tmp_path, update_bytes(float("nan")))
    with pytest.raises(ProtocolError, match="E-WIRE-05"):
        computing.check(update)
    assert computing.measured(update.id) is None


def test_what_no_round_takes_is_forgotten_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MEASURED", 2)
    computing, update = begun(tmp_path), sent(tmp_path, DATA)
    for name in ("first", "second", "third"):
        computing.check(update._replace(id=name))
    assert [computing.measured(name) is None for name in ("first", "second", "third")] == [True, False, False]


@pytest.mark.fault("a run's worker", "finds the disk full", "the run stops with E-STATE-63 and can be resumed")
def test_a_state_that_the_disk_does_not_take_is_an_error_of_the_disk(tmp_path: Path) -> None:
    computing, limits = begun(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(UnavailableError, match="E-STATE-63"):
            computing.written({"w": {"weight": torch.zeros(10_000)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_round_of_hundreds_of_hospitals_needs_no_thread_for_each(tmp_path: Path) -> None:
    names, asked, over = [f"hospital{k}" for k in range(300)], list[str](), Future[None]()

    def interrupted() -> tuple[str, Path]:
        raise RunInterrupted("run")

    def ask(silo: str, *_: object) -> Later[tuple[str, Path]]:
        asked.append(silo)
        return Later(over, interrupted)

    computing = begun(tmp_path, names=names)
    nothing = SimpleNamespace(opened=lambda *_: None, broadcast=lambda *_: None, ask=ask)
    computing.service = nothing  # type: ignore[assignment]
    state, before = computing.initial(), threading.active_count()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(computing.run, Rounds(state.path, 0, 0, [], None))
        until(lambda: len(asked) == len(names), "all to be asked")
        assert threading.active_count() == before + 1
        over.set_result(None)
        with pytest.raises(RunInterrupted):
            run.result(60)


def begun(folder: Path, **more: object) -> RunWork:
    agreed = manifest(rounds=1, **more)  # type: ignore[arg-type]
    computing = RunWork(Place(str(folder), f"{folder}/.written-"))
    computing.take(Setup(agreed.to_json(), [(member.name, 0, 0) for member in agreed.members]))
    return computing


def sent(folder: Path, data: bytes) -> Update:
    file = folder / "update"
    file.write_bytes(data)
    return Update("one", "north", 0, TaskKind.TRAIN.value, str(file))
