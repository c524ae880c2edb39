"""A ledger from before there was a key: checked against its own events, then carried on under the key.

Its events stay, since others have signed for their hashes; one event under the key repeats all that they and the rows
beside them say.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from fl_core.errors import StateError
from privacy.accounting.accountant import Filter
from privacy.ledger import hash_chain
from privacy.ledger.account import Account, Budget, Entry, UnsoundError, mechanism_rows, planned_of
from privacy.ledger.hash_chain import START, UNKEYED, ChainHead, Event
from privacy.ledger.tables import digest_of_units, insert


def bring_under_key(db: sqlite3.Connection, name: str, secret: bytes) -> None:
    """Check an unkeyed ledger and rewrite it, inside a transaction without foreign keys.

    Raises StateError (E-BUDGET-07) on an event that was changed, and on rows that differ from the events.
    """
    facts = {str(k): str(v) for k, v in db.execute("SELECT key, value FROM meta")}
    events, head = _events(db, name)
    units = [(bytes(d), str(c)) for d, c in db.execute("SELECT digest, collection FROM unit_digest")]
    try:
        account = _Reader(db).read(events)
        strangers = {c for _, c in units} - set(account.collections)
        if strangers:
            raise UnsoundError(f"units stand in {sorted(strangers)}, which no event registers")
        account.units = {c: digest_of_units(d for d, of in units if of == c) for c in account.collections}
    except (UnsoundError, ValueError, KeyError, TypeError, IndexError, ArithmeticError, RecursionError) as error:
        raise StateError(
            "E-BUDGET-07",
            f"expected rows of the ledger {name} as its events have them, found a difference: {error}; restore the "
            "file from a backup",
        ) from error
    for kind, what in db.execute("SELECT type, name FROM sqlite_master WHERE type IN('view','table')").fetchall():
        if not what.startswith("sqlite_"):
            db.execute(f'DROP {kind} "{what}"')
    made = {**hash_chain.new_facts(), "ledger_id": facts["ledger_id"], "key": facts["key"], "unkeyed": str(len(events))}
    hash_chain.create(db, made)
    insert(db, account.rows())
    db.executemany("INSERT INTO unit_digest VALUES(?,?)", units)
    previous = START.hash
    for event in events:
        found = hash_chain.unkeyed_hash(previous, event)
        db.execute(
            "INSERT INTO event(seq,entry,subject,state,detail,created_at,prev_hash,hash) VALUES(?,?,?,?,?,?,?,?)",
            (*event, previous, found),
        )
        previous = found
    if events:
        said = Event(head.seq + 1, None, f"from schema {UNKEYED}", "MIGRATED", account.snapshot(), hash_chain.now())
        hash_chain.write(db, hash_chain.derived(secret, made), head, said)


def _events(db: sqlite3.Connection, name: str) -> tuple[list[Event], ChainHead]:
    head, found = START, []
    rows = db.execute("SELECT seq, entry, subject, state, detail, created_at, prev_hash, hash FROM event ORDER BY seq")
    for *fields, previous, digest in rows:
        event = Event(*fields)
        right = (
            event.seq == head.seq + 1 and previous == head.hash and digest == hash_chain.unkeyed_hash(previous, event)
        )
        if not right:
            raise StateError(
                "E-BUDGET-07", f"event {event.seq} of the ledger {name} was changed: restore the file from a backup"
            )
        head = ChainHead(event.seq, digest)
        found.append(event)
    return found, head


class _Reader:
    """The rows of an unkeyed ledger: each is used up by the event that bears it out, and none may be left."""

    def __init__(self, db: sqlite3.Connection) -> None:
        def rows(what: str) -> list[Any]:
            return db.execute(f"SELECT {what}").fetchall()

        versions = rows("fingerprint, collection, records, units FROM dataset_version")
        entries = rows("id, collection, fingerprint, run, manifest, round, attempt, kind FROM entry")
        self._collections = dict(rows("name, unit FROM collection"))
        self._versions = {fingerprint: facts for fingerprint, *facts in versions}
        self._budgets = rows("collection, epsilon, delta, filter_order, operator, reason FROM budget ORDER BY seq")
        self._entries = {row[0]: row for row in entries}
        self._mechanisms: dict[str, list[Any]] = {}
        for row in rows("entry, idx, purpose, noise, rate, steps FROM mechanism ORDER BY entry, idx"):
            self._mechanisms.setdefault(row[0], []).append(row)
        self._kept = rows("fingerprint, name, value, created_at FROM kept")

    def read(self, events: Sequence[Event]) -> Account:
        """Follow the events; raises UnsoundError, or what reading a row that is none raises."""
        account = Account()
        for event in events:
            if event.entry is not None:
                account.apply(event._replace(detail=self._made(event)) if event.entry in self._entries else event)
            elif event.state == "REGISTERED":
                account.apply(event._replace(detail=self._version(event)))
            elif event.state == "BUDGET":
                account.apply(event._replace(detail=self._budget(event)))
            elif event.state in ("RESTORED", "REFUSED"):
                account.apply(event)
            else:
                raise UnsoundError(f"event {event.seq}, {event.state}, is about no entry")
        left = {
            "entry": self._entries,
            "mechanism": self._mechanisms,
            "budget": self._budgets,
            "dataset_version": self._versions,
            "collection": set(self._collections) - set(account.collections),
        }
        for table, rows in left.items():
            if rows:
                raise UnsoundError(f"table {table} has rows that no event made: {sorted(map(str, rows))[0]}")
        account.kept = {(f, name): (value, at) for f, name, value, at in self._kept}
        return account

    def _made(self, event: Event) -> str:
        id, collection, fingerprint, run, manifest, round, attempt, kind = self._entries.pop(event.entry)
        named = f"{run}/{round}/{kind}/{attempt}/{collection}"
        if kind == "restored":
            named = f"restored/{round}/{run.removeprefix('restored ')[:16]}/{collection}"
        planned = planned_of(json.loads(event.detail))
        entry = Entry(id, collection, fingerprint, run, manifest, round, attempt, kind, "", planned)
        if named != id:
            raise UnsoundError(f"the row of entry {id!r} is that of {named!r}")
        if list(map(repr, mechanism_rows(entry))) != list(map(repr, self._mechanisms.pop(id, []))):
            raise UnsoundError(f"the mechanisms of {id!r} are not those of event {event.seq}")
        return entry.detail()

    def _version(self, event: Event) -> str:
        collection, records, units = self._versions.pop(event.detail)
        if collection != event.subject:
            raise UnsoundError(f"version {event.detail} stands in {collection!r}, registered in {event.subject!r}")
        facts = {"fingerprint": event.detail, "unit": self._collections[collection], "records": records}
        return json.dumps(facts | {"units": units, "digests": ""})

    def _budget(self, event: Event) -> str:
        collection, epsilon, delta, order, operator, reason = self._budgets.pop(0)
        said = f"epsilon {epsilon!r} delta {delta!r} by {operator}: {reason}"
        if (collection, said) != (event.subject, event.detail):
            raise UnsoundError(f"the budget of {collection!r}, {said!r}, is not that of event {event.seq}")
        return Budget(collection, Filter(epsilon, delta, order), operator, reason, "").detail()
