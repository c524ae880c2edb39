"""A hash chain in an append-only SQLite table, which shows every later change.

The table is `event`: `seq` (INTEGER PRIMARY KEY AUTOINCREMENT), the owner's columns, `prev_hash` and `hash`. The owner
defines the hash function and its key. Uses sqlite3 directly: the schema is SQL for auditors, with triggers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from service_core.storage.disk import disk_error

BUSY_S = 60.0
PASSING = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN")
"""Errors that do not mean a damaged file."""
Row = tuple[Any, ...]
"""Row number and the owner's columns."""


class ChainHead(NamedTuple):
    """The end of a chain: number and hash of the last row."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq} {self.hash}"


class BrokenChainError(Exception):
    """A row that breaks the chain. after: head before it   row: the row with its `prev_hash` and `hash`."""

    def __init__(self, after: ChainHead, row: Row) -> None:
        super().__init__(f"row {row[0]} does not follow from row {after.seq}")
        self.after = after
        self.row = row


@dataclass(frozen=True, slots=True)
class Chain:
    """The chain of one kind of file. columns: the owner's   start: head of an empty chain.

    hash_of: returns the hash of a row, given the previous hash and the row
    """

    columns: tuple[str, ...]
    hash_of: Callable[[str, Row], str]
    start: ChainHead

    def head(self, db: sqlite3.Connection) -> ChainHead:
        row = db.execute("SELECT seq, hash FROM event ORDER BY seq DESC LIMIT 1").fetchone()
        return ChainHead(int(row[0]), str(row[1])) if row else self.start

    def append(self, db: sqlite3.Connection, values: Row, number: int | None = None) -> ChainHead:
        """Append a row within a transaction. number: of the row; by default the next one."""
        before = self.head(db)
        row = (before.seq + 1 if number is None else number, *values)
        head = ChainHead(row[0], self.hash_of(before.hash, row))
        names = f"seq,{','.join(self.columns)},prev_hash,hash"
        marks = ",".join("?" * (len(row) + 2))
        db.execute(f"INSERT INTO event({names}) VALUES({marks})", (*row, before.hash, head.hash))
        return head

    def holds(self, db: sqlite3.Connection, head: ChainHead) -> bool:
        row = db.execute("SELECT hash FROM event WHERE seq=?", (head.seq,)).fetchone()
        return row is not None and row[0] == head.hash

    def follow(self, db: sqlite3.Connection, after: ChainHead) -> Iterator[tuple[Row, ChainHead]]:
        """Yield the rows after a head, each with its head; raises BrokenChainError at the first broken one."""
        query = f"SELECT seq,{','.join(self.columns)},prev_hash,hash FROM event WHERE seq>? ORDER BY seq"  # noqa: S608
        head = after
        for *fields, previous, hash in db.execute(query, (after.seq,)):
            row = tuple(fields)
            if row[0] != head.seq + 1 or previous != head.hash or hash != self.hash_of(head.hash, row):
                raise BrokenChainError(head, (*row, previous, hash))
            head = ChainHead(row[0], hash)
            yield row, head


@contextmanager
def transaction(db: sqlite3.Connection, file: Path) -> Iterator[None]:
    """Run the block in a write transaction; raises as `sqlite_disk_errors` after rolling back."""
    with sqlite_disk_errors(file):
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # SQLite rolls back itself when the disk is full
                db.execute("ROLLBACK")
            raise


@contextmanager
def sqlite_disk_errors(file: Path) -> Iterator[None]:
    """Replace SQLite errors that do not mean a damaged file by UnavailableError (E-STATE-63)."""
    try:
        yield
    except sqlite3.OperationalError as error:
        name = str(getattr(error, "sqlite_errorname", ""))
        if not name.startswith(PASSING):
            raise
        raise disk_error(file, name == "SQLITE_FULL", f"{name}: {error}") from error
