"""The state of a ledger, computed only from its events: spending, budgets, registrations; and admission.

All figures come from here; the file's views show them to other tools. A round is admitted if it fits the budget of its
records and its run's bounds, and was not repeated too often. A run is identified by its id and by its manifest. The
coordinator chooses both, so the run's bounds apply to all charges of this coordinator under either. Charges of another
consortium on the same ledger do not count. A new id with a new manifest is a new request, bounded by policy and budget.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fl_core.errors import RefusedError
from privacy.accounting.accountant import RENYI, Bound, Mechanism, PrivacyFilter, aggregated, filter_named
from privacy.accounting.shared_noise import SharedNoise
from privacy.ledger.event_chain import LedgerEvent

OPEN = ("INTENT", "RUNNING")
CHARGED = (*OPEN, "SPENT", "SPENT_ON_RECOVERY")
"""States of charged entries: all except refused entries and those released unused."""
SEEDED = "seeded noise"
"""Marks an entry with reproducible noise: it is charged, but gives no privacy."""
_NEXT: Mapping[str, tuple[str, ...]] = {
    "": ("INTENT", "REFUSED"),
    "INTENT": ("RUNNING", "RELEASED_UNUSED", "SPENT_ON_RECOVERY"),
    "RUNNING": ("SPENT", "SPENT_ON_RECOVERY"),
}


@dataclass(frozen=True, slots=True)
class PlannedRelease:
    """One mechanism of an entry, its purpose, and the terms of distributed noise, if any."""

    purpose: str
    mechanism: Mechanism
    shared: SharedNoise | None = None

    @property
    def alone(self) -> Mechanism:
        """The mechanism if masks fail."""
        m = self.mechanism
        return m if self.shared is None else replace(m, noise=self.shared.alone(m.noise))


@dataclass(slots=True)
class LedgerEntry:
    """One planned release, usually one round of one run.

    owner: the process that reserved it   coordinator: that requested it; empty if none did, as after a restoration.
    """

    id: str
    collection: str
    fingerprint: str
    run: str
    manifest: str
    round: int
    attempt: int
    kind: str
    created_at: str
    planned: tuple[PlannedRelease, ...]
    owner: str = ""
    state: str = ""
    coordinator: str = ""

    @property
    def charged(self) -> bool:
        return self.state in CHARGED

    def detail(self) -> str:
        facts = {
            name: getattr(self, name)
            for name in ("collection", "fingerprint", "run", "manifest", "round", "attempt", "kind", "owner")
        }
        coordinator = {"coordinator": self.coordinator} if self.coordinator else {}
        shared = {p.purpose: p.shared.facts(p.mechanism.noise) for p in self.planned if p.shared}
        more = {"shared": shared} if shared else {}  # absent without shared noise, as in entries of early versions
        return json.dumps(facts | coordinator | {"mechanisms": plain(self.planned)} | more)

    @classmethod
    def of(cls, event: LedgerEvent) -> LedgerEntry:
        facts = json.loads(event.detail)
        return cls(
            str(event.entry),
            facts["collection"],
            facts["fingerprint"],
            facts["run"],
            facts["manifest"],
            int(facts["round"]),
            int(facts["attempt"]),
            facts["kind"],
            event.created_at,
            _with_shared(planned_of(facts["mechanisms"]), dict(facts.get("shared", {}))),
            facts["owner"],
            coordinator=facts.get("coordinator", ""),
        )


@dataclass(frozen=True, slots=True)
class DataVersion:
    """A version of a collection's data, with its numbers of records and units."""

    collection: str
    records: int
    units: int
    created_at: str


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget, the operator who set it, and the reason."""

    collection: str
    filter: PrivacyFilter
    operator: str
    reason: str
    created_at: str

    def detail(self) -> str:
        f = self.filter
        facts = {"epsilon": f.epsilon, "delta": f.delta, "order": f.order}
        named = {"filter": f.filter} if f.filter != RENYI else {}  # absent in early budgets: all were RENYI
        return json.dumps(facts | named | {"operator": self.operator, "reason": self.reason})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A coordinator's refusals with one code, and their number so far; early entries have only the code."""

    code: str
    coordinator: str = ""
    times: int = 1

    def detail(self) -> str:
        return json.dumps(asdict(self)) if self.coordinator else self.code

    @classmethod
    def of(cls, detail: str) -> Refusal:
        if not detail.startswith("{"):
            return cls(detail)
        facts = json.loads(detail)
        return cls(str(facts["code"]), str(facts["coordinator"]), int(facts["times"]))


class InvalidEventError(Exception):
    """An event contradicts the events before it."""


@dataclass
class Account:
    """The state of a ledger after some of its events.

    Attributes:
        collections: name -> (unit, since)
        single: collections with a version without groups
        units: name -> digest of the digests of its units
        forgiven: heads seen by others that were accepted as lost
        restored: number of restorations
        refusals: (coordinator, code) -> count in the last event about it
    """

    entries: dict[str, LedgerEntry] = field(default_factory=dict)
    collections: dict[str, tuple[str, str]] = field(default_factory=dict)
    single: set[str] = field(default_factory=set)
    versions: dict[str, DataVersion] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    budgets: list[Budget] = field(default_factory=list)
    stored_values: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    forgiven: set[str] = field(default_factory=set)
    restored: int = 0
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    _spent: dict[str, Counter[tuple[float, float]]] = field(default_factory=lambda: defaultdict(Counter))
    _of_run: dict[str, dict[str, LedgerEntry]] = field(default_factory=lambda: defaultdict(dict))

    def apply(self, event: LedgerEvent) -> None:
        """Apply one event; raises InvalidEventError if it contradicts the previous ones or cannot be read."""
        try:
            if event.entry is not None:
                self._move(event)
            elif event.state == "REGISTERED":
                facts = json.loads(event.detail)
                self._register(event.subject, event.created_at, facts)
            elif event.state == "BUDGET":
                facts = json.loads(event.detail)
                filter, order = filter_named(facts.get("filter", RENYI)), float(facts["order"])
                kept = PrivacyFilter(float(facts["epsilon"]), float(facts["delta"]), order, filter)
                self.budgets.append(Budget(event.subject, kept, facts["operator"], facts["reason"], event.created_at))
            elif event.state == "KEPT":
                facts = json.loads(event.detail)
                self.stored_values[event.subject, facts["name"]] = facts["value"], event.created_at
            elif event.state == "RESTORED":
                seq, hash, *times = event.detail.split()  # version 1 wrote no count
                self.forgiven.add(f"{seq} {hash}")
                self.restored = max([self.restored + 1, *map(int, times)])
            elif event.state == "MIGRATED":
                self._load(json.loads(event.detail))
            elif event.state == "REFUSED":
                refusal = Refusal.of(event.detail)
                self.refusals[refusal.coordinator, refusal.code] = refusal.times
            else:
                raise InvalidEventError(f"{event.state} does not refer to an entry")
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise InvalidEventError(f"its detail cannot be read ({type(error).__name__}: {error})") from error

    def _move(self, event: LedgerEvent) -> None:
        id = str(event.entry)
        entry = self.entries.get(id)
        old = "" if entry is None else entry.state
        if event.state not in _NEXT.get(old, ()):
            raise InvalidEventError(f"{id!r} cannot go from {old or 'nothing'} to {event.state}")
        if entry is None:
            entry = self._enter(LedgerEntry.of(event))
        self._tally(entry, -1)
        entry.state = event.state
        self._tally(entry, 1)

    def _enter(self, entry: LedgerEntry) -> LedgerEntry:
        self.entries[entry.id] = self._of_run[f"run {entry.run}"][entry.id] = entry
        if entry.manifest:
            self._of_run[f"manifest {entry.manifest}"][entry.id] = entry
        return entry

    def _tally(self, entry: LedgerEntry, sign: int) -> None:
        if entry.charged:
            for p in entry.planned:
                self._spent[entry.collection][p.mechanism.noise, p.mechanism.rate] += sign * p.mechanism.steps

    def _register(self, collection: str, at: str, facts: Mapping[str, Any]) -> None:
        self.collections.setdefault(collection, (facts["unit"], at))
        if facts["unit"] == "record":
            self.single.add(collection)
        version = DataVersion(collection, int(facts["records"]), int(facts["units"]), at)
        self.versions.setdefault(facts["fingerprint"], version)
        self.units[collection] = facts["digests"]

    def _load(self, facts: Mapping[str, Any]) -> None:
        """Load the state of a ledger of version 1 (`privacy.ledger.before_the_key`)."""
        if self.entries or self.versions:
            raise InvalidEventError("the first event must name the ledger's key")
        self.collections = {name: (unit, at) for name, (unit, at) in facts["collections"].items()}
        self.single = {name for name, (unit, _) in self.collections.items() if unit == "record"}
        self.versions = {fingerprint: DataVersion(*row) for fingerprint, row in facts["versions"].items()}
        self.units = dict(facts["units"])
        for collection, detail, at in facts["budgets"]:
            self.apply(LedgerEvent(0, None, collection, "BUDGET", detail, at))
        self.stored_values = {(fingerprint, name): (value, at) for fingerprint, name, value, at in facts["kept"]}
        for id, state, detail, at in facts["entries"]:
            entry = self._enter(LedgerEntry.of(LedgerEvent(0, id, id, "", detail, at)))
            entry.state = state
            self._tally(entry, 1)
        self.forgiven, self.restored = set(facts["forgiven"]), int(facts["restored"])

    # ---- what follows from it -----------------------------------------------------------------------------------

    def budget(self, collection: str) -> PrivacyFilter | None:
        return next((b.filter for b in reversed(self.budgets) if b.collection == collection), None)

    def unit(self, collection: str) -> str:
        """Return the privacy unit of a collection: records, if any version has no groups."""
        return "record" if collection in self.single else self.collections[collection][0]

    def history(self, collection: str) -> list[Mechanism]:
        spent = self._spent.get(collection, Counter())
        return [Mechanism(z, q, n) for (z, q), n in sorted(spent.items()) if n]

    def alone(self, collection: str) -> list[Mechanism]:
        """Return the spending under the assumption that masks over shared noise failed."""
        made = [e.planned for e in self.entries.values() if e.collection == collection and e.charged]
        return aggregated(p.alone for planned in made for p in planned)

    def of_run(self, run: str, manifest: str, collection: str) -> list[LedgerEntry]:
        """List a run's entries at a collection: those with its id or with its manifest."""
        entries = {**self._of_run.get(f"run {run}", {}), **self._of_run.get(f"manifest {manifest}", {})}
        return [entry for entry in entries.values() if entry.collection == collection]


def plain(planned: Iterable[PlannedRelease]) -> list[list[object]]:
    return [[p.purpose, p.mechanism.noise, p.mechanism.rate, p.mechanism.steps] for p in planned]


def planned_of(rows: Iterable[tuple[str, float, float, int]]) -> tuple[PlannedRelease, ...]:
    """Read planned releases from JSON values; raises ValueError, or ConfigError (E-PRIV-20), on other values."""
    return tuple(PlannedRelease(str(p), Mechanism(float(z), float(q), int(n))) for p, z, q, n in rows)


def _with_shared(planned: Iterable[PlannedRelease], shared: Mapping[str, Any]) -> tuple[PlannedRelease, ...]:
    terms = {purpose: SharedNoise.read(facts) for purpose, facts in shared.items()}
    return tuple(replace(p, shared=terms.get(p.purpose)) for p in planned)


# ---- admission -------------------------------------------------------------------------------------------------------

ATTEMPTS = 3
"""How often one round of a run may be charged to a collection: once, and again after up to two crashes."""


@dataclass(frozen=True, slots=True)
class LedgerTask:
    """The purpose of an entry: a round of a run under a manifest, and the data version that it reads.

    coordinator: that requests it; empty matches any, as in entries of earlier versions.
    """

    run: str
    manifest: str
    round: int
    kind: str
    fingerprint: str
    coordinator: str = ""

    def may_be_of(self, entry: LedgerEntry) -> bool:
        return self.coordinator == entry.coordinator or not (self.coordinator and entry.coordinator)


def times_charged(account: Account, collection: str, task: LedgerTask) -> int:
    """Return how often the coordinator's round was charged to a collection, under its run or its manifest."""
    of_run = account.of_run(task.run, task.manifest, collection)
    return sum(e.charged and task.may_be_of(e) and (e.round, e.kind) == (task.round, task.kind) for e in of_run)


def refused(
    account: Account,
    collection: str,
    task: LedgerTask,
    requested: Sequence[Mechanism],
    cap: PrivacyFilter | None,
    run: Sequence[Bound],
) -> RefusedError | None:
    """Return the refusal of a request, None if it is admitted; raises RefusedError (E-BUDGET-02) without a budget."""
    budget = account.budget(collection)
    if budget is None or not math.isfinite(budget.epsilon):
        raise RefusedError(
            "E-BUDGET-02",
            f"expected a budget for {collection!r}, found none: set one with `silo ledger budget set`",
        )
    spent = account.history(collection)
    cap = cap and cap.kept_like(budget)
    if not (budget.admits(spent, requested) and (cap is None or cap.admits(spent, requested))):
        message = f"the privacy budget of {collection!r} does not cover round {task.round + 1} of this run"
        message += budget.remedy(spent, requested)
        return RefusedError("E-BUDGET-01", message)
    before = [e for e in account.of_run(task.run, task.manifest, collection) if e.charged and task.may_be_of(e)]
    tried = times_charged(account, collection, task)
    if tried >= ATTEMPTS:
        return RefusedError(
            "E-BUDGET-12",
            f"{collection!r} has already been charged {tried} times for round {task.round + 1} of run {task.run}; "
            f"{ATTEMPTS} is the limit",
        )
    of_run = [p.mechanism for e in before for p in e.planned]
    if not all(bound.admits(of_run, requested) for bound in run):
        return RefusedError(
            "E-BUDGET-12",
            f"round {task.round + 1} exceeds what run {task.run} and all runs of the same manifest may spend of "
            f"{collection!r}: it asks for more than it announced, or than the policy allows for one run",
        )
    return None
