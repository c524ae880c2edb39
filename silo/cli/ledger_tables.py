"""What a person and a machine see of the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from privacy.accounting.accountant import replace_one
from privacy.ledger.ledger import Ledger
from silo.cli.console import OUT, show_rows
from silo.facts.leaving import Unprotected

Json = Mapping[str, Any]
DEFAULT_DELTA = 1e-5


def collection_json(ledger: Ledger, name: str) -> dict[str, Any]:
    """Collect what the ledger knows of a collection; epsilons are at the delta of its budget, 1e-5 without one."""
    status = ledger.status(name)
    delta = status.delta or DEFAULT_DELTA
    twice, more = replace_one(status.spent_rdp, delta)
    return {
        "collection": name,
        "unit": status.unit,
        "budget": None if status.epsilon is None else {"epsilon": status.epsilon, "delta": status.delta},
        "delta": delta,
        "epsilon": status.spent_rdp,
        "epsilon_prv": status.spent_prv,
        "epsilon_replace_one": {"epsilon": twice, "delta": more},
        "used": status.used,
        "entries": [
            {
                "entry": entry,
                "state": state,
                "releases": [{"purpose": p.purpose, **asdict(p.mechanism)} for p in planned],
            }
            for entry, state, planned in ledger.entries(name)
        ],
    }


_LEGEND = (
    "unit: what a budget protects. spent (RDP): the epsilon that counts, of private runs; spent (PRV): a tighter bound "
    "of the same. used: the share of the budget as the ledger adds it up, to which epsilon is not in proportion: at "
    "100 % it is the budget's. one replaced: epsilon where one record is exchanged for another, instead of added or "
    "removed."
)


def show_collections(found: Sequence[Json]) -> None:
    if not found:
        OUT.print("Nothing is registered in this ledger: `silo ledger register --data REF` enters data.")
        return
    OUT.print(_sentence(found))
    show_rows(
        "Privacy budgets",
        ("collection", "unit", "budget", "spent (RDP)", "spent (PRV)", "used", "one replaced"),
        [
            (
                c["collection"],
                c["unit"],
                "none" if c["budget"] is None else f"epsilon {c['budget']['epsilon']:g} at {c['delta']:g}",
                f"{c['epsilon']:.4f}",
                f"{c['epsilon_prv']:.3f}",
                "-" if c["used"] is None else f"{100 * c['used']:.1f} %",
                f"{c['epsilon_replace_one']['epsilon']:.4f}",
            )
            for c in found
        ],
        headings=True,
    )
    if OUT.is_terminal:
        OUT.print(_LEGEND)


def _sentence(found: Sequence[Json]) -> str:
    """Say in one sentence what the table says."""
    limited = [c for c in found if c["budget"] is not None]
    if not limited:
        return (
            "No collection of records has a budget, so no private run may use any: `silo ledger budget set` gives one."
        )
    most = max(limited, key=lambda c: c["used"] or 0.0)
    others = len(found) - len(limited)
    return (
        f"Of the budgets of {len(limited)} {'collection' if len(limited) == 1 else 'collections'} at most "
        f"{100 * (most['used'] or 0.0):.1f} % is spent ({most['collection']})"
        + (
            f"; {others} without a budget {'takes' if others == 1 else 'take'} part in no private run."
            if others
            else "."
        )
    )


def show_unprotected(found: Mapping[str, Unprotected], shared: bool) -> None:
    """Say of which collections updates left that no spending covers. shared: other homes may use the ledger."""
    for name, count in found.items():
        if count.updates:
            OUT.print(f"{name}: {count.sentence()}")
    if shared:
        OUT.print("Updates without privacy of other homes that use this ledger are not among these: ask there.")


def show_entries(found: Iterable[Json]) -> None:
    show_rows(
        "Entries",
        ("entry", "state", "for", "noise", "rate", "steps"),
        [
            (e["entry"], e["state"], r["purpose"], f"{r['noise']:.4g}", f"{r['rate']:.4g}", str(r["steps"]))
            for c in found
            for e in c["entries"]
            for r in e["releases"]
        ],
        headings=True,
    )
