"""Migration of ledgers of version 1, which had no key: they are checked against their own events.

Their events stay, since others have signed their hashes. The first event under the key repeats the contents of all
events and rows.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence

from fl_core.errors import StateError
from privacy.accounting.accountant import PrivacyFilter
from privacy.ledger.account import Account, Budget, InvalidEventError, LedgerEntry, plain, planned_of
from privacy.ledger.event_chain import GENESIS, LedgerEvent, unkeyed_hash

_ENTRY = "entry"


def snapshot(db: sqlite3.Connection, name: str) -> str:
    """Return the contents of a ledger of version 1, for the first event under a key; empty without events.

    Raises StateError (E-BUDGET-07) if an event was changed, or if rows differ from the events.
    """
    events: list[LedgerEvent] = []
    previous = GENESIS
    rows = db.execute("SELECT seq, entry, subject, state, detail, created_at, prev_hash, hash FROM event ORDER BY seq")
    for *fields, before, digest in rows:
        event = LedgerEvent(*fields)
        if (event.seq, before, digest) != (len(events) + 1, previous, unkeyed_hash(previous, event)):
            raise _edited(name, f"event {event.seq} was changed")
        events.append(event)
        previous = digest
    try:
        return _say(_read(db, events)) if events else ""
    except (InvalidEventError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise _edited(name, f"its rows do not match its events ({type(error).__name__}: {error})") from error


def _read(db: sqlite3.Connection, events: Sequence[LedgerEvent]) -> Account:
    """Replay the events. Match each row with the event that created it; no row may be left."""
    made = _rows(db)
    account = Account()
    for event in events:
        if event.state in ("INTENT", "REFUSED") and event.entry is not None:
            stated = plain(planned_of(json.loads(event.detail)))
            event = event._replace(detail=made[_ENTRY, event.entry, repr(stated)].pop(0))
        elif event.state in ("REGISTERED", "BUDGET"):
            event = event._replace(detail=made[event.state, event.subject, event.detail].pop(0))
        account.apply(event)
    if left := sorted(str(key) for key, details in made.items() if details):
        raise InvalidEventError(f"no event made {left[0]}")
    if strangers := {c for (c,) in db.execute("SELECT name FROM collection")} ^ set(account.collections):
        raise InvalidEventError(f"no version of {sorted(strangers)} is registered")
    units: dict[str, list[bytes]] = {c: [] for c in account.collections}
    for digest, collection in db.execute("SELECT digest, collection FROM unit_digest"):
        units[collection].append(bytes(digest))
    account.units = {c: hashlib.sha256(b"".join(sorted(digests))).hexdigest() for c, digests in units.items()}
    kept = db.execute("SELECT fingerprint, name, value, created_at FROM kept")
    account.stored_values = {(fingerprint, what): (value, at) for fingerprint, what, value, at in kept}
    return account


def _rows(db: sqlite3.Connection) -> dict[tuple[str, str, str], list[str]]:
    """Return the rows that events created, in the present form, by the values in their events."""
    made: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    mechanisms = defaultdict(list)
    for id, *release in db.execute("SELECT entry, purpose, noise, rate, steps FROM mechanism ORDER BY entry, idx"):
        mechanisms[id].append(release)
    for id, collection, fingerprint, run, manifest, round, attempt, kind, at in db.execute(
        "SELECT id, collection, fingerprint, run, manifest, round, attempt, kind, created_at FROM entry"
    ):
        planned = planned_of(mechanisms.pop(id))
        entry = LedgerEntry(id, collection, fingerprint, run, manifest, round, attempt, kind, at, planned)
        names = f"{run}/{round}/{kind}/{attempt}/{collection}"
        if kind == "restored":
            names = f"restored/{round}/{run.removeprefix('restored ')[:16]}/{collection}"
        made[_ENTRY, names, repr(plain(planned))].append(entry.detail())
    if mechanisms:
        raise InvalidEventError(f"the mechanisms of {sorted(mechanisms)[0]} have no entry")
    for fingerprint, collection, unit, records, units in db.execute(
        "SELECT v.fingerprint, v.collection, c.unit, v.records, v.units FROM dataset_version v "
        "JOIN collection c ON c.name = v.collection"
    ):
        version = {"fingerprint": fingerprint, "unit": unit, "records": records, "units": units, "digests": ""}
        made["REGISTERED", collection, fingerprint].append(json.dumps(version))
    for collection, epsilon, delta, order, operator, reason in db.execute(
        "SELECT collection, epsilon, delta, filter_order, operator, reason FROM budget ORDER BY seq"
    ):
        budget = Budget(collection, PrivacyFilter(epsilon, delta, order), operator, reason, "")
        made["BUDGET", collection, f"epsilon {epsilon!r} delta {delta!r} by {operator}: {reason}"].append(
            budget.detail()
        )
    return made


def _say(account: Account) -> str:
    facts = {
        "collections": account.collections,
        "versions": {f: [v.collection, v.records, v.units, v.created_at] for f, v in account.versions.items()},
        "units": account.units,
        "budgets": [[b.collection, b.detail(), b.created_at] for b in account.budgets],
        "kept": [[*key, *value] for key, value in account.stored_values.items()],
        "entries": [[e.id, e.state, e.detail(), e.created_at] for e in account.entries.values()],
        "forgiven": sorted(account.forgiven),
        "restored": account.restored,
    }
    return json.dumps(facts)


def _edited(name: str, what: str) -> StateError:
    return StateError("E-BUDGET-07", f"the ledger {name} was edited or damaged: {what}. Restore it from a backup")
