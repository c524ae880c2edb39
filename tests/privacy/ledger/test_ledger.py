"""The ledger: reserve, start, commit; crashes, concurrency, tampering, restored backups (T-40, T-41)."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fl_core.errors import FederationError, RefusedError, StateError, UnavailableError
from privacy.accounting.accountant import Mechanism
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease

ROUND = (PlannedRelease("training", Mechanism(2.85, 0.032, 31)),)


def made(tmp_path: Path, epsilon: float | None = 2.0) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.register("isic/center3", "group", "v1", 10, [f"lesion {i}" for i in range(8)])
    if epsilon:
        ledger.set_budget("isic/center3", epsilon, 1e-5, "dpo", "the ethics board's decision")
    return ledger


def task(t: int, run: str = "run", fingerprint: str = "v1") -> LedgerTask:
    return LedgerTask(run, "digest", t, "train", fingerprint)


def spend(ledger: Ledger, t: int, run: str = "run") -> None:
    entry = ledger.reserve("isic/center3", task(t, run), ROUND)
    ledger.start(entry)
    ledger.commit(entry, "sha")


@pytest.mark.fault("a disk", "is full while a hospital's ledger is written", "E-STATE-63; a running task stays charged")
def test_a_full_disk_is_said_as_such_and_what_runs_stays_charged(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    entry = ledger.reserve("isic/center3", task(0), ROUND)
    ledger.start(entry)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(UnavailableError, match="E-STATE-63"):
            ledger.commit(entry, "sha")
        with pytest.raises(UnavailableError, match="E-STATE-63"):
            ledger.reserve("isic/center3", task(1), ROUND)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ((_, state, planned),) = ledger.entries("isic/center3")
    assert (state, tuple(planned)) == ("RUNNING", ROUND)
    ledger.commit(entry, "sha")
    ledger.verify()


def test_t_41_exactly_forty_seven_rounds_fit_over_runs_and_restarts(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    for t in range(47):
        spend(ledger if t % 2 else Ledger(tmp_path / "ledger.db"), t, f"run{t % 3}")
    before = ledger.status("isic/center3")
    with pytest.raises(RefusedError, match="E-BUDGET-01"):
        ledger.reserve("isic/center3", task(47), ROUND)
    assert ledger.status("isic/center3") == before
    assert before.used is not None
    assert 0.95 < before.used <= 1
    assert before.spent_rdp <= 2.0
    assert [e[2] for e in ledger.events()][-1] == "REFUSED"


@pytest.mark.parametrize("started", [pytest.param(False, marks=pytest.mark.slow), True])
def test_t_40_a_crash_counts_as_spent(tmp_path: Path, started: bool) -> None:
    """A process that is killed after `reserve`, or after `start`."""
    made(tmp_path)
    program = f"""
import sys
from pathlib import Path
from privacy.accounting.accountant import Mechanism
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
ledger = Ledger(Path({str(tmp_path / "ledger.db")!r}))
planned = [PlannedRelease("training", Mechanism(2.85, 0.032, 31))]
entry = ledger.reserve("isic/center3", LedgerTask("run", "digest", 0, "train", "v1"), planned)
if {started}:
    ledger.start(entry)
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    ledger = Ledger(tmp_path / "ledger.db")
    charged = ledger.status("isic/center3").spent_rdp
    assert charged > 0
    assert len(ledger.recover()) == 1
    assert ledger.status("isic/center3").spent_rdp == charged
    assert ledger.recover() == []
    again = ledger.reserve("isic/center3", task(0), ROUND)  # the same round anew is a new entry, charged again
    assert again.split("/")[3] == "1"
    assert ledger.status("isic/center3").spent_rdp > charged
    ledger.verify()


def _reserve(file: str, number: int) -> bool:
    try:
        Ledger(Path(file)).reserve("isic/center3", task(number, f"run{number}"), ROUND)
    except RefusedError:
        return False
    return True


def test_t_41_concurrent_reservations_serialise_and_never_pass_the_cap(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    for t in range(40):
        spend(ledger, t)
    with ThreadPoolExecutor(14) as pool:  # each with a connection of its own
        admitted = sum(pool.map(_reserve, [str(tmp_path / "ledger.db")] * 14, range(14)))
    assert admitted == 7
    assert ledger.history("isic/center3") == [Mechanism(2.85, 0.032, 31 * 47)]
    ledger.verify()


@pytest.mark.parametrize("statement", ["UPDATE event SET state='RELEASED_UNUSED'", "DELETE FROM event"])
def test_t_41_events_can_neither_be_changed_nor_deleted(tmp_path: Path, statement: str) -> None:
    spend(made(tmp_path), 0)
    with sqlite3.connect(tmp_path / "ledger.db") as db, pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute(statement)


def test_t_41_illegal_transitions_are_blocked(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    entry = ledger.reserve("isic/center3", task(0), ROUND)
    with pytest.raises(StateError, match="E-BUDGET-12"):
        ledger.commit(entry, "sha")
    ledger.start(entry)
    with pytest.raises(StateError, match="E-BUDGET-12"):
        ledger.release_unused(entry)
    ledger.commit(entry, "sha")
    with pytest.raises(StateError, match="E-BUDGET-12"):
        ledger.start(entry)


def test_what_never_ran_can_be_given_back(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    ledger.release_unused(ledger.reserve("isic/center3", task(0), ROUND))
    assert ledger.status("isic/center3").spent_rdp == 0


def test_an_older_copy_that_was_put_back_is_found(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    spend(ledger, 0)
    backup = (tmp_path / "ledger.db").read_bytes()
    spend(ledger, 1)
    seen = ledger.head()
    ledger.verify(seen)
    (tmp_path / "ledger.db").write_bytes(backup)
    with pytest.raises(StateError, match="E-BUDGET-08"):
        ledger.verify()  # whoever has it open notices by itself
    with pytest.raises(StateError, match="E-BUDGET-08"):
        spend(ledger, 7)
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.verify()
    with pytest.raises(StateError, match="E-BUDGET-08"):
        ledger.verify(seen)
    spend(ledger, 7)  # as long as before, and another chain
    with pytest.raises(StateError, match="E-BUDGET-08"):
        ledger.verify(seen)


@pytest.mark.fault(
    "an operator", "restores an older ledger under a service that wrote one more line", "detected: E-BUDGET-08"
)
@pytest.mark.parametrize("replaced", [False, True])
def test_an_open_ledger_notices_the_loss_of_its_own_last_event(tmp_path: Path, replaced: bool) -> None:
    ledger, file = made(tmp_path), tmp_path / "ledger.db"
    backup = file.read_bytes()
    ledger.reserve("isic/center3", task(0), ROUND)
    if replaced:
        (tmp_path / "older").write_bytes(backup)
        (tmp_path / "older").replace(file)
    else:
        file.write_bytes(backup)
    with pytest.raises(StateError, match="E-BUDGET-08"):
        ledger.reserve("isic/center3", task(1), ROUND)


def test_one_more_image_does_not_mint_a_new_budget(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    spend(ledger, 0)
    spent = ledger.status("isic/center3").spent_rdp
    assert ledger.register("isic/center3", "group", "v2", 11, [f"lesion {i}" for i in range(9)])
    assert not ledger.register("isic/center3", "group", "v2", 11, [f"lesion {i}" for i in range(9)])
    assert ledger.status("isic/center3").spent_rdp == spent
    ledger.reserve("isic/center3", task(1, fingerprint="v2"), ROUND)
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        ledger.register("other name", "group", "v3", 3, ["lesion 2", "somebody new"])
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        ledger.reserve("isic/center3", task(2, fingerprint="v9"), ROUND)


def test_no_patient_is_named_in_the_ledger(tmp_path: Path) -> None:
    made(tmp_path)
    assert b"lesion" not in (tmp_path / "ledger.db").read_bytes()


def test_without_a_budget_nothing_is_reserved(tmp_path: Path) -> None:
    ledger = made(tmp_path, epsilon=None)
    with pytest.raises(RefusedError, match="E-BUDGET-02"):
        ledger.reserve("isic/center3", task(0), ROUND)
    with pytest.raises(FederationError, match="E-BUDGET-04"):
        ledger.set_budget("isic/centre3", 2.0, 1e-5, "dpo", "misspelt")


def test_a_lower_budget_keeps_what_is_spent(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    for t in range(20):
        spend(ledger, t)
    ledger.set_budget("isic/center3", 0.5, 1e-5, "dpo", "revised")
    with pytest.raises(RefusedError, match="E-BUDGET-01"):
        ledger.reserve("isic/center3", task(20), ROUND)


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    made(tmp_path)
    assert stat.S_IMODE((tmp_path / "ledger.db").stat().st_mode) == 0o600
