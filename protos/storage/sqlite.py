"""One SQLite file that many threads, and now and then a second process, use at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import RLock

from sqlalchemy import URL, Connection, MetaData, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.schema import CreateIndex, CreateTable

from fl_core.errors import StateError
from protos.storage.migration import Step, migrate

BUSY_SECONDS = 30.0
"""How long a statement waits for another process."""
_CONNECTIONS = 16


class Database:
    """Transactions on a file, usable from every thread.

    Guarantees: what was written in a `write` block is on the disk when the block ends (WAL, synchronous=FULL), all of
    it or nothing; a `read` block sees one moment and waits for no writer.
    """

    def __init__(self, path: Path, tables: MetaData, steps: Sequence[Step], known: Collection[str]) -> None:
        """Open, make or migrate the file; see `migrate`.

        Raises StateError (E-STATE-22) on a damaged file, one of another form, or one of a newer version.
        """
        self.path = path
        # Threads of this process queue here: SQLite's own waiting is a sleep, meant for the rare other process.
        self._write_lock = RLock()
        self._engine = create_engine(
            URL.create("sqlite", database=str(path)),  # as text, a ? or % of the path would be the URL's own
            connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
            pool_size=_CONNECTIONS,
            max_overflow=-1,
        )
        event.listen(self._engine, "connect", _configure)

        def create(db: sqlite3.Connection) -> None:
            for table in tables.sorted_tables:
                db.execute(str(CreateTable(table).compile(self._engine)))
                for index in sorted(table.indexes, key=lambda index: str(index.name)):
                    db.execute(str(CreateIndex(index).compile(self._engine)))

        try:
            with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
                migrate(db, create, steps, known)
            with self.read():  # the first connection makes the log beside the file
                pass
        except (sqlite3.DatabaseError, DatabaseError) as error:
            self.close()
            raise StateError(
                "E-STATE-22",
                f"expected a database in {path}, found a file that SQLite cannot use ({error}): restore it from a "
                "backup",
            ) from error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads."""
        with self._engine.connect() as db:
            db.exec_driver_sql("BEGIN")
            yield db

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that writes; no other writer is inside, in this process or another."""
        with self._write_lock, self._engine.begin() as db:
            db.exec_driver_sql("BEGIN IMMEDIATE")
            yield db

    def close(self) -> None:
        self._engine.dispose()


def _configure(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    del entry
    if not isinstance(connection, sqlite3.Connection):
        raise TypeError(f"expected a connection of sqlite3, found {type(connection).__name__}")
    # The driver would begin lazily and deferred; two threads that read and then write could then never finish.
    connection.isolation_level = None
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
