"""An append-only SQLite file whose events are chained by HMAC-SHA256 under a key outside it.

The chain is that of `service_core.storage.chain`; every connection waits for the disk (synchronous=EXTRA).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from fl_core.errors import StateError
from privacy.ledger import key as ledger_key
from service_core.storage.chain import (
    BUSY_S,
    PASSING,
    BrokenChainError,
    Chain,
    ChainHead,
    sqlite_disk_errors,
    transaction,
)
from service_core.storage.migration import migrate, statements
from service_core.storage.private_files import sync_path
from service_core.storage.unfinished import require_finished

SCHEMA_VERSION = 4
_CHAIN_VERSION = "2"
"""Version of the chaining, an input of the chain's key; independent of the version of the schema."""
_TABLES = ("meta", "event", "unit_digest")
GENESIS = "0" * 64
START = ChainHead(0, GENESIS)
_FACTS = ("schema_version", "ledger_id", "key", "unkeyed")
"""Names in `meta`. unkeyed: number of events of version 1, without a key. The chain's key depends on all but the first.
"""
Snapshot = Callable[[sqlite3.Connection, str], str]


class LedgerEvent(NamedTuple):
    """One event of the file. entry: the entry that it changes, if any."""

    seq: int
    entry: str | None
    subject: str
    state: str
    detail: str
    created_at: str


class EventChain:
    """The file (mode 0600), its transactions and its chain of events. key: the secret's file, by default next to it.

    Guarantees: a transaction is on the disk when it ends; `follow` finds an event that was changed, removed from the
    middle or written without the key. A file of version 1, which had no key, is checked and continued under a key.
    """

    def __init__(self, file: Path, key: Path | None, snapshot: Snapshot, older: bool = False) -> None:
        """Open, create or migrate the file.

        snapshot: returns the contents of a file of version 1, for its first event under a key   older: also accept a
        copy of version 1 although a key exists, and so a later file.

        Raises StateError: E-BUDGET-14 without its key, E-BUDGET-07 on a damaged file, E-BUDGET-08 on a restored copy of
        version 1, E-STATE-22 on a file of a newer version or of another form, E-STATE-26 in a home with an interrupted
        restore.
        """
        require_finished(file.parent)
        self.file, self.key_file = file, key or ledger_key.key_path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        with self.damage():
            self._migrate(snapshot, older)
            with self.reading() as db:
                facts = {str(k): str(v) for k, v in db.execute("SELECT key, value FROM meta")}
            if set(facts) != set(_FACTS):
                raise self.changed(f"table meta holds {sorted(facts)}, not {sorted(_FACTS)}")
            self.secret = ledger_key.require(self.key_file)
            self.units_key = facts["key"].encode()
            self.unkeyed = int(facts["unkeyed"])
            self._mac_key = derive_key(self.secret, facts)

    @property
    def events(self) -> Chain:
        return Chain(LedgerEvent._fields[1:], lambda previous, row: self._hash(previous, LedgerEvent(*row)), START)

    def changed(self, what: str) -> StateError:
        return StateError(
            "E-BUDGET-07",
            f"the ledger {self.file.name} was changed, or {self.key_file.name} is not its key: {what}. Training "
            "stops until the ledger is restored from a backup",
        )

    def follow(self, db: sqlite3.Connection, after: ChainHead) -> Iterator[tuple[LedgerEvent, ChainHead]]:
        """Yield the events after a checked head, each with its own head.

        Raises StateError: E-BUDGET-07 if an event was changed, E-BUDGET-08 if the file does not have the head.
        """
        if after.seq and not self.events.holds(db, after):
            raise rolled_back(after.seq, self.events.head(db).seq)
        head = after
        try:
            for row, head in self.events.follow(db, after):
                yield LedgerEvent(*row), head
        except BrokenChainError as broken:
            last = broken.after.seq
            raise self.changed(f"event {last + 1} does not follow from event {last}") from None
        if 0 < self.unkeyed >= head.seq:
            raise self.changed(f"it ends at event {head.seq}, before its key was created")

    def _hash(self, previous: str, event: LedgerEvent) -> str:
        return (
            unkeyed_hash(previous, event) if event.seq <= self.unkeyed else keyed_hash(self._mac_key, previous, event)
        )

    def write(
        self, db: sqlite3.Connection, entry: str | None, subject: str, state: str, detail: str, time: str = ""
    ) -> None:
        """Append an event within a transaction. entry: the entry that it changes, if any."""
        self.events.append(db, (entry, subject, state, detail, time or now()))

    # ---- the file -----------------------------------------------------------------------------------------------

    def _migrate(self, snapshot: Snapshot, older: bool) -> None:
        """Create or migrate the file; its key is on the disk before that.

        The new key of a file of version 1 has a temporary name until the file uses it. Once it has its final name, a
        file of version 1 is known to be an older copy.
        """
        pending = self.key_file.with_name(f"{self.key_file.name}.new")
        with self.reading() as db:
            version = schema_version(db)
            first_key = version == 1 and not (older and self.key_file.exists())
            if first_key and self.key_file.exists():
                raise StateError(
                    "E-BUDGET-08",
                    f"{self.file.name} is a copy from before the key {self.key_file.name} was created: put the newer "
                    "ledger back; if it is lost, accept the spending with `silo ledger restore`",
                )
            if version <= 1:
                ledger_key.obtain(pending if first_key else self.key_file)
            steps = (
                lambda db: self._bring_under(db, pending if first_key else self.key_file, snapshot),
                _rebuild,
                _rebuild,
            )
            migrate(db, _create, steps, _TABLES, version=schema_version, set_version=_set_version)
        if pending.exists():
            pending.unlink() if self.key_file.exists() else pending.replace(self.key_file)
            sync_path(self.key_file.parent)

    def _bring_under(self, db: sqlite3.Connection, key: Path, snapshot: Snapshot) -> None:
        detail = snapshot(db, self.file.name)
        self.unkeyed = self.events.head(db).seq
        _rebuild(db)
        db.execute("INSERT INTO meta VALUES('unkeyed',?)", (str(self.unkeyed),))
        if detail:
            facts = {str(k): str(v) for k, v in db.execute("SELECT key, value FROM meta")}
            self._mac_key = derive_key(ledger_key.require(key), facts)
            self.write(db, None, "from version 1", "MIGRATED", detail)

    @contextmanager
    def damage(self) -> Iterator[None]:
        """Replace SQLite's errors on a damaged file by StateError (E-BUDGET-07); temporary errors pass unchanged."""
        try:
            yield
        except (sqlite3.DatabaseError, KeyError, ValueError) as error:
            if getattr(error, "sqlite_errorname", "").startswith(PASSING):
                raise
            raise self.changed(f"SQLite cannot read it ({error})") from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self.file, timeout=BUSY_S, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous=EXTRA")
            yield db
        finally:
            db.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction; raises UnavailableError (E-STATE-63) on a full disk, after rolling back."""
        with sqlite_disk_errors(self.file), self.reading() as db, transaction(db, self.file):
            yield db


def keyed_hash(key: bytes, previous: str, event: LedgerEvent) -> str:
    text = json.dumps([previous, *event], separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def unkeyed_hash(previous: str, event: LedgerEvent) -> str:
    """Return the hash of an event of version 1."""
    fields = [previous, event.entry or "", event.subject, event.state, event.detail, event.created_at]
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()


def derive_key(secret: bytes, facts: dict[str, str]) -> bytes:
    """Derive the chain's key from the secret and from `meta` without the version, which this protects."""
    text = json.dumps(["chain", _CHAIN_VERSION, *(facts[name] for name in _FACTS[1:])]).encode()
    return hmac.new(secret, text, hashlib.sha256).digest()


def schema_version(db: sqlite3.Connection) -> int:
    """Return the version of a file, 0 without a table `meta`; raises KeyError or ValueError on an invalid table."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
        return 0
    return int(dict(db.execute("SELECT key, value FROM meta"))["schema_version"])


def _set_version(db: sqlite3.Connection, version: int) -> None:
    db.execute("UPDATE meta SET value=? WHERE key='schema_version'", (str(version),))


def _create(db: sqlite3.Connection) -> None:
    for statement in schema_statements():
        db.execute(statement)
    facts = (str(SCHEMA_VERSION), secrets.token_hex(16), secrets.token_hex(32), "0")
    db.executemany("INSERT INTO meta VALUES(?,?)", zip(_FACTS, facts, strict=True))


def _rebuild(db: sqlite3.Connection) -> None:
    """Recreate all tables and views, keeping the events and the digests of units."""
    kept = {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in _TABLES}  # noqa: S608  # our own names
    for kind, name in db.execute("SELECT type, name FROM sqlite_master WHERE type IN('view','table')").fetchall():
        if not name.startswith("sqlite_"):
            db.execute(f'DROP {kind} "{name}"')
    of_triggers = [statement for statement in schema_statements() if statement.startswith("CREATE TRIGGER")]
    for statement in schema_statements():
        if statement not in of_triggers:
            db.execute(statement)
    for name, rows in kept.items():
        for row in rows:
            db.execute(f"INSERT INTO {name} VALUES({','.join('?' * len(row))})", row)
    for statement in of_triggers:  # afterwards: each event would look through all before it
        db.execute(statement)


def schema_differences(db: sqlite3.Connection) -> Iterator[str]:
    """Yield additions, changes and removals in the schema."""
    actual, expected = _schema_of(db), _schema()
    for key in sorted({*actual, *expected}):
        if actual.get(key) != expected.get(key):
            how = "is missing" if key not in actual else "was changed" if key in expected else "was added"
            yield f"{key[0]} {key[1]} {how}"


@cache
def _schema() -> Mapping[tuple[str, str], tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as db:
        for statement in schema_statements():
            db.execute(statement)
        return _schema_of(db)


def _schema_of(db: sqlite3.Connection) -> dict[tuple[str, str], tuple[str, str]]:
    rows = db.execute("SELECT type, name, tbl_name, coalesce(sql,'') FROM sqlite_master")
    # White space between words does not change SQL: another layout of the schema is no difference.
    return {(str(kind), str(name)): (str(table), " ".join(str(sql).split())) for kind, name, table, sql in rows}


def now() -> str:
    return datetime.now(UTC).isoformat()


def schema_statements() -> list[str]:
    return statements(files("privacy.ledger").joinpath("schema.sql").read_text())


def rolled_back(seen: int, last: int) -> StateError:
    return StateError(
        "E-BUDGET-08",
        f"the ledger ends at event {last}, but event {seen} was recorded elsewhere: an older copy was restored. "
        "Training stops until the newer copy is back",
    )
