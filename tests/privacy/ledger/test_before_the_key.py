"""A ledger of 0.1.0 from before there was a key: checked against itself, brought under a key once, never put back.

It is `tests/data/homes/first/ledger.sql`: two rounds and an evaluation of a private run, charged to digits/p5c2/0.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.datasets import TensorExamples
from fl_core.errors import RefusedError, StateError
from privacy.accounting.accountant import Mechanism
from privacy.ledger import event_chain, key
from privacy.ledger.event_chain import LedgerEvent
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.registration import register
from service_core.storage.chain import ChainHead
from tests.support.older_homes import older_ledger

TRAIN, TEST = "north/train", "north/test"
LAST = 21
HEAD = ChainHead(LAST, "6011a45e2874d596ba9da8243f7cea1f384fe1ff7178fad91614fb9ebcb91d87")
EDITABLE = "".join(
    f"DROP TRIGGER {t}_{w};" for t in ("event", "entry", "mechanism", "budget") for w in ("noupd", "nodel")
)


def older(folder: Path, change: str = "") -> Path:
    (folder / "ledger.db").unlink(missing_ok=True)
    return older_ledger("first", folder, change)


def test_what_was_spent_is_spent_and_others_signatures_hold(tmp_path: Path) -> None:
    file = older(tmp_path)
    ledger = Ledger(file)
    assert (tmp_path / "ledger.key").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "ledger.key.new").exists()
    assert ledger.history(TRAIN) == [Mechanism(1.4273681640625, 0.1103448275862069, 18)]
    assert ledger.history(TEST) == [Mechanism(20.0, 1.0, 3)]
    status = ledger.status(TRAIN)
    assert (status.epsilon, status.delta) == (8.0, 1e-5)
    assert status.spent_rdp == pytest.approx(2.2625, abs=1e-4)
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["SPENT", "SPENT"]
    assert ledger.verify(HEAD) == LAST + 1
    assert Ledger(file).verify(HEAD) == LAST + 1
    fingerprint = next(iter(v for v in json.loads(ledger.events()[LAST][3])["versions"]))
    entry = Ledger(file).reserve(
        TRAIN, LedgerTask("run-1", "m" * 64, 0, "train", fingerprint), [PlannedRelease("training", Mechanism(16.0))]
    )
    ledger.start(entry)
    ledger.commit(entry, "sha")
    assert Ledger(file).verify(HEAD) == LAST + 4
    assert len(ledger.history(TRAIN)) == 2


def test_no_budget_is_forgotten_a_round_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(older(tmp_path))
    fingerprint = next(iter(json.loads(ledger.events()[LAST][3])["versions"]))
    with pytest.raises(RefusedError, match="E-BUDGET-01"):
        ledger.reserve(
            TRAIN, LedgerTask("run-1", "m" * 64, 0, "train", fingerprint), [PlannedRelease("t", Mechanism(0.65))]
        )
    empty = Ledger(tmp_path / "empty.db")
    empty.register(TRAIN, "record", fingerprint, 1, ["x"])
    empty.set_budget(TRAIN, 8.0, 1e-5, "tester", "test")
    empty.reserve(TRAIN, LedgerTask("run-1", "m" * 64, 0, "train", fingerprint), [PlannedRelease("t", Mechanism(0.65))])


def rewritten(file: Path, change: Callable[[LedgerEvent], LedgerEvent]) -> None:
    """Change events of version 1 and compute the chain anew, which took no secret."""
    with closing(sqlite3.connect(file)) as db, db:
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type='trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        previous = event_chain.GENESIS
        columns = "seq, entry, subject, state, detail, created_at"
        for row in db.execute(f"SELECT {columns} FROM event WHERE seq<={LAST} ORDER BY seq").fetchall():
            event = change(LedgerEvent(*row))
            digest = event_chain.unkeyed_hash(previous, event)
            values = (event.detail, previous, digest, event.seq)
            db.execute("UPDATE event SET detail=?, prev_hash=?, hash=? WHERE seq=?", values)
            previous = digest
        for _, sql in triggers:
            db.execute(sql)


def test_its_events_are_pinned_from_then_on(tmp_path: Path) -> None:
    file = older(tmp_path)
    Ledger(file).verify()
    rewritten(file, lambda e: e._replace(detail=e.detail.replace("1.4273", "142.73")))
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file).verify()


def test_the_event_under_the_key_cannot_be_cut_off(tmp_path: Path) -> None:
    file = older(tmp_path)
    Ledger(file).verify()
    with closing(sqlite3.connect(file)) as db, db:
        (sql,) = db.execute("SELECT sql FROM sqlite_master WHERE name='event_nodel'").fetchone()
        db.execute("DROP TRIGGER event_nodel")
        db.execute(f"DELETE FROM event WHERE seq>{LAST}")
        db.execute(sql)
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file).verify()


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
        "UPDATE dataset_version SET collection='north/test'",
        "INSERT INTO unit_digest VALUES(x'00','nobody')",
        "DELETE FROM event WHERE seq=9",
        "UPDATE event SET detail='x' WHERE seq=9",
        "UPDATE event SET state='REFUSED' WHERE state='SPENT'",
    ],
)
def test_one_that_was_edited_is_not_brought_under_a_key(tmp_path: Path, statement: str) -> None:
    file = older(tmp_path, f"{EDITABLE}{statement};")
    edited = file.read_bytes()
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file)
    assert file.read_bytes() == edited
    assert not (tmp_path / "ledger.key").exists()


@pytest.mark.parametrize(
    "detail",
    ["", "{}", "[[1]]", '[["x", NaN, 1, 1]]', '[["x", 1e999, 1.0, 1]]', '[["x", 1.0, 1.0, 1e400]]', "[" * 5000],
)
def test_events_that_say_what_no_ledger_says_are_reported(tmp_path: Path, detail: str) -> None:
    file = older(tmp_path)
    rewritten(file, lambda e: e._replace(detail=detail) if e.state == "INTENT" else e)
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(file)


def test_a_copy_from_before_the_key_is_an_older_copy(tmp_path: Path) -> None:
    file = older(tmp_path)
    Ledger(file)
    older(tmp_path)
    with pytest.raises(StateError, match=r"E-BUDGET-08.*silo ledger restore"):
        Ledger(file)
    assert Ledger(file, older=True).verify() == LAST + 1  # what `silo ledger restore` does, which charges for it


def test_the_version_cannot_be_turned_back(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.db").register("a", "record", "v", 1, ["x"])
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
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

    monkeypatch.setattr(event_chain.EventChain, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        Ledger(file)
    monkeypatch.undo()
    assert file.read_bytes() == before
    pending = key.require(tmp_path / "ledger.key.new")
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Ledger(file)
    monkeypatch.undo()
    assert not (tmp_path / "ledger.key").exists()
    assert Ledger(file).verify(HEAD) == LAST + 1
    assert key.require(tmp_path / "ledger.key") == pending
    older(tmp_path)
    with pytest.raises(StateError, match="E-BUDGET-08"):
        Ledger(file)


def test_its_records_are_known_by_both_names_at_the_next_registration(tmp_path: Path) -> None:
    ledger, data = Ledger(older(tmp_path)), datasets.load("digits/p5c2/0")
    other = replace(data, fingerprint="another")
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(ledger, other, "mine")  # known by the digests of their numbers
    register(ledger, data, "north")
    assert ledger.verify(HEAD) > LAST + 1
    regrouped = TensorExamples(data.train.x, data.train.labels, tuple(f"p{k}" for k in range(len(data.train))))
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(ledger, replace(data, train=regrouped, fingerprint="regrouped"), "mine")


def test_a_ledger_that_came_under_its_key_with_version_2_opens(tmp_path: Path) -> None:
    """Version 2 had the same event under the key: what it wrote is what version 4 writes, but for the schema."""
    file = older(tmp_path)
    Ledger(file)
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("UPDATE meta SET value='2' WHERE key='schema_version'")
    ledger = Ledger(file)
    assert ledger.verify(HEAD) == LAST + 1
    assert ledger.status(TRAIN).spent_rdp == pytest.approx(2.2625, abs=1e-4)


def test_a_ledger_of_the_last_0_1_0_opens_with_its_spending(tmp_path: Path) -> None:
    ledger = Ledger(older_ledger("last", tmp_path))
    assert ledger.verify() == 21
    assert ledger.status(TRAIN).spent_rdp == pytest.approx(2.08675, abs=1e-4)
