"""What waits for the disk and what does not, in processes that end without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.storage.database import Database

KILLED = """
import os, sys
from pathlib import Path
from coordinator.storage.database import Database

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
