"""What waits for the disk and what does not, in processes that end without a word."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import bindparam, delete, insert, select

from coordinator.database import Database, Lookup
from coordinator.tables import counters, runs

KILLED = """
import os, sys
from pathlib import Path
from coordinator.database import Database

database = Database(Path(sys.argv[1]))
with database.note() as db:
    db.exec_driver_sql("CREATE TABLE noted (x)")
    db.exec_driver_sql("INSERT INTO noted VALUES (7)")
os._exit(0)
"""


def test_a_write_waits_for_the_disk_and_a_note_does_not(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    for transaction, synchronous in ((database.write, 2), (database.note, 1)):
        with transaction() as db:
            assert db.exec_driver_sql("PRAGMA synchronous").scalar_one() == synchronous
            assert db.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    database.close()


def test_a_note_survives_the_end_of_the_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "db")], check=True)
    database = Database(tmp_path / "db")
    with database.read() as db:
        assert db.exec_driver_sql("SELECT x FROM noted").scalar_one() == 7
    database.close()


def test_a_note_is_all_or_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.note() as db:
        db.exec_driver_sql("CREATE TABLE noted (x)")

    def interrupted() -> None:
        with database.note() as db:
            db.exec_driver_sql("INSERT INTO noted VALUES (7)")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    with database.read() as db:
        assert db.exec_driver_sql("SELECT count(*) FROM noted").scalar_one() == 0
    database.close()


def test_a_lookup_sees_what_was_committed_last_and_nothing_that_was_not(tmp_path: Path) -> None:
    database, other = Database(tmp_path / "db"), Database(tmp_path / "db")
    asked = Lookup(select(counters.c.value).where(counters.c.name == bindparam("name")))
    assert database.look_up(asked, name="x") == []
    for by, value in ((database, 1), (other, 2)):
        with by.write() as db:
            db.execute(delete(counters))
            db.execute(insert(counters).values(name="x", value=value))
            assert [row.value for row in database.look_up(asked, name="x")] == [1] * (value - 1)
        assert [row.value for row in database.look_up(asked, name="x")] == [value]
    database.close()
    other.close()


def test_lookups_of_many_threads_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.write() as db:
        db.execute(insert(counters), [{"name": str(k), "value": k} for k in range(50)])
    asked = Lookup(select(counters.c.value, counters.c.name).where(counters.c.name == bindparam("name")))
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda k: database.look_up(asked, name=str(k % 50)), range(2000))
    assert list(found) == [[(k % 50, str(k % 50))] for k in range(2000)]
    database.close()


def test_a_lookup_of_what_sqlite_does_not_hold_as_it_is_read_is_refused() -> None:
    with pytest.raises(TypeError, match=r"found JSON in \['members'\]"):
        Lookup(select(runs.c.id, runs.c.members))
