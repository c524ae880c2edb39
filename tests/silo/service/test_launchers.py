"""A worker that Slurm or a command starts: the same bytes, and what becomes of it, its queue and its job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fl_core.errors import ConfigError, StateError
from fl_core.types.records import TrainConfig
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage import shared_folder
from service_core.workers.child import worker_words
from silo.cancellation import CancelToken
from silo.operations.doctor import Examination
from silo.operations.liveness import Health, Liveness
from silo.service import workers
from silo.service.launchers import Launcher
from silo.service.workers import CagedWorker
from silo.settings import SiloSettings
from silo.storage.home import Home, ServeOptions
from silo.worker import process
from tests.support import some, until
from tests.support.caged_hospitals import Serving, programmed, started_in, uploaded, worker_of
from tests.support.fake_coordinator import PATIENCE, Hospital, enrolled, manifest
from tests.support.privacy import budgeted, private
from tests.support.services import service
from tests.support.slurm import FakeSlurm, missing_programs, real_jobs, real_slurm

LONG = replace(manifest(), train=TrainConfig(epochs=10_000, batch_size=8))
"""A task that nobody waits for."""
SLURM = "slurm --partition=gpu --gres=gpu:1"
CLEAN = f"command env -i PATH={os.environ['PATH']} PYTHONPATH={os.environ.get('PYTHONPATH', '')} {{worker}}"
"""A worker that knows nothing of the service's environment, as behind ssh or in a container."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    yield FakeSlurm(tmp_path / "slurm", monkeypatch)
    _until_cancelled()


def _until_cancelled() -> None:
    for thread in threading.enumerate():
        if thread.name == "scancel":
            thread.join(60)


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """Start hospitals whose worker is launched: by a launcher, for a run, in a folder."""
    programmed(monkeypatch)
    with started_in(tmp_path) as serve:
        yield lambda launcher, run=None, folder=None: serve(run, folder, launcher=launcher)


# ---- what is refused at the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "cannot be parsed"),
        ("nobody", "something else"),
        ("local --fast", "something else"),
        ("command", "something else"),
        ("command 'env", "cannot be parsed"),
        ("command env python3", "neither {worker} nor {arguments}"),
        ("command env {wroker}", "{wroker}"),
        ("command env {worker} {0}", "{0}"),
        ("command env {worker} {", "'{'"),
        ("command env x{worker}", "separate words"),
        ("command env {home.path} {worker}", "{home.path}"),
        ("command no-such-program {worker}", "no program 'no-such-program'"),
        ("slurm gpu", "'gpu', which is not an option"),
        ("slurm -p gpu", "'gpu', which is not an option"),
    ],
)
def test_what_could_never_start_a_worker_is_refused_with_words(
    tmp_path: Path, slurm: FakeSlurm, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match="E-CFG-02") as refused:
        Launcher.of(text, Home(tmp_path))
    assert problem in str(refused.value)


def test_slurm_is_refused_where_its_programs_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no program 'srun'"):
        Launcher.of("slurm", Home(tmp_path))


def test_a_template_is_filled_without_a_shell(tmp_path: Path) -> None:
    text = "command env -v '{home}:{home}' NAME={name} 'a b;c' '{{x}}' {worker}"
    filled = Launcher.of(text, Home(tmp_path))._filled("worker-1")
    home = str(tmp_path)
    assert filled == [
        *("env", "-v", f"{home}:{home}", "NAME=worker-1", "a b;c", "{x}"),
        *worker_words("silo.worker"),
    ]


# ---- the same as before ----------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("launcher", some([SLURM, f"command {sys.executable} {{arguments}}"]))
def test_a_run_has_the_bytes_that_it_has_with_a_worker_of_this_machine(
    serving: Serving, slurm: FakeSlurm, launcher: str
) -> None:
    made = []
    for text in ("local", launcher):
        hospital = serving(text)
        hospital.train()
        hospital.settle()
        hospital.offer(1)
        hospital.sent(2)
        made.append(uploaded(hospital))
        if text == SLURM:
            assert {"--partition=gpu", "--gres=gpu:1", "--ntasks=1"} <= {*slurm.jobs()[0]["options"]}
        (began,) = [notice for notice in hospital.notices if notice.event == "worker"]
        assert began.facts["launcher"] == text.split()[0]
        hospital.end()
    assert made[0] == made[1]
    assert len(set(made[0])) == 2
    until(lambda: not slurm.jobs())


@pytest.mark.integration
def test_a_worker_without_the_services_environment_uses_its_ledger(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ledger would be another budget."""
    ledger = budgeted(tmp_path / "home")
    (elsewhere := tmp_path / "elsewhere").mkdir(mode=0o700)
    for name in ("ledger.db", "ledger.key"):
        (tmp_path / "home" / name).rename(elsewhere / name)
    monkeypatch.setenv("CONSILIUM_SILO_LEDGER", str(elsewhere / "ledger.db"))
    serving(CLEAN, private(), tmp_path / "home").train()
    assert not (tmp_path / "home" / "ledger.db").exists()
    ledger = type(ledger)(elsewhere / "ledger.db", elsewhere / "ledger.key")
    assert {state for c in ledger.collections() for _, state, _ in ledger.entries(c)} == {"SPENT"}


def test_a_home_changes_its_journal_with_its_launcher(tmp_path: Path) -> None:
    for launcher, mode in (("local", "wal"), (CLEAN, "delete"), ("local", "wal")):
        place = settings(tmp_path / "home", launcher)
        store = service(place, [], PATIENCE, lambda: None, None).store  # type: ignore[arg-type,return-value]
        with store.database.read() as db:
            assert db.exec_driver_sql("PRAGMA journal_mode").scalar_one() == mode
        store.close_database()


# ---- what does not fit together --------------------------------------------------------------------------------------


def settings(folder: Path, launcher: str) -> SiloSettings:
    return SiloSettings(enrolled(folder), "digits/p3c4/1", device="cpu", launcher=launcher)


def started(place: SiloSettings) -> CagedWorker:
    launcher = Launcher.of(place.launcher, place.home)
    worker = CagedWorker(place, launcher, "center1", lambda _: None, lambda *_: None, lambda _: place.data)
    worker.begin("", CancelToken())
    return worker


@pytest.mark.integration
@pytest.mark.fault(
    "a worker on another machine",
    "shares a ledger with services that it cannot see",
    "refused with E-RUN-55 before it reads anything",
)
def test_a_shared_ledger_is_refused_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "machine", lambda: "another")
    monkeypatch.setenv("CONSILIUM_SILO_LEDGER", str(tmp_path / "elsewhere" / "ledger.db"))
    with pytest.raises(StateError, match=r"E-RUN-55.*only this home may use its ledger"):
        started(settings(tmp_path / "home", CLEAN))


@pytest.mark.fault(
    "a worker on another machine",
    "has another build, which might change the database",
    "refused with E-RUN-55 before it opens the database",
)
def test_a_worker_of_another_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"E-RUN-55.*consilium-fl 0\+other"):
        process._join_service({"software": "consilium-fl 0+other"}, Home(tmp_path))


@pytest.mark.integration
@pytest.mark.fault(
    "a worker on another machine",
    "shares the home through a file system whose locks are local",
    "refused with E-RUN-55 before it opens the database",
)
def test_a_worker_that_does_not_see_the_services_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = dict.fromkeys(shared_folder._KINDS, lambda *_: None)
    monkeypatch.setattr(shared_folder, "_KINDS", nothing)
    with pytest.raises(StateError, match=r"E-RUN-55.*fcntl locks do not hold"):
        started(settings(tmp_path / "home", CLEAN))


# ---- the queue -------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "QUEUE_FIRST_S", 0.05)
    monkeypatch.setattr(workers, "QUEUE_S", 0.2)


@pytest.mark.integration
def test_an_abort_in_the_queue_takes_two_seconds_and_leaves_no_job(
    serving: Serving, slurm: FakeSlurm, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.0)
    hospital = serving(SLURM)
    until(lambda: not slurm.jobs())
    slurm.hold()
    del hospital.notices[:]
    hospital.offer()
    waiting = until(lambda: [n for n in hospital.notices if n.event == "queue"])
    assert "waits in the queue of Slurm, reason Resources, since 20" in waiting[0].text
    assert hospital.service.lives()
    began = time.monotonic()
    hospital.control.last.send(run_ended=pb.RunEnded(run_id=hospital.run_id, state="aborted"))
    until(lambda: "stopped" in hospital.events(), seconds=20)
    assert time.monotonic() - began < 2.0
    until(lambda: not slurm.jobs(), seconds=20)
    assert hospital.service.store.count_kills() == []
    assert [n.facts["waits"] for n in hospital.notices if n.event == "queue"][-1] == ""


@pytest.mark.integration
def test_a_service_works_while_its_first_worker_waits_and_ends_in_the_queue_when_it_is_told_to(
    tmp_path: Path, slurm: FakeSlurm, impatient: None
) -> None:
    slurm.hold()
    hospital = Hospital(tmp_path / "home", run_round=None, launcher=SLURM)
    begun = hospital.launch()
    until(lambda: "queue" in hospital.events())
    assert begun.lives()
    assert not hospital.control.sessions
    began = time.monotonic()
    hospital.stop()
    assert time.monotonic() - began < 5.0
    until(lambda: not slurm.jobs(), seconds=20)
    hospital.host.stop()


@pytest.mark.integration
def test_a_service_whose_worker_left_the_queue_connects_and_trains(
    tmp_path: Path, slurm: FakeSlurm, impatient: None
) -> None:
    slurm.hold()
    hospital = Hospital(tmp_path / "home", run_round=None, launcher=SLURM)
    hospital.launch()
    until(lambda: "queue" in hospital.events())
    slurm.go_on()
    until(lambda: hospital.control.sessions)
    hospital.train()
    hospital.end()


# ---- what ends -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault(
    "Slurm",
    "ends a worker's job in the middle of a task (time limit, preemption)",
    "the service repeats the task once; after a second kill the run is refused (E-RUN-46)",
)
def test_a_job_that_slurm_ends_is_a_kill_of_the_worker(serving: Serving, slurm: FakeSlurm) -> None:
    hospital = serving(SLURM, LONG)
    hospital.offer()
    for times in (1, 2):
        until(lambda times=times: hospital.events().count("training") == times, seconds=120)
        slurm.preempt()
        until(lambda times=times: hospital.events().count("killed") == times, seconds=60)
    assert hospital.refused().code == "E-RUN-46"
    assert hospital.service.lives()


@pytest.mark.integration
@pytest.mark.fault("srun", "is killed", "its job is cancelled and keeps no GPU")
def test_an_srun_that_is_killed_leaves_no_job(serving: Serving, slurm: FakeSlurm) -> None:
    hospital = serving(SLURM, LONG)
    hospital.offer()
    until(lambda: "training" in hospital.events(), seconds=120)
    (job,) = slurm.jobs()
    slurm.hold()
    os.kill(worker_of(hospital).pid or 0, signal.SIGKILL)
    until(lambda: job["id"] not in [left["id"] for left in slurm.jobs()], seconds=20)


@pytest.mark.integration
@pytest.mark.fault(
    "a hospital's service",
    "is killed while its worker queues or works",
    "the next service cancels the job before it opens the database",
)
@pytest.mark.parametrize("queued", some([True, False]))
def test_a_service_that_starts_again_leaves_no_job_of_the_last_one(
    tmp_path: Path, slurm: FakeSlurm, impatient: None, queued: bool
) -> None:
    if queued:
        slurm.hold()
    code = f"""
    import time
    from pathlib import Path
    from tests.support.fake_coordinator import Hospital
    hospital = Hospital(Path({str(tmp_path / "home")!r}), run_round=None, launcher={SLURM!r})
    hospital.launch()
    time.sleep(600)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(words, cwd=Path(__file__).parents[3]) as service:
        (left,) = until(slurm.jobs)
        until(lambda: queued or (tmp_path / "home" / "worker.lock").exists())
        os.kill(left["id"], signal.SIGSTOP)  # this srun notices nothing
        service.kill()
    Launcher.of(SLURM, Home(tmp_path / "home")).take_over()
    until(lambda: not slurm.jobs(), seconds=20)
    os.kill(left["id"], signal.SIGKILL)


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_status_and_doctor_say_where_the_worker_is_and_why_none_is(
    tmp_path: Path, serving: Serving, slurm: FakeSlurm, impatient: None
) -> None:
    hospital = serving(SLURM)
    home = Home(hospital.folder)
    home.note_served(ServeOptions("digits", launcher=SLURM))

    def told() -> str:
        liveness = Liveness(home)
        for notice in hospital.notices:
            liveness.note(notice)
        liveness.beat()
        with home.locked():
            (finding,) = Examination(home, network=False).checks()["worker"]()
            assert finding.found == "; ".join(Health.of(home).worker())
            return finding.found

    assert f"runs on {os.uname().nodename}, job " in told()
    assert "cannot open a socket" in told()
    slurm.hold()
    worker_of(hospital).end()
    before = len(hospital.notices)
    hospital.offer()
    until(lambda: "queue" in hospital.events()[before:])
    assert told().startswith("a worker waits in the queue of Slurm, reason Resources")


# ---- the real one ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())
def test_a_run_through_a_real_slurm(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    with real_slurm(tmp_path / "slurm", monkeypatch):
        made = []
        for launcher in ("local", "slurm --time=1:00:00"):
            hospital = serving(launcher)
            hospital.train()
            made.append(uploaded(hospital))
            hospital.end()
        assert made[0] == made[1]
        until(lambda: not real_jobs(), seconds=60)

        hospital = serving("slurm", LONG)
        hospital.offer()
        until(lambda: "training" in hospital.events(), seconds=120)
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], check=True)
        until(lambda: "killed" in hospital.events(), seconds=60)
        until(lambda: hospital.events().count("training") == 2, seconds=120)
        hospital.control.last.send(run_ended=pb.RunEnded(run_id=hospital.run_id, state="aborted"))
        until(lambda: "stopped" in hospital.events(), seconds=20)
        until(lambda: not real_jobs(), seconds=60)

        with subprocess.Popen(["srun", "--quiet", "sleep", "600"]) as other:
            until(lambda: "RUNNING" in real_jobs(), seconds=60)
            hospital.run_id = "run-2"
            before = len(hospital.notices)
            hospital.offer()
            until(lambda: "queue" in hospital.events()[before:], seconds=60)
            began = time.monotonic()
            hospital.control.last.send(run_ended=pb.RunEnded(run_id="run-2", state="aborted"))
            until(lambda: hospital.events().count("stopped") == 2, seconds=20)
            assert time.monotonic() - began < 2.0
            until(lambda: len(real_jobs().splitlines()) == 1, seconds=60)
            other.terminate()
            hospital.end()
        _until_cancelled()
