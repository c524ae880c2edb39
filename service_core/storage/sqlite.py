"""A SQLite file for many threads and occasionally a second process."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any

from sqlalchemy import (
    JSON,
    URL,
    Boolean,
    ColumnElement,
    Connection,
    Float,
    MetaData,
    Select,
    String,
    case,
    create_engine,
    event,
    func,
    select,
    type_coerce,
)
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DatabaseError, IntegrityError
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.schema import CreateIndex, CreateTable

from fl_core.errors import FederationError, StateError, UnavailableError
from service_core.storage.disk import disk_error, disk_errors
from service_core.storage.generation import (
    BUSY_SECONDS,
    COUNT,
    FIRST,
    READ,
    Generation,
    GenerationFile,
    begin_incarnation,
    generation_of,
    open_read_only,
    open_untouched,
)
from service_core.storage.migration import Step, migrate, set_journal_mode
from service_core.storage.unfinished import require_finished

log = logging.getLogger(__name__)
LOG_BYTES = 4 << 20
"""A longer WAL is checkpointed."""
_CONNECTIONS = 16
_SHOWN = 120


class Database:
    """Transactions on a file, for several threads.

    Guarantees: a `write` block is atomic and on the disk when it ends (synchronous=EXTRA); a `read` block sees a
    snapshot, and with a WAL waits for no writer. A file that lacks changes is not opened: see
    `service_core.storage.generation`.
    """

    def __init__(
        self,
        path: Path,
        tables: MetaData,
        steps: Sequence[Step],
        contents: Callable[[], int] = lambda: 0,
        accept_loss: bool = False,
        rehearsal: bool = False,
        wal: bool | None = None,
    ) -> None:
        """Open, create or migrate the file. steps: see `migrate`   tables: including `incarnation_table`.

        contents: see `GenerationFile.require`   accept_loss: continue with an incomplete database
        rehearsal: open a temporary copy; raises the errors that opening the file itself would raise
        wal: True: a write-ahead log, for processes that share memory; False: a rollback journal, for processes on
        several machines; None: the file's present mode, in a new file a write-ahead log.
        Raises StateError: E-STATE-22 on a damaged file, another kind of file or a newer version; E-STATE-23 on a file
        that is missing, empty, older or another home's; E-STATE-26 in an unfinished folder; E-STATE-20 if another
        program has the file open under the other journal.
        """
        require_finished(path.parent)
        self.path = path
        self._copy: TemporaryDirectory[str] | None = None
        if rehearsal:
            with self._storage_errors():
                path = self._rehearsal_of(path, contents)
        # Threads of this process queue here: SQLite's busy handler only sleeps, which suits the rare second process.
        self._write_lock = RLock()
        self._file = GenerationFile(path)
        self._engine = create_engine(
            URL.create("sqlite", database=str(path)),  # a URL string would misread ? and % in the path
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
            db.execute(FIRST)

        with self._storage_errors():
            if not accept_loss and not rehearsal:
                self._file.require_file()
                with closing(open_read_only(path) if path.exists() else sqlite3.connect(":memory:")) as db:
                    self._file.require(db, contents)
            with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
                if wal is None and generation_of(db) is None:
                    wal = True
                migrate(db, create, steps, tables.tables)
                if wal is not None:  # of a file that is ours now
                    self._choose_journal(db, "WAL" if wal else "DELETE")
                self.incarnation = self._begin(db, accept_loss)
        self.checkpoint()

    def _choose_journal(self, db: sqlite3.Connection, mode: str) -> None:
        try:
            set_journal_mode(db, mode, BUSY_SECONDS)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY":
                raise
            raise StateError(
                "E-STATE-20",
                f"another program uses {self.path}, so its journal mode cannot change to {mode}: stop that program "
                "(silo page, for instance), and start again",
            ) from error

    def _rehearsal_of(self, path: Path, contents: Callable[[], int]) -> Path:
        """Check the generation of the file, and copy the file into a temporary folder next to it."""
        GenerationFile(path).require_file()
        self._copy = TemporaryDirectory(prefix=".rehearsal-", suffix=".tmp", dir=path.parent)
        copy = Path(self._copy.name, path.name)
        with closing(open_untouched(path) if path.exists() else sqlite3.connect(":memory:")) as db:
            GenerationFile(path).require(db, contents)
            with closing(sqlite3.connect(copy)) as target:
                db.backup(target)
                generation = generation_of(target)
        if generation is not None:
            GenerationFile(copy).replace(generation)
        return copy

    def _begin(self, db: sqlite3.Connection, anew: bool) -> str:
        """Record the generation, of a new incarnation if `anew`; return the incarnation."""
        if anew:
            before = None
            with suppress(StateError):  # it may be damaged
                before = self._file.read()
            now = begin_incarnation(db, before.number if before is not None else 0)
            self._file.replace(now)
        else:
            stored = generation_of(db)
            assert stored is not None
            now = stored
            self._file.advance(now)
        return now.incarnation

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read transaction. Raises as `write`."""
        with self._storage_errors(), self._engine.connect() as db:
            db.exec_driver_sql("BEGIN")
            yield db

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open the only write transaction, over all threads and processes.

        Raises UnavailableError (E-STATE-63) on a full or unusable disk, StateError (E-STATE-22) if the file or a row
        that was read is damaged.
        """
        with self._write_lock, self._storage_errors():
            now = None
            with self._engine.begin() as db:
                db.exec_driver_sql("BEGIN IMMEDIATE")
                before = _changes(db)
                yield db
                if _changes(db) != before:
                    now = Generation(*db.exec_driver_sql(COUNT).one())
            if now is not None:
                self._file.advance(now)
        self.shorten_log()

    def checkpoint(self, whole: bool = False) -> None:
        """Checkpoint the WAL, if there is one, as far as readers allow, without waiting.

        whole: truncate the WAL, so that no overwritten data remain in it
        A full disk is no error here: the WAL keeps all committed data, and the next write reports the full disk.
        """
        how = "TRUNCATE" if whole else "PASSIVE"
        try:
            with self._write_lock, self._storage_errors(), self._engine.connect() as db:
                now = Generation(*db.exec_driver_sql(READ).one())
                db.exec_driver_sql("PRAGMA busy_timeout = 0")
                try:
                    busy, logged, moved = db.exec_driver_sql(f"PRAGMA wal_checkpoint({how})").one()
                finally:
                    db.exec_driver_sql(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")
                if not busy and logged == moved:
                    self._file.advance(now, checkpointed=True)
        except UnavailableError as error:
            log.warning("no checkpoint of %s: %s", self.path.name, error)

    def compact(self) -> None:
        """Rewrite the file without deleted data. Raises as `write`."""
        with self._write_lock, self._storage_errors(), self._engine.connect() as db:
            db.exec_driver_sql("VACUUM")
        self.checkpoint(whole=True)

    def shorten_log(self) -> None:
        """Checkpoint a long WAL. SQLite's own checkpoints are off, since they would not be recorded."""
        try:
            if self.path.with_name(f"{self.path.name}-wal").stat().st_size > LOG_BYTES:
                self.checkpoint()
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Checkpoint and close all connections."""
        try:
            self.checkpoint()
        finally:
            self._engine.dispose()
            if self._copy is not None:
                self._copy.cleanup()

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Replace errors of SQLite, and of reading a damaged row, by our own."""
        try:
            with disk_errors(self.path):
                yield
        except (FederationError, IntegrityError):
            raise
        except (sqlite3.DatabaseError, DatabaseError) as error:
            raise self._explained(error) from error
        except (ValueError, TypeError, LookupError) as error:
            raise StateError(
                "E-STATE-22",
                f"{self.path} contains a damaged row ({type(error).__name__}: {str(error)[:_SHOWN]}): restore the "
                "folder from a backup",
            ) from error

    def _explained(self, error: sqlite3.DatabaseError | DatabaseError) -> FederationError:
        cause = error.orig if isinstance(error, DatabaseError) else error
        name = str(getattr(cause, "sqlite_errorname", ""))
        if name.startswith(("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_BUSY")):
            return disk_error(self.path, name == "SQLITE_FULL", f"{name}: {cause}")
        return StateError(
            "E-STATE-22",
            f"SQLite cannot use the database {self.path} ({cause}): restore it from a backup",
        )


def fetch_at_once(db: Connection, query: Select[Any]) -> list[dict[str, Any]]:
    """Return all rows of a query, as `db.execute(query).mappings()` would, in one step of SQLite.

    The driver releases Python's lock at each row: in a busy service a thousand rows wait a thousand times. Times are
    exact (SQLite itself rounds numbers beyond about 1e100). Columns of bytes cannot be read in this way.
    """
    rows = query.subquery().c
    wanted = func.json_group_array(func.json_array(*map(_as_json, rows)))
    values = json.loads(db.scalar(select(wanted)) or "[]")
    exact = [float if isinstance(c.type, Float) else bool if isinstance(c.type, Boolean) else None for c in rows]
    return [
        {
            c.name: value if value is None or read is None else read(value)
            for c, read, value in zip(rows, exact, row, strict=True)
        }
        for row in values
    ]


def _as_json(column: ColumnElement[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, JSON):
        return func.json(type_coerce(column, String))
    # Into JSON, SQLite writes 15 digits of a number; as text it keeps all.
    return case((column.is_not(None), func.printf("%!.17g", column))) if isinstance(column.type, Float) else column


def _changes(db: Connection) -> int:
    """Return the number of rows that this connection has changed."""
    raw = db.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw.total_changes


def _configure(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    del entry
    if not isinstance(connection, sqlite3.Connection):
        raise TypeError(f"expected a connection of sqlite3, found {type(connection).__name__}")
    # The driver begins deferred transactions: two threads that read and then write would deadlock.
    connection.isolation_level = None
    for pragma in (
        "synchronous = EXTRA",  # also the removal of a rollback journal
        "foreign_keys = ON",
        "wal_autocheckpoint = 0",
        f"journal_size_limit = {LOG_BYTES // 2}",
    ):
        connection.execute(f"PRAGMA {pragma}")
