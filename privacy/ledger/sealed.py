"""Encrypted summary of a ledger's spending, stored by the coordinator; only the hospital's key opens it.

It is sent with every update, and the coordinator returns the newest one in each session. So a hospital that lost its
ledger can find out its spending. The coordinator sees a ciphertext, padded to full kilobytes, and the number of
restorations of this ledger. AES-256-GCM under a key derived from the ledger's key; the head and that number are
authenticated too.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from privacy.accounting.accountant import ORDERS, Mechanism, PrivacyFilter, rdp
from privacy.ledger.account import Account, PlannedRelease, plain, planned_of
from service_core.storage.chain import ChainHead

PAD, MAX_BYTES, _NONCE = 1024, 65536, 12
_ORDER = ORDERS[30]


@dataclass(frozen=True, slots=True)
class SpendingSummary:
    """Spending by collection at one moment: all charges, the most expensive entry, and the budget if there is one."""

    spent: Mapping[str, Sequence[Mechanism]]
    worst: Mapping[str, Sequence[PlannedRelease]]
    budgets: Mapping[str, PrivacyFilter]

    @classmethod
    def of(cls, account: Account) -> SpendingSummary:
        names = sorted(account.collections)
        budgets = {name: account.budget(name) for name in names}
        return cls(
            {name: account.history(name) for name in names},
            {name: most_expensive(account, name) for name in names},
            {name: budget for name, budget in budgets.items() if budget is not None},
        )


def most_expensive(account: Account, collection: str) -> tuple[PlannedRelease, ...]:
    """Return the releases of a collection's most expensive charged entry; empty if there is none."""
    budget = account.budget(collection)
    order = budget.order if budget else _ORDER
    made = {e.planned for e in account.entries.values() if e.collection == collection and e.charged}
    return max(made, key=lambda p: float(rdp([x.mechanism for x in p], [order])[0]), default=())


def seal(secret: bytes, head: ChainHead, restored: int, figures: SpendingSummary) -> bytes:
    """Encrypt the summary at a head; empty if it is too large to send. Recovery treats an empty summary as unknown."""
    plain_figures = {
        "spent": {c: [[m.noise, m.rate, m.steps] for m in spent] for c, spent in figures.spent.items()},
        "worst": {c: plain(planned) for c, planned in figures.worst.items()},
        "budgets": {c: [f.epsilon, f.delta, f.order, f.filter] for c, f in figures.budgets.items()},
    }
    raw = zlib.compress(json.dumps(plain_figures, separators=(",", ":")).encode(), 9)
    raw = len(raw).to_bytes(4, "big") + raw
    raw += bytes(-len(raw) % PAD)
    if len(raw) > MAX_BYTES:
        return b""
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(_key(secret)).encrypt(nonce, raw, f"{head} {restored}".encode())


def unseal(secret: bytes, head: ChainHead, restored: int, sealed: bytes) -> SpendingSummary | None:
    """Decrypt a summary; None unless it is this ledger's summary at this head."""
    try:
        raw = AESGCM(_key(secret)).decrypt(sealed[:_NONCE], sealed[_NONCE:], f"{head} {restored}".encode())
        plain_figures: Mapping[str, Any] = json.loads(zlib.decompress(raw[4 : 4 + int.from_bytes(raw[:4], "big")]))
        return SpendingSummary(
            {c: [Mechanism(z, q, n) for z, q, n in spent] for c, spent in plain_figures["spent"].items()},
            {c: planned_of(planned) for c, planned in plain_figures["worst"].items()},
            {c: PrivacyFilter(*budget) for c, budget in plain_figures["budgets"].items()},
        )
    except (InvalidTag, ValueError, KeyError, TypeError, zlib.error):
        return None


def largest_of(every: Sequence[SpendingSummary]) -> SpendingSummary:
    """Return the maximum over several summaries, since copies of a ledger may have diverged."""
    spent: dict[str, dict[tuple[float, float], int]] = {}
    costs: dict[str, list[Sequence[PlannedRelease]]] = {}
    for figures in every:
        for name, history in figures.spent.items():
            most = spent.setdefault(name, {})
            for m in history:
                most[m.noise, m.rate] = max(m.steps, most.get((m.noise, m.rate), 0))
        for name, planned in figures.worst.items():
            costs.setdefault(name, []).append(planned)
    return SpendingSummary(
        {name: [Mechanism(z, q, n) for (z, q), n in sorted(most.items())] for name, most in spent.items()},
        {name: max(made, key=_cost) for name, made in costs.items()},
        {},
    )


def _cost(planned: Sequence[PlannedRelease]) -> float:
    return float(rdp([p.mechanism for p in planned], [_ORDER])[0])


def _key(secret: bytes) -> bytes:
    return hmac.new(secret, b"sealed figures", hashlib.sha256).digest()
