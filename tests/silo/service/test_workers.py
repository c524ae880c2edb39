"""A worker in a process of its own: the same bytes as in the service, and what becomes of a task when either ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fl_core.errors import StateError
from fl_core.types.records import TrainConfig
from protos.consilium.v1 import federation_pb2 as pb
from silo.service import launchers, workers
from silo.service.workers import CagedWorker
from tests.support import until
from tests.support.caged_hospitals import Serving, gone, pid_of, programmed, started_in, uploaded, worker_of
from tests.support.fake_coordinator import Hospital, manifest
from tests.support.privacy import budgeted, private

pytestmark = pytest.mark.integration

LONG = replace(manifest(), train=TrainConfig(epochs=10_000, batch_size=8))
"""A task that nobody waits for."""


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    programmed(monkeypatch)
    with started_in(tmp_path) as serve:
        yield serve


# ---- the same as before ----------------------------------------------------------------------------------------------


def test_two_rounds_and_an_evaluation_in_a_worker_have_the_bytes_that_they_have_in_the_service(
    tmp_path: Path, serving: Serving
) -> None:
    made = []
    for run_round in ({}, {"run_round": None}):
        hospital = Hospital(tmp_path / f"compared{len(made)}", **run_round)
        try:
            hospital.start()
            hospital.train()
            hospital.settle()
            hospital.offer(1)
            hospital.sent(2)
            hospital.close(1)
            hospital.offer(2, kind=pb.EVALUATE)
            hospital.sent(3)
            events = [event for event in hospital.events() if event != "worker"]
            made.append((uploaded(hospital), events))
        finally:
            hospital.end()
    assert made[0] == made[1]
    assert len(set(made[0][0])) == 3


def test_a_private_round_is_reserved_read_and_committed_in_the_worker(tmp_path: Path, serving: Serving) -> None:
    ledger = budgeted(tmp_path / "home")
    hospital = serving(private(), tmp_path / "home")
    hospital.train()
    assert {state for c in ledger.collections() for _, state, _ in ledger.entries(c)} == {"SPENT"}
    assert pid_of(hospital) != os.getpid()


def test_what_refuses_a_run_in_the_worker_is_told_and_recorded_as_in_the_service(serving: Serving) -> None:
    hospital = serving(replace(manifest(), software="0.0.1"))
    hospital.offer()
    assert hospital.refused().code == "E-WIRE-01"


# ---- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "a hospital's worker",
    "is killed, for instance for lack of memory",
    "the service continues with a new worker; after a second kill the run is refused (E-RUN-46)",
)
def test_the_service_lives_on_when_its_worker_is_killed_and_the_second_kill_gives_the_run_up(serving: Serving) -> None:
    hospital = serving(LONG)
    hospital.offer()
    for times in (1, 2):
        until(lambda times=times: hospital.events().count("training") == times, seconds=120)
        os.killpg(pid_of(hospital), signal.SIGKILL)
        until(lambda times=times: hospital.events().count("killed") == times, seconds=60)
    assert hospital.refused().code == "E-RUN-46"
    assert hospital.service.lives()
    said = [a.code for a in hospital.answers() if a.accepted and a.code]
    assert said == ["E-RUN-46"]  # with the second try, which went on


@pytest.mark.fault("a hospital's service", "is killed while its worker computes", "the worker ends too")
def test_a_worker_ends_with_its_service(tmp_path: Path) -> None:
    code = f"""
    import sys, time
    from pathlib import Path
    from tests.support.fake_coordinator import Hospital
    hospital = Hospital(Path({str(tmp_path / "home")!r}), run_round=None)
    hospital.start()
    print(list(hospital.service._runner.worker._workers.values())[-1].pid, flush=True)
    time.sleep(600)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as service:
        assert service.stdout is not None
        pid = int(service.stdout.readline())
        service.kill()
    until(lambda: gone(pid), seconds=20)


def test_a_worker_that_cannot_start_is_an_error_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programmed(monkeypatch, "import os; os._exit(7)")
    with pytest.raises(StateError, match=r"E-RUN-55.*status 7"):
        Hospital(tmp_path / "home", run_round=None).start()


def test_a_signal_to_every_process_of_a_service_ends_no_task(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count as a kill, of which there are two in a run."""
    hospital = serving(LONG)
    hospital.offer()
    until(lambda: "training" in hospital.events(), seconds=60)
    os.killpg(pid_of(hospital), signal.SIGTERM)
    hospital.close(included=False)
    until(lambda: "stopped" in hospital.events(), seconds=60)
    assert "killed" not in hospital.events()
    assert hospital.service.store.count_kills() == []


def test_of_a_worker_that_ended_by_itself_no_folder_is_left(serving: Serving) -> None:
    hospital = serving()
    folders = worker_of(hospital)._settings.home.scratch
    os.killpg(pid_of(hospital), signal.SIGKILL)
    until(lambda: not list(folders.iterdir()), seconds=60)


# ---- giving up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"], ids=["in a call", "in a call that lets no thread run"])
def test_an_aborted_step_ends_within_two_seconds_with_its_process(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    programmed(
        monkeypatch,
        f"""
        import ctypes
        import silo.worker.__main__
        from silo.training.trainer import Trainer
        Trainer._attempt = lambda *_, **__: ctypes.{library}(None).sleep(600)
        """,
    )
    hospital = serving()
    hospital.offer()
    until(lambda: "training" in hospital.events(), seconds=60)
    aborted_within_two_seconds(hospital, pid_of(hospital))


def test_a_step_that_can_be_given_up_leaves_the_worker_for_the_next_round(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_S", 60.0)
    hospital = serving(LONG)
    hospital.offer()
    until(lambda: "training" in hospital.events(), seconds=60)
    pid = pid_of(hospital)
    hospital.close(included=False)
    until(lambda: "stopped" in hospital.events(), seconds=60)
    hospital.offer(1)
    until(lambda: hospital.events().count("training") == 2, seconds=60)
    assert pid_of(hospital) == pid


def aborted_within_two_seconds(hospital: Hospital, pid: int) -> None:
    began = time.monotonic()
    hospital.control.last.send(run_ended=pb.RunEnded(run_id=hospital.run_id, state="aborted"))
    until(lambda: gone(pid), seconds=20)
    assert time.monotonic() - began < 2.0
    until(lambda: "ended" in hospital.events())
    until(lambda: "stopped" in hospital.events())
    assert hospital.service.store.count_kills() == []
    assert hospital.service.lives()


HANGS = """
    import threading
    import silo.worker.process
    silo.worker.process.serve = lambda *_: threading.Event().wait()
    """


def replaced(hospital: Hospital, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """End the worker, and have the next one run Python before it begins."""
    programmed(monkeypatch, before)
    os.killpg(pid_of(hospital), signal.SIGKILL)
    until(lambda: not hospital.service._runner.worker._workers)


@pytest.mark.fault("a hospital's worker", "hangs while it loads", "ended by an abort or by the end of the service")
def test_a_worker_that_hangs_while_it_loads_is_ended_by_an_abort(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = serving()
    replaced(hospital, monkeypatch, HANGS)
    hospital.offer()
    until(lambda: hospital.service._runner.worker._workers and worker_of(hospital).pid)
    aborted_within_two_seconds(hospital, pid_of(hospital))


def test_a_worker_that_hangs_while_it_loads_is_ended_with_the_service(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = serving()
    replaced(hospital, monkeypatch, HANGS)
    hospital.offer()
    until(lambda: hospital.service._runner.worker._workers and worker_of(hospital).pid)
    pid, began = pid_of(hospital), time.monotonic()
    hospital.stop()
    assert time.monotonic() - began < 10.0
    assert gone(pid)


def test_a_worker_that_is_not_ready_in_time_is_ended_and_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programmed(monkeypatch, HANGS)
    monkeypatch.setattr(workers, "START_S", 0.5)
    with pytest.raises(StateError, match=r"E-RUN-55.*not ready within 0\.5 s"):
        Hospital(tmp_path / "home", run_round=None).start()


def test_a_launcher_that_cannot_start_a_process_is_an_error_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch() -> subprocess.Popen[bytes]:
        raise FileNotFoundError("sbatch")

    monkeypatch.setattr(launchers, "launch_here", launch)
    with pytest.raises(StateError, match=r"E-RUN-55.*sbatch"):
        Hospital(tmp_path / "home", run_round=None).start()


STOPS_ONCE_STAGED = """
    import os, signal, threading
    import silo.worker.__main__
    from service_core.storage.object_store import ObjectStore
    from silo.storage.outbox import PendingEntry
    ObjectStore.sync = lambda *_: threading.Event().wait()
    PendingEntry.finish = lambda self: os.kill(os.getpid(), signal.SIGSTOP)
    """
STOPS_ONCE_ENTERED = """
    import os, signal
    import silo.worker.__main__
    from silo.storage.outbox import PendingEntry
    PendingEntry.finish = lambda self: (self._wait(), os.kill(os.getpid(), signal.SIGSTOP))
    """


@pytest.mark.fault(
    "a hospital's worker", "is stopped while it writes its update", "ended by an abort; the service continues"
)
def test_a_worker_that_is_stopped_between_staged_and_entered_is_ended_by_an_abort(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    programmed(monkeypatch, STOPS_ONCE_STAGED)
    hospital = serving()
    hospital.offer()
    until(lambda: psutil.Process(pid_of(hospital)).status() == psutil.STATUS_STOPPED, seconds=60)
    until(lambda: hospital.transfer.uploads, "the upload to begin")
    aborted_within_two_seconds(hospital, pid_of(hospital))


def test_a_worker_that_never_enters_its_update_is_ended_and_another_one_tries(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    programmed(monkeypatch, STOPS_ONCE_STAGED)
    monkeypatch.setattr(workers, "ENTER_S", 0.5)
    hospital = serving()
    hospital.offer()
    assert hospital.refused().code == "E-RUN-46"
    assert hospital.events().count("killed") == 2


def test_an_update_that_a_stopped_worker_had_entered_is_sent_and_not_computed_again(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    programmed(monkeypatch, STOPS_ONCE_ENTERED)
    monkeypatch.setattr(workers, "ENTER_S", 0.5)
    hospital = serving()
    hospital.offer()
    hospital.sent()
    assert hospital.events().count("killed") == 1


# ---- how long it stays -----------------------------------------------------------------------------------------------


def test_a_worker_stays_while_its_run_is_under_way_and_ends_some_time_after_it(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.0)
    hospital = serving()
    hospital.train()
    hospital.settle()
    pid = pid_of(hospital)
    hospital.offer(1)
    hospital.sent(2)
    assert pid_of(hospital) == pid
    hospital.control.last.send(run_ended=pb.RunEnded(run_id=hospital.run_id, state="finished"))
    until(lambda: gone(pid), seconds=20)


def test_a_finished_run_leaves_its_worker_for_a_minute_and_an_aborted_one_does_not(tmp_path: Path) -> None:
    made = []
    for state in ("running", "finished", "", "asked", "aborted", "failed"):
        worker = CagedWorker.__new__(CagedWorker)
        worker._child = SimpleNamespace(pid=1, lives=True)  # type: ignore[assignment]
        worker._run_id, worker._since = "run-1", time.monotonic()
        worker.end = lambda state=state: made.append(state)  # type: ignore[method-assign]
        worker.rest(lambda run, state=state: state)
    assert made == ["aborted", "failed"]


def test_a_worker_whose_run_is_over_does_the_next_run(serving: Serving) -> None:
    hospital = serving()
    hospital.train()
    hospital.settle()
    pid = pid_of(hospital)
    hospital.control.last.send(run_ended=pb.RunEnded(run_id=hospital.run_id, state="finished"))
    until(lambda: hospital.service.store.state_of(hospital.run_id) == "finished")
    hospital.run_id = "run-2"
    hospital.offer()
    hospital.sent(2)
    assert pid_of(hospital) == pid


def test_runs_that_take_turns_keep_their_workers_and_a_third_ends_the_one_that_was_idle_for_longest(
    serving: Serving,
) -> None:
    hospital, pids = serving(), []
    for number, (run, round) in enumerate((("run-1", 0), ("run-2", 0), ("run-1", 1), ("run-3", 0))):
        hospital.run_id = run
        hospital.offer(round)
        hospital.sent(number + 1)
        hospital.close(round)
        pids.append(pid_of(hospital))
    first, second, again, third = pids
    assert first == again
    assert len({first, second, third}) == 3
    until(lambda: gone(second), seconds=20)
    assert not gone(first)


# ---- what is asked of it, and what it asks ---------------------------------------------------------------------------


@pytest.mark.fault(
    "a hospital's worker",
    "requests an object that its task does not name, as a hidden message",
    "refused with E-WIRE-06; the coordinator is not asked",
)
def test_a_worker_gets_no_object_that_its_task_does_not_name(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that is asked for is read by the coordinator: records could be spelled in it."""
    programmed(
        monkeypatch,
        """
        import silo.worker.__main__
        from silo.worker.process import _PipedService
        fetch = _PipedService.fetch
        _PipedService.fetch = lambda self, digest, *more: fetch(self, "ab" * 32, *more)
        """,
    )
    hospital = serving()
    hospital.offer()
    assert hospital.refused().code == "E-WIRE-06"
    assert hospital.transfer.calls == []


@pytest.mark.fault("a hospital's worker", "sends nonsense", "ended; the service continues")
@pytest.mark.parametrize(
    "said",
    [
        "{",
        "[]",
        "{}",
        '{"what": 1}',
        '{"fetch": 1, "accept": 2}',
        '{"staged": []}',
        '{"failed": {"kind": "RefusedError", "code": [1], "message": 2}}',
    ],
)
def test_a_worker_that_says_what_nobody_understands_is_ended_and_the_service_goes_on(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    programmed(
        monkeypatch,
        f"""
        import silo.worker.__main__
        from silo.worker.tasks import TaskWork
        def train(self, offer, service):
            service.line.outgoing.write({said!r}.encode() + bytes([10]))
            service.line.outgoing.flush()
            return service.fetch("")
        TaskWork.train = train
        """,
    )
    hospital = serving()
    hospital.offer()
    assert hospital.refused().code == "E-RUN-46"
    assert hospital.service.lives()


@pytest.mark.fault(
    "a hospital's worker",
    "reports a cancelled task with a text of its own",
    "counted as killed (E-RUN-46); its text is dropped",
)
@pytest.mark.parametrize("said", ["raise CancelledError(WORDS)", "service.tell(CancelledError(WORDS))"])
def test_a_worker_cannot_say_in_its_own_words_that_a_task_was_given_up(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    programmed(
        monkeypatch,
        f"""
        import silo.worker.__main__
        from silo.cancellation import CancelledError
        from silo.worker.tasks import TaskWork
        WORDS = "Jane Doe"
        def train(self, offer, service):
            {said}
            service.stop.wait(600)
        TaskWork.train = train
        """,
    )
    hospital = serving()
    hospital.offer()
    assert hospital.refused().code == "E-RUN-46"
    assert "stopped" not in hospital.events()
    assert "Jane Doe" not in repr([hospital.notices, hospital.answers()])


# ---- the policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "code"), [("", ""), ("_filter_calls", ""), ("_filter_calls,_leave_network", "E-POLICY-21")]
)
def test_a_policy_may_require_that_the_worker_reaches_no_network(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, code: str
) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "policy.toml").write_text('[worker]\nisolation = "required"\n')
    programmed(
        monkeypatch,
        f"""
        import silo.worker.__main__
        from silo.worker import cage
        def refuse():
            raise OSError("not here")
        for name in {missing!r}.split(","):
            setattr(cage, name, refuse)
        """,
    )
    hospital = serving(home=tmp_path / "home")
    hospital.offer()
    if code:
        assert hospital.refused().code == code
        assert "training" not in hospital.events()
    else:
        hospital.sent()


def test_the_worker_knows_no_network_library() -> None:
    code = "import silo.worker.process, sys; print('grpc' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
