"""Databases of earlier versions open and say what they said; what cannot be opened is left as it is.

tests/data/silo_v3.sql is what version 3 held at a hospital after a real private run, and with an update in the outbox
of a second run that it had approved by hand; receipts and sealed figures are cut short. silo_v4.sql, silo_v5.sql and
silo_v6.sql are the same file as these versions left it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from fl_core.errors import StateError
from fl_core.types.enums import TaskKind
from protos.wire.tasks import TaskKey
from silo.reports.leaving import leaving
from silo.storage import store as stores
from silo.storage.schema import MIGRATIONS
from silo.storage.store import Store
from silo.storage.tasks import Attestation

DUMP = Path(__file__).resolve().parents[2] / "data" / "silo_v3.sql"
VERSION_4 = DUMP.with_name("silo_v4.sql")
VERSION_5 = DUMP.with_name("silo_v5.sql")
VERSION_6 = DUMP.with_name("silo_v6.sql")
FINISHED, OPEN = "fedavg-digits-efab", TaskKey("waits-d1ea", 0, TaskKind.TRAIN)
VERSION_2 = "PRAGMA user_version = 2; ALTER TABLE tasks DROP COLUMN attested; DROP TABLE approvals;"
VERSION_1 = VERSION_2 + "PRAGMA user_version = 1; ALTER TABLE tasks DROP COLUMN mirrored;"


def older(file: Path, change: str = "", dump: Path = DUMP) -> Path:
    with closing(sqlite3.connect(file)) as db:
        db.executescript(dump.read_text() + change)
    return file


@contextmanager
def opened(file: Path) -> Iterator[Store]:
    store = Store(file)
    try:
        yield store
    finally:
        store.close_database()


@pytest.mark.parametrize(
    ("change", "dump"),
    [("", DUMP), (VERSION_2, DUMP), (VERSION_1, DUMP), ("", VERSION_4), ("", VERSION_5), ("", VERSION_6)],
)
def test_runs_and_outbox_of_a_file_of_any_version_are_there(tmp_path: Path, change: str, dump: Path) -> None:
    older(tmp_path / "silo.db", change, dump)
    for _ in range(2):
        with opened(tmp_path / "silo.db") as again:
            first, second = again.history()
            assert (first.run_id, first.state, first.state_round) == (FINISHED, "finished", 1)
            assert [(t.key.kind.value, t.receipt, t.included) for t in first.tasks] == [
                ("train", True, True),
                ("train", True, True),
                ("evaluate", True, True),
            ]
            assert first.tasks[0].evaluation is not None
            assert first.tasks[0].evaluation.noise is not None
            assert (second.run_id, second.state, second.state_round) == (OPEN.run_id, "running", None)
            (entry,) = again.outbox()
            assert (entry.key, entry.size, entry.receipt is not None) == (OPEN, 155244, True)
            assert entry.mirrored is (change == VERSION_1)  # which of the states count was not known before
            assert again.committed(FINISHED) == (entry.state_digest, 1)
            assert len(again.receipts()) == 4
            assert {entry.object_digest, entry.base_digest, entry.manifest_digest} <= again.referenced()
            met = again.contact()
            assert met is not None
            assert met.software == "consilium-fl 0.1.0"
    with opened(tmp_path / "silo.db") as again:
        assert again.close(OPEN, included=True)
        assert again.outbox() == []
        assert again.committed(OPEN.run_id) == (entry.state_digest, 0)


def test_approvals_and_what_was_attested_are_there(tmp_path: Path) -> None:
    with opened(older(tmp_path / "silo.db")) as store:
        assert [(a.name, a.decided) for a in store.approvals.all()] == [("asks", None), ("waits", True)]
        assert store.approvals.decide("asks", approved=False).decided is False
        assert store.latest_attestation_sent().seq == 21
    with opened(older(tmp_path / "older.db", VERSION_2)) as store:
        assert store.approvals.all() == []
        assert store.approvals.ask("run", "m" * 64, "name", "about") is None
        assert store.outbox()[0].attested == Attestation()


def test_a_migrated_file_has_the_tables_of_a_new_one(tmp_path: Path) -> None:
    def columns(file: Path) -> list[tuple[object, ...]]:
        with opened(file) as store, store.database.read() as db:
            every = (
                "SELECT m.name, p.name, p.type, p.pk FROM sqlite_master m, pragma_table_info(m.name) p ORDER BY 1, 2"
            )
            return [tuple(row) for row in db.exec_driver_sql(every)]

    assert columns(older(tmp_path / "silo.db", VERSION_1)) == columns(tmp_path / "new.db")


def test_what_an_earlier_version_did_not_note_is_empty(tmp_path: Path) -> None:
    with opened(older(tmp_path / "silo.db", dump=VERSION_5)) as store:
        assert {a.request for a in store.approvals.all()} == {run.leaves for run in store.history()} == {""}
        assert [t.size for t in store.history()[0].tasks] == [155244, 155244, 344]


def test_every_update_of_an_earlier_version_is_listed_with_its_data_as_one_that_may_have_had_no_privacy(
    tmp_path: Path,
) -> None:
    with opened(older(tmp_path / "silo.db", dump=VERSION_6)) as store:
        listed = store.unprotected()
        assert {update.splits for update in listed} == {None}
        assert sorted((u.run_id, u.fingerprint) for u in listed) == [*[(FINISHED, "f" * 64)] * 3, (OPEN.run_id, "")]
        left = leaving(store)
        assert left.unprotected.sentence() == "Of 4 earlier updates no version noted whether they had privacy."
        assert {run.privacy for run in left.runs} == {""}


def test_a_crash_while_it_is_migrated_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(db: sqlite3.Connection) -> None:
        db.execute("DROP TABLE bases")
        raise KeyboardInterrupt

    before = older(tmp_path / "silo.db", VERSION_1).read_bytes()
    monkeypatch.setattr(stores, "MIGRATIONS", (*stores.MIGRATIONS[:-1], killed))
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path / "silo.db")
    monkeypatch.undo()
    assert (tmp_path / "silo.db").read_bytes() == before
    with opened(tmp_path / "silo.db") as store:
        assert len(store.outbox()) == 1


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("PRAGMA user_version = 99", f"of version {len(MIGRATIONS) + 1} or older, found version 99.*use that one"),
        ("DROP TABLE tasks", "found another file .version 3.: restore the one that was there from a backup"),
    ],
)
def test_a_newer_file_or_another_one_is_refused_with_what_to_do(tmp_path: Path, made: str, said: str) -> None:
    before = older(tmp_path / "silo.db", made).read_bytes()
    with pytest.raises(StateError, match=f"E-STATE-22.*{said}"):
        Store(tmp_path / "silo.db")
    assert (tmp_path / "silo.db").read_bytes() == before


def test_the_data_of_a_run_of_an_older_file_are_fixed_from_its_next_round_on(tmp_path: Path) -> None:
    with opened(older(tmp_path / "silo.db", dump=VERSION_4)) as store:
        assert [store.fix_data(OPEN.run_id, found) for found in ("a", "b", "a")] == [True, False, True]
