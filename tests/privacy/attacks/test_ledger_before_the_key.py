"""A ledger of the version without a key: checked against itself, brought under a key once, and never again put back.

tests/data/ledger_v1.db was written by that version: ten digits in center1/train, five in center1/test, five entries
charged (one of them by a crash, one left open), one given back, one refused.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.datasets import SiloDataset, TensorExamples
from fl_core.errors import RefusedError, StateError
from privacy.accounting.accountant import Mechanism
from privacy.ledger import hash_chain, key
from privacy.ledger.hash_chain import ChainHead, Event
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.registration import register, version

FIXTURE = Path(__file__).resolve().parents[2] / "data" / "ledger_v1.db"
TRAIN, TEST = "center1/train", "center1/test"
SPENT = [Mechanism(2.85, 0.032, 124), Mechanism(8.0, 1.0, 4)]
HEAD = ChainHead(24, "8f0bf5a5a2efe2e336e46fcbc481efbe0316e1e39efa24fd873ec9764840fe68")


def older(tmp_path: Path) -> Path:
    shutil.copy(FIXTURE, tmp_path / "ledger.db")
    (tmp_path / "ledger.db").chmod(0o600)
    return tmp_path / "ledger.db"


def data() -> SiloDataset:
    whole = datasets.load("digits/p3c4/1")

    def cut(e, n: int) -> TensorExamples:
        return TensorExamples(e.x[:n], e.labels[:n])

    return replace(whole, train=cut(whole.train, 10), test=cut(whole.test, 5), fingerprint="fifteen digits")


def test_it_is_brought_under_a_key_and_says_what_it_said(tmp_path: Path) -> None:
    file = older(tmp_path)
    ledger = Ledger(file)
    assert (tmp_path / "ledger.key").stat().st_mode & 0o777 == 0o600
    assert ledger.history(TRAIN) == SPENT
    assert ledger.history(TEST) == [Mechanism(20.0)]
    budget = ledger.budget(TRAIN)
    assert budget is not None
    assert (budget.epsilon, budget.delta) == (3.0, 1e-5)
    assert ledger.status(TRAIN).spent_rdp == pytest.approx(1.1597802854947261)
    states = [state for _, state, _ in ledger.entries(TRAIN)]
    assert states == ["SPENT", "SPENT_ON_RECOVERY", "SPENT", "RELEASED_UNUSED", "REFUSED", "RUNNING"]
    assert ledger.kept(version(data(), "train"), "class counts") == "[1.0, 2.0]"
    assert [e[2] for e in ledger.events()][24:] == ["MIGRATED"]
    assert ledger.verify(HEAD) == 25  # what others have signed for is still there
    assert Ledger(file).verify(HEAD) == 25
    assert len(Ledger(file).recover()) == 1
    anew = Ledger(file)
    entry = anew.reserve(
        TRAIN,
        LedgerTask("run-1", "manifest-1", 3, "train", version(data(), "train")),
        [PlannedRelease("training", Mechanism(5.0))],
    )
    anew.start(entry)
    anew.commit(entry, "sha")
    assert anew.verify(HEAD) > 26
    assert Ledger(file).verify() == anew.verify()
    with sqlite3.connect(file) as db:
        assert db.execute("SELECT value FROM meta WHERE key='schema_version'").fetchone() == ("2",)


def test_its_events_are_pinned_from_then_on(tmp_path: Path) -> None:
    """An event from before the key, and the chain after it rewritten without a key, as it would have passed before."""
    file = older(tmp_path)
    Ledger(file).verify()
    rewritten(file, lambda e: e._replace(detail=e.detail.replace("2.85", "285.0")))
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file).verify()
    file.unlink()
    (tmp_path / "ledger.key").unlink()
    older(tmp_path)
    Ledger(file).verify()
    with sqlite3.connect(file) as db:
        db.execute("DROP TRIGGER event_nodel")
        db.execute("DELETE FROM event WHERE seq>24")
        db.execute(
            "CREATE TRIGGER event_nodel BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END"
        )
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file).verify()


def rewritten(file: Path, change: Callable[[Event], Event]) -> None:
    """Change events and compute the chain anew, which took no secret."""
    db = sqlite3.connect(file)
    triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type='trigger'").fetchall()
    for name, _ in triggers:
        db.execute(f"DROP TRIGGER {name}")
    previous = hash_chain.GENESIS
    for row in db.execute(
        "SELECT seq, entry, subject, state, detail, created_at FROM event WHERE seq<=24 ORDER BY seq"
    ).fetchall():
        event = change(Event(*row))
        found = hash_chain.unkeyed_hash(previous, event)
        db.execute(
            "UPDATE event SET detail=?, prev_hash=?, hash=? WHERE seq=?", (event.detail, previous, found, event.seq)
        )
        previous = found
    for _, sql in triggers:
        db.execute(sql)
    db.commit()
    db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE mechanism SET noise=noise*100",
        "DELETE FROM mechanism",
        "UPDATE mechanism SET noise=9e999",
        "UPDATE budget SET epsilon=200",
        "DELETE FROM budget",
        "INSERT INTO budget SELECT 9,collection,200,delta,1.1,operator,reason,created_at FROM budget WHERE seq=1",
        "UPDATE entry SET round=7 WHERE round=0",
        "DELETE FROM entry WHERE round=1",
        "INSERT INTO collection VALUES('mine','record','now')",
        "DELETE FROM dataset_version",
        "UPDATE dataset_version SET collection='center1/test'",
        "INSERT INTO unit_digest VALUES(x'00','nobody')",
        "DELETE FROM event WHERE seq=9",
        "UPDATE event SET detail='x' WHERE seq=9",
        "UPDATE event SET state='REFUSED' WHERE state='SPENT'",
    ],
)
def test_one_that_was_edited_is_not_brought_under_a_key(tmp_path: Path, statement: str) -> None:
    file = older(tmp_path)
    db = sqlite3.connect(file)
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='trigger'").fetchall():
        db.execute(f"DROP TRIGGER {name}")
    db.execute(statement)
    db.commit()
    db.close()
    edited = file.read_bytes()
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file)
    assert file.read_bytes() == edited


def test_events_that_say_what_no_ledger_says_are_reported(tmp_path: Path) -> None:
    for detail in (
        "",
        "{}",
        "[[1]]",
        '[["x", NaN, 1, 1]]',
        '[["x", 1e999, 1.0, 1]]',
        '[["x", 1.0, 1.0, 1e400]]',
        "[" * 5000,
    ):
        file = older(tmp_path)
        rewritten(file, lambda e, d=detail: e._replace(detail=d) if e.state == "INTENT" else e)
        with pytest.raises(StateError, match="E-BUDGET-07"):
            Ledger(file)


def test_a_copy_from_before_the_key_is_an_older_copy(tmp_path: Path) -> None:
    file = older(tmp_path)
    Ledger(file)
    older(tmp_path)
    with pytest.raises(StateError, match="E-BUDGET-08"):
        Ledger(file)
    assert Ledger(file, older=True).verify() == 25  # what `silo ledger restore` does, which charges for it


def test_the_version_cannot_be_turned_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.register("a", "record", "v", 1, ["x"])
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute("UPDATE meta SET value='1' WHERE key='schema_version'")
    with pytest.raises(StateError, match="E-BUDGET-08"):
        Ledger(tmp_path / "ledger.db")


def test_a_crash_while_it_is_brought_under_the_key_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = older(tmp_path)
    before = file.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hash_chain, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        Ledger(file)
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert key.require(tmp_path / "ledger.key").migrating
    monkeypatch.setattr(key, "migrated", killed)
    with pytest.raises(KeyboardInterrupt):
        Ledger(file)
    monkeypatch.undo()
    assert key.require(tmp_path / "ledger.key").migrating
    assert Ledger(file).verify(HEAD) == 25
    older(tmp_path)
    with pytest.raises(StateError, match="E-BUDGET-08"):  # the crash does not let a copy from before the key pass
        Ledger(file)


def test_a_file_under_another_key_does_not_end_a_migration(tmp_path: Path) -> None:
    """Else whoever can write the file, and not read the key, would have the hospital's own ledger refused."""
    other = Ledger(tmp_path / "other.db", tmp_path / "other.key")
    other.register("a", "record", "v", 1, ["x"])
    file = older(tmp_path)
    key.obtain(tmp_path / "ledger.key", migrating=True)
    shutil.copy(tmp_path / "other.db", file)
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file)
    older(tmp_path)
    assert Ledger(file).verify(HEAD) == 25


def test_its_records_are_known_by_both_names_at_the_next_registration(tmp_path: Path) -> None:
    file, own = older(tmp_path), data()
    ledger = Ledger(file)
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(ledger, replace(own, fingerprint="another"), "mine")  # known by the digests of their bytes
    assert set(register(ledger, own, "center1").values()) == {False}
    with sqlite3.connect(file) as db:
        assert db.execute("SELECT count(*) FROM unit_digest").fetchone() == (2 * 15 + 1,)
    assert ledger.verify() == 27
    assert set(register(ledger, own, "center1").values()) == {False}
    assert ledger.verify() == 27
    regrouped = TensorExamples(own.train.x, own.train.labels, tuple(f"p{k}" for k in range(10)))
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(ledger, replace(own, train=regrouped, fingerprint="regrouped"), "mine")
    assert json.loads(ledger.events()[-1][3])["digests"]
