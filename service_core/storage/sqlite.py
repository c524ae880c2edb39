"""One SQLite file that many threads, and now and then a second process, use at once."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock

from sqlalchemy import URL, Connection, MetaData, create_engine, event
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
    read_only,
    untouched,
)
from service_core.storage.migration import Step, migrate
from service_core.storage.unfinished import require_finished

log = logging.getLogger(__name__)
LOG_BYTES = 4 << 20
"""A log that is longer is brought into the file."""
_CONNECTIONS = 16
_SHOWN = 120


class Database:
    """Transactions on a file, usable from every thread.

    Guarantees: what was written in a `write` block is on the disk when the block ends (WAL, synchronous=FULL), all of
    it or nothing; a `read` block sees one moment and waits for no writer. A file that lacks what was written is not
    opened; see `service_core.storage.generation`.
    """

    def __init__(
        self,
        path: Path,
        tables: MetaData,
        steps: Sequence[Step],
        contents: Callable[[], int] = lambda: 0,
        accept_loss: bool = False,
        rehearsal: bool = False,
    ) -> None:
        """Open, make or migrate the file; steps: see `migrate`   tables: with that of `incarnation_table`.

        contents: see `GenerationFile.require`   accept_loss: go on with what is there, whatever lies beside it.
        rehearsal: open a copy, which goes when it is closed; raises what opening the file itself would raise.
        Raises StateError: E-STATE-22 on a damaged file, one of another form, or one of a newer version; E-STATE-23 on
        one that is missing, empty, older or another home's; E-STATE-26 in a folder that a command did not finish.
        """
        require_finished(path.parent)
        self.path = path
        self._copy: TemporaryDirectory[str] | None = None
        if rehearsal:
            with self._storage_errors():
                path = self._rehearsal_of(path, contents)
        # Threads of this process queue here: SQLite's own waiting is a sleep, meant for the rare other process.
        self._write_lock = RLock()
        self._file = GenerationFile(path)
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
            db.execute(FIRST)

        with self._storage_errors():
            if not accept_loss and not rehearsal:
                self._file.require_file()
                with closing(read_only(path) if path.exists() else sqlite3.connect(":memory:")) as db:
                    self._file.require(db, contents)
            with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
                migrate(db, create, steps, tables.tables)
                self.incarnation = self._begin(db, accept_loss)
        self.checkpoint()

    def _rehearsal_of(self, path: Path, contents: Callable[[], int]) -> Path:
        """Copy the file into a folder beside it, once it is as new as it must be."""
        GenerationFile(path).require_file()
        self._copy = TemporaryDirectory(prefix=".rehearsal-", suffix=".tmp", dir=path.parent)
        copy = Path(self._copy.name, path.name)
        with closing(untouched(path) if path.exists() else sqlite3.connect(":memory:")) as db:
            GenerationFile(path).require(db, contents)
            with closing(sqlite3.connect(copy)) as target:
                db.backup(target)
                generation = generation_of(target)
        if generation is not None:
            GenerationFile(copy).replace(generation)
        return copy

    def _begin(self, db: sqlite3.Connection, anew: bool) -> str:
        """Note the generation that the file was opened with, of a new incarnation if it is to begin anew."""
        if anew:
            before = self._file.read_leniently()
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
        """Open a transaction that only reads. Raises as `write`."""
        with self._storage_errors(), self._engine.connect() as db:
            db.exec_driver_sql("BEGIN")
            yield db

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that writes; no other writer is inside, in this process or another.

        Raises UnavailableError (E-STATE-63) when the disk is full or takes nothing, StateError (E-STATE-22) when the
        file, or a row that was read, is damaged.
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
        """Bring what the log holds into the file itself, as far as no reader is in the way; waits for nobody.

        whole: and empty the log, so that it holds nothing any more of what was overwritten in the file.
        A disk that takes nothing is no error here: the log keeps what was committed, and the next write says so.
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
            log.warning("the log of %s stays as it is: %s", self.path.name, error)

    def compact(self) -> None:
        """Write the file anew without what was deleted. Raises as `write`."""
        with self._write_lock, self._storage_errors(), self._engine.connect() as db:
            db.exec_driver_sql("VACUUM")
        self.checkpoint(whole=True)

    def shorten_log(self) -> None:
        """Bring the log into the file where it has grown long. SQLite is not left to do that: nobody would note it."""
        try:
            if self.path.with_name(f"{self.path.name}-wal").stat().st_size > LOG_BYTES:
                self.checkpoint()
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Close all connections, with the log in the file unless another process reads it."""
        try:
            self.checkpoint()
        finally:
            self._engine.dispose()
            if self._copy is not None:
                self._copy.cleanup()

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Raise an error of ours in place of SQLite's, and of what reading a damaged row raises."""
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
                f"expected rows in {self.path} as this software writes them, found one that is damaged "
                f"({type(error).__name__}: {str(error)[:_SHOWN]}): restore the folder from a backup",
            ) from error

    def _explained(self, error: sqlite3.DatabaseError | DatabaseError) -> FederationError:
        cause = error.orig if isinstance(error, DatabaseError) else error
        name = str(getattr(cause, "sqlite_errorname", ""))
        if name.startswith(("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_BUSY")):
            return disk_error(self.path, name == "SQLITE_FULL", f"{name}: {cause}")
        return StateError(
            "E-STATE-22",
            f"expected a database in {self.path}, found a file that SQLite cannot use ({cause}): restore it from a "
            "backup",
        )


def _changes(db: Connection) -> int:
    """Count the rows that this connection has changed since it was made."""
    raw = db.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw.total_changes


def _configure(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    del entry
    if not isinstance(connection, sqlite3.Connection):
        raise TypeError(f"expected a connection of sqlite3, found {type(connection).__name__}")
    # The driver would begin lazily and deferred; two threads that read and then write could then never finish.
    connection.isolation_level = None
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "wal_autocheckpoint = 0",
        f"journal_size_limit = {LOG_BYTES // 2}",
    ):
        connection.execute(f"PRAGMA {pragma}")
