"""Detects a database that is missing, empty, older or another home's, before anything is deleted or answered.

Every transaction increments a generation number in the database, and then in a file next to it. A database that lacks
its newest changes (its log was lost, or an older file was restored) is behind that file. The file also has the
incarnation, a random id that changes when a database is created or restored.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Column, Integer, MetaData, String, Table

from fl_core.errors import StateError
from service_core.storage.digests import digest
from service_core.storage.disk import disk_errors
from service_core.storage.private_files import replace_file

TABLE = "incarnation"
FIRST = "INSERT INTO incarnation VALUES (1, lower(hex(randomblob(16))), 1)"
FIRST_TABLE = f"""
CREATE TABLE incarnation (id INTEGER NOT NULL PRIMARY KEY, incarnation VARCHAR NOT NULL, generation INTEGER NOT NULL);
{FIRST};
"""
"""Migration step that adds the generation."""
READ = "SELECT incarnation, generation FROM incarnation"
COUNT = "UPDATE incarnation SET generation = generation + 1 RETURNING incarnation, generation"
BUSY_SECONDS = 30.0
"""Seconds that a statement waits for another process."""
_HEADER = 20
"""Bytes of a SQLite file up to and including its journal mode."""
_RECORD_BYTES = 256  # within one sector, which a disk writes whole


def incarnation_table(metadata: MetaData) -> Table:
    """Add the one-row table of incarnation and generation to a schema."""
    return Table(
        TABLE,
        metadata,
        Column("id", Integer, primary_key=True),
        Column("incarnation", String, nullable=False),
        Column("generation", Integer, nullable=False),
    )


class Generation(NamedTuple):
    """An incarnation of a database and its number of changes."""

    incarnation: str
    number: int


class GenerationRecord(NamedTuple):
    """Content of the file. checkpointed: number of changes in the main database file, without the log."""

    incarnation: str
    number: int
    checkpointed: int = 0


class GenerationFile:
    """The file next to a database, mode 0600; written and read by several processes."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self.path = database.with_name(f"{database.name}.generation")

    def read(self) -> GenerationRecord | None:
        """Return the record; None without a file. Raises StateError (E-STATE-23) on a damaged one."""
        try:
            with self._locked(os.O_RDONLY, fcntl.LOCK_SH) as file:
                data = os.pread(file, _RECORD_BYTES, 0)
        except FileNotFoundError:
            return None
        return self._parse(data)

    def advance(self, now: Generation, checkpointed: bool = False) -> None:
        """Record a generation unless a later one is recorded. checkpointed: it is in the main database file.

        Only a checkpoint is synced: after it the log may be lost.
        """
        try:
            with self._locked(os.O_RDWR, fcntl.LOCK_EX) as file:
                noted = self._parse(os.pread(file, _RECORD_BYTES, 0))
                if noted.incarnation != now.incarnation:
                    return  # the home was restored under this process, which its next start reports
                number = max(noted.number, now.number)
                whole = max(noted.checkpointed, now.number) if checkpointed else noted.checkpointed
                if (new := GenerationRecord(now.incarnation, number, whole)) != noted:
                    os.pwrite(file, _record(new), 0)
                    if checkpointed:
                        os.fsync(file)
        except FileNotFoundError:
            self._create(now)

    def _create(self, now: Generation) -> None:
        """Create the file atomically, unless another process creates it."""
        aside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        replace_file(aside, _record(GenerationRecord(*now)), 0o600)
        try:
            with disk_errors(self.path):
                os.link(aside, self.path)
        except FileExistsError:
            self.advance(now)
        finally:
            aside.unlink()

    def replace(self, now: Generation) -> None:
        """Replace the file; on the disk on return."""
        replace_file(self.path, _record(GenerationRecord(*now)), 0o600)

    def require_file(self) -> None:
        """Raise StateError (E-STATE-23) on a missing or older database file, sqlite3.Error on a damaged one.

        Call it before SQLite opens the file for writing, which would join it with another file's log or delete the log.
        During or after an interrupted checkpoint the main file is half old and half new, and its log has the missing
        pages. So it counts as damaged only together with its log. If the log was lost, the main file is newer than the
        last recorded checkpoint.
        """
        noted = self.read()
        if noted is None:
            return
        if not self._database.exists() or not self._database.stat().st_size:
            raise self._behind(
                f"the database {self._database} is missing or empty, but {self.path.name} records its generation "
                f"{noted.number}"
            )
        stored, half_done = None, False
        try:
            stored = self._main_file_generation()
        except sqlite3.DatabaseError:
            if not _has_log(self._database):
                raise
            half_done = True
            with suppress(sqlite3.DatabaseError):  # else the generation's own page is half written
                stored = self._main_file_generation(shorter=True)
        number = stored.number if stored is not None else 0
        if stored is not None and stored.incarnation == noted.incarnation and number < noted.checkpointed:
            raise self._behind(
                f"the database {self._database} lacks the last {noted.number - number} changes that "
                f"{self.path.name} counts"
            )
        if half_done or (number > noted.checkpointed and not _has_log(self._database)):
            _require_sound(self._database)

    def _main_file_generation(self, shorter: bool = False) -> Generation | None:
        """Read the generation from the main file without its log. shorter: trust its length, not its header."""
        with closing(sqlite3.connect(f"{self._database.absolute().as_uri()}?immutable=1", uri=True)) as db:
            if shorter:
                db.execute("PRAGMA writable_schema = ON")  # SQLite then uses the file's length
            return generation_of(db)

    def require(self, db: sqlite3.Connection, contents: Callable[[], int]) -> None:
        """Raise StateError (E-STATE-23) unless the database is as new as the record next to it.

        contents: counts the stored objects, which must be 0 if the database is new
        """
        noted, stored = self.read(), generation_of(db)
        if noted is None and stored is not None and stored.number > 1:
            noted = self.read()  # another process may have just written it
            if noted is None:
                raise self._behind(
                    f"the database {self._database} has generation {stored.number}, but there is no "
                    f"{self.path.name}: the database belongs to another home"
                )
        if noted is None:
            if stored is None and _is_new(db) and (number := contents()):
                raise self._behind(
                    f"the database {self._database} is missing or empty, but its home has {number} stored files"
                )
            return
        if stored is None:
            raise self._behind(
                f"{self._database} is not the database whose generation {noted.number} {self.path.name} records"
            )
        if stored.incarnation != noted.incarnation:
            raise self._behind(f"the database {self._database} belongs to another home, or is from before a restore")
        if stored.number < noted.number:
            raise self._behind(
                f"the database {self._database} lacks the last {noted.number - stored.number} changes that "
                f"{self.path.name} counts"
            )

    def _behind(self, problem: str) -> StateError:
        name = self._database.name
        return StateError(
            "E-STATE-23",
            f"{problem}. Nothing was changed. Put the newest {name} back, together with {name}-wal if there is one, "
            "or restore a backup into an empty home; if there is nothing newer, run `restore --accept-loss`",
        )

    def _parse(self, data: bytes) -> GenerationRecord:
        try:
            raw = json.loads(data)
            record = GenerationRecord(str(raw["incarnation"]), int(raw["generation"]), int(raw["checkpointed"]))
            if raw["check"] != _check(record):
                raise ValueError("its check is wrong")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise self._behind(
                f"{self.path} is damaged, so it is unknown whether the database {self._database} is complete"
            ) from None
        return record

    @contextmanager
    def _locked(self, mode: int, lock: int) -> Iterator[int]:
        file = os.open(self.path, mode | os.O_CLOEXEC)
        try:
            fcntl.flock(file, lock)
            yield file
        finally:
            os.close(file)


def open_read_only(database: Path, timeout: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Open a database and its log for reading.

    Changes nothing, except that SQLite rolls back a transaction that a crash left in a rollback journal.
    """
    how = "rw" if _size(database, "-journal") else "ro"
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode={how}", uri=True, timeout=timeout)


def open_untouched(database: Path, timeout: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Open a database as `open_read_only` does, without creating files next to it."""
    if _is_logged(database) and not database.with_name(f"{database.name}-wal").exists():
        # No process has it open, and SQLite would create a log even to read.
        return sqlite3.connect(f"{database.absolute().as_uri()}?immutable=1", uri=True)
    return open_read_only(database, timeout)


def _is_logged(database: Path) -> bool:
    """Tell whether a file says that it has a WAL."""
    facts = database.stat()
    return os.pread(_descriptor(database, facts.st_dev, facts.st_ino), _HEADER, 0)[_HEADER - 2 :] == b"\2\2"


@cache
def _descriptor(database: Path, device: int, inode: int) -> int:
    """Open a file for good: closing any descriptor of it drops all locks of this process on it, also SQLite's."""
    del device, inode
    return os.open(database, os.O_RDONLY | os.O_CLOEXEC)


def _require_sound(database: Path) -> None:
    with closing(open_read_only(database)) as db:
        wrong = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0]).splitlines()[-1]
    if wrong != "ok":
        raise sqlite3.DatabaseError(f"{wrong}, even with its log")


def _has_log(database: Path) -> bool:
    return _size(database, "-wal") > 0 or _size(database, "-journal") > 0


def _size(database: Path, end: str) -> int:
    try:
        return database.with_name(f"{database.name}{end}").stat().st_size
    except FileNotFoundError:
        return 0


def generation_of(db: sqlite3.Connection) -> Generation | None:
    """Return the generation of a database; None in a new one."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone():
        return None
    row = db.execute(READ).fetchone()
    return None if row is None else Generation(str(row[0]), int(row[1]))


def begin_incarnation(db: sqlite3.Connection, after: int) -> Generation:
    """Start a new incarnation, as after a restore: the record next to the database is no longer valid.

    after: count on from this generation, if the database's own is lower
    """
    row = db.execute(
        "UPDATE incarnation SET incarnation = ?, generation = max(generation, ?) + 1 RETURNING incarnation, generation",
        (secrets.token_hex(16), after),
    ).fetchone()
    return Generation(str(row[0]), int(row[1]))


def _is_new(db: sqlite3.Connection) -> bool:
    return not db.execute("SELECT 1 FROM sqlite_master").fetchone()


def _check(noted: GenerationRecord) -> str:
    return digest(" ".join(map(str, noted)).encode())[:16]


def _record(noted: GenerationRecord) -> bytes:
    record = {
        "incarnation": noted.incarnation,
        "generation": noted.number,
        "checkpointed": noted.checkpointed,
        "check": _check(noted),
    }
    return json.dumps(record).encode().ljust(_RECORD_BYTES - 1) + b"\n"
