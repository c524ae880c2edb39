"""Runs that a process of their own computes: the same model, and what becomes of a run whose process ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from consilium.research.engines.in_process import simulate
from coordinator.runs import workers as run_workers
from coordinator.runs.exchange import Place, Setup, Update
from coordinator.runs.tasks import RunInterrupted
from coordinator.runs.workers import ProcessWorker
from coordinator.storage.records import RunState
from fl_core.errors import ConfigError, ProtocolError, UnavailableError
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from service_core.storage.object_store import ObjectStore
from tests.support import until
from tests.support.coordinator import FAST, World, events
from tests.support.federation import federation, manifest
from tests.support.federations import shares
from tests.support.warm import WarmWorker

pytestmark = pytest.mark.integration

PROCESSES = replace(FAST, start_worker=ProcessWorker)
LAUNCHED = list[WarmWorker]()


@pytest.fixture(autouse=True)
def _launches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_workers, "launch_here", programmed)
        yield
        LAUNCHED.clear()


def test_a_process_computes_the_model_of_the_simulation_and_the_next_run_and_ends_when_no_run_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = manifest(rounds=2)
    expected = tensor_maps.digest(simulate(RunSetup.of(agreed), shares(), Observer())["w"])
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        made.come()
        for number in range(2):
            run = made.world.submit(agreed, f"request {number}")
            assert made.world.finished(run.id, 120).model_digest == expected
        (only,) = workers()
        assert only.create_time() < made.world.run(run.id).created
        assert not left_over(made.world)
        monkeypatch.setattr("coordinator.runs.workers.IDLE_S", 0.0)
        until(lambda: not workers(), "its worker to end")


@pytest.mark.fault(
    "a run's worker",
    "is killed, for instance for lack of memory",
    "only its run pauses (E-RUN-56); after resume it ends with the same model",
)
def test_a_run_whose_process_is_killed_pauses_alone_and_ends_in_the_same_model(tmp_path: Path) -> None:
    agreed = manifest(rounds=3)
    expected = tensor_maps.digest(simulate(RunSetup.of(agreed), shares(), Observer())["w"])
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        gate = threading.Event()
        made.come(wait=lambda round: round == 1 and not gate.is_set())
        run = made.world.submit(agreed)
        until(lambda: made.world.run(run.id).closed == 1, "the first round", 120)
        active = made.world.server.runs._active[run.id]
        for worker in workers():
            worker.send_signal(signal.SIGKILL)
        paused = made.world.ended(run.id)
        assert paused.state is RunState.PAUSED
        assert paused.reason.startswith("E-RUN-56")
        assert "SIGKILL" in paused.reason
        assert not left_over(made.world)
        assert made.world.server.runs.lives()
        made.world.server.runs.resume(run.id)
        until(lambda: made.world.run(run.id).state is RunState.RUNNING, "the run to go on", 60)
        record = made.world.server.store.runs.rounds(run.id)[0].record
        with pytest.raises(RunInterrupted):  # what the killed process asked for last comes late
            active.closed(replace(record, round=1), None, "")
        assert made.world.run(run.id).closed == 1
        gate.set()
        assert made.world.finished(run.id, 120).model_digest == expected
        assert made.included(run.id)[0] == made.included(run.id)[1]
        assert not events(made.world, run.id, "refused")


@pytest.mark.fault(
    "a run's worker",
    "is killed once while it checks an update",
    "the run pauses (E-RUN-56); the update is sent again, without new training",
)
def test_an_update_whose_check_is_killed_once_is_taken_by_the_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = manifest(rounds=1)
    expected = tensor_maps.digest(simulate(RunSetup.of(agreed), shares(), Observer())["w"])
    once = tmp_path / "once"
    once.touch()
    code = f"""
    import os, signal
    from pathlib import Path
    from coordinator.worker import work
    check = work.RunWork.check
    def killed_once(self, update):
        try:
            Path({str(once)!r}).unlink()
        except FileNotFoundError:
            return check(self, update)
        os.kill(os.getpid(), signal.SIGKILL)
    work.RunWork.check = killed_once
    """
    monkeypatch.setattr(run_workers, "launch_here", lambda: programmed(code))
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        made.come()
        run = made.world.submit(agreed)
        paused = made.world.ended(run.id, 120)
        assert paused.state is RunState.PAUSED
        assert paused.reason.startswith("E-RUN-56")
        made.world.server.runs.resume(run.id)
        assert made.world.finished(run.id, 120).model_digest == expected
        for name in made.here:
            assert made[name].script.begun == [(0, TaskKind.TRAIN), (1, TaskKind.EVALUATE)]


@pytest.mark.fault(
    "a hospital",
    "sends an update whose check always ends the checking process",
    "the run pauses once and names the hospital; then the update is refused and the run continues",
)
def test_an_update_whose_check_always_ends_its_process_is_refused_by_name_and_pauses_its_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
    import os
    from coordinator.worker import work
    check = work.RunWork.check
    work.RunWork.check = lambda self, update: os.abort() if update.silo == "south" else check(self, update)
    """
    monkeypatch.setattr(run_workers, "launch_here", lambda: programmed(code))
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        made.come(wait=lambda _: False)
        run = made.world.submit(manifest(rounds=2, quorum=2))
        paused = made.world.ended(run.id, 120)
        assert paused.state is RunState.PAUSED
        assert paused.reason.startswith("E-RUN-56")
        assert re.search("SIGABRT while it checked updates of [a-z, ]*south", paused.reason)
        made.world.server.runs.resume(run.id)
        made.world.finished(run.id, 120)
        assert all("south" not in included for included in made.included(run.id))
        refused = events(made.world, run.id, "refused")
        assert refused
        assert all(silo == "south" and "E-RUN-56" in text for silo, text in refused)


@pytest.mark.fault("a coordinator", "is killed while a run's worker computes", "the worker ends too")
def test_a_process_ends_with_its_service(tmp_path: Path) -> None:
    code = f"""
    import time
    from coordinator.runs.exchange import Place
    from coordinator.runs.workers import ProcessWorker
    print(ProcessWorker(Place({str(tmp_path)!r}, {f"{tmp_path}/.written-"!r}))._child.pid, flush=True)
    time.sleep(600)
    """
    words = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        worker = psutil.Process(int(service.stdout.readline()))
        service.kill()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the end of the worker", 20)


def test_an_abort_ends_the_process_of_a_run(tmp_path: Path) -> None:
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        made.come(wait=lambda round: True)
        run = made.world.submit(manifest(rounds=3))
        until(workers, "its worker", 60)
        until(lambda: made.world.server.store.runs.round(run.id, 0), "the first round", 60)
        made.world.server.runs.abort(run.id)
        made.world.ended(run.id)
        until(lambda: not workers(), "its worker to end")


def test_a_process_that_cannot_begin_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no distribution 'nowhere'"):
        _ = ProcessWorker(Place(str(tmp_path), f"{tmp_path}/.written-", ["nowhere"])).extensions


def test_a_worker_that_is_kept_is_free_of_its_last_run_before_another_can_take_it(tmp_path: Path) -> None:
    class Watched:
        lives = True

        def __setattr__(self, name: str, value: object) -> None:
            assert name == "service"
            freed.append(kept._spare is None)

    def start(place: Place) -> Watched:
        left.append(Path(f"{place.written}x.part"))
        left[0].touch()
        return Watched()

    freed, left = list[bool](), list[Path]()
    kept = run_workers.RunWorkers(None, ObjectStore(tmp_path), start)  # type: ignore[arg-type]
    with kept.opening():
        pass
    assert freed == [True]
    assert kept._spare is not None
    assert not left[0].exists()


def test_an_abort_ends_a_process_that_does_not_answer(tmp_path: Path) -> None:
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        made.come(wait=lambda round: True)
        run = made.world.submit(manifest(rounds=3))
        until(lambda: made.world.server.store.runs.round(run.id, 0), "the first round", 60)
        until(workers, "its worker", 60)[0].send_signal(signal.SIGSTOP)
        made.world.server.runs.abort(run.id)
        assert made.world.ended(run.id).state is RunState.ABORTED
        until(lambda: not workers(), "its worker to end")


HANGS = """
    import threading
    from coordinator.worker import __main__, process
    process.serve = lambda *_: threading.Event().wait()
    """


def submitted_before_its_worker_hangs(world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """Submit a run whose worker hangs while it loads: that which opened the run is not kept for it."""
    monkeypatch.setattr(run_workers.RunWorkers, "_keep", run_workers.RunWorkers._end)
    launches = iter([run_workers.launch_here])
    monkeypatch.setattr(run_workers, "launch_here", lambda: next(launches, lambda: programmed(HANGS))())
    return world.submit(manifest(rounds=1)).id


@pytest.mark.fault("a run's worker", "hangs while it loads", "ended by an abort or by the end of the service")
def test_an_abort_ends_a_process_that_hangs_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        run_id = submitted_before_its_worker_hangs(made.world, monkeypatch)
        made.come()
        until(workers, "its worker", 60)
        made.world.server.runs.abort(run_id)
        assert made.world.ended(run_id).state is RunState.ABORTED
        until(lambda: not workers(), "its worker to end", 10)
        assert not left_over(made.world)


def test_a_service_that_stops_ends_processes_that_hang_while_they_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        run_id = submitted_before_its_worker_hangs(made.world, monkeypatch)
        made.come()
        until(workers, "its worker", 60)
        errors = list[UnavailableError]()

        def submit() -> None:
            with pytest.raises(UnavailableError, match=r"E-RUN-56.*run the command again") as raised:
                made.world.submit(manifest(rounds=2), "another")
            errors.append(raised.value)

        opening = threading.Thread(target=submit, daemon=True)
        opening.start()
        until(lambda: len(workers()) == 2, "the worker that opens another run", 60)
        port, began = made.world.port, time.monotonic()
        made.world.stop()
        assert time.monotonic() - began < 20
        assert not workers()
        opening.join(30)
        assert len(errors) == 1
        monkeypatch.undo()
        made.world.start(port)
        made.world.finished(run_id, 120)


def test_a_process_that_is_not_ready_in_time_pauses_its_run_and_the_reason_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        made.come()
        monkeypatch.setattr(run_workers, "launch_here", lambda: programmed(HANGS))
        monkeypatch.setattr(run_workers, "START_S", 0.5)
        with pytest.raises(UnavailableError, match=r"E-RUN-56.*not ready within 0\.5 s.*run the command again"):
            made.world.submit(manifest(rounds=1))
        monkeypatch.undo()
        run_id = submitted_before_its_worker_hangs(made.world, monkeypatch)
        monkeypatch.setattr(run_workers, "START_S", 0.5)
        paused = made.world.ended(run_id)
        assert paused.state is RunState.PAUSED
        assert paused.reason.startswith("E-RUN-56")
        assert "not ready within 0.5 s" in paused.reason
        assert not workers()


def test_a_service_that_stops_ends_a_process_that_computes_and_continues_its_run(tmp_path: Path) -> None:
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        gate = threading.Event()
        made.come(wait=lambda round: round == 1 and not gate.is_set())
        run = made.world.submit(manifest(rounds=3))
        until(lambda: made.world.run(run.id).closed == 1, "the first round", 120)
        workers()[0].send_signal(signal.SIGSTOP)
        port = made.world.port
        made.world.stop()
        assert not workers()
        made.world.start(port)
        assert not left_over(made.world)
        assert made.world.run(run.id).state is RunState.RUNNING
        gate.set()
        made.world.finished(run.id, 120)


def test_what_stops_every_process_of_a_service_pauses_no_run(tmp_path: Path) -> None:
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        gate = threading.Event()
        made.come(wait=lambda round: round == 1 and not gate.is_set())
        run = made.world.submit(manifest(rounds=2))
        until(lambda: made.world.run(run.id).closed == 1, "the first round", 120)
        workers()[0].send_signal(signal.SIGTERM)
        gate.set()
        made.world.finished(run.id, 120)


def test_a_round_that_is_being_stored_when_its_process_ends_is_closed_before_the_run_pauses(tmp_path: Path) -> None:
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        runs, stores, gate = made.world.server.store.runs, threading.Event(), threading.Event()
        close = runs.close_round

        def slow(*given: object) -> object:
            stores.set()
            gate.wait(60)
            return close(*given)

        runs.close_round = slow
        made.come()
        run = made.world.submit(manifest(rounds=1))
        assert stores.wait(120)
        process = workers()[0]
        process.kill()
        until(lambda: not workers(), "its worker to end")
        assert not made.world.run(run.id).state.ended
        gate.set()
        assert made.world.ended(run.id).state is RunState.PAUSED
        assert made.world.run(run.id).closed == 1
        made.world.server.runs.resume(run.id)
        made.world.finished(run.id, 120)


def test_a_worker_that_has_ended_is_replaced_although_a_check_has_not_left_it_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.runs.workers.IDLE_S", 0.0)
    with federation(tmp_path / "home", settings=PROCESSES) as made:
        run = made.world.submit(manifest(rounds=1))
        made.world.server.runs.abort(run.id)
        made.world.ended(run.id)
        workers_of = made.world.server.runs.workers.of
        with workers_of(run.id) as first:
            workers()[0].kill()
            until(lambda: not first.lives, "its end")
            with workers_of(run.id) as second:
                assert second.initial().size
        until(lambda: not workers(), "both to end")
        assert not left_over(made.world)


def test_a_name_of_millions_of_characters_in_an_update_ends_no_process(tmp_path: Path) -> None:
    agreed = manifest(rounds=1)
    worker = ProcessWorker(Place(str(tmp_path), f"{tmp_path}/.written-"))
    worker.take(Setup(agreed.to_json(), [(member.name, 0, 0) for member in agreed.members]))
    meta = json.dumps({"groups": [], "paths": [["\u00e9" * 3_900_000, "weight"]]}, ensure_ascii=False)
    tensor = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": {"consilium": meta}, "000000": tensor}, ensure_ascii=False).encode()
    file = tmp_path / "update"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    try:
        with pytest.raises(ProtocolError, match="E-WIRE-06"):
            worker.check(Update("one", "north", 0, TaskKind.TRAIN.value, str(file)))
        assert worker.lives
    finally:
        worker.end()


def programmed(before: str = "") -> WarmWorker:
    """Launch a worker that runs Python before it begins."""
    LAUNCHED.append(WarmWorker("coordinator.worker", textwrap.dedent(before)))
    return LAUNCHED[-1]


def workers() -> list[psutil.Process]:
    """Return those that run, the oldest first."""
    return [psutil.Process(worker.pid) for worker in LAUNCHED if worker.poll() is None]


def left_over(world: World) -> list[Path]:
    return list(world.server.objects.folder.glob(".*"))
