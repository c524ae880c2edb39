"""One SQLite file, written to by many threads and by a second process (the command line) at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError

from coordinator.storage import schema as tables
from fl_core.errors import StateError
from protos.storage.prepared_select import Lookups
from protos.storage.sqlite import open_engine


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
        self._engine, self._notes = open_engine(path, "FULL"), open_engine(path, "NORMAL")
        try:
            self._prepare()
        except DatabaseError as error:
            raise StateError(
                "E-STATE-22",
                f"expected the coordinator's database in {path}, found a file that SQLite cannot use ({error.orig}): "
                "restore it from a backup",
            ) from error
        self.lookups = Lookups(path)

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
            self._complete(db)
            db.exec_driver_sql(f"PRAGMA user_version = {tables.VERSION}")

    @staticmethod
    def _complete(db: Connection) -> None:
        """Give a file from before attestations carried what a ledger had spent the columns for it."""
        known = {row[1] for row in db.exec_driver_sql("PRAGMA table_info(attestations)")}
        for column, kind in (("sealed", "BLOB NOT NULL DEFAULT x''"), ("restored", "INTEGER NOT NULL DEFAULT 0")):
            if column not in known:
                db.exec_driver_sql(f"ALTER TABLE attestations ADD COLUMN {column} {kind}")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads."""
        with self._engine.begin() as db:
            _driver(db).execute("BEGIN")  # it waits for nobody, so nothing needs to translate its errors
            yield db

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
        self.lookups.close()


def _driver(db: Connection) -> sqlite3.Connection:
    """Return SQLite's own connection, in which a transaction begins without an event: those slow every statement."""
    found = db.connection.driver_connection
    assert isinstance(found, sqlite3.Connection)
    return found
