"""Going on after a ledger was lost: whatever may have been spent since the copy that is left, counts as spent."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence

from fl_core.errors import StateError
from privacy.accounting import Filter, Mechanism, rdp
from privacy.chain import Head, now
from privacy.ledger import Ledger, Planned

EVENTS_PER_ENTRY = 2
"""An entry that was charged has at least so many events: reserved, and started."""


def acknowledge(ledger: Ledger, seen: Head, operator: str) -> dict[str, int]:
    """Accept an older copy of the ledger by charging what it may have forgotten; return charges by collection.

    seen: the head that others have signed for. Every collection is charged as many times its most expensive entry as
    events can be missing; one without any entry, its whole budget. Raises StateError: E-BUDGET-09 when nothing is
    missing, E-BUDGET-04 when no collection with a budget is there to be charged.
    """
    own = ledger.head()
    try:
        ledger.verify(seen)
    except StateError as error:
        if error.code != "E-BUDGET-08":
            raise
    else:
        raise StateError("E-BUDGET-09", f"expected a ledger that lacks event {seen.seq}, found that it has it")
    missing = seen.seq - own.seq if own.seq < seen.seq else seen.seq
    times = math.ceil(missing / EVENTS_PER_ENTRY)
    found: dict[str, int] = {}
    for name in ledger.collections():
        budget = ledger.budget(name)
        if budget is None:
            continue
        worst = _worst(ledger, name, budget)
        _charge(ledger, name, worst or [_all_of(budget)], times if worst else 1, seen)
        found[name] = times if worst else 1
    if not found:
        raise StateError("E-BUDGET-04", "expected a collection with a budget to charge, found none: register the data")
    with ledger._transaction() as db:
        ledger._event(db, None, f"restored by {operator}", "RESTORED", str(seen))
    return found


def _worst(ledger: Ledger, name: str, budget: Filter) -> list[Planned]:
    """Return what the most expensive entry of a collection released; nothing where there is no entry."""
    made = [planned for _, _, planned in ledger.entries(name)]
    return max(made, key=lambda p: float(rdp([x.mechanism for x in p], [budget.order])[0]), default=[])


def _all_of(budget: Filter) -> Planned:
    """Return a release that takes the whole budget: RDP alpha / (2 z^2) = its bound."""
    return Planned("everything", Mechanism(math.sqrt(budget.order / (2 * budget.bound))))


def _charge(ledger: Ledger, name: str, planned: Sequence[Planned], times: int, seen: Head) -> None:
    """Write entries that were never admitted, because they may have happened: past the budget as well."""
    with ledger._transaction() as db:
        (fingerprint,) = db.execute(
            "SELECT fingerprint FROM dataset_version WHERE collection=? ORDER BY registered_at DESC LIMIT 1", (name,)
        ).fetchone()
        entry = f"restored/{seen.seq}/{seen.hash[:16]}/{name}"
        try:
            db.execute(
                "INSERT INTO entry VALUES(?,?,?,?,?,?,?,?,?)",
                (entry, name, fingerprint, f"restored {seen.hash}", "", seen.seq, 0, "restored", now()),
            )
        except sqlite3.IntegrityError:
            return  # charged before; the process was killed before it had noted that
        charged = [(p.purpose, p.mechanism.noise, p.mechanism.rate, p.mechanism.steps * times) for p in planned]
        db.executemany(
            "INSERT INTO mechanism VALUES(?,?,?,?,?,?)", [(entry, i, *values) for i, values in enumerate(charged)]
        )
        ledger._event(db, entry, entry, "INTENT", json.dumps(charged))
        ledger._event(db, entry, entry, "SPENT_ON_RECOVERY", "may have been spent after the copy was made")
