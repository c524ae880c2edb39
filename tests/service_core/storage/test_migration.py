"""Files of every version become the newest one, whole or not at all; what is none of them is left alone."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest

from fl_core.errors import StateError
from service_core.storage import migration
from service_core.storage.migration import Step, migrate, set_journal_mode


def create(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE things (name TEXT, size INTEGER, made REAL)")


def add_size(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE things ADD COLUMN size INTEGER DEFAULT 7")


def add_made(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE things ADD COLUMN made REAL")
    db.execute("UPDATE things SET made = size * 2.0")


STEPS: tuple[Step, ...] = (add_size, add_made)


def connect(path: Path, timeout: float = 30) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=timeout, isolation_level=None)


def open_file(path: Path, steps: tuple[Step, ...] = STEPS) -> list[tuple[object, ...]]:
    with closing(connect(path)) as db:
        migrate(db, create, steps, ("things",))
        assert db.execute("PRAGMA user_version").fetchone() == (1 + len(steps),)
        return db.execute("SELECT name, size, made FROM things").fetchall()


def older(path: Path, version: int = 1) -> Path:
    with closing(connect(path)) as db:
        db.execute("CREATE TABLE things (name TEXT)")
        db.execute("INSERT INTO things VALUES ('a')")
        for step in STEPS[: version - 1]:
            step(db)
        db.execute(f"PRAGMA user_version = {version}")
    return path


def test_a_new_file_is_made_as_the_newest_version(tmp_path: Path) -> None:
    assert open_file(tmp_path / "db") == []
    assert open_file(tmp_path / "db") == []


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_of_any_version_goes_through_the_steps_that_it_lacks(tmp_path: Path, version: int) -> None:
    assert open_file(older(tmp_path / "db", version)) == [("a", 7, 14.0)]
    assert open_file(tmp_path / "db") == [("a", 7, 14.0)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, sqlite3.OperationalError])
def test_what_is_interrupted_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted(db: sqlite3.Connection) -> None:
        add_made(db)
        raise error

    before = older(tmp_path / "db").read_bytes()
    with pytest.raises(error):
        open_file(tmp_path / "db", (add_size, interrupted))
    assert (tmp_path / "db").read_bytes() == before
    assert open_file(tmp_path / "db") == [("a", 7, 14.0)]


def test_of_many_that_open_a_file_at_once_one_migrates(tmp_path: Path) -> None:
    older(tmp_path / "db")
    at_once = Barrier(8)

    def opened(_: int) -> list[tuple[object, ...]]:
        at_once.wait()
        return open_file(tmp_path / "db")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(opened, range(8))) == [[("a", 7, 14.0)]] * 8


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("PRAGMA user_version = 4; CREATE TABLE things (name)", "use the newer version"),
        ("CREATE TABLE things (name)", ".version 0. is not a database.*: restore"),
        ("CREATE TABLE letters (name)", ".version 0. is not a database with the tables things: restore"),
        ("PRAGMA user_version = 3; CREATE TABLE letters (name)", ".version 3. is not a database.*: restore"),
        ("PRAGMA user_version = -1; CREATE TABLE things (name)", ".version -1. is not a database.*: restore"),
    ],
)
def test_a_newer_file_or_another_one_is_left_alone_and_the_error_says_what_to_do(
    tmp_path: Path, made: str, said: str
) -> None:
    with closing(connect(tmp_path / "db")) as db:
        db.executescript(made)
    before = (tmp_path / "db").read_bytes()
    with pytest.raises(StateError, match=f"E-STATE-22.*{said}"):
        open_file(tmp_path / "db")
    assert (tmp_path / "db").read_bytes() == before


def test_a_file_gets_its_journal_once_another_process_has_finished_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    path = tmp_path / "db"
    with closing(connect(path, 0)) as db, closing(connect(path, 0)) as reader:
        create(db)
        reader.execute("BEGIN")
        reader.execute("SELECT name FROM things").fetchall()

        def finish(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                reader.execute("COMMIT")

        monkeypatch.setattr(migration.time, "sleep", finish)
        set_journal_mode(db, "WAL", 60)
        assert len(waits) == 2
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        reader.execute("SELECT name FROM things").fetchall()  # it has the log open now
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            set_journal_mode(db, "DELETE", 0)
