"""Transactions of many threads and processes on one file, and what is left of them when a process ends unasked."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import JSON, Column, Integer, MetaData, Table, insert, select, text, update

from fl_core.errors import StateError
from service_core.storage.generation import incarnation_table
from service_core.storage.sqlite import Database

metadata = MetaData()
incarnation_table(metadata)
counts = Table("counts", metadata, Column("id", Integer, primary_key=True), Column("value", Integer))

OPENED = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_sqlite import add, opened

database = opened(Path(sys.argv[1]))
for _ in range(20):
    add(database)
os._exit(0)
"""


def opened(path: Path) -> Database:
    return Database(path, counts.metadata, ())


def add(database: Database) -> None:
    with database.write() as db:
        found = db.scalar(select(counts.c.value))
        if found is None:
            db.execute(insert(counts).values(id=1, value=1))
        else:
            db.execute(update(counts).values(value=found + 1))


def value(database: Database) -> int | None:
    with database.read() as db:
        return db.scalar(select(counts.c.value))


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a#b", "a b", "ä", "file:a"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    with closing(opened(tmp_path / name)) as database:
        add(database)
    assert sorted(file.name for file in tmp_path.iterdir()) == [name, f"{name}.generation"]
    with closing(opened(tmp_path / name)) as database:
        assert value(database) == 1


def test_a_write_waits_for_the_disk(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "db")) as database, database.write() as db:
        assert db.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
        assert db.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"


def test_a_write_is_all_or_nothing(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "db")) as database:
        add(database)

        def interrupted() -> None:
            with database.write() as db:
                db.execute(update(counts).values(value=7))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert value(database) == 1
        add(database)
        assert value(database) == 2


def test_a_reader_sees_one_moment_and_waits_for_no_writer(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "db")) as database, closing(opened(tmp_path / "db")) as other:
        add(database)
        with database.read() as reading:
            assert reading.scalar(select(counts.c.value)) == 1
            with other.write() as db:
                db.execute(update(counts).values(value=7))
                assert value(database) == 1
            assert reading.scalar(select(counts.c.value)) == 1
            assert value(database) == 7


def test_threads_do_not_lose_each_others_writes(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "db")) as database, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: add(database), range(200)))
        assert value(database) == 200


@pytest.mark.integration
def test_processes_that_make_a_file_at_once_and_end_unasked_lose_nothing(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", OPENED, str(tmp_path / "db")]) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    with closing(opened(tmp_path / "db")) as database:
        assert value(database) == 80


def test_a_damaged_file_is_left_alone_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"this is no database, whatever its name says")
    with pytest.raises(StateError, match=r"E-STATE-22.*restore it from a backup"):
        opened(tmp_path / "db")
    assert (tmp_path / "db").read_bytes() == b"this is no database, whatever its name says"
    assert [file.name for file in tmp_path.iterdir()] == ["db"]


def test_a_damaged_row_is_an_error_of_ours(tmp_path: Path) -> None:
    tables = MetaData()
    incarnation_table(tables)
    columns = Column("id", Integer, primary_key=True), Column("data", JSON)
    table = Table("many", tables, *columns)
    with closing(Database(tmp_path / "db", tables, ())) as database:
        with database.write() as db:
            db.execute(insert(table).values(id=1, data={}))
            db.execute(text("UPDATE many SET data = '{'"))
        with pytest.raises(StateError, match="E-STATE-22"), database.read() as db:
            db.execute(select(table)).all()
