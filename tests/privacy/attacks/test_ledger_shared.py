"""One ledger for several services of a hospital: each counts what the others spend, and none what they are still at."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fl_core.errors import RefusedError, StateError
from privacy.accounting.accountant import Mechanism, PrivacyFilter
from privacy.ledger import owners
from privacy.ledger.account import Refusal
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.recovery import SeenHead, charge_unknown_spending

SKIN = "skin/train"
ROUND = [PlannedRelease("training", Mechanism(2.85, 0.032, 31))]

SERVICE = """
import sys
from pathlib import Path
from privacy.accounting.accountant import Mechanism
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
ledger = Ledger(Path(sys.argv[1]))
planned = [PlannedRelease("training", Mechanism(2.85, 0.032, 31))]
entry = ledger.reserve("skin/train", LedgerTask("theirs", "m", 0, "train", "v1"), planned)
ledger.start(entry)
print("at work", flush=True)
for line in sys.stdin:
    ledger.commit(entry, "sha")
    print("done", flush=True)
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "ledger.db")
    made.register(SKIN, "record", "v1", 2, ["a", "b"])
    made.set_budget(SKIN, 2.0, 1e-5, "dpo", "the board")
    return made


def service(file: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    return process


@pytest.mark.integration
def test_what_another_service_is_at_stays_open_until_it_is_done_or_gone(tmp_path: Path, ledger: Ledger) -> None:
    with service(tmp_path / "ledger.db") as other:
        try:
            assert ledger.recover() == []
            assert Ledger(tmp_path / "ledger.db").recover() == []
            assert [state for _, state, _ in ledger.entries(SKIN)] == ["RUNNING"]
            with pytest.raises(StateError, match="E-BUDGET-11"):  # nothing is restored under a service at work
                charge_unknown_spending(ledger, [SeenHead(ledger.head())], "dpo")
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write("go on\n")
            other.stdin.flush()
            assert other.stdout.readline() == "done\n"
        finally:
            other.kill()
    with service(tmp_path / "ledger.db") as other:
        assert owners.has_others(tmp_path / "ledger.db")
        assert not owners.has_others(tmp_path / "another.db")
        other.kill()
    assert len(ledger.recover()) == 1
    assert [state for _, state, _ in ledger.entries(SKIN)] == ["SPENT", "SPENT_ON_RECOVERY"]
    assert not owners.has_others(tmp_path / "ledger.db")
    ledger.verify()


@pytest.mark.fault(
    "an operator",
    "deletes all files next to a ledger that a service uses",
    "the current task stays open and is charged once",
)
def test_what_a_service_is_at_stays_open_when_all_files_beside_the_ledger_are_deleted(
    tmp_path: Path, ledger: Ledger
) -> None:
    with service(tmp_path / "ledger.db") as other:
        try:
            for path in tmp_path.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in ("ledger.db", "ledger.key"):
                    path.unlink()
            assert ledger.recover() == []
            with pytest.raises(StateError, match="E-BUDGET-11"):
                charge_unknown_spending(ledger, [SeenHead(ledger.head())], "dpo")
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write("go on\n")
            other.stdin.flush()
            assert other.stdout.readline() == "done\n"
        finally:
            other.kill()
    assert ledger.recover() == []
    assert [state for _, state, _ in ledger.entries(SKIN)] == ["SPENT"]


def test_a_service_sees_what_another_one_spends(tmp_path: Path, ledger: Ledger) -> None:
    other = Ledger(tmp_path / "ledger.db")
    for t in range(47):
        mine = (ledger, other)[t % 2]
        entry = mine.reserve(SKIN, LedgerTask(f"run {t}", f"m {t}", 0, "train", "v1"), ROUND)
        mine.start(entry)
        mine.commit(entry, "sha")
    for mine in (ledger, other):
        with pytest.raises(RefusedError, match="E-BUDGET-01"):
            mine.reserve(SKIN, LedgerTask("run", "m", 0, "train", "v1"), ROUND)
    assert ledger.history(SKIN) == other.history(SKIN) == [Mechanism(2.85, 0.032, 31 * 47)]
    assert ledger.verify() == other.verify()


def test_an_owner_that_nobody_could_be_is_no_owner(tmp_path: Path, ledger: Ledger) -> None:
    for token in ("", "x", "../../etc/passwd", "0" * 32, "g" * 32):
        assert not owners.is_alive(tmp_path / "ledger.db", token)
    own = owners.own_token(tmp_path / "ledger.db")
    assert own == owners.own_token(tmp_path / "ledger.db")
    assert not owners.is_alive(tmp_path / "ledger.db", own)  # what this process left open is for it to count
    assert ledger.recover() == []


def asked_by(ledger: Ledger, coordinator: str, run: str = "run", bounds: tuple[PrivacyFilter, ...] = ()) -> str:
    """Ask for round 1 of a run, and do it; return the code of the refusal, or nothing."""
    task = LedgerTask(run, "the manifest", 0, "train", "v1", coordinator)
    try:
        entry = ledger.reserve(SKIN, task, ROUND, run=bounds)
    except RefusedError as error:
        return error.code
    ledger.start(entry)
    ledger.commit(entry, "sha")
    return ""


def test_a_consortium_uses_up_no_attempt_and_no_bound_of_another_on_the_same_ledger(ledger: Ledger) -> None:
    """A coordinator chooses ids and manifests, also those of another consortium's run."""
    bounds = (PrivacyFilter.of(0.7, 1e-5),)
    assert [asked_by(ledger, "theirs", run) for run in ("run", "run", "another", "run")] == ["", "", "", "E-BUDGET-12"]
    assert [asked_by(ledger, "mine", bounds=bounds) for _ in range(4)] == ["", "", "", "E-BUDGET-12"]
    again = Ledger(ledger.chain.file)  # what is known of who asked is in the chain
    assert [asked_by(again, who) for who in ("mine", "theirs", "third")] == ["E-BUDGET-12", "E-BUDGET-12", ""]
    assert ledger.history(SKIN) == [Mechanism(2.85, 0.032, 31 * 7)]  # all of it is spent of the one budget
    again.verify()


def test_an_entry_of_an_earlier_version_counts_for_every_consortium(ledger: Ledger) -> None:
    assert [asked_by(ledger, "") for _ in range(3)] == [""] * 3
    assert asked_by(ledger, "mine") == "E-BUDGET-12"
    assert asked_by(ledger, "mine", "another run of this manifest") == "E-BUDGET-12"


@pytest.mark.integration
def test_a_refusal_that_repeats_without_end_is_an_event_only_each_time_that_its_number_doubles(ledger: Ledger) -> None:
    def noted() -> list[Refusal]:
        return [Refusal.of(detail) for _, _, state, detail, _ in ledger.events() if state == "REFUSED"]

    for n in range(1000):
        ledger.note_refusal(f"run-{n}", "E-POLICY-05", "theirs")
    assert [found.times for found in noted()] == [*range(1, 11), 16, 32, 64, 128, 256, 512]
    ledger.note_refusal("run", "E-POLICY-05", "mine")  # each coordinator's, and each kind, is its own
    ledger.note_refusal("run", "E-BUDGET-01", "theirs")
    assert [(f.coordinator, f.code, f.times) for f in noted()[-2:]] == [
        ("mine", "E-POLICY-05", 1),
        ("theirs", "E-BUDGET-01", 1),
    ]
    ledger = Ledger(ledger.chain.file)
    for n in range(513):
        ledger.note_refusal(f"run-{n}", "E-POLICY-05", "theirs")  # a restart goes on from what is in the file
    assert noted()[-1].times == 1024
    ledger.verify()
