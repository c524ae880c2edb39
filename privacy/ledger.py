"""The hospital's privacy ledger: what its records have been used for, and what is left of their budget.

Reserve before the first record is read, start, commit once the output is safe; whatever is open after a crash counts as
spent. Entries, mechanisms and events are append-only, events are chained by SHA-256, and the newest head is echoed in
every signed message, so a restored backup is noticed. A budget belongs to a collection of records and covers all its
versions: one more image does not mint a new budget. Admission is the fixed-order filter of accounting.py.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fl_core.errors import RefusedError, StateError
from privacy.accounting import Filter, History, Mechanism, epsilon_prv, epsilon_rdp
from privacy.chain import Chain, now

_ELSEWHERE = "SELECT collection FROM unit_digest WHERE digest=? AND collection<>?"


@dataclass(frozen=True, slots=True)
class Planned:
    """One mechanism of an entry and what it is for."""

    purpose: str
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class Task:
    """What an entry is for: a round of a run, of a manifest, and the version of the data that it reads."""

    run: str
    manifest: str
    round: int
    kind: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Status:
    """A collection's budget; epsilon and delta are None while none is set; used: the share of the filter's bound."""

    collection: str
    unit: str
    epsilon: float | None
    delta: float | None
    spent_rdp: float
    spent_prv: float | None
    used: float | None


class Ledger(Chain):
    """One hospital's ledger file, mode 0600.

    Guarantees: concurrent reservations serialise; a reservation that does not fit changes nothing but the record of
    its refusal; what is reserved is on the disk when `reserve` returns.
    """

    # ---- what the operator does ---------------------------------------------------------------------------------

    def register(self, collection: str, unit: str, fingerprint: str, records: int, units: Sequence[str]) -> bool:
        """Register a version of a collection's data; tell whether it is new.

        units: the identity of each unit (a group's name, a record's digest); kept as keyed digests alone.
        Raises RefusedError (E-BUDGET-03) when a unit stands in another collection already.
        """
        key = self._meta("key").encode()
        digests = {hmac.new(key, u.encode(), hashlib.sha256).digest() for u in units}
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM dataset_version WHERE fingerprint=?", (fingerprint,)).fetchone():
                return False
            db.execute("INSERT OR IGNORE INTO collection VALUES(?,?,?)", (collection, unit, now()))
            other = [
                row[0] for d in digests
                for row in db.execute(_ELSEWHERE, (d, collection))
            ]  # fmt: skip
            if other:
                raise RefusedError(
                    "E-BUDGET-03",
                    f"expected records that are in no other collection, found {len(other)} of {len(digests)} units in "
                    f"{sorted(set(other))}: serve them under that name, so that their spending adds up",
                )
            db.executemany("INSERT OR IGNORE INTO unit_digest VALUES(?,?)", [(d, collection) for d in digests])
            db.execute(
                "INSERT INTO dataset_version VALUES(?,?,?,?,?)", (fingerprint, collection, records, len(digests), now())
            )
            self._event(db, None, collection, "REGISTERED", fingerprint)
        return True

    def set_budget(self, collection: str, epsilon: float, delta: float, operator: str, reason: str) -> None:
        """Set a collection's budget; spending stays what it is. There is no such call over the network.

        Raises StateError (E-BUDGET-04) for a collection that is not registered.
        """
        order = Filter.of(epsilon, delta).order
        with self._transaction() as db:
            if not db.execute("SELECT 1 FROM collection WHERE name=?", (collection,)).fetchone():
                raise StateError(
                    "E-BUDGET-04", f"expected one of the collections {self.collections()}, found {collection!r}"
                )
            db.execute(
                "INSERT INTO budget(collection,epsilon,delta,filter_order,operator,reason,created_at) "
                "VALUES(?,?,?,?,?,?,?)",
                (collection, epsilon, delta, order, operator, reason, now()),
            )
            self._event(db, None, collection, "BUDGET", f"epsilon {epsilon!r} delta {delta!r} by {operator}: {reason}")

    def release_unused(self, entry: str) -> None:
        """Give back an entry that never started; raises StateError (E-BUDGET-05) on any other."""
        self._move(entry, "RELEASED_UNUSED", "released by the operator")

    # ---- what a round does --------------------------------------------------------------------------------------

    def reserve(self, collection: str, task: Task, planned: Sequence[Planned], cap: Filter | None = None) -> str:
        """Set aside what a round will release; return the entry's id. On disk on return, before any record is read.

        cap: a second budget, the policy's, that it must fit as well.
        Raises RefusedError: E-BUDGET-01 when it does not fit (the refusal is recorded), E-BUDGET-02 when the collection
        has no budget, E-BUDGET-06 when the data was changed without being registered.
        """
        with self._transaction() as db:
            version = db.execute(
                "SELECT collection FROM dataset_version WHERE fingerprint=?", (task.fingerprint,)
            ).fetchone()
            if version is None or version[0] != collection:
                raise RefusedError(
                    "E-BUDGET-06", f"expected data registered under {collection!r}, found another version: register it"
                )
            budget = self._budget(db, collection)
            if budget is None:
                raise RefusedError(
                    "E-BUDGET-02",
                    f"expected a budget for {collection!r}, found none: `silo ledger budget set` gives one",
                )
            (attempt,) = db.execute(
                "SELECT count(*) FROM entry WHERE run=? AND round=? AND kind=? AND collection=?",
                (task.run, task.round, task.kind, collection),
            ).fetchone()
            entry = f"{task.run}/{task.round}/{task.kind}/{attempt}/{collection}"
            db.execute(
                "INSERT INTO entry VALUES(?,?,?,?,?,?,?,?,?)",
                (entry, collection, task.fingerprint, task.run, task.manifest, task.round, attempt, task.kind, now()),
            )
            db.executemany(
                "INSERT INTO mechanism VALUES(?,?,?,?,?,?)",
                [
                    (entry, i, p.purpose, p.mechanism.noise, p.mechanism.rate, p.mechanism.steps)
                    for i, p in enumerate(planned)
                ],
            )
            spent, asked = self._history(db, collection), [p.mechanism for p in planned]
            fits = budget.admits(spent, asked) and (cap is None or cap.admits(spent, asked))
            self._event(db, entry, entry, "INTENT" if fits else "REFUSED", json.dumps(_plain(planned)))
        if not fits:
            raise RefusedError(
                "E-BUDGET-01", f"the privacy budget of {collection!r} does not cover round {task.round} of this run"
            )
        return entry

    def start(self, entry: str) -> None:
        """Note that records are about to be read; raises StateError (E-BUDGET-05) unless it was just reserved."""
        self._move(entry, "RUNNING", "")

    def commit(self, entry: str, output: str) -> None:
        """Note that the output is safe in the outbox; output: its SHA-256."""
        self._move(entry, "SPENT", output)

    def recover(self) -> list[str]:
        """Count as spent, in full, whatever a crash left open; return those entries. Call when nothing is at work."""
        with self._transaction() as db:
            rows = db.execute("SELECT id FROM entry_state WHERE state IN('INTENT','RUNNING') ORDER BY id").fetchall()
            for (entry,) in rows:
                self._event(db, entry, entry, "SPENT_ON_RECOVERY", "open after a restart: counted in full")
        return [entry for (entry,) in rows]

    def note_refusal(self, subject: str, reason: str) -> None:
        """Write down that a run was refused before anything was reserved: the record for an audit."""
        with self._transaction() as db:
            self._event(db, None, subject, "REFUSED", reason)

    def keep(self, fingerprint: str, name: str, value: str) -> None:
        """Keep what was released once for a version of the data; what is kept already stays as it is."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO kept VALUES(?,?,?,?)", (fingerprint, name, value, now()))

    # ---- what anybody may read ----------------------------------------------------------------------------------

    def collections(self) -> list[str]:
        """List the collections."""
        with self._reading() as db:
            return [name for (name,) in db.execute("SELECT name FROM collection ORDER BY name")]

    def collection_of(self, fingerprint: str) -> str | None:
        """Return the collection under which a version of data is registered."""
        with self._reading() as db:
            row = db.execute("SELECT collection FROM dataset_version WHERE fingerprint=?", (fingerprint,)).fetchone()
        return str(row[0]) if row else None

    def budget(self, collection: str) -> Filter | None:
        """Return the budget in force."""
        with self._reading() as db:
            return self._budget(db, collection)

    def kept(self, fingerprint: str, name: str) -> str | None:
        """Return what was released once for a version of the data."""
        with self._reading() as db:
            row = db.execute("SELECT value FROM kept WHERE fingerprint=? AND name=?", (fingerprint, name)).fetchone()
        return str(row[0]) if row else None

    def entries(self, collection: str) -> list[tuple[str, str, list[Planned]]]:
        """List (entry, state, what it releases) of a collection, oldest first."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT id, state FROM entry_state WHERE collection=? ORDER BY created_at, id", (collection,)
            ).fetchall()
            return [(str(i), str(state), self._planned(db, i)) for i, state in rows]

    def history(self, collection: str) -> History:
        """Return everything that counts against a collection."""
        with self._reading() as db:
            return self._history(db, collection)

    def status(self, collection: str, prv: bool = True) -> Status:
        """Return a collection's spending by RDP and PRV at the delta of its budget, 1e-5 without one."""
        with self._reading() as db:
            spent, budget = self._history(db, collection), self._budget(db, collection)
            (unit,) = db.execute("SELECT unit FROM collection WHERE name=?", (collection,)).fetchone()
        delta = budget.delta if budget else 1e-5
        return Status(
            collection, unit, budget.epsilon if budget else None, budget.delta if budget else None,
            epsilon_rdp(spent, delta), epsilon_prv(spent, delta) if prv else None,
            budget.used(spent) if budget else None,
        )  # fmt: skip

    def fits(self, collection: str, planned: Iterable[Mechanism]) -> bool:
        """Tell whether so much would still be admitted; False without a budget."""
        with self._reading() as db:
            budget = self._budget(db, collection)
            return budget is not None and budget.admits(self._history(db, collection), planned)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _move(self, entry: str, state: str, detail: str) -> None:
        with self._transaction() as db:
            try:
                self._event(db, entry, entry, state, detail)
            except sqlite3.IntegrityError as error:
                raise StateError("E-BUDGET-05", f"the ledger does not let {entry!r} become {state}: {error}") from error

    @staticmethod
    def _budget(db: sqlite3.Connection, collection: str) -> Filter | None:
        row = db.execute(
            "SELECT epsilon, delta, filter_order FROM budget WHERE collection=? ORDER BY seq DESC LIMIT 1",
            (collection,),
        ).fetchone()
        return Filter(*map(float, row)) if row else None

    @staticmethod
    def _planned(db: sqlite3.Connection, entry: str) -> list[Planned]:
        rows = db.execute("SELECT purpose, noise, rate, steps FROM mechanism WHERE entry=? ORDER BY idx", (entry,))
        return [Planned(str(p), Mechanism(float(z), float(q), int(n))) for p, z, q, n in rows]

    @staticmethod
    def _history(db: sqlite3.Connection, collection: str) -> list[Mechanism]:
        rows = db.execute("SELECT noise, rate, steps FROM charged WHERE collection=?", (collection,))
        return [Mechanism(float(z), float(q), int(n)) for z, q, n in rows]


def _plain(planned: Sequence[Planned]) -> list[list[object]]:
    return [[p.purpose, p.mechanism.noise, p.mechanism.rate, p.mechanism.steps] for p in planned]
