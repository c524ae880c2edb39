"""Whoever edits a ledger's file is found: spending is recomputed from events chained under a key outside it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fl_core.errors import RefusedError, StateError
from privacy.accounting.accountant import Mechanism
from privacy.ledger import event_chain
from privacy.ledger import key as ledger_key
from privacy.ledger.event_chain import LedgerEvent
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease

SKIN = "skin/train"
ROUND = (PlannedRelease("training", Mechanism(2.85, 0.032, 31)), PlannedRelease("prototypes", Mechanism(8.0)))


def spent(tmp_path: Path) -> Ledger:
    """Make a ledger with two rounds, a refusal, something kept and a budget of 2."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.register(SKIN, "group", "v1", 10, [f"lesion {i}" for i in range(8)])
    ledger.set_budget(SKIN, 2.0, 1e-5, "dpo", "the board")
    for t in range(2):
        entry = ledger.reserve(SKIN, LedgerTask("run", "m", t, "train", "v1"), ROUND)
        ledger.start(entry)
        ledger.commit(entry, "sha")
    with pytest.raises(RefusedError):
        ledger.reserve(SKIN, LedgerTask("run", "m", 2, "train", "v1"), [PlannedRelease("training", Mechanism(0.01))])
    ledger.keep("v1", "class counts", "[3.0]")
    ledger.verify()
    return ledger


def edited(tmp_path: Path, script: str) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.executescript(script)


UNITS = {
    "forgotten": "DELETE FROM unit_digest",
    "added": "INSERT INTO unit_digest VALUES(x'00','skin/train')",
    "moved": "UPDATE unit_digest SET collection='mine'",
}


@pytest.mark.parametrize("edit", UNITS)
def test_units_that_were_not_registered_are_named_and_decide_nothing(tmp_path: Path, edit: str) -> None:
    ledger = spent(tmp_path)
    before = ledger.history(SKIN), ledger.budget(SKIN)
    edited(tmp_path, UNITS[edit])
    anew = Ledger(tmp_path / "ledger.db")
    for opened in (ledger, anew):
        with pytest.raises(StateError, match=r"E-BUDGET-07.*unit_digest"):
            opened.verify()
    assert (anew.history(SKIN), anew.budget(SKIN)) == before
    with pytest.raises(RefusedError, match="E-BUDGET-01"):
        anew.reserve(SKIN, LedgerTask("run", "m", 9, "train", "v1"), [PlannedRelease("training", Mechanism(0.7))])


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("DROP TRIGGER event_noupd", "trigger event_noupd is missing"),
        ("DROP VIEW charged", "view charged is missing"),
        ("CREATE TRIGGER more AFTER INSERT ON event BEGIN DELETE FROM unit_digest; END", "trigger more was added"),
        ("CREATE VIEW more AS SELECT 1", "view more was added"),
        ("CREATE INDEX more ON event(subject)", "index more was added"),
        ("ALTER TABLE unit_digest ADD COLUMN more TEXT", "table unit_digest was changed"),
        (
            "CREATE TABLE more AS SELECT * FROM budget; UPDATE more SET epsilon=200; DROP VIEW budget; "
            "ALTER TABLE more RENAME TO budget",
            "table budget was added; view budget is missing",
        ),
    ],
)
def test_a_schema_that_is_not_the_ledgers_is_found_before_anything_is_admitted(
    tmp_path: Path, script: str, named: str
) -> None:
    ledger = spent(tmp_path)
    edited(tmp_path, script)
    for use in (ledger.verify, Ledger(tmp_path / "ledger.db").verify, Ledger(tmp_path / "ledger.db").collections):
        with pytest.raises(StateError, match=f"E-BUDGET-07.*{named}"):
            use()


def test_a_view_that_forgets_is_found_and_changes_nothing(tmp_path: Path) -> None:
    ledger = spent(tmp_path)
    before = ledger.history(SKIN)
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        (sql,) = db.execute("SELECT sql FROM sqlite_master WHERE name='charged'").fetchone()
        db.execute("DROP VIEW charged")
        db.execute(sql.replace("'SPENT',", "'NEVER',"))
    assert ledger.history(SKIN) == before
    with pytest.raises(StateError, match=r"E-BUDGET-07.*view charged was changed"):
        ledger.verify()


def rechained(tmp_path: Path, change: Callable[[LedgerEvent], LedgerEvent], secret: bytes) -> None:
    """Rewrite the chain from its beginning, under a secret."""
    db = sqlite3.connect(tmp_path / "ledger.db")
    facts = dict(db.execute("SELECT key, value FROM meta"))
    events = [
        LedgerEvent(*row) for row in db.execute("SELECT seq, entry, subject, state, detail, created_at FROM event")
    ]
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='trigger'").fetchall():
        db.execute(f"DROP TRIGGER {name}")
    db.execute("DELETE FROM event")
    head = event_chain.START
    for event in events:
        new = change(event)
        found = event_chain.keyed_hash(event_chain.derive_key(secret, facts), head.hash, new)
        db.execute(
            "INSERT INTO event(seq,entry,subject,state,detail,created_at,prev_hash,hash) VALUES(?,?,?,?,?,?,?,?)",
            (*new, head.hash, found),
        )
        head = event_chain.ChainHead(new.seq, found)
    for statement in event_chain.schema_statements():
        if statement.startswith("CREATE TRIGGER"):
            db.execute(statement)
    db.commit()
    db.close()


def louder(event: LedgerEvent) -> LedgerEvent:
    """Say of what was spent that its noise was a hundred times as much."""
    if event.state != "INTENT":
        return event
    facts = json.loads(event.detail)
    facts["mechanisms"] = [[p, 100 * z, q, n] for p, z, q, n in facts["mechanisms"]]
    return event._replace(detail=json.dumps(facts))


@pytest.mark.parametrize("secret", [b"\0" * 32, b"somebody else's secret, 32 bytes"])
def test_a_chain_that_was_made_anew_without_the_key_is_found(tmp_path: Path, secret: bytes) -> None:
    spent(tmp_path)
    rechained(tmp_path, louder, secret)
    for use in (
        lambda x: x.verify(),
        lambda x: x.history(SKIN),
        lambda x: x.recover(),
        lambda x: x.reserve(SKIN, LedgerTask("run", "m", 5, "train", "v1"), ROUND),
    ):
        with pytest.raises(StateError, match=r"E-BUDGET-07.*event 1"):
            use(Ledger(tmp_path / "ledger.db"))


def test_the_test_above_would_pass_unnoticed_with_the_key(tmp_path: Path) -> None:
    """The same rewriting under the right key is a chain that holds: it is the key that protects."""
    spent(tmp_path)
    rechained(tmp_path, louder, ledger_key.require(tmp_path / "ledger.key"))
    assert Ledger(tmp_path / "ledger.db").history(SKIN)[0].noise == 285.0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE event SET detail='x' WHERE seq=2",
        "UPDATE event SET created_at='2001' WHERE seq=3",
        "UPDATE event SET subject='other' WHERE seq=2",
        "DELETE FROM event WHERE seq=4",
        "UPDATE event SET seq=seq+1 WHERE seq>=4",
        "UPDATE meta SET value='0' WHERE key='key'",
        "UPDATE meta SET value='another' WHERE key='ledger_id'",
        "UPDATE meta SET value='3' WHERE key='unkeyed'",
        "UPDATE meta SET value='99' WHERE key='unkeyed'",
        "UPDATE meta SET value='many' WHERE key='unkeyed'",
        "DELETE FROM meta WHERE key='unkeyed'",
        "DELETE FROM meta",
        "INSERT INTO meta VALUES('more','1')",
    ],
)
def test_an_event_or_a_fact_that_was_changed_is_found(tmp_path: Path, statement: str) -> None:
    spent(tmp_path)
    db = sqlite3.connect(tmp_path / "ledger.db")
    db.execute("DROP TRIGGER event_noupd")
    db.execute("DROP TRIGGER event_nodel")
    if "seq+1" in statement:
        db.execute("UPDATE event SET seq=-seq WHERE seq>=4")
        statement = "UPDATE event SET seq=1-seq WHERE seq<0"
    db.execute(statement)
    for schema in event_chain.schema_statements():
        if schema.startswith(("CREATE TRIGGER event_noupd", "CREATE TRIGGER event_nodel")):
            db.execute(schema)
    db.commit()
    db.close()
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(tmp_path / "ledger.db").verify()


def test_a_file_that_is_no_database_any_more_is_said_to_be_damaged(tmp_path: Path) -> None:
    spent(tmp_path)
    raw = bytearray((tmp_path / "ledger.db").read_bytes())
    for at in range(len(raw) // 2, len(raw)):
        raw[at] = 0xA5
    (tmp_path / "ledger.db").write_bytes(raw)
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(tmp_path / "ledger.db").verify()
    (tmp_path / "ledger.db").write_bytes(b"not SQLite" * 500)
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(tmp_path / "ledger.db")


# ---- the key --------------------------------------------------------------------------------------------------------


def test_without_its_key_or_with_another_a_ledger_decides_nothing(tmp_path: Path) -> None:
    spent(tmp_path)
    key = tmp_path / "ledger.key"
    assert key.stat().st_mode & 0o777 == 0o600
    apart = tmp_path / "elsewhere" / "key"
    apart.parent.mkdir()
    key.rename(apart)
    with pytest.raises(StateError, match="E-BUDGET-14"):
        Ledger(tmp_path / "ledger.db")
    assert not key.exists()  # nothing is made in its place
    assert Ledger(tmp_path / "ledger.db", apart).verify() > 0
    apart.chmod(0o640)
    with pytest.raises(StateError, match=r"E-BUDGET-14.*0640"):
        Ledger(tmp_path / "ledger.db", apart)
    apart.chmod(0o600)
    other = Ledger(tmp_path / "other.db")
    shutil.copy(other.chain.key_file, key)
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(tmp_path / "ledger.db").verify()
    for wrong in (b"", b"{}", b'{"key": "ab"}', b'{"key": 3}', b"[]"):
        key.write_bytes(wrong)
        with pytest.raises(StateError, match="E-BUDGET-14"):
            Ledger(tmp_path / "ledger.db")
    key.unlink()
    key.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StateError, match="E-BUDGET-14"):
        Ledger(tmp_path / "ledger.db")


def test_the_key_is_not_in_the_ledger(tmp_path: Path) -> None:
    spent(tmp_path)
    secret = ledger_key.require(tmp_path / "ledger.key")
    raw = (tmp_path / "ledger.db").read_bytes()
    assert secret not in raw
    assert secret.hex().encode() not in raw


@pytest.mark.integration
def test_ten_thousand_events_are_read_in_seconds_and_afterwards_only_what_is_new(tmp_path: Path) -> None:
    import time

    ledger = spent(tmp_path)
    with ledger.chain.transaction() as db:
        for n in range(10_000):
            ledger.chain.write(db, None, f"run-{n}", "REFUSED", "E-POLICY-05")
    started = time.process_time()
    anew = Ledger(tmp_path / "ledger.db")
    anew.verify()
    first = time.process_time() - started
    started = time.process_time()
    for t in range(20):
        anew.release_unused(anew.reserve(SKIN, LedgerTask("fast", "n", t, "train", "v1"), ROUND[1:]))
    later = (time.process_time() - started) / 20
    assert first < 10
    assert later < first / 5
