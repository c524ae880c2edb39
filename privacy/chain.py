"""An append-only SQLite file whose events are chained by SHA-256: what a ledger is kept in."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from fl_core.errors import StateError

SCHEMA_VERSION = "1"
GENESIS = "0" * 64
_BUSY_S = 60.0


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the chain of events: number of the last one and its hash."""

    seq: int
    hash: str

    def __str__(self) -> str:
        """Write it as an event names a head that it accepts."""
        return f"{self.seq} {self.hash}"


class Chain:
    """The file, mode 0600, its transactions, and the chain of its events.

    Guarantees: what a transaction wrote is on the disk when it ends; an event that was changed or removed is found by
    `verify`, and so is an older copy of the file by whoever remembers its head.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        with self._transaction() as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
                for statement in _statements():
                    db.execute(statement)
                facts = {
                    "schema_version": SCHEMA_VERSION,
                    "ledger_id": secrets.token_hex(16),
                    "key": secrets.token_hex(32),
                }
                db.executemany("INSERT INTO meta VALUES(?,?)", facts.items())
        if (found := self._meta("schema_version")) != SCHEMA_VERSION:
            raise StateError(
                "E-STATE-70", f"expected a ledger of schema {SCHEMA_VERSION}, found {found}: use the newer software"
            )

    def events(self) -> list[tuple[int, str, str, str, str]]:
        """List (seq, subject, state, detail, time) in order."""
        with self._reading() as db:
            rows = db.execute("SELECT seq, subject, state, detail, created_at FROM event ORDER BY seq").fetchall()
        return [(int(a), str(b), str(c), str(d), str(e)) for a, b, c, d, e in rows]

    def head(self) -> Head:
        """Return the end of the chain."""
        with self._reading() as db:
            return self._head(db)

    def verify(self, seen: Head | None = None) -> int:
        """Check the chain from its beginning and return the number of events.

        seen: a head that was signed before. Raises StateError: E-BUDGET-07 on an event that was changed, E-BUDGET-08
        when the ledger ends before, or differs at, a head that others have seen: an older copy was put back.
        """
        previous, count, forgiven = GENESIS, 0, set[str]()
        with self._reading() as db:
            rows = db.execute(
                "SELECT seq, coalesce(entry,''), subject, state, detail, created_at, prev_hash, hash FROM event "
                "ORDER BY seq"
            ).fetchall()
        at: dict[int, str] = {}
        for seq, entry, subject, state, detail, time, prev, found in rows:
            if prev != previous or found != _hash(prev, [entry, subject, state, detail, time]):
                raise StateError("E-BUDGET-07", f"event {seq} of the ledger {self._file.name} was changed: restore it")
            previous, count = found, count + 1
            at[int(seq)] = found
            if state == "RESTORED":
                forgiven.add(detail)
        if seen is not None and seen.seq and at.get(seen.seq) != seen.hash and str(seen) not in forgiven:
            raise StateError(
                "E-BUDGET-08",
                f"expected a ledger that goes on after event {seen.seq}, found one that ends at {count}: an older copy "
                "was put back; nothing is trained until the newer one is restored",
            )
        return count

    @staticmethod
    def _head(db: sqlite3.Connection) -> Head:
        row = db.execute("SELECT seq, hash FROM event ORDER BY seq DESC LIMIT 1").fetchone()
        return Head(int(row[0]), str(row[1])) if row else Head(0, GENESIS)

    def _event(self, db: sqlite3.Connection, entry: str | None, subject: str, state: str, detail: str) -> None:
        previous, time = self._head(db).hash, now()
        digest = _hash(previous, [entry or "", subject, state, detail, time])
        db.execute(
            "INSERT INTO event(entry,subject,state,detail,prev_hash,hash,created_at) VALUES(?,?,?,?,?,?,?)",
            (entry, subject, state, detail, previous, digest, time),
        )

    def _meta(self, key: str) -> str:
        with self._reading() as db:
            return str(db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()[0])

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None)
        try:
            db.execute("PRAGMA foreign_keys=ON")
            db.execute("PRAGMA synchronous=EXTRA")
            yield db
        finally:
            db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")


def _hash(previous: str, fields: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([previous, *fields], separators=(",", ":")).encode()).hexdigest()


def now() -> str:
    """Return the time in UTC, as the ledger writes it."""
    return datetime.now(UTC).isoformat()


def _statements() -> list[str]:
    """Split the schema into statements: a trigger holds semicolons of its own."""
    found, pending = [], ""
    for line in files("privacy").joinpath("ledger_schema.sql").read_text().splitlines():
        if line.startswith("--"):
            continue
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            found.append(pending)
            pending = ""
    return found
