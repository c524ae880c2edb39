"""A ledger of this version's form opens and says what it said; a newer file and another one are refused.

tests/data/ledger_v2.sql with its key: two rounds spent, one that was running, one given back and one refused. What
becomes of a ledger from before the key is in the attacks' tests.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fl_core.errors import StateError
from privacy.accounting.accountant import Mechanism
from privacy.ledger import hash_chain
from privacy.ledger.hash_chain import SCHEMA_VERSION, ChainHead
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease

DATA = Path(__file__).resolve().parents[2] / "data"
HEAD = ChainHead(14, "49cf545e4e7bdb7c383d8abfc34bd018bc24954a37929e44860f22e70b67b71b")
NORTH = "north/train"


def older(folder: Path, change: str = "") -> Path:
    with closing(sqlite3.connect(folder / "ledger.db")) as db:
        db.executescript((DATA / "ledger_v2.sql").read_text() + change)
    shutil.copy(DATA / "ledger_v2.key", folder / "ledger.key")
    (folder / "ledger.key").chmod(0o600)
    return folder / "ledger.db"


def test_what_it_says_is_there_and_it_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(older(tmp_path))
    assert ledger.verify(HEAD) == 14
    assert ledger.head() == HEAD
    assert [state for _, state, _ in ledger.entries(NORTH)] == [
        "SPENT",
        "SPENT",
        "RUNNING",
        "RELEASED_UNUSED",
        "REFUSED",
    ]
    status = ledger.status(NORTH)
    assert (status.epsilon, status.delta) == (3.0, 1e-5)
    assert status.spent_rdp == pytest.approx(0.6796397149386584)
    assert ledger.kept("f" * 64, "class counts") == "[1.0, 2.0]"
    ledger.reserve(
        NORTH,
        LedgerTask("run-1", "m" * 64, 5, "train", "f" * 64),
        [PlannedRelease("training", Mechanism(16.0, 0.5, 10))],
    )
    assert Ledger(tmp_path / "ledger.db").verify(HEAD) == 15


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            "UPDATE meta SET value='99' WHERE key='schema_version'",
            f"E-STATE-22.*of version {SCHEMA_VERSION} or older, found version 99.*use that one",
        ),
        ("DROP VIEW entry_state; DROP TABLE budget", "E-STATE-22.*found another file.*restore"),
        ("DROP TABLE meta", "E-STATE-22.*found another file .version 0.: restore"),
        ("DELETE FROM meta", "E-BUDGET-07.*restored from a backup"),
    ],
)
def test_a_newer_file_or_another_one_is_refused_with_what_to_do(tmp_path: Path, made: str, message: str) -> None:
    before = older(tmp_path, made).read_bytes()
    with pytest.raises(StateError, match=message):
        Ledger(tmp_path / "ledger.db")
    assert (tmp_path / "ledger.db").read_bytes() == before


def test_a_later_version_of_the_schema_leaves_the_key_of_the_chain() -> None:
    facts = hash_chain.new_facts()
    later = facts | {"schema_version": str(hash_chain.SCHEMA_VERSION + 1)}
    assert hash_chain.derived(b"secret", facts) == hash_chain.derived(b"secret", later)
    assert hash_chain.derived(b"secret", facts) != hash_chain.derived(b"secret", facts | {"key": "other"})


def test_a_schema_that_is_laid_out_anew_is_no_change(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    with closing(sqlite3.connect(ledger.file)) as db, db:
        db.execute("PRAGMA writable_schema=ON")
        db.execute("UPDATE sqlite_master SET sql=replace(sql,'BEGIN SELECT','BEGIN\n  SELECT') WHERE name='kept_nodel'")
    ledger.verify()
    with closing(sqlite3.connect(ledger.file)) as db, db:
        db.execute("PRAGMA writable_schema=ON")
        db.execute("UPDATE sqlite_master SET sql=replace(sql,'ABORT','FAIL') WHERE name='kept_nodel'")
    with pytest.raises(StateError, match="trigger kept_nodel was changed"):
        ledger.verify()
