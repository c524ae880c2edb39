"""A worker of several processes: the bytes of one, and what becomes of it when one of them ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_core.errors import ConfigError
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.records import TrainConfig
from protos.consilium.v1 import federation_pb2 as pb
from silo.training.helpers import Helpers
from tests.support import until
from tests.support.caged_hospitals import Serving, pid_of, programmed, started_in, uploaded, worker_of
from tests.support.fake_coordinator import Hospital, manifest
from tests.support.privacy import budgeted, private

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="helpers are there on Linux alone"),
]

GROUP = NamedOptions("digits_cnn", {"norm": "group"})
DIVIDED = replace(manifest(), model=GROUP, train=TrainConfig(epochs=1, batch_size=64, micro_batch=24))
LONG = replace(DIVIDED, train=TrainConfig(epochs=10_000, batch_size=8, micro_batch=3))
"""A task that nobody waits for."""


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """Start hospitals whose worker is so many caged processes; 0: the service computes."""
    programmed(monkeypatch)
    with started_in(tmp_path) as serve:

        def start(run: RunManifest, processes: int, folder: Path | None = None) -> Hospital:
            return serve(run, folder, caged=bool(processes), **({"processes": processes} if processes else {}))

        yield start


def processes_of(hospital: Hospital) -> list[int]:
    """Return a worker's first process and its helpers."""
    pid = pid_of(hospital)
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def walls_of(process: int) -> tuple[str, ...]:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    spaces = (str(Path(f"/proc/{process}/ns/{name}").readlink()) for name in ("net", "user"))
    return (*spaces, status["NoNewPrivs"], status["Seccomp"], status["Seccomp_filters"])


def gone(pid: int) -> bool:
    """Tell whether a process has ended, whoever has yet to take note of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def said_of_training(hospital: Hospital) -> list[str]:
    return [notice.text for notice in hospital.notices if notice.event == "training"]


# ---- the same bits ---------------------------------------------------------------------------------------------------

SHARED = (
    "fedavg fedprox scaffold fednova feddyn feddc moon fedproc fedlc fedrs fedphp map local fedper fedrep fedbabu "
    "ditto creff fedproto fedgela fednh fedloge"
)
"""Methods whose steps are shared, with the options of the other tests."""
ALONE = {"fedgen": "method.draws=class", "fedrod": "method.variant=linear", "analytic": "takes no training steps"}
"""Methods whose steps one process computes, and what it says."""
REFUSED = ("fedmr", "fedcd", "fedvls")
"""Methods whose loss mixes the examples of a batch, which nothing divides."""
PRIVATE = ("private fedavg", "private fedprox", "private fedgela", "private ditto")


def test_every_method_has_the_same_bits_in_three_processes_or_says_why_one_computes_its_steps() -> None:
    words = [sys.executable, "-m", "tests.support.helped"]
    done = subprocess.run(words, capture_output=True, check=True, cwd=Path(__file__).parents[3])
    made = json.loads(done.stdout)
    for name in (*SHARED.split(), *PRIVATE):
        result = made.pop(name)
        alone, shared = result["shared"]
        assert shared == alone, name
        assert result["parts"] > 0, name
    assert all(text in made.pop(name)["alone"] for name, text in ALONE.items())
    assert all("E-CFG-08" in made.pop(name)["refused"] for name in REFUSED)
    assert not made, "a new method: say whether its steps can be shared"


def test_two_caged_processes_send_the_bytes_of_one_in_the_service(serving: Serving) -> None:
    made = []
    for processes in (0, 2):
        hospital = serving(DIVIDED, processes)
        hospital.train()
        hospital.settle()
        hospital.offer(1)
        hospital.sent(2)
        made.append(uploaded(hospital))
    assert made[0] == made[1]
    assert len(set(made[0])) == 2
    assert all("in 2 of 2 processes" in text for text in said_of_training(hospital))


def test_private_steps_in_two_caged_processes_send_the_bytes_of_one_and_are_charged_once(
    tmp_path: Path, serving: Serving
) -> None:
    run = replace(private(physical_batch=40), model=GROUP)
    made, charged = [], []
    for processes in (0, 2):
        home = tmp_path / f"private{processes}"
        ledger = budgeted(home)
        hospital = serving(run, processes, home)
        hospital.train()
        made.append(uploaded(hospital))
        charged.append([ledger.entries(collection) for collection in ledger.collections()])
    assert made[0] == made[1]
    assert charged[0] == charged[1]
    assert "in 2 of 2 processes" in said_of_training(hospital)[0]


def test_a_run_whose_steps_are_computed_at_once_says_that_one_process_trains(serving: Serving) -> None:
    hospital = serving(replace(DIVIDED, train=TrainConfig(epochs=1, batch_size=64)), 2)
    hospital.train()
    assert (
        "in 1 of 2 processes, since each step is computed in one piece; the lead can set train.micro_batch"
        in (said_of_training(hospital)[0])
    )


# ---- the cage, and ends ----------------------------------------------------------------------------------------------


def test_helpers_are_in_the_cage_of_their_worker_and_have_no_line_to_the_service(serving: Serving) -> None:
    hospital = serving(LONG, 3)
    first, *helpers = processes_of(hospital)
    assert len(helpers) == 2
    assert {walls_of(helper) for helper in helpers} == {walls_of(first)} != {walls_of(os.getpid())}
    files = [{str(file.readlink()) for file in Path(f"/proc/{p}/fd").iterdir()} for p in (first, *helpers)]
    pipes = worker_of(hospital)._running.line
    numbers = pipes.incoming.fileno(), pipes.outgoing.fileno()
    line = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in numbers}
    assert line <= files[0]
    assert not any(line & of_helper for of_helper in files[1:])


@pytest.mark.fault(
    "a hospital's worker", "loses one of its processes", "all end within a second, and the task is tried again"
)
def test_a_worker_ends_within_a_second_with_any_of_its_processes_and_the_task_is_tried_again(serving: Serving) -> None:
    hospital = serving(LONG, 3)
    hospital.offer()
    until(lambda: "training" in hospital.events(), seconds=120)
    processes = processes_of(hospital)
    os.kill(processes[-1], signal.SIGKILL)
    began = time.monotonic()
    until(lambda: all(map(gone, processes)), seconds=20)
    assert time.monotonic() - began < 1.0
    until(lambda: hospital.events().count("training") == 2, seconds=120)
    assert hospital.events().count("killed") == 1
    processes = processes_of(hospital)
    os.kill(processes[0], signal.SIGKILL)
    until(lambda: all(map(gone, processes)), seconds=20)


def test_an_aborted_step_ends_within_two_seconds_with_all_processes_though_one_hangs(serving: Serving) -> None:
    hospital = serving(LONG, 3)
    hospital.offer()
    until(lambda: "training" in hospital.events(), seconds=120)
    processes = processes_of(hospital)
    os.kill(processes[-1], signal.SIGSTOP)
    began = time.monotonic()
    hospital.control.last.send(run_ended=pb.RunEnded(run_id=hospital.run_id, state="aborted"))
    until(lambda: all(map(gone, processes)), seconds=20)
    assert time.monotonic() - began < 2.0
    until(lambda: "ended" in hospital.events())
    assert hospital.service.store.count_kills() == []


@pytest.mark.parametrize("processes", [0, 65])
def test_a_number_of_processes_that_cannot_be_is_refused(processes: int) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*--processes from 1 to 64"):
        Helpers.fork(processes, "cpu")


def test_more_processes_than_gpus_are_refused() -> None:
    helpers = Helpers([None, None], None)  # type: ignore[list-item, arg-type]
    helpers.require_gpus(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"E-CFG-02.*found --processes 3 and 0 GPUs"):
        helpers.require_gpus(torch.device("cuda:0"))
