"""The hospital's privacy ledger: uses of its records, and their budgets.

Call `reserve` before the first record is read, then `start`, then `commit` once the output is on the disk. Entries that
are open after a crash count as spent. Every signed message repeats the newest head, so that a restored backup is
noticed. A budget belongs to a collection of records and covers all its versions; its filter decides on admission
(accountant.py).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fl_core.errors import ConfigError, RefusedError, StateError
from privacy.accounting.accountant import (
    AUTO,
    GAUSSIAN,
    Bound,
    FilterName,
    History,
    Mechanism,
    PrivacyFilter,
    epsilon_of,
    epsilon_spent,
    filter_named,
    gaussian_cost,
)
from privacy.ledger import before_the_key, owners
from privacy.ledger.account import (
    ATTEMPTS,
    OPEN,
    SEEDED,
    Account,
    Budget,
    InvalidEventError,
    LedgerEntry,
    LedgerTask,
    PlannedRelease,
    Refusal,
    refused,
    times_charged,
)
from privacy.ledger.event_chain import (
    START,
    EventChain,
    LedgerEvent,
    now,
    rolled_back,
    schema_differences,
)
from privacy.ledger.sealed import SpendingSummary, seal
from service_core.storage.chain import ChainHead

__all__ = ["ATTEMPTS", "BudgetStatus", "Ledger", "LedgerTask", "PlannedRelease"]

EACH_REFUSAL = 10
"""Number of refusals of a coordinator with one code that are recorded one by one."""
SHOWN = 5
_SEQUENCES = 2**63
_ELSEWHERE = "SELECT collection FROM unit_digest WHERE digest=? AND collection<>?"


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """A collection's budget and spending. epsilon, delta, used: None without a budget.

    spent_rdp: epsilon as the budget counts it (exact if all releases are over all records)   spent_prv: epsilon by the
    privacy loss of all releases; None if not requested   used: share of the filter's bound   spent_alone: epsilon if
    the masks over shared noise failed; spent_rdp without shared noise   filter: of the budget; empty without one.
    """

    collection: str
    unit: str
    epsilon: float | None
    delta: float | None
    spent_rdp: float
    spent_prv: float | None
    used: float | None
    spent_alone: float
    filter: str = ""


class Ledger:
    """One hospital's ledger: the chain of its events, and the account computed from them. Thread-safe.

    The first use reads the file from its beginning (10,000 events take about a fifth of a second), later uses only new
    events. So an open ledger notices when its file is replaced or changed.

    Guarantees: all answers follow from events, and an event counts only after it was checked under the key. Concurrent
    reservations are serialised, also between services. A refused reservation changes nothing except the record of its
    refusal. A reservation is on the disk when `reserve` returns.
    """

    def __init__(self, file: Path, key: Path | None = None, older: bool = False) -> None:
        """Open or create the file; as `EventChain`."""
        self.chain = EventChain(file, key, before_the_key.snapshot, older)
        self._lock = threading.RLock()
        self._account, self._seen = Account(), START
        self._refused: Counter[tuple[str, str]] = Counter()

    # ---- its events ---------------------------------------------------------------------------------------------

    def head(self) -> ChainHead:
        with self.chain.reading() as db:
            return self.chain.events.head(db)

    def events(self) -> list[tuple[int, str, str, str, str]]:
        """List (seq, subject, state, detail, time) in order."""
        with self.chain.reading() as db:
            rows = db.execute("SELECT seq, subject, state, detail, created_at FROM event ORDER BY seq").fetchall()
        return [(int(a), str(b), str(c), str(d), str(e)) for a, b, c, d, e in rows]

    def verify(self, seen: ChainHead | None = None) -> int:
        """Check the whole file from its beginning, including schema and units, and return the number of events.

        seen: a head that was signed before. Raises StateError: E-BUDGET-07 if an event, a unit or a part of the schema
        was changed, E-BUDGET-08 if the ledger lacks `seen` or a head that this process has read.
        """
        with self._lock, self.chain.damage(), self.chain.reading() as db:
            db.execute("BEGIN")
            self._catch_up(db)
            account, head, at = Account(), START, {0: START.hash}
            for event, head in self.chain.follow(db, START):
                at[head.seq] = head.hash
                self._apply(account, event)
            differences = [*schema_differences(db), *_unit_differences(db, account)]
            if stray := db.execute("SELECT count(*) FROM event WHERE seq<1").fetchone()[0]:
                differences.append(f"table event: events start at 1, found {stray} before")
            broken = [str(row[0]) for row in db.execute("PRAGMA quick_check") if row[0] != "ok"]
        if wrong := differences + broken:
            raise self._differs(wrong)
        if seen is not None and seen.seq and at.get(seen.seq) != seen.hash and str(seen) not in account.forgiven:
            raise rolled_back(seen.seq, head.seq)
        return head.seq

    def require(self, seen: ChainHead) -> None:
        """Raise StateError (E-BUDGET-08) if the chain lacks a head that was signed before; read only new events."""
        with self._current() as account:
            if seen.seq and str(seen) not in account.forgiven and not self.holds(seen):
                raise rolled_back(seen.seq, self._seen.seq)

    def holds(self, head: ChainHead) -> bool:
        if not 0 <= head.seq < _SEQUENCES:  # the coordinator may state any number
            return False
        with self.chain.reading() as db:
            return self.chain.events.holds(db, head)

    def account_at(self, seq: int) -> Account:
        """Return the account after an event, computed from the first event."""
        account = Account()
        with self._lock, self.chain.reading() as db:
            db.execute("BEGIN")
            for event, head in self.chain.follow(db, START):
                if head.seq > seq:
                    break
                self._apply(account, event)
        return account

    @contextmanager
    def writing(self) -> Iterator[tuple[sqlite3.Connection, Account]]:
        """Open a write transaction, with the account before it.

        Raises StateError as `verify` on events and schema: an added trigger, for example, could remove written data.
        """
        with self._lock:
            with self.chain.transaction() as db:
                account = self._catch_up(db)
                with self.chain.damage():
                    self._require_schema(db)
                yield db, account
                written = list(self.chain.follow(db, self._seen))
            self._take(written)  # after it is on the disk; from now on its loss is noticed

    @contextmanager
    def _current(self) -> Iterator[Account]:
        """Yield the current account, and block other threads of this process meanwhile."""
        with self._lock, self.chain.reading() as db:
            db.execute("BEGIN")
            yield self._catch_up(db)

    def _catch_up(self, db: sqlite3.Connection) -> Account:
        """Read new events; call it before anything is written in the same transaction.

        Raises StateError as `verify` on events and, the first time, on the schema.
        """
        with self.chain.damage():
            if self._seen == START:
                self._require_schema(db)
            self._take(self.chain.follow(db, self._seen))
        return self._account

    def _take(self, events: Iterable[tuple[LedgerEvent, ChainHead]]) -> None:
        for event, head in events:
            self._apply(self._account, event)
            self._seen = head

    def _apply(self, account: Account, event: LedgerEvent) -> None:
        if event.seq <= self.chain.unkeyed:
            return  # the first event under the key repeats these
        try:
            account.apply(event)
        except InvalidEventError as error:
            raise self.chain.changed(f"event {event.seq}: {error}") from error

    def _require_schema(self, db: sqlite3.Connection) -> None:
        if wrong := list(schema_differences(db)):
            raise self._differs(wrong)

    def _differs(self, wrong: Sequence[str]) -> StateError:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        return StateError(
            "E-BUDGET-07",
            f"rows or schema of the ledger {self.chain.file.name} differ from its events in {len(wrong)} places: "
            f"{'; '.join(wrong[:SHOWN])}{more}. Restore the file from a backup",
        )

    # ---- what the operator does ---------------------------------------------------------------------------------

    def register(
        self,
        collection: str,
        unit: str,
        fingerprint: str,
        records: int,
        units: Sequence[str],
        contents: Iterable[str] = (),
        labels: str = "",
    ) -> bool:
        """Register a version of a collection's data; tell whether it is new.

        units: the identity of each unit (a group's name, a record's content)   contents: further identities of the
        same records; both are stored only as keyed digests   labels: digest of the table or query with the labels.

        Raises RefusedError (E-BUDGET-04) if a unit or a content is in another collection, StateError (E-BUDGET-07) if
        the file's units are not the registered ones.
        """
        of_units, every = self._digests(units), self._digests((*units, *contents))
        with self.writing() as (db, account):
            if wrong := list(_unit_differences(db, account)):
                raise self._differs(wrong)
            version = account.versions.get(fingerprint)
            other = {row[0] for d in every for row in db.execute(_ELSEWHERE, (d, collection))}
            if version is not None and version.collection != collection:
                other.add(version.collection)
            if other:
                raise RefusedError(
                    "E-BUDGET-04",
                    f"some of {len(of_units)} units are already registered in {sorted(other)}: serve them under that "
                    "name, so that their spending adds up, or leave them out",
                )
            registered = {
                row[0] for row in db.execute("SELECT digest FROM unit_digest WHERE collection=?", (collection,))
            }
            if version is not None and every <= registered:
                return False
            db.executemany("INSERT INTO unit_digest VALUES(?,?)", [(d, collection) for d in every - registered])
            facts = {"fingerprint": fingerprint, "unit": unit, "records": records, "units": len(of_units)}
            facts |= {"labels": labels} if labels else {}
            detail = json.dumps(facts | {"digests": _digest_of_units(every | registered)})
            self.chain.write(db, None, collection, "REGISTERED", detail)
        return version is None

    def set_budget(
        self,
        collection: str,
        epsilon: float,
        delta: float,
        operator: str,
        reason: str,
        filter: FilterName | None = None,
    ) -> None:
        """Set a collection's budget; spending stays. No message from the network can call this.

        filter: None for the filter of its last budget, or "auto" for its first one. Raises StateError (E-BUDGET-04) if
        the collection is not registered, ConfigError (E-PRIV-20) on an invalid budget, or on "gaussian" after training
        steps.
        """
        with self.writing() as (db, account):
            if collection not in account.collections:
                raise StateError(
                    "E-BUDGET-04",
                    f"expected one of the collections {sorted(account.collections)}, found {collection!r}",
                )
            before = account.budget(collection)
            named = filter_named(filter or (before.filter if before else AUTO))
            if filter == GAUSSIAN and math.isinf(gaussian_cost(account.history(collection))):
                raise ConfigError(
                    "E-PRIV-20",
                    f"{collection!r} has been charged for sampled training steps, which the filter gaussian cannot "
                    "count: use the filter renyi",
                )
            made = Budget(collection, PrivacyFilter.of(float(epsilon), float(delta), named), operator, reason, now())
            self.chain.write(db, None, collection, "BUDGET", made.detail(), made.created_at)

    def release_unused(self, entry: str) -> None:
        """Release an entry that never started, at no cost; raises StateError (E-BUDGET-12) on any other entry."""
        self._move(entry, "RELEASED_UNUSED", "released by the operator")

    # ---- what a round does --------------------------------------------------------------------------------------

    def reserve(
        self,
        collection: str,
        task: LedgerTask,
        planned: Sequence[PlannedRelease],
        cap: PrivacyFilter | None = None,
        run: Sequence[Bound] = (),
    ) -> str:
        """Reserve a round's releases; return the entry's id. The entry is on the disk on return. Read no record before.

        cap: a second budget, from the policy   run: bounds on all charges of this run at this collection. Raises
        RefusedError: E-BUDGET-01 if a budget does not cover the round, E-BUDGET-12 if it exceeds the run's bounds or
        was charged too often (these refusals are recorded), E-BUDGET-02 without a budget, E-BUDGET-04 on unregistered
        data.
        """
        with self.writing() as (db, account):
            version = account.versions.get(task.fingerprint)
            if version is None or version.collection != collection:
                raise RefusedError(
                    "E-BUDGET-04",
                    f"this version of the data is not registered under {collection!r}: register it with `silo "
                    "ledger register`",
                )
            refusal = refused(account, collection, task, [p.mechanism for p in planned], cap, run)
            same = [e for e in account.of_run(task.run, "", collection) if (e.round, e.kind) == (task.round, task.kind)]
            entry = f"{task.run}/{task.round}/{task.kind}/{len(same)}/{collection}"
            made = LedgerEntry(
                entry,
                collection,
                task.fingerprint,
                task.run,
                task.manifest,
                task.round,
                len(same),
                task.kind,
                now(),
                tuple(planned),
                owners.own_token(self.chain.file),
                coordinator=task.coordinator,
            )
            self.enter(db, made, "REFUSED" if refusal else "INTENT")
        if refusal:
            raise refusal
        return entry

    def require_room(
        self,
        collection: str,
        task: LedgerTask,
        planned: Iterable[Mechanism],
        cap: PrivacyFilter | None = None,
        run: Sequence[Bound] = (),
    ) -> None:
        """Raise the errors of `reserve`, without reserving or recording anything."""
        with self._current() as account:
            if refusal := refused(account, collection, task, list(planned), cap, run):
                raise refusal

    def times_charged(self, collection: str, task: LedgerTask) -> int:
        with self._current() as account:
            return times_charged(account, collection, task)

    def start(self, entry: str) -> None:
        """Record that data are about to be read; raises StateError (E-BUDGET-12) unless the entry is reserved."""
        self._move(entry, "RUNNING", "")

    def commit(self, entry: str, output: str) -> None:
        """Record that the entry's output is in the outbox. output: its SHA-256."""
        self._move(entry, "SPENT", output)

    def recover(self) -> list[str]:
        """Count entries that a crash left open as spent; return them. Skip those of other live processes."""
        with self.writing() as (db, account):
            rows = [e for e in account.entries.values() if e.state in OPEN]
            left = sorted(e.id for e in rows if not owners.is_alive(self.chain.file, e.owner))
            for entry in left:
                self.chain.write(db, entry, entry, "SPENT_ON_RECOVERY", "open after a restart: counted in full")
        return left

    def note_refusal(self, subject: str, code: str, coordinator: str = "") -> None:
        """Count a refusal. Stored are the first ten of a coordinator with one code, then the 16th, 32nd, and so on.

        So endless refusals add an event only when their number doubles. After a restart, counting continues from the
        last stored number. Refusals without a coordinator are all stored.
        """
        which = coordinator, code
        with self._lock:
            with self._current() as account:
                times = max(self._refused[which], account.refusals[which]) + 1
            self._refused[which] = times
            if coordinator and times > EACH_REFUSAL and times & (times - 1):
                return
            with self.writing() as (db, _):
                self.chain.write(db, None, subject, "REFUSED", Refusal(code, coordinator, times).detail())

    def keep(self, fingerprint: str, name: str, value: str) -> None:
        """Store a release that is made once per data version; an existing one is not replaced."""
        with self.writing() as (db, account):
            if (fingerprint, name) in account.stored_values:
                return
            self.chain.write(db, None, fingerprint, "KEPT", json.dumps({"name": name, "value": value}))

    def elsewhere(self, collection: str, names: Iterable[str]) -> list[str]:
        with self.chain.reading() as db:
            return [
                name
                for name in names
                if any(db.execute(_ELSEWHERE, (d, collection)).fetchone() for d in self._digests([name]))
            ]

    # ---- what anybody may read ----------------------------------------------------------------------------------

    def collections(self) -> list[str]:
        with self._current() as account:
            return sorted(account.collections)

    def collection_of(self, fingerprint: str) -> str | None:
        with self._current() as account:
            version = account.versions.get(fingerprint)
        return version.collection if version else None

    def budget(self, collection: str) -> PrivacyFilter | None:
        with self._current() as account:
            return account.budget(collection)

    def stored_value(self, fingerprint: str, name: str) -> str | None:
        with self._current() as account:
            return account.stored_values.get((fingerprint, name), (None,))[0]

    def entries(self, collection: str) -> list[tuple[str, str, list[PlannedRelease]]]:
        with self._current() as account:
            return [(e.id, e.state, list(e.planned)) for e in account.entries.values() if e.collection == collection]

    def charged_runs(self) -> dict[str, set[str]]:
        """Return, by run id, the collections that were charged for releases with secret noise."""
        collections: dict[str, set[str]] = {}
        with self._current() as account:
            for entry in account.entries.values():
                if entry.charged and not entry.kind.endswith(SEEDED):
                    collections.setdefault(entry.run, set()).add(entry.collection)
        return collections

    def history(self, collection: str) -> History:
        with self._current() as account:
            return account.history(collection)

    def status(self, collection: str, prv: bool = True, planned: Iterable[Mechanism] = ()) -> BudgetStatus:
        """Return a collection's spending at its budget's delta, 1e-5 without a budget.

        planned: counted as if it were spent as well; nothing is reserved.
        """
        with self._current() as account:
            spent, budget = [*account.history(collection), *planned], account.budget(collection)
            alone = [*account.alone(collection), *planned]
            unit = account.unit(collection)
        delta = budget.delta if budget else 1e-5
        return BudgetStatus(
            collection,
            unit,
            budget.epsilon if budget else None,
            budget.delta if budget else None,
            epsilon_of(spent, delta),
            epsilon_spent(spent, delta) if prv else None,
            budget.used(spent) if budget else None,
            epsilon_of(alone, delta),
            budget.decided(spent) if budget else "",
        )

    def statement(self) -> tuple[ChainHead, bytes, int]:
        with self._current() as account:
            head = self._seen
            sealed = seal(self.chain.secret, head, account.restored, SpendingSummary.of(account)) if head.seq else b""
            return head, sealed, account.restored

    # ---- inside -------------------------------------------------------------------------------------------------

    def _digests(self, names: Iterable[str]) -> set[bytes]:
        return {hmac.new(self.chain.units_key, name.encode(), hashlib.sha256).digest() for name in names}

    def enter(self, db: sqlite3.Connection, made: LedgerEntry, state: str) -> None:
        """Write an entry and its first event within a `writing` transaction."""
        self.chain.write(db, made.id, made.id, state, made.detail(), made.created_at)

    def _move(self, entry: str, state: str, detail: str) -> None:
        with self.writing() as (db, _):
            try:
                self.chain.write(db, entry, entry, state, detail)
            except sqlite3.IntegrityError as error:
                raise StateError("E-BUDGET-12", f"the ledger cannot set {entry!r} to {state}: {error}") from error


def _digest_of_units(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _unit_differences(db: sqlite3.Connection, account: Account) -> Iterator[str]:
    digests: dict[str, list[bytes]] = {}
    for digest, collection in db.execute("SELECT digest, collection FROM unit_digest"):
        if isinstance(digest, bytes):
            digests.setdefault(str(collection), []).append(digest)
        else:
            yield f"table unit_digest: expected a digest, found {digest!r}"
    for collection in sorted({*digests, *account.units}):
        if account.units.get(collection) != _digest_of_units(digests.get(collection, [])):
            yield f"table unit_digest: the units of {collection!r} differ from the registered ones"
