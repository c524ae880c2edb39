"""A ledger's tables: writing rows, and comparing rows and schema with what they must be."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from privacy.ledger import hash_chain
from privacy.ledger.account import Account, Rows

_KEYS: Mapping[str, int] = {"collection": 1, "dataset_version": 1, "budget": 1, "entry": 1, "mechanism": 2, "kept": 2}
"""How many of the first columns of each table name a row."""


def insert(db: sqlite3.Connection, rows: Rows) -> None:
    for table, made in rows.items():
        for row in made:
            db.execute(f"INSERT INTO {table} VALUES({','.join('?' * len(row))})", row)


def digest_of_units(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def differences(db: sqlite3.Connection, account: Account) -> Iterator[str]:
    yield from schema_differences(db)
    for table, made in account.rows().items():
        wanted = {row[: _KEYS[table]]: row for row in made}
        for row in db.execute(f"SELECT * FROM {table}"):  # noqa: S608  # one of ours
            right = wanted.pop(row[: _KEYS[table]], None)
            if repr(right) != repr(row):
                yield f"table {table}: expected {right or 'no such row'}, found {row}"
        for row in wanted.values():
            yield f"table {table}: expected {row}, found no such row"
    yield from unit_differences(db, account)
    if stray := db.execute("SELECT count(*) FROM event WHERE seq<1").fetchone()[0]:
        yield f"table event: expected events from 1 on, found {stray} before"


def unit_differences(db: sqlite3.Connection, account: Account) -> Iterator[str]:
    found: dict[str, list[bytes]] = {}
    for digest, collection in db.execute("SELECT digest, collection FROM unit_digest"):
        if isinstance(digest, bytes):
            found.setdefault(str(collection), []).append(digest)
        else:
            yield f"table unit_digest: expected a digest, found {digest!r}"
    for collection in sorted({*found, *account.units}):
        if account.units.get(collection) != digest_of_units(found.get(collection, [])):
            yield f"table unit_digest: the units of {collection!r} are not those that were registered"


def schema_differences(db: sqlite3.Connection) -> Iterator[str]:
    found, right = _schema_of(db), _schema()
    for key in sorted({*found, *right}):
        if found.get(key) != right.get(key):
            how = "is missing" if key not in found else "was changed" if key in right else "was added"
            yield f"{key[0]} {key[1]} {how}"


@cache
def _schema() -> Mapping[tuple[str, str], tuple[str, str]]:
    db = sqlite3.connect(":memory:")
    try:
        for statement in hash_chain.statements():
            db.execute(statement)
        return _schema_of(db)
    finally:
        db.close()


def _schema_of(db: sqlite3.Connection) -> dict[tuple[str, str], tuple[str, str]]:
    rows = db.execute("SELECT type, name, tbl_name, coalesce(sql,'') FROM sqlite_master")
    # Between words any white space is the same SQL: a schema that is only laid out anew is no change.
    return {(str(kind), str(name)): (str(table), " ".join(str(sql).split())) for kind, name, table, sql in rows}
