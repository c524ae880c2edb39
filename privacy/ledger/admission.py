"""What a ledger admits: a round that fits the budget of its records and its run's bounds, and not too often.

A run is known by its id and by its manifest, both its coordinator's to choose, so its bounds hold for everything that
this coordinator had charged under either; what another consortium on the same ledger had charged is no part of it.
Under a new id and a new manifest it is a new request, which policy and budget bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_core.errors import RefusedError
from privacy.accounting.accountant import Bound, Filter, Mechanism
from privacy.ledger.account import Account, Entry

ATTEMPTS = 3
"""How often one round of a run may be charged to a collection: the first time, and again after a crash or two."""


@dataclass(frozen=True, slots=True)
class LedgerTask:
    """What an entry is for: a round of a run, of a manifest, and the version of the data that it reads.

    coordinator: who asks; empty counts as everybody's, as in entries of earlier versions.
    """

    run: str
    manifest: str
    round: int
    kind: str
    fingerprint: str
    coordinator: str = ""

    def may_be_of(self, entry: Entry) -> bool:
        return self.coordinator == entry.coordinator or not (self.coordinator and entry.coordinator)


def times_charged(account: Account, collection: str, task: LedgerTask) -> int:
    """Count how often a coordinator's round was charged to a collection, under its run or its manifest."""
    of_run = account.of_run(task.run, task.manifest, collection)
    return sum(e.charged and task.may_be_of(e) and (e.round, e.kind) == (task.round, task.kind) for e in of_run)


def refused(
    account: Account,
    collection: str,
    task: LedgerTask,
    asked: Sequence[Mechanism],
    cap: Filter | None,
    run: Sequence[Bound],
) -> RefusedError | None:
    """Return the refusal of a request, None when it is admitted. Raises RefusedError (E-BUDGET-02) without a budget."""
    budget = account.budget(collection)
    if budget is None or not math.isfinite(budget.epsilon):
        raise RefusedError(
            "E-BUDGET-02",
            f"expected a budget for {collection!r}, found none: `silo ledger budget set` gives one",
        )
    spent = account.history(collection)
    if not (budget.admits(spent, asked) and (cap is None or cap.admits(spent, asked))):
        message = f"the privacy budget of {collection!r} does not cover round {task.round + 1} of this run"
        return RefusedError("E-BUDGET-01", message)
    before = [e for e in account.of_run(task.run, task.manifest, collection) if e.charged and task.may_be_of(e)]
    tried = times_charged(account, collection, task)
    if tried >= ATTEMPTS:
        return RefusedError(
            "E-BUDGET-12",
            f"expected round {task.round + 1} of run {task.run} at most {ATTEMPTS} times, found that {collection!r} "
            f"was charged for it {tried} times",
        )
    of_run = [p.mechanism for e in before for p in e.planned]
    if not all(bound.admits(of_run, asked) for bound in run):
        return RefusedError(
            "E-BUDGET-12",
            f"what run {task.run}, and any of the same manifest, may spend of {collection!r} in all does not cover "
            f"round {task.round + 1}: it asks for more than it announced, or than the policy allows one run",
        )
    return None
