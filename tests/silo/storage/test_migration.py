"""A database that 0.1.0 wrote opens and says what it said; one that cannot be opened is left as it is.

tests/data/silo_v7.sql is a hospital's after three real runs, with an update of a fourth in its outbox, and one run that
waits for an answer. Receipts are cut short, and the count of its changes begins at one, as beside no file of
generations.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from fl_core.errors import StateError
from fl_core.types.enums import TaskKind
from protos.wire.tasks import TaskKey
from silo.storage.store import SiloStore
from silo.storage.tasks import OutboxEntry
from tests.support.hospital import signed_update
from tests.support.older_homes import AGES, older_file

DUMP = Path(__file__).resolve().parents[2] / "data" / "silo_v7.sql"
PLAIN, PERSONAL, PRIVATE, ASKS = "plain-b6c1", "personal-4bc4", "private-1534", "asks-ca29"
OPEN = TaskKey("waits-9e36", 0, TaskKind.TRAIN)


def written(file: Path, change: str = "") -> Path:
    with closing(sqlite3.connect(file)) as db:
        db.executescript(DUMP.read_text() + change)
    return file


@contextmanager
def opened(file: Path) -> Iterator[SiloStore]:
    store = SiloStore(file)
    try:
        yield store
    finally:
        store.close_database()


def columns(file: Path) -> list[tuple[object, ...]]:
    every = "SELECT m.name, p.name, p.type, p.pk FROM sqlite_master m, pragma_table_info(m.name) p ORDER BY 1, 2"
    with opened(file) as store, store.database.read() as db:
        return [tuple(row) for row in db.exec_driver_sql(every)]


def test_runs_questions_and_outbox_are_there_and_the_run_under_way_goes_on(tmp_path: Path) -> None:
    with opened(written(tmp_path / "silo.db")) as store:
        assert [(r.run_id, r.state, r.state_round) for r in store.history()] == [
            (PLAIN, "finished", 1),
            (PERSONAL, "finished", 0),
            (PRIVATE, "finished", 1),
            (OPEN.run_id, "running", None),
        ]
        of_private = store.history()[2].tasks
        assert [(t.key.kind.value, t.receipt, t.included, t.size) for t in of_private] == [
            ("train", True, True, 155244),
            ("train", True, True, 155244),
            ("evaluate", True, True, 344),
        ]
        assert of_private[0].evaluation is not None
        assert of_private[0].evaluation.noise is not None
        (entry,) = store.outbox()
        assert (entry.key, entry.size, entry.receipt is not None, entry.mirrored) == (OPEN, 166820, True, False)
        assert store.committed(PRIVATE) == (entry.state_digest, 1)
        assert len(store.receipts()) == 9
        assert {entry.object_digest, entry.base_digest, entry.manifest_digest} <= store.referenced()
        assert [(a.run_id, a.decided) for a in store.approvals.all()] == [(ASKS, None), (OPEN.run_id, True)]
        assert store.approvals.decide("asks", approved=False).decided is False
        assert store.latest_attestation_sent().seq == 21
        assert [len([u for u in store.unprotected() if u.run_id == run]) for run in (PLAIN, PERSONAL)] == [3, 2]
        met = store.contact()
        assert met is not None
        assert met.software.startswith("consilium-fl 0.1.0")
    with opened(tmp_path / "silo.db") as again:
        assert again.close(OPEN, included=True)
        assert again.outbox() == []
        assert again.committed(OPEN.run_id) == (entry.state_digest, 0)


@pytest.mark.parametrize("age", AGES)
def test_a_hospital_of_any_0_1_0_opens_with_its_runs(tmp_path: Path, age: str) -> None:
    file = older_file(age, "silo", tmp_path / "silo.db")
    for _ in range(2):
        with opened(file) as store:
            runs = {run.name: run for run in store.history()}
            assert list(runs) == ["plain" if age == "first" else "masked", "private"]
            for run in runs.values():
                assert (run.state, run.state_round) == ("finished", 1)
                assert [(t.key.kind.value, t.receipt, t.included) for t in run.tasks] == [
                    ("train", True, True),
                    ("train", True, True),
                    ("evaluate", True, True),
                ]
                assert run.tasks[0].evaluation is not None
            noise = [task.evaluation and task.evaluation.noise for task in runs["private"].tasks]
            assert all(noise) is (age == "first")  # which noted none: what is no count had some
            assert store.outbox() == []
            assert store.latest_attestation_sent().seq == 20
            assert len(store.receipts()) == 6
            expected = {"first": {None}, "last": {("train",), ("test", "train"), ("test",)}}[age]
            assert {update.splits for update in store.unprotected()} <= expected
            assert len(store.unprotected()) == (6 if age == "first" else 3)


@pytest.mark.parametrize("age", AGES)
def test_a_hospital_of_any_0_1_0_gets_the_tables_of_a_new_one(tmp_path: Path, age: str) -> None:
    assert columns(older_file(age, "silo", tmp_path / "silo.db")) == columns(tmp_path / "new.db")


def row_of_0_1_0(entry: OutboxEntry, receipt: bytes | None) -> dict[str, object]:
    told = {**entry.facts(), "kind": "train", "base_digest": entry.base_digest, "attested": json.dumps(entry.attested)}
    done = {
        "receipt": receipt,
        "closed": receipt and 1.0,
        "included": receipt and True,
        "staged": 1.0,
        "mirrored": True,
    }
    return told | done | {"evaluation": "", "coordinator": ""}


def test_receipts_of_0_1_0_stay_what_was_signed_and_their_rows_become_shorter(tmp_path: Path) -> None:
    """Real ones: a hospital of 0.1.0 kept them whole, and its attestation beside each once more, in hex."""
    made = [signed_update(k, sealed_in_receipt=True) for k in range(21)]
    signed, (waiting, _) = [receipt for _, receipt in made[:20]], made[20]
    with closing(sqlite3.connect(written(tmp_path / "silo.db"))) as db, db:
        cut_short = {row[0] for row in db.execute("SELECT receipt FROM tasks WHERE receipt IS NOT NULL")}
        for row in (row_of_0_1_0(entry, receipt if entry is not waiting else None) for entry, receipt in made):
            db.execute(f"INSERT INTO tasks ({', '.join(row)}) VALUES (:{', :'.join(row)})", row)
    for _ in range(2):
        with opened(tmp_path / "silo.db") as store:
            assert [receipt for receipt in store.receipts() if receipt not in cut_short] == signed
            assert cut_short <= set(store.receipts()), "what is no receipt is kept as it is"
            assert [e.attested for e in store.outbox() if e.key == waiting.key] == [waiting.attested]
            with store.database.read() as db:
                size = "sum(length(receipt) + length(attested) + coalesce(length(sealed), 0)) / 20.0"
                after = db.exec_driver_sql(f"SELECT {size} FROM tasks WHERE run_id = 'run-1'").scalar_one()
    assert len(signed[0]) + len(json.dumps(waiting.attested)) > 4500
    assert after < 1400, "what a receipt of 0.1.0 signs holds 1,052 bytes that are sealed"


def test_it_has_the_tables_of_a_new_file(tmp_path: Path) -> None:
    assert columns(written(tmp_path / "silo.db")) == columns(tmp_path / "new.db")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("PRAGMA user_version = 99", "has version 99.*use the newer version"),
        ("DROP TABLE tasks", ".version 7. is not a database.*: restore the database from a backup"),
    ],
)
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, made: str, said: str) -> None:
    before = written(tmp_path / "silo.db", made).read_bytes()
    with pytest.raises(StateError, match=f"E-STATE-22.*{said}"):
        SiloStore(tmp_path / "silo.db")
    assert (tmp_path / "silo.db").read_bytes() == before
