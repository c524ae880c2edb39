"""An append-only SQLite file whose events are chained by HMAC-SHA256 under a key outside it.

Uses sqlite3 itself, unlike the services' databases: the schema is SQL for auditors, with triggers that keep it
append-only, and every connection waits for the disk (synchronous=EXTRA).
"""

from __future__ import annotations

import hashlib
import hmac
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
from typing import NamedTuple

from fl_core.errors import StateError
from privacy.ledger import key as ledger_key
from service_core.storage.disk import disk_error
from service_core.storage.migration import migrate

SCHEMA_VERSION = 2
_CHAIN_VERSION = "2"
"""Of how events are chained, part of the chain's key; a later version of the schema leaves it as it is."""
UNKEYED = 1
"""The version whose events were chained by SHA-256 alone."""
_IN_EVERY_VERSION = ("meta", "collection", "budget", "entry", "mechanism", "event")
GENESIS = "0" * 64
_FACTS = ("schema_version", "ledger_id", "key", "unkeyed")
_BUSY_S = 60.0
_PASSING = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")
_OF_DISK = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN")
"""Errors that say nothing against the file."""


class Event(NamedTuple):
    """One event as the file has it; entry: what it moves, None where it is about no entry."""

    seq: int
    entry: str | None
    subject: str
    state: str
    detail: str
    created_at: str


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The end of the chain of events: number of the last one and its hash."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq} {self.hash}"


START = ChainHead(0, GENESIS)


class HashChain:
    """The file, mode 0600, its transactions, and the chain of its events; key: the secret's file, beside it by default.

    Guarantees: what a transaction wrote is on the disk when it ends; an event that was changed, removed from the middle
    or written without the key is found by `_follow`. A file from before the key is checked, and brought under one.
    """

    def __init__(self, file: Path, key: Path | None = None, older: bool = False) -> None:
        """Open or make the file. older: also a copy from before the key, where the key has a later one.

        Raises StateError: E-BUDGET-14 without its key, E-BUDGET-07 on an unkeyed file that was changed, E-BUDGET-08 on
        an unkeyed one that was put back, E-STATE-22 on a newer version or another form.
        """
        self._file, self.key_file = file, key or ledger_key.beside(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        with self._damage():
            self._migrate(older)
            facts = self._facts()
            if set(facts) != set(_FACTS):
                raise self.changed(f"table meta holds {sorted(facts)}, not {sorted(_FACTS)}")
            used = ledger_key.require(self.key_file)
            self.secret = used.secret
            self.units_key = facts["key"].encode()
            self._unkeyed = int(facts["unkeyed"])
            self._mac_key = derived(self.secret, facts)
            if used.migrating:
                self._note_migrated(used)

    @property
    def file(self) -> Path:
        return self._file

    @property
    def migrated(self) -> bool:
        """Tell whether it began before there was a key: units of that time are known by other digests as well."""
        return self._unkeyed > 0

    def events(self) -> list[tuple[int, str, str, str, str]]:
        """List (seq, subject, state, detail, time) in order."""
        with self._reading() as db:
            rows = db.execute("SELECT seq, subject, state, detail, created_at FROM event ORDER BY seq").fetchall()
        return [(int(a), str(b), str(c), str(d), str(e)) for a, b, c, d, e in rows]

    def head(self) -> ChainHead:
        with self._reading() as db:
            return self._head(db)

    def changed(self, what: str) -> StateError:
        return StateError(
            "E-BUDGET-07",
            f"the ledger {self._file.name} was changed, or {self.key_file.name} is not its key: {what}; nothing is "
            "trained until it is restored from a backup",
        )

    def _follow(self, db: sqlite3.Connection, after: ChainHead) -> Iterator[tuple[Event | None, ChainHead]]:
        """Yield the events after a checked head (None where one precedes the key), each with its own head.

        Raises StateError: E-BUDGET-07 on an event that was changed, E-BUDGET-08 when the head itself is gone.
        """
        if after.seq:
            row = db.execute("SELECT hash FROM event WHERE seq=?", (after.seq,)).fetchone()
            if row is None or row[0] != after.hash:
                raise rolled_back(after.seq, self._head(db).seq)
        rows = db.execute(
            "SELECT seq, entry, subject, state, detail, created_at, prev_hash, hash FROM event WHERE seq>? "
            "ORDER BY seq",
            (after.seq,),
        )
        head = after
        for *fields, previous, found in rows:
            event = Event(*fields)
            right = self._hash(head.hash, event) if event.seq == head.seq + 1 else None
            if previous != head.hash or found != right:
                raise self.changed(f"event {head.seq + 1} does not follow from event {head.seq}")
            head = ChainHead(event.seq, found)
            yield (event if event.seq > self._unkeyed else None), head
        if head.seq < self._unkeyed or (head.seq == self._unkeyed != 0):
            raise self.changed(f"it ends at event {head.seq}, before it came under its key")

    def _hash(self, previous: str, event: Event) -> str:
        if event.seq <= self._unkeyed:
            return unkeyed_hash(previous, event)
        return keyed_hash(self._mac_key, previous, event)

    @staticmethod
    def _head(db: sqlite3.Connection) -> ChainHead:
        row = db.execute("SELECT seq, hash FROM event ORDER BY seq DESC LIMIT 1").fetchone()
        return ChainHead(int(row[0]), str(row[1])) if row else START

    def write_event(
        self, db: sqlite3.Connection, entry: str | None, subject: str, state: str, detail: str, time: str = ""
    ) -> None:
        head = self._head(db)
        write(db, self._mac_key, head, Event(head.seq + 1, entry, subject, state, detail, time or now()))

    # ---- the file -----------------------------------------------------------------------------------------------

    def _migrate(self, older: bool) -> None:
        """Make a new file, or bring one of the version before under the key, which is on the disk before that."""
        from privacy.ledger.migration import bring_under_key

        with self._reading(foreign_keys=False) as db:
            found, key = schema_version(db), None
            if found == 0:
                key = ledger_key.obtain(self.key_file)
            elif found == UNKEYED:
                key = ledger_key.obtain(self.key_file, migrating=True)
                if not key.migrating and not older:
                    raise StateError(
                        "E-BUDGET-08",
                        f"expected a ledger under the key {self.key_file.name}, found a copy of {self._file.name} from "
                        "before that: put the newer one back; if it is lost, accept the spending: silo ledger restore",
                    )
            secret = key.secret if key else b""
            steps = [lambda db: bring_under_key(db, self._file.name, secret)]
            # A version is a fact that the key of the chain depends on: it is written with the others.
            migrate(
                db,
                lambda db: create(db, new_facts()),
                UNKEYED,
                steps,
                _IN_EVERY_VERSION,
                version=schema_version,
                set_version=lambda _db, _version: None,
            )

    def _note_migrated(self, key: ledger_key.Key) -> None:
        """Note that this file is under the key; a crash before this is made up for at the next start."""
        with self._reading() as db:
            for _ in self._follow(db, START):
                pass
        ledger_key.migrated(self.key_file, key)

    def _facts(self) -> dict[str, str]:
        with self._reading() as db:
            return {str(k): str(v) for k, v in db.execute("SELECT key, value FROM meta")}

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Raise E-BUDGET-07 in place of SQLite's own error on a file that it cannot read; passing errors stay."""
        try:
            yield
        except (sqlite3.DatabaseError, KeyError, ValueError) as error:
            if getattr(error, "sqlite_errorname", "").startswith(_PASSING):
                raise
            raise self.changed(f"SQLite cannot read it ({error})") from error

    @contextmanager
    def _reading(self, foreign_keys: bool = True) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None)
        try:
            db.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
            db.execute("PRAGMA synchronous=EXTRA")
            yield db
        finally:
            db.close()

    @contextmanager
    def _transaction(self, foreign_keys: bool = True) -> Iterator[sqlite3.Connection]:
        """Open a transaction; raises UnavailableError (E-STATE-63) when the disk takes nothing: nothing was written."""
        with self._disk(), self._reading(foreign_keys) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                if db.in_transaction:  # SQLite ends it itself when the disk is full
                    db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            name = str(getattr(error, "sqlite_errorname", ""))
            if not name.startswith(_OF_DISK):
                raise
            raise disk_error(self._file, name == "SQLITE_FULL", f"{name}: {error}") from error


def keyed_hash(key: bytes, previous: str, event: Event) -> str:
    text = json.dumps([previous, *event], separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def write(db: sqlite3.Connection, key: bytes, head: ChainHead, event: Event) -> None:
    db.execute(
        "INSERT INTO event(seq,entry,subject,state,detail,created_at,prev_hash,hash) VALUES(?,?,?,?,?,?,?,?)",
        (*event, head.hash, keyed_hash(key, head.hash, event)),
    )


def unkeyed_hash(previous: str, event: Event) -> str:
    fields = [previous, event.entry or "", event.subject, event.state, event.detail, event.created_at]
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()


def derived(secret: bytes, facts: dict[str, str]) -> bytes:
    """Derive the key of the chain: it depends on all other facts of the file, so none can be changed."""
    text = json.dumps(["chain", _CHAIN_VERSION, *(facts[name] for name in _FACTS[1:])]).encode()
    return hmac.new(secret, text, hashlib.sha256).digest()


def schema_version(db: sqlite3.Connection) -> int:
    """Return the version that a file names, 0 of one without facts; raises KeyError or ValueError on wrong ones."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
        return 0
    return int(dict(db.execute("SELECT key, value FROM meta"))["schema_version"])


def new_facts() -> dict[str, str]:
    """Return the facts of a new file. key: of the digests of units   unkeyed: events before there was a key."""
    return dict(zip(_FACTS, (str(SCHEMA_VERSION), secrets.token_hex(16), secrets.token_hex(32), "0"), strict=True))


def create(db: sqlite3.Connection, facts: dict[str, str]) -> None:
    """Make the tables, inside a transaction."""
    for statement in statements():
        db.execute(statement)
    db.executemany("INSERT INTO meta VALUES(?,?)", facts.items())


def now() -> str:
    return datetime.now(UTC).isoformat()


def statements() -> Sequence[str]:
    """Split the schema into statements: a trigger holds semicolons of its own."""
    found, pending = [], ""
    for line in files("privacy.ledger").joinpath("schema.sql").read_text().splitlines():
        if line.startswith("--"):
            continue
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            found.append(pending)
            pending = ""
    return found


def rolled_back(seen: int, own: int) -> StateError:
    return StateError(
        "E-BUDGET-08",
        f"expected a ledger that goes on after event {seen}, found one that ends at {own}: an older copy "
        "was put back; nothing is trained until the newer one is restored",
    )
