"""Recovery of a lost ledger: everything that may have been spent since the remaining copy counts as spent.

The sealed figures sent with updates show the attested spending. A round after the last attestation is charged like the
most expensive entry so far, as often as one round may be charged (`ATTEMPTS`). If no figures can be opened, every
collection loses its whole budget. The bounds of single runs start again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fl_core.errors import StateError
from privacy.accounting.accountant import Mechanism, PrivacyFilter, rdp
from privacy.ledger import owners
from privacy.ledger.account import ATTEMPTS, Account, LedgerEntry
from privacy.ledger.event_chain import now
from privacy.ledger.ledger import Ledger, PlannedRelease
from privacy.ledger.sealed import SpendingSummary, largest_of, most_expensive, unseal
from service_core.storage.chain import ChainHead


class SeenHead(NamedTuple):
    """A head of the ledger that others have signed, with the sealed summary and number of restores sent with it."""

    head: ChainHead
    sealed: bytes = b""
    restored: int = 0


def charge_unknown_spending(ledger: Ledger, seen: Sequence[SeenHead], operator: str) -> dict[str, str]:
    """Accept an older copy of the ledger by charging everything that it may lack.

    Returns a description of the charge by collection. seen: every head that others have signed, in any order.

    Raises StateError: E-BUDGET-11 if nothing is missing, or while a service uses the ledger; E-BUDGET-04 if a charged
    collection is not registered, or there is nothing to charge; as `Ledger.verify` if the ledger was edited.
    """
    if owners.has_others(ledger.chain.file):
        raise StateError("E-BUDGET-11", "a service is using this ledger: stop it first")
    newest = max(seen, key=lambda s: (s.restored, s.head.seq, bool(s.sealed)), default=SeenHead(ChainHead(0, "")))
    try:
        ledger.verify(newest.head)
    except StateError as error:
        if error.code != "E-BUDGET-08":
            raise
    else:
        raise StateError(
            "E-BUDGET-11", f"nothing to restore: the ledger has event {newest.head.seq}, the newest on record"
        )
    fork = max((s.head.seq for s in seen if ledger.holds(s.head)), default=0)
    unsealed = {s: unseal(ledger.chain.secret, s.head, s.restored, s.sealed) for s in seen}
    figures = unsealed[newest] and largest_of(
        [f for s, f in unsealed.items() if f is not None and not ledger.holds(s.head)]
    )
    common = ledger.account_at(fork)
    with ledger.writing() as (db, account):
        charges = _everything(account) if figures is None else _missing(account, common, figures)
        entry = f"restored/{newest.head.seq}/{newest.head.hash[:16]}"
        for name, planned in charges.items():
            fingerprint = [f for f, v in account.versions.items() if v.collection == name][-1]
            made = LedgerEntry(
                f"{entry}/{name}",
                name,
                fingerprint,
                f"restored {newest.head.hash}",
                "",
                newest.head.seq,
                account.restored,
                "restored",
                now(),
                tuple(planned),
            )
            ledger.enter(db, made, "INTENT")
            ledger.chain.write(db, made.id, made.id, "SPENT_ON_RECOVERY", "may have been spent after the copy was made")
        times = 1 + max([account.restored, *(s.restored for s in seen)])
        ledger.chain.write(db, None, f"restored by {operator}", "RESTORED", f"{newest.head} {times}")
    how = "its whole budget" if figures is None else f"what was attested, and {ATTEMPTS} times its most expensive entry"
    return dict.fromkeys(sorted(charges), how)


def _missing(account: Account, common: Account, figures: SpendingSummary) -> dict[str, list[PlannedRelease]]:
    charged = {name for name, spent in figures.spent.items() if spent}
    if strangers := sorted(charged - set(account.collections)):
        raise StateError(
            "E-BUDGET-04", f"the collections {strangers} were charged, but are not in the ledger: register them"
        )
    charges: dict[str, list[PlannedRelease]] = {}
    for name in account.collections:
        left = Counter({(m.noise, m.rate): m.steps for m in figures.spent.get(name, ())})
        left.subtract({(m.noise, m.rate): m.steps for m in common.history(name)})
        lost = [PlannedRelease("attested", Mechanism(z, q, n)) for (z, q), n in sorted(left.items()) if n > 0]
        most = max(most_expensive(account, name), figures.worst.get(name, ()), key=lambda p: _cost(account, name, p))
        again = [replace(p, mechanism=replace(p.mechanism, steps=p.mechanism.steps * ATTEMPTS)) for p in most]
        if lost or again:
            charges[name] = lost + again
    if not charges:
        raise _nothing()
    return charges


def _everything(account: Account) -> dict[str, list[PlannedRelease]]:
    budgets = {name: account.budget(name) for name in account.collections}
    limits = [b for b in budgets.values() if b is not None]
    if not limits:
        raise _nothing()
    most = max(limits, key=lambda b: b.epsilon)
    return {name: [_all_of(b or most)] for name, b in budgets.items()}


def _cost(account: Account, name: str, planned: Sequence[PlannedRelease]) -> float:
    budget = account.budget(name) or PrivacyFilter.of(1.0, 1e-5)
    return float(rdp([p.mechanism for p in planned], [budget.order])[0])


def _all_of(budget: PrivacyFilter) -> PlannedRelease:
    """Return a release that spends the whole budget under both filters: alpha / (2 z^2) = its RDP bound, z = 1 / mu."""
    bound = max(budget.bound, 1e-6)
    return PlannedRelease("everything", Mechanism(min(math.sqrt(budget.order / (2 * bound)), 1 / budget.mu)))


def _nothing() -> StateError:
    return StateError("E-BUDGET-04", "the ledger has no collection with a budget to charge: register the data")
