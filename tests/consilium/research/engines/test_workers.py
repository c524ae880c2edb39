"""Silos' rounds in several processes: the bits of one process, errors with words, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from consilium.research.engines import workers
from consilium.research.engines.in_process import MemoryStateStore, ResumePoint, RoundHistory, SiloShare, simulate
from consilium.research.engines.worker import dumps, loads
from consilium.research.engines.workers import WorkerError, WorkerPool, worthwhile
from fl_core.errors import ConfigError, DataError
from fl_core.methods import METHODS
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.records import TrainConfig
from fl_core.types.values import Bundle, Part, RoundContext, State
from tests.support.federations import METHOD_OPTIONS, Given, Kept, manifest, same, same_bundle, shares

pytestmark = pytest.mark.integration

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)


class Unreadable(Given):
    """Examples whose files are damaged."""

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        raise DataError("E-DATA-04", "expected a readable image at 7.jpg, found none")


class Faulty(Given):
    """Examples with a fault that nobody foresaw."""

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        raise ZeroDivisionError("of the reader")


class Deadly(Given):
    """Examples whose reader ends its process, as the system does where memory is short."""

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class DeadlyReply(Given):
    """Examples after whose reading the process ends in the middle of its reply."""

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        def half(self: Connection, buffer: bytes) -> None:
            os.write(self.fileno(), buffer[: len(buffer) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        Connection._send = half  # type: ignore[attr-defined]
        return super().batch(index, augment)


def processes() -> list[int]:
    """List the children of this process; that of `multiprocessing`, which stays, is there from the first call on."""
    resource_tracker.ensure_running()
    own = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in own for pid in file.read_text().split()]


def spoilt(*kinds: type[Given]) -> list[SiloShare]:
    """Give the first silos training examples of these kinds."""
    found = shares()
    for k, kind in enumerate(kinds):
        train = found[k].train
        assert isinstance(train, Given)
        found[k] = replace(found[k], train=kind(train.x, train.labels))
    return found


def assert_as_in_one_process(run: RunSetup, pool: WorkerPool) -> None:
    here, there = Kept(), Kept()
    expected, found = simulate(run, shares(), here), pool.simulate(there)
    assert set(found) == set(expected)
    assert all(same(found[group], expected[group]) for group in expected)
    assert here.records == there.records
    assert len(here.states) == len(there.states)


RUN = RunSetup.of(manifest("scaffold", train=TRAIN, rounds=3, cohort=2, personal=True))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Start workers for a method whose silos keep states, with personal models and a cohort."""
    with WorkerPool(RUN, shares(), 2, 1) as found:
        yield found


def test_workers_give_the_bits_of_one_process(pool: WorkerPool) -> None:
    assert_as_in_one_process(RUN, pool)


def test_a_run_goes_on_in_workers(pool: WorkerPool) -> None:
    whole, rest, states = Kept(), Kept(), MemoryStateStore()
    expected = pool.simulate(whole)
    with pytest.raises(KeyboardInterrupt):
        pool.simulate(Ends(), states)
    point = ResumePoint(2, whole.states[1], [r.medians for r in whole.records[:2]])
    found = pool.simulate(rest, states, point)
    assert all(same(found[group], expected[group]) for group in expected)
    assert rest.records == whole.records[2:]


class Ends(RoundHistory):
    """Ends a simulation before its third round is sent."""

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        if context.round == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_workers_give_the_bits_of_one_process_for_every_method(method: str) -> None:
    run = RunSetup.of(manifest(method, METHOD_OPTIONS.get(method, {}), train=TRAIN, rounds=3, personal=True))
    with WorkerPool(run, shares(), 3, 1) as pool:
        assert_as_in_one_process(run, pool)


class Refused(RoundHistory):
    """Keeps why silos sent nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.why: dict[str, str] = {}

    def refused(self, name: str, why: str) -> None:
        self.why[name] = why


def test_a_worker_that_is_killed_ends_the_run_with_words_and_a_silos_own_error_does_not() -> None:
    run, history, before = RunSetup.of(manifest(train=TRAIN, rounds=1, quorum=1)), Refused(), processes()
    given = spoilt(Unreadable, Deadly)
    with (
        pytest.raises(WorkerError, match=r"SIGKILL in the round of east.*--workers") as caught,
        WorkerPool(run, given, 1, 1) as pool,
    ):
        pool.simulate(history)
    assert caught.value.code == "E-RUN-38"
    assert history.why["north"].startswith("E-DATA-04: expected a readable image at 7.jpg")
    assert processes() == before


def test_a_worker_that_is_killed_while_it_sends_ends_the_run_with_words() -> None:
    """Half a reply is in the pipe: nobody waits for the rest."""
    run = RunSetup.of(manifest(train=TRAIN, rounds=1))
    with (
        pytest.raises(WorkerError, match=r"SIGKILL in the round of north.*--workers"),
        WorkerPool(run, spoilt(DeadlyReply), 1, 1) as pool,
    ):
        pool.simulate(RoundHistory())


def test_a_worker_that_waits_and_is_killed_ends_the_next_round_with_words() -> None:
    run = RunSetup.of(manifest(train=TRAIN, rounds=1))
    with WorkerPool(run, shares(), 1, 1) as pool:
        worker = pool._workers[0]
        worker.process.kill()
        worker.process.join()
        with pytest.raises(WorkerError, match="SIGKILL in the round of north"):
            pool.simulate(RoundHistory())


@pytest.mark.slow
def test_a_fault_of_a_round_ends_the_simulation_with_its_traceback() -> None:
    run, before = RunSetup.of(manifest(train=TRAIN, rounds=1)), processes()
    with (
        pytest.raises(RuntimeError, match=r"round of east(.|\n)*ZeroDivisionError: of the reader"),
        WorkerPool(run, spoilt(Given, Faulty), 2, 1) as pool,
    ):
        pool.simulate(RoundHistory())
    assert processes() == before


def test_examples_that_cannot_be_sent_are_refused_before_anything_starts() -> None:
    class Local(Given):
        """Of a class that no other process can import."""

    before = processes()
    with (
        pytest.raises(ConfigError, match="--workers 1") as caught,
        WorkerPool(RunSetup.of(manifest()), spoilt(Local), 2, 1),
    ):
        raise AssertionError
    assert caught.value.code == "E-CFG-08"
    assert processes() == before


SCRIPT = """
from fl_core.rounds.run_setup import RunSetup
from consilium.research.engines.in_process import RoundHistory
from consilium.research.engines.workers import WorkerPool
from tests.support.federations import manifest, shares
with WorkerPool(RunSetup.of(manifest(rounds=100000)), shares(), 2, 1) as pool:
    print(*[w.process.pid for w in pool._workers], flush=True)
    pool.simulate(RoundHistory())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_simulation_that_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    """Its script has no `if __name__ == "__main__"`, which nobody who uses a library expects to need."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert parent.stdout is not None
    started = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(started) == 2
    os.killpg(parent.pid, how) if how == signal.SIGINT else parent.kill()  # a terminal sends Ctrl-C to all
    _, told = parent.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while (left := [pid for pid in started if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
    assert told.count("Traceback") == (how == signal.SIGINT)  # its own alone


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_messages_come_back_with_the_same_bits_of_any_type_and_shape() -> None:
    state: State = {
        "w": {"a": torch.tensor([float("nan"), -0.0, 1e-40]), "scalar": torch.tensor(3), "none": torch.zeros(0, 4)},
        "empty": {},
        "k": {"half": torch.randn(3, 5).bfloat16().T, "yes": torch.tensor([True]), "double": torch.zeros(1).double()},
    }
    found = cast("State", loads(pickle.loads(pickle.dumps(dumps(state)))))
    assert {g: [*v] for g, v in found.items()} == {g: [*v] for g, v in state.items()}
    for group, values in state.items():
        for name, value in values.items():
            there = found[group][name]
            assert (there.dtype, there.shape) == (value.dtype, value.shape)
            assert (
                there.contiguous().view(-1).view(torch.uint8).tolist()
                == value.contiguous().view(-1).view(torch.uint8).tolist()
            )
    bundle = {"delta": Part.of({"a": torch.ones(2, 2)}, 3.0), "bare": Part({}, torch.zeros(4))}
    assert same_bundle(cast("Bundle", loads(dumps(bundle))), bundle)


def test_a_message_carries_a_view_and_not_the_memory_that_it_is_a_view_of() -> None:
    view = torch.zeros(1 << 20)[3:5]
    sent = pickle.dumps(dumps(view))
    assert len(sent) < 1000
    returned = cast("Tensor", loads(pickle.loads(sent)))
    returned += 1  # it may be written to, as a silo's state is


def test_few_or_tiny_silos_stay_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunSetup.of(manifest(train=TRAIN, rounds=3))
    assert not worthwhile(run, shares(), 2, 1, 3)
    for seconds, rounds, expected in ((1e-5, 10**4, False), (0.005, 20, False), (0.05, 100, True)):
        monkeypatch.setattr(workers, "_step_seconds", lambda *_, s=seconds: s)
        assert worthwhile(run, shares(), 2, 1, rounds) is expected
        assert not worthwhile(run, shares(), 1, 1, rounds)
    alone = RunSetup.of(manifest(train=TRAIN, cohort=1))
    assert not worthwhile(alone, shares(), 2, 1, 1000)


def test_the_estimate_changes_no_generator_and_no_model() -> None:
    run, before = RunSetup.of(manifest(train=TRAIN)), torch.get_rng_state()
    weights = {name: v.clone() for name, v in run.model.state_dict().items()}
    worthwhile(run, shares(), 2, 1, 10**4)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(weights, run.model.state_dict())
