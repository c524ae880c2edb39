"""A chain of events and the account that follows from it.

The first use reads the file from its beginning (10,000 events take about a fifth of a second), later ones the events
since; so an open ledger notices when the file beneath it is replaced or changed.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fl_core.errors import StateError
from privacy.ledger.account import Account, UnsoundError
from privacy.ledger.hash_chain import START, ChainHead, Event, HashChain, rolled_back
from privacy.ledger.tables import differences, schema_differences

SHOWN = 5
_SEQUENCES = 2**63


class VerifiedChain(HashChain):
    """A chain with the account of its events; usable from several threads.

    Guarantees: no row other than an event decides anything; an event counts only after it was checked under the key.
    """

    def __init__(self, file: Path, key: Path | None = None, older: bool = False) -> None:
        super().__init__(file, key, older)
        self._lock = threading.RLock()
        self._account, self._seen = Account(), START

    def verify(self, seen: ChainHead | None = None) -> int:
        """Check all of the file from its beginning, rows and schema included, and return the number of events.

        seen: a head that was signed before. Raises StateError: E-BUDGET-07 on an event, a row or a part of the schema
        that was changed, E-BUDGET-08 when the ledger lacks a head that others, or this process, have seen.
        """
        with self._lock, self._damage(), self._reading() as db:
            db.execute("BEGIN")
            self._catch_up(db)
            account, head, at = Account(), START, {0: START.hash}
            for event, head in self._follow(db, START):
                at[head.seq] = head.hash
                if event is not None:
                    self._apply(account, event)
            found = list(differences(db, account))
            broken = [str(row[0]) for row in db.execute("PRAGMA quick_check") if row[0] != "ok"]
        if wrong := found + broken:
            raise self.differs(wrong)
        if seen is not None and seen.seq and at.get(seen.seq) != seen.hash and str(seen) not in account.forgiven:
            raise rolled_back(seen.seq, head.seq)
        return head.seq

    def differs(self, wrong: Sequence[str]) -> StateError:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        return StateError(
            "E-BUDGET-07",
            f"expected rows and schema of the ledger {self._file.name} as its events have them, found "
            f"{len(wrong)} differences: {'; '.join(wrong[:SHOWN])}{more}; restore the file from a backup",
        )

    def require(self, seen: ChainHead) -> None:
        """Raise StateError (E-BUDGET-08) unless the chain has a head that was signed before; reads only what is new."""
        with self._current() as account:
            if seen.seq and str(seen) not in account.forgiven and not self.holds(seen):
                raise rolled_back(seen.seq, self._seen.seq)

    def holds(self, head: ChainHead) -> bool:
        if not 0 <= head.seq < _SEQUENCES:  # what a coordinator says may be any number
            return False
        with self._reading() as db:
            row = db.execute("SELECT hash FROM event WHERE seq=?", (head.seq,)).fetchone()
        return row is not None and row[0] == head.hash

    def account_at(self, seq: int) -> Account:
        """Return the account as it was after an event: a copy, read from the beginning."""
        account = Account()
        with self._lock, self._reading() as db:
            db.execute("BEGIN")
            for event, head in self._follow(db, START):
                if head.seq > seq:
                    break
                if event is not None:
                    self._apply(account, event)
        return account

    @contextmanager
    def _current(self) -> Iterator[Account]:
        """Read the account as it is now; other threads of this process wait."""
        with self._lock, self._reading() as db:
            db.execute("BEGIN")
            yield self._catch_up(db)

    @contextmanager
    def writing(self) -> Iterator[tuple[sqlite3.Connection, Account]]:
        """Open a transaction that writes, beside the account as it is before it.

        Raises StateError as `verify` does on events and on the schema: an added trigger could take away what is
        written.
        """
        with self._lock:
            with self._transaction() as db:
                account = self._catch_up(db)
                with self._damage():
                    self._require_schema(db)
                yield db, account
                written = list(self._follow(db, self._seen))
            self._take(written)  # only once it is on the disk; from then on its loss is noticed

    def _require_schema(self, db: sqlite3.Connection) -> None:
        if wrong := list(schema_differences(db)):
            raise self.differs(wrong)

    def _catch_up(self, db: sqlite3.Connection) -> Account:
        """Follow what was written since; call it before anything is written in the same transaction.

        Raises StateError as `verify` does on events and, the first time, on the schema.
        """
        with self._damage():
            if self._seen == START:
                self._require_schema(db)
            self._take(self._follow(db, self._seen))
        return self._account

    def _take(self, events: Iterable[tuple[Event | None, ChainHead]]) -> None:
        for event, head in events:
            if event is not None:
                self._apply(self._account, event)
            self._seen = head

    def _apply(self, account: Account, event: object) -> None:
        try:
            account.apply(event)  # type: ignore[arg-type]
        except UnsoundError as error:
            raise self.changed(f"event {getattr(event, 'seq', '?')}: {error}") from error
