"""A ledger that 0.1.0 wrote opens, says what it said and goes on; a newer file, an older one and another are refused.

tests/data/ledger_v2.sql, with its key, has two collections, entries in every state of two consortia, something kept and
a counted refusal. Its tables repeated the events; they are views now.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fl_core.errors import StateError
from privacy.accounting.accountant import Mechanism
from privacy.ledger import event_chain
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from service_core.storage.chain import ChainHead

DATA = Path(__file__).resolve().parents[2] / "data"
HEAD = ChainHead(24, "c426ac8f29ae32ff794d58cfd0834576b26287ff8ef5d2091110ee45dfc3c3be")
NORTH = "north/train"
REPEATED = ("collection", "dataset_version", "entry", "mechanism", "kept", "entry_state", "charged", "event", "meta")


def written(folder: Path, change: str = "") -> Path:
    with closing(sqlite3.connect(folder / "ledger.db")) as db:
        db.executescript((DATA / "ledger_v2.sql").read_text() + change)
    shutil.copy(DATA / "ledger_v2.key", folder / "ledger.key")
    (folder / "ledger.key").chmod(0o600)
    return folder / "ledger.db"


def rows(file: Path, name: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(file)) as db:
        found = db.execute(f"SELECT * FROM {name}")  # one of ours
        return [tuple(c[0] for c in found.description), *sorted(found.fetchall(), key=repr)]


@pytest.mark.integration
def test_what_it_says_is_there_and_it_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(written(tmp_path))
    assert ledger.verify(HEAD) == 24
    assert ledger.head() == HEAD
    assert [(entry[:8], state) for entry, state, _ in ledger.entries(NORTH)] == [
        ("run-1/0/", "SPENT"),
        ("run-1/1/", "SPENT"),
        ("run-1/2/", "SPENT_ON_RECOVERY"),
        ("run-1/3/", "RELEASED_UNUSED"),
        ("run-1/4/", "REFUSED"),
        ("run-3/0/", "SPENT_ON_RECOVERY"),
        ("run-1/5/", "RUNNING"),
        ("run-1/6/", "INTENT"),
    ]
    status = ledger.status(NORTH)
    assert (status.epsilon, status.delta, status.unit) == (3.0, 1e-5, "record")
    assert status.spent_rdp == pytest.approx(0.9604131628131337)
    assert ledger.stored_value("f" * 64, "class counts") == "[1.0, 2.0]"
    ledger.reserve(
        NORTH,
        LedgerTask("run-1", "m" * 64, 7, "train", "f" * 64),
        [PlannedRelease("training", Mechanism(16.0, 0.5, 10))],
    )
    assert Ledger(tmp_path / "ledger.db").verify(HEAD) == 25


def test_the_views_show_auditors_what_the_tables_held(tmp_path: Path) -> None:
    file = written(tmp_path)
    before = {name: rows(file, name) for name in REPEATED}
    budgets = [row[1:] for row in rows(file, "budget")]
    Ledger(file)
    after = {name: rows(file, name) for name in REPEATED}
    assert after.pop("meta")[1:] == [
        row if row[0] != "schema_version" else (row[0], "4") for row in before.pop("meta")[1:]
    ]
    assert after == before
    assert [row[1:] for row in rows(file, "budget")] == budgets  # numbered by their events now


def test_an_event_that_was_changed_in_an_older_file_is_found(tmp_path: Path) -> None:
    file = written(tmp_path, "DROP TRIGGER event_noupd; UPDATE event SET detail='sha2' WHERE state='SPENT';")
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file).verify()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("UPDATE meta SET value='99' WHERE key='schema_version'", "E-STATE-22.*has version 99.*use the newer version"),
        ("DROP TABLE meta", "E-STATE-22.*.version 0. is not a database.*: restore"),
        ("DROP TABLE unit_digest", "E-BUDGET-07.*restored from a backup"),
        ("DELETE FROM meta", "E-BUDGET-07.*restored from a backup"),
    ],
)
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, made: str, message: str) -> None:
    before = written(tmp_path, made).read_bytes()
    with pytest.raises(StateError, match=message):
        Ledger(tmp_path / "ledger.db")
    assert (tmp_path / "ledger.db").read_bytes() == before


def test_a_later_version_of_the_schema_leaves_the_key_of_the_chain() -> None:
    facts = {"schema_version": "3", "ledger_id": "a", "key": "b", "unkeyed": "0"}
    later = facts | {"schema_version": "4"}
    assert event_chain.derive_key(b"secret", facts) == event_chain.derive_key(b"secret", later)
    assert event_chain.derive_key(b"secret", facts) != event_chain.derive_key(b"secret", facts | {"key": "other"})


def test_a_schema_that_is_laid_out_anew_is_no_change(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")

    def change(old: str, new: str) -> None:
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
            db.execute("PRAGMA writable_schema=ON")
            db.execute("UPDATE sqlite_master SET sql=replace(sql,?,?) WHERE name='event_nodel'", (old, new))

    change("BEGIN SELECT", "BEGIN\n  SELECT")
    ledger.verify()
    change("ABORT", "FAIL")
    with pytest.raises(StateError, match="trigger event_nodel was changed"):
        ledger.verify()
