"""Privacy spending of each collection of records, and a preview of a run's additional spending."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from privacy.accounting.accountant import Mechanism, PrivacyFilter
from silo.reports.disclosure import NO_UPDATES, Unprotected
from silo.reports.run_request import RunRequest
from silo.storage.tasks import UnprotectedUpdate

if TYPE_CHECKING:
    from privacy.ledger.ledger import Ledger
    from privacy.policy import Policy

SPLITS = ("train", "test")
WHOLE = "hospital"
"""The collection of all the hospital's data."""
_SAYABLE = math.log(1e6)


@dataclass(frozen=True, slots=True)
class Spending:
    """A collection's spending, by RDP. spent, budget: epsilon at `delta`.

    budget, delta: of the ledger's budget; None and 1e-5 without one   cap: epsilon of the policy's own budget
    used: used share of a budget, the larger of both; None without a budget, or if one is too small for any run
    (`closed`)   unprotected: updates of its records that the spending does not cover.
    """

    collection: str
    unit: str
    spent: float
    delta: float
    budget: float | None
    cap: float | None
    used: float | None
    closed: bool = False
    unprotected: Unprotected = NO_UPDATES

    @property
    def limit(self) -> float | None:
        return min((e for e in (self.budget, self.cap) if e is not None), default=None)

    def sentence(self) -> str:
        """Describe the spending in private runs to the person responsible for the records; `warning` covers others."""
        whom = {"hospital": "the hospital as a whole", "group": "each patient", "record": "each record"}
        unit = whom.get(self.unit, f"each {self.unit}")
        charged = "runs that protect the hospital as a whole" if self.unit == WHOLE else "private runs"
        if not self.spent:
            start = f"Nothing has been spent for {unit} in {charged}."
            if self.limit is None:
                return f"{start} There is no budget: private runs are refused."
            return f"{start} The budget of epsilon {self.limit:g} is too small for any run." if self.closed else start
        of = "" if self.limit is None else f" of {self.limit:g}"
        factor = (
            f"a factor of {math.exp(self.spent):,.2g}" if self.spent < _SAYABLE else "a factor of more than a million"
        )
        if self.spent < math.log(100):
            factor = f"a factor of {math.exp(self.spent):.1f}"
        return (
            f"Epsilon {self.spent:.2f}{of} is spent for {unit} in {charged}. From these runs alone, the odds of a "
            f"correct guess about one of them grow by at most {factor} (except with probability {self.delta:g})."
        )

    @property
    def warning(self) -> str:
        """Describe the updates that the sentence does not cover; empty if there are none."""
        return self.unprotected.sentence(" of this hospital's records" if self.unit == WHOLE else " of these records")


@dataclass(frozen=True, slots=True)
class SpendingPreview:
    """A collection's spending before and after a run. fits: whether all budgets would admit the run."""

    before: Spending
    after: Spending
    fits: bool

    @property
    def more(self) -> float:
        return max(0.0, (self.after.used or 0.0) - (self.before.used or 0.0))

    def sentence(self) -> str:
        name, now, then = self.before.collection, self.before.spent, self.after.spent
        if self.before.budget is None:
            return f"{name} has no budget, so the run would be refused: silo ledger budget set {name}"
        text = f"{name}: epsilon spent would rise from {now:.2f} to {then:.2f} of {self.before.limit:g}"
        return text if self.fits else f"{text}. It does not fit: the run would be refused"


def spending(
    ledger: Ledger,
    policy: Policy | None,
    name: str,
    planned: Sequence[Mechanism] = (),
    updates: Sequence[UnprotectedUpdate] = (),
) -> Spending:
    """Read a collection's spending.

    policy: None if it cannot be read   planned: mechanisms to count as spent   updates: the home's unprotected updates.
    """
    status, cap = ledger.status(name, prv=False, planned=planned), None if policy is None else policy.caps().get(name)
    budget = ledger.budget(name)
    limits = [limit.kept_like(budget) for limit in (budget, cap) if limit is not None]
    closed, spent = any(limit.closed for limit in limits), [*ledger.history(name), *planned]
    return Spending(
        collection=name,
        unit=status.unit,
        spent=status.spent_rdp,
        delta=status.delta or 1e-5,
        budget=status.epsilon,
        cap=None if cap is None else cap.epsilon,
        used=None if closed else max((limit.used(spent) for limit in limits), default=None),
        closed=closed,
        unprotected=unprotected(ledger, name, updates),
    )


def unprotected(ledger: Ledger, name: str, updates: Iterable[UnprotectedUpdate]) -> Unprotected:
    """Count the unprotected updates of a collection's records, by the data versions in the ledger.

    Guarantees: none is left out. Updates with data that are not in the ledger count for every collection. Updates of
    an earlier version of the software count for each split, unless their run was charged for that split.
    """
    charged, unprotected_updates = ledger.charged_runs(), list[tuple[str, bool]]()
    for update in updates:
        splits = update.splits
        if splits is None:
            splits = tuple(s for s in SPLITS if not any(c.endswith(f"/{s}") for c in charged.get(update.run_id, ())))
        collections = {ledger.collection_of(version_of(update.fingerprint, split)) for split in splits}
        if collections and (name == WHOLE or collections & {name, None}):
            unprotected_updates.append((update.run_id, name == WHOLE or name in collections))
    return Unprotected(
        len(unprotected_updates),
        len({run for run, _ in unprotected_updates}),
        sum(not registered for _, registered in unprotected_updates),
    )


def preview(
    ledger: Ledger, policy: Policy | None, request: RunRequest, fingerprint: str = ""
) -> tuple[SpendingPreview, ...] | None:
    """Compute an upper bound on a run's spending of each collection; None if the data's collection is unknown.

    fingerprint: of the served data; empty if unknown.
    """
    collections, previews = ledger.collections(), []
    for split, mechanisms in request.mechanisms().items():
        if not mechanisms:
            continue
        name = _collection(ledger, collections, split, fingerprint)
        if name is None:
            return None
        history, budget = ledger.history(name), ledger.budget(name)
        limits: list[PrivacyFilter] = [] if budget is None else [budget]
        limits += [] if policy is None else [cap.kept_like(budget) for key, cap in policy.caps().items() if key == name]
        fits = budget is not None and all(limit.admits(history, mechanisms) for limit in limits)
        before, after = spending(ledger, policy, name), spending(ledger, policy, name, mechanisms)
        previews.append(SpendingPreview(before, after, fits))
    return tuple(previews)


def _collection(ledger: Ledger, collections: Sequence[str], split: str, fingerprint: str) -> str | None:
    if split == WHOLE:
        return WHOLE if WHOLE in collections else None
    if fingerprint:
        return ledger.collection_of(version_of(fingerprint, split))
    candidates = [name for name in collections if name.endswith(f"/{split}")]
    return candidates[0] if len(candidates) == 1 else None


def version_of(fingerprint: str, split: str) -> str:
    """Return the version of a split; the same as `privacy.ledger.registration.version`."""
    return hashlib.sha256(f"{fingerprint}|{split}".encode()).hexdigest()


def charges_of(charges: Mapping[str, Sequence[Mechanism]]) -> dict[str, tuple[tuple[float, float, int], ...]]:
    from privacy.accounting.accountant import aggregated

    return {
        split: tuple((m.noise, m.rate, m.steps) for m in aggregated(mechanisms))
        for split, mechanisms in charges.items()
    }
