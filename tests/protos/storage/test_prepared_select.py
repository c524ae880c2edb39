"""What is asked in every call is what SQLAlchemy would answer, of any thread and after any commit."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    DateTime,
    Engine,
    Enum,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    bindparam,
    column,
    insert,
    select,
)
from sqlalchemy.types import TypeEngine

from protos.storage.prepared_select import Lookup, Lookups
from protos.storage.sqlite import open_engine

things = Table(
    "things", MetaData(),
    Column("id", Integer, primary_key=True), Column("name", String), Column("seen", Float), Column("is_open", Boolean),
    Column("members", JSON), Column("raw", LargeBinary),
)  # fmt: skip
ROWS: list[dict[str, object]] = [
    {"id": 1, "name": "ä", "seen": 0.1, "is_open": True, "members": ["a", {"b": None}], "raw": b"\0\xff"},
    {"id": 2, "name": "", "seen": None, "is_open": None, "members": None, "raw": None},
    {"id": 3, "name": None, "seen": -1e300, "is_open": False, "members": {}, "raw": b""},
]
ALL, ONE = select(things).order_by(things.c.id), select(things).where(things.c.id == bindparam("id"))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    made = open_engine(tmp_path / "db", "FULL")
    with made.begin() as db:
        things.metadata.create_all(db)
        db.execute(insert(things), ROWS)
    return made


def test_rows_are_those_of_sqlalchemy(engine: Engine, tmp_path: Path) -> None:
    lookups = Lookups(tmp_path / "db")
    with engine.begin() as db:
        wanted = [row._asdict() for row in db.execute(ALL)]
    assert [row._asdict() for row in lookups.all(Lookup(ALL))] == wanted == ROWS
    assert lookups.first(Lookup(ONE), id=3).is_open is False
    assert lookups.first(Lookup(ONE), id=4) is None
    lookups.close()


def test_a_lookup_sees_what_was_committed_before_it_and_nothing_else(engine: Engine, tmp_path: Path) -> None:
    lookups, one = Lookups(tmp_path / "db"), Lookup(ONE)
    with engine.begin() as db:
        db.exec_driver_sql("BEGIN")
        db.execute(insert(things), {"id": 4, "name": "new"})
        assert lookups.all(one, id=4) == []
    assert [row.name for row in lookups.all(one, id=4)] == ["new"]
    lookups.close()


def test_lookups_of_many_threads_do_not_get_in_each_others_way(engine: Engine, tmp_path: Path) -> None:
    lookups, one = Lookups(tmp_path / "db"), Lookup(ONE)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: lookups.first(one, id=1 + k % 3)._asdict(), range(2000)))
    assert found == [ROWS[k % 3] for k in range(2000)]
    lookups.close()


def test_closing_waits_for_the_lookup_under_way_and_ends_those_that_come_later(engine: Engine, tmp_path: Path) -> None:
    """A connection that is closed under a statement of another thread ends the process."""
    lookups, inside, closed = Lookups(tmp_path / "db"), Event(), Event()

    def between_two_rows(cursor: sqlite3.Cursor, row: tuple[object, ...]) -> tuple[object, ...]:
        del cursor
        inside.set()
        assert not closed.wait(0.1), "closed before the lookup had ended"
        return row

    def close() -> None:
        lookups.close()
        closed.set()

    lookups._driver.row_factory = between_two_rows
    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(lookups.all, Lookup(ALL))
        assert inside.wait(30)
        pool.submit(close).result(30)
        assert len(asking.result(30)) == len(ROWS)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        lookups.all(Lookup(ALL))


def test_a_lookup_may_hold_values_of_its_own(engine: Engine, tmp_path: Path) -> None:
    lookups, named = Lookups(tmp_path / "db"), select(things.c.id).where(things.c.name == "ä").limit(1)
    assert lookups.all(Lookup(named)) == [(1,)]
    lookups.close()


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a#b", "a b", "ä", "file:a"])
def test_files_of_any_name_are_the_same_for_engines_and_lookups(tmp_path: Path, name: str) -> None:
    engine = open_engine(tmp_path / name, "FULL")
    with engine.begin() as db:
        things.metadata.create_all(db)
        db.execute(insert(things), ROWS)
    lookups = Lookups(tmp_path / name)
    assert len(lookups.all(Lookup(ALL))) == len(ROWS)
    lookups.close()
    engine.dispose()
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_lookup_may_be_of_nothing_at_all(engine: Engine, tmp_path: Path) -> None:
    lookups, nothing = Lookups(tmp_path / "db"), bindparam("nothing", None, type_=String)
    assert lookups.all(Lookup(select(things.c.id).where(nothing.is_(None)).limit(1))) == [(1,)]
    lookups.close()


@pytest.mark.parametrize("kind", [DateTime(), Enum("a", "b"), JSON()])
def test_a_parameter_that_sqlite_holds_otherwise_is_refused(kind: TypeEngine[object]) -> None:
    with pytest.raises(TypeError, match="takes as they are, found 'given'"):
        Lookup(select(things).where(column("odd", kind) == bindparam("given")))


def test_a_lookup_of_a_list_of_any_length_is_refused() -> None:
    with pytest.raises(TypeError, match="one value per parameter"):
        Lookup(select(things).where(things.c.id.in_(bindparam("ids", expanding=True))))
