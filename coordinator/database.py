"""One SQLite file, written to by many threads and by a second process (the command line) at once."""

from __future__ import annotations

import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, RLock
from typing import Any

from sqlalchemy import JSON, Connection, Engine, Select, create_engine, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import ConnectionPoolEntry

from coordinator import tables
from fl_core.errors import StateError

_BUSY_SECONDS = 30.0


class Lookup:
    """A SELECT that is asked with every call: compiled once, and run by SQLite's driver itself (`Database.look_up`).

    What SQLAlchemy does around an execution and its transaction is more than a hundred calls of Python, this is three.
    Rows are named tuples of what SQLite holds: 0 and 1 for a boolean, no JSON (TypeError).
    """

    def __init__(self, statement: Select[Any]) -> None:
        columns = statement.selected_columns
        if packed := [column.name for column in columns if isinstance(column.type, JSON)]:
            raise TypeError(f"expected columns as SQLite holds them, found JSON in {packed}")
        self.text = str(statement.compile(dialect=sqlite.dialect(paramstyle="named")))
        row = namedtuple("Row", [column.name for column in columns])  # type: ignore[misc]  # named by the statement
        self.row: Callable[[Sequence[object]], Any] = row._make


class Database:
    """Transactions on the coordinator's file.

    Guarantees: what was written in a `write` block is on the disk when the block ends (WAL, synchronous=FULL), all
    of it or nothing; of a `note` block the same, but for the disk; a reader sees one moment and blocks nobody.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        # Threads of this process queue here: SQLite's own waiting is a sleep, meant for the rare other process.
        self._turn = RLock()
        self._engine, self._notes = _engine(path, "FULL"), _engine(path, "NORMAL")
        try:
            self._prepare()
        except DatabaseError as error:
            raise StateError(
                "E-STATE-22",
                f"expected the coordinator's database in {path}, found a file that SQLite cannot use ({error.orig}): "
                "restore it from a backup",
            ) from error
        self._driver, self._asking = _connect(path), Lock()

    def _prepare(self) -> None:
        with self.write() as db:
            found = int(db.exec_driver_sql("PRAGMA user_version").scalar_one())
            if found > tables.VERSION:
                raise StateError(
                    "E-STATE-22",
                    f"expected {self.path} of version {tables.VERSION} or older, found {found}: a newer version "
                    "of this software wrote it; start that version again",
                )
            tables.metadata.create_all(db)
            db.exec_driver_sql(f"PRAGMA user_version = {tables.VERSION}")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads."""
        with self._engine.begin() as db:
            _driver(db).execute("BEGIN")  # it waits for nobody, so nothing needs to translate its errors
            yield db

    def look_up(self, lookup: Lookup, **given: object) -> Sequence[Any]:
        """Return the rows of a statement, a transaction of its own: as they are at this moment."""
        with self._asking:
            return [lookup.row(row) for row in self._driver.execute(lookup.text, given).fetchall()]

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that writes; no other writer is inside, in this process or another."""
        with self._in_turn(self._engine) as db:
            yield db

    @contextmanager
    def note(self) -> Iterator[Connection]:
        """Open a transaction that writes what nobody is promised yet, and wait for no disk.

        The next `write` brings it to the disk with its own; killing this process loses nothing. Only a machine that
        loses its power may forget it, and then whoever wrote it writes it again, or it is a mere count or event.
        """
        with self._in_turn(self._notes) as db:
            yield db

    @contextmanager
    def _in_turn(self, engine: Engine) -> Iterator[Connection]:
        with self._turn, engine.begin() as db:
            db.exec_driver_sql("BEGIN IMMEDIATE")
            yield db

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()
        self._notes.dispose()
        self._driver.close()


def _connect(path: Path) -> sqlite3.Connection:
    """Connect to read, one statement at a time, from any thread."""
    made = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
    made.execute("PRAGMA query_only = ON")
    return made


def _engine(path: Path, synchronous: str) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}", connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False}, pool_size=16,
        max_overflow=-1,
    )  # fmt: skip

    @event.listens_for(engine, "connect")
    def _on_connect(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        del entry
        if not isinstance(connection, sqlite3.Connection):
            raise TypeError(f"expected a connection of sqlite3, found {type(connection).__name__}")
        connection.isolation_level = None  # the driver's implicit BEGIN would come too late for a writer
        for pragma in ("journal_mode = WAL", f"synchronous = {synchronous}", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _driver(db: Connection) -> sqlite3.Connection:
    """Return SQLite's own connection, in which a transaction begins without an event: those slow every statement."""
    found = db.connection.driver_connection
    assert isinstance(found, sqlite3.Connection)
    return found
