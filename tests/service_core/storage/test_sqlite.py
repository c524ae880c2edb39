"""Transactions of many threads and processes on one file, and what is left of them when a process ends unasked."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    insert,
    select,
    text,
    update,
)

from fl_core.errors import StateError
from service_core.storage import sqlite
from service_core.storage.generation import incarnation_table, open_untouched
from service_core.storage.sqlite import Database, fetch_at_once

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


def opened(path: Path, wal: bool | None = None) -> Database:
    return Database(path, counts.metadata, (), wal=wal)


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


@pytest.mark.parametrize(("wal", "mode"), [(None, "wal"), (True, "wal"), (False, "delete")])
def test_a_write_waits_for_the_disk(tmp_path: Path, wal: bool | None, mode: str) -> None:
    with closing(opened(tmp_path / "db", wal)) as database, database.write() as db:
        assert db.exec_driver_sql("PRAGMA synchronous").scalar_one() == 3
        assert db.exec_driver_sql("PRAGMA journal_mode").scalar_one() == mode


def mode_of(path: Path) -> str:
    with closing(opened(path)) as database, database.read() as db:
        return str(db.exec_driver_sql("PRAGMA journal_mode").scalar_one())


def test_a_file_keeps_its_journal_until_somebody_chooses_another(tmp_path: Path) -> None:
    """What a command opened with a WAL would be no longer safe for a worker on another machine."""
    path = tmp_path / "db"
    for wal, mode in ((None, "wal"), (False, "delete"), (None, "delete"), (True, "wal")):
        with closing(opened(path, wal)) as database:
            add(database)
            assert mode_of(path) == mode
    with closing(opened(path)) as database:
        assert value(database) == 4


def test_a_journal_is_not_changed_under_a_process_that_has_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.1)
    with closing(opened(tmp_path / "db")) as database, database.read() as db:
        db.scalar(select(counts.c.value))
        with pytest.raises(StateError, match="E-STATE-20"):
            opened(tmp_path / "db", wal=False)


def test_what_a_rollback_journal_left_behind_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with closing(opened(path, wal=False)) as database:
        add(database)
    code = f"""
    import os, sqlite3
    db = sqlite3.connect({str(path)!r}, isolation_level=None)
    db.execute("PRAGMA cache_size = 1")
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE counts SET value = 7")
    db.executemany("INSERT INTO counts VALUES (?, 0)", [(k,) for k in range(2, 3000)])
    os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert path.with_name("db-journal").stat().st_size
    with closing(opened(path)) as database:
        assert value(database) == 1


def test_to_look_at_a_file_drops_no_lock_of_this_process_on_it(tmp_path: Path) -> None:
    """fcntl(2): a process loses its locks on a file when it closes any descriptor of it."""
    path = tmp_path / "db"
    other = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0.1).execute('BEGIN IMMEDIATE')"
    with closing(opened(path, wal=False)) as database:
        add(database)
        with database.write() as db:
            db.execute(update(counts).values(value=7))
            with closing(open_untouched(path)) as looking:
                assert looking.execute("SELECT value FROM counts").fetchone() == (1,)
            locked = subprocess.run([sys.executable, "-c", other, str(path)], capture_output=True, text=True)
            assert "database is locked" in locked.stderr


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


kinds = Table(
    "kinds",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("at", Float),
    Column("facts", JSON),
    Column("on", Boolean),
    Column("text", String),
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "at": st.none() | st.just(0.0) | st.floats(1e-6, 1e12),
                "facts": st.none() | st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.text("a\"'ü\n")),
                "on": st.none() | st.booleans(),
                "text": st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
            }
        )
    )
)
def test_rows_fetched_at_once_are_those_fetched_one_by_one(rows: list[dict[str, object]]) -> None:
    engine = create_engine("sqlite://")
    kinds.metadata.create_all(engine)
    with engine.begin() as db:
        if rows:
            db.execute(insert(kinds), rows)
        query = select(kinds, kinds.c.at.label("again")).order_by(kinds.c.id)
        assert fetch_at_once(db, query) == [dict(row) for row in db.execute(query).mappings()]
