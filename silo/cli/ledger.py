"""`silo ledger`: how the hospital's records were used, and the budgets that only the hospital sets.

No message from the network can run these commands.
"""

from __future__ import annotations

import getpass
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_core.errors import ConfigError, StateError
from privacy.accounting.accountant import FilterName, replace_one
from privacy.ledger.account import PlannedRelease
from privacy.ledger.ledger import Ledger
from service_core.command_line import command
from service_core.console import OUT, CommandResult, KeyValues, TextTable
from service_core.storage.chain import ChainHead
from silo.cli.options import DataRootOption, SiloHome, open_store
from silo.reports.disclosure import Unprotected
from silo.storage.home import Home
from silo.storage.tasks import UnprotectedUpdate

app = typer.Typer(no_args_is_help=True, help="The privacy ledger: how records were used, and their budgets.")
budget = typer.Typer(no_args_is_help=True, help="Budgets of collections of records.")
app.add_typer(budget, name="budget")


def _ledger(home: Home, make: bool = False) -> Ledger:
    """Open a home's ledger; raises StateError (E-BUDGET-04) if there is none, unless `make`."""
    if make:
        home.make()
    elif not home.ledger.exists():
        raise StateError("E-BUDGET-04", f"there is no ledger in {home.ledger}. Create it with: silo ledger register")
    return Ledger(home.ledger, home.ledger_key)


@app.command("show")
@command
def show_ledger(
    entries: Annotated[bool, typer.Option("--entries", help="List every entry.")] = False,
    *,
    home: SiloHome,
) -> CommandResult:
    """Show how much of each collection's budget is spent, computed in two ways.

    Epsilon is for adding or removing one unit; for replacing a unit it is twice that. It covers private runs only, so
    the number of updates that left this home without privacy is shown, too. The JSON output has all entries with their
    mechanisms, so that you can compute the same numbers.
    """
    from silo.reports.spending import unprotected

    updates = _unprotected_updates(home)
    if not home.ledger.exists():
        return _no_ledger(updates, home.shares_ledger)
    ledger = _ledger(home)
    counts = {name: unprotected(ledger, name, updates) for name in ledger.collections()}
    collections = [collection_json(ledger, name) | {"unprotected": count._asdict()} for name, count in counts.items()]
    head = ledger.head()
    return CommandResult(
        {"collections": collections, "events": head.seq, "head": head.hash},
        _shown(collections, counts, home.shares_ledger, entries),
    )


def _no_ledger(updates: Sequence[UnprotectedUpdate], shared: bool) -> CommandResult:
    """Answer for a home without registered data: no private run was possible; other runs were."""
    count = Unprotected.of_home(updates)
    nothing = {"collections": [], "events": 0, "head": "", "unprotected": count._asdict()}
    return CommandResult(nothing, [*_shown([], {"this home": count}, shared, entries=False)])


def _unprotected_updates(home: Home) -> list[UnprotectedUpdate]:
    if not home.database.exists():  # nothing left a home that never joined
        return []
    with open_store(home.database) as store:
        return store.unprotected()


@app.command()
@command
def verify(home: SiloHome) -> CommandResult:
    """Recompute the ledger from its events, and name every table, view, trigger or unit that differs.

    Events are checked with the ledger's key, and against the signed records of the coordinator and other hospitals, so
    that missing events are found.
    """
    ledger, seen = _ledger(home), _seen(home)
    count, head = ledger.verify(seen), ledger.head()
    events = f"{count}, unbroken" if count else "none: nothing has been registered here, or the file was emptied"
    facts = [("events", events), ("head", head.hash), ("others saw", f"event {seen.seq}")]
    return CommandResult({"events": count, "head": head.hash, "seen": seen.seq}, [KeyValues(facts)])


@app.command()
@command
def register(
    data: Annotated[str, typer.Option("--data", help="The data, as for `silo serve`.", metavar="REF")],
    name: Annotated[str | None, typer.Option("--name", help="The collection's name. Default: the reference.")] = None,
    data_root: DataRootOption = None,
    *,
    home: SiloHome,
) -> CommandResult:
    """Register data in the ledger, before the first private run and again whenever records are added or removed.

    The training and the test records become two collections, NAME/train and NAME/test. The collection `hospital`
    contains all data under all names; runs with silo-level privacy are charged to it. A new version keeps the budget
    and the spending of its collection. Patients are stored as keyed digests only.

    A record is identified by its decoded pixels and the name of its group. Renaming files, appending bytes, lossless
    conversion, new labels or new groups make no new record; registering one under another NAME is refused. But an image
    that was re-encoded with loss, cropped or resized has other pixels, so it counts as a new record with a budget of
    its own. So use one NAME for all data of the same patients. Name groups (patients) wherever they are known, and
    always in the same way. Register the original files, and serve derived files under the same NAME.
    """
    from fl_core import datasets
    from privacy.ledger import registration
    from silo.pacs.mirror import Mirror, resolved

    ledger = _ledger(home, make=True)
    loaded = datasets.load(resolved(home, data), data_root=data_root)
    pacs = Mirror.of(home, data)
    registered = registration.register(
        ledger,
        loaded,
        name or (loaded.origin if pacs is None else pacs.reference.public),
        "" if pacs is None else pacs.label_source,
    )
    words = {True: "a new version is registered", False: "was registered before"}
    return CommandResult(
        {"collections": registered}, [KeyValues([(name, words[new]) for name, new in registered.items()])]
    )


@budget.command("set")
@command
def set_budget(
    collection: Annotated[str, typer.Argument(help="NAME/train, NAME/test or hospital; NAME alone: both splits.")],
    epsilon: Annotated[float, typer.Option("--epsilon", help="Total epsilon of all runs, without a time limit.")],
    delta: Annotated[float, typer.Option("--delta", help="Total delta, less than 1 / (10 x number of units).")],
    reason: Annotated[str, typer.Option("--reason", help="The reason, for the record.")],
    operator: Annotated[str | None, typer.Option("--operator", help="Who decides. Default: the current user.")] = None,
    filter: Annotated[
        FilterName | None,
        typer.Option("--filter", help="How spending is counted. Default: unchanged; `auto` for the first budget."),
    ] = None,
    *,
    home: SiloHome,
) -> CommandResult:
    """Set the budget of a collection. It replaces an earlier budget; what was spent stays spent.

    `--filter gaussian` counts releases over all records (analytic, surveys, evaluations, prototypes alone) exactly, but
    refuses training in steps over samples. `renyi` allows both, but releases over all records need 6 to 9 % more noise.
    With `auto` the first private run decides.
    """
    if not (epsilon > 0 and 0 < delta < 1e-3):
        raise ConfigError("E-PRIV-20", f"expected epsilon > 0 and 0 < delta < 0.001, found {epsilon} and {delta}")
    ledger = _ledger(home)
    both = [name for name in ledger.collections() if name in (f"{collection}/train", f"{collection}/test")]
    chosen = both or [collection]
    for name in chosen:
        ledger.set_budget(name, epsilon, delta, operator or getpass.getuser(), reason, filter)
    facts = [(name, f"epsilon {epsilon:g} at delta {delta:g}") for name in chosen]
    return CommandResult({"collections": chosen, "epsilon": epsilon, "delta": delta}, [KeyValues(facts)])


@app.command()
@command
def release(
    entry: Annotated[str, typer.Argument(help="The entry's name in `silo ledger show --entries`.")],
    *,
    home: SiloHome,
) -> CommandResult:
    """Return a charge that was reserved for a task that never started. Run this while the service is stopped."""
    ledger = _ledger(home)
    with home.locked():
        ledger.release_unused(entry)
    return CommandResult({"released": entry}, [KeyValues([("released", entry)])])


@app.command()
@command
def restore(
    acknowledge: Annotated[
        bool,
        typer.Option("--acknowledge-spend", help="Confirm that the largest amount that may be missing is charged."),
    ] = False,
    operator: Annotated[str | None, typer.Option("--operator", help="Who decides. Default: the current user.")] = None,
    *,
    home: SiloHome,
) -> CommandResult:
    """Continue with an older copy of the ledger if the newest is lost. The largest possible missing amount is charged.

    Spending up to the last state that the coordinator or other hospitals have on record is charged exactly, from
    encrypted amounts in that record. For later rounds, every collection is charged its most expensive entry, times the
    allowed number of attempts for a round. Without these amounts, or without the key to decrypt them, each collection
    loses its whole budget. Later receipts state how often a restore was done.
    """
    from privacy.ledger.ledger import Ledger
    from privacy.ledger.recovery import SeenHead, charge_unknown_spending
    from silo.admission.rules import HospitalRules

    if not acknowledge:
        raise ConfigError(
            "E-BUDGET-11",
            "expected --acknowledge-spend: every collection will be charged the largest amount that may be missing",
        )
    with home.make().locked():
        with open_store(home.database) as store:
            seen = [
                SeenHead(ChainHead(s.seq, s.head), bytes.fromhex(s.sealed), s.restored)
                for s in HospitalRules(home, store).all_attestations()
            ]
        charged = charge_unknown_spending(
            Ledger(home.ledger, home.ledger_key, older=True), seen, operator or getpass.getuser()
        )
    return CommandResult(
        {"charged": charged}, [KeyValues([(name, f"charged {what}") for name, what in charged.items()])]
    )


@app.command("place")
@command
def place_ledger(
    path: Annotated[Path | None, typer.Argument(help="The ledger's file. Default: show where it is.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The key's file. Default: in the ledger's folder.")] = None,
    *,
    home: SiloHome,
) -> CommandResult:
    """Show or set where the ledger and its key are: a ledger that several homes share, or a key on another disk.

    A hospital in several consortia has a home for each. Their runs share one budget only if all homes name one ledger,
    on one machine. This command does not move the files: move them first, while no service runs. CONSILIUM_SILO_LEDGER
    and CONSILIUM_SILO_LEDGER_KEY override this setting.
    """
    if path is not None or key is not None:
        with home.make().locked():
            before, after = home.ledger, (path or home.ledger).expanduser().absolute()
            if before.exists() and before.absolute() != after:
                raise StateError(
                    "E-BUDGET-11",
                    f"{before} still has a ledger, and its spending would be forgotten. First move it, with its "
                    f"key, to {after}, or elsewhere if this home never spent anything",
                )
            if after.exists():
                beside = after.with_name(f"{after.stem}.key")
                Ledger(after, key or beside).verify(_seen(home))
            home.place_ledger(after, key)
    facts = {"ledger": str(home.ledger), "key": str(home.ledger_key)}
    return CommandResult(facts, [KeyValues(facts.items())])


def _seen(home: Home) -> ChainHead:
    from silo.admission.rules import HospitalRules

    with open_store(home.database) as store:
        seen = HospitalRules(home, store).latest_attestation()
    return ChainHead(seen.seq, seen.head)


# ---- output ----------------------------------------------------------------------------------------------------------

Json = Mapping[str, Any]
DEFAULT_DELTA = 1e-5


def _release(planned: PlannedRelease) -> dict[str, Any]:
    m = planned.mechanism
    shared = {"shared": planned.shared.facts(m.noise)} if planned.shared else {}
    return {"purpose": planned.purpose, **asdict(m), **shared}


def collection_json(ledger: Ledger, name: str) -> dict[str, Any]:
    """Return what the ledger has about a collection; epsilons at the delta of its budget, or 1e-5 without one."""
    status = ledger.status(name)
    delta = status.delta or DEFAULT_DELTA
    twice, more = replace_one(status.spent_rdp, delta)
    return {
        "collection": name,
        "unit": status.unit,
        "budget": None
        if status.epsilon is None
        else {"epsilon": status.epsilon, "delta": status.delta, "filter": status.filter},
        "delta": delta,
        "epsilon": status.spent_rdp,
        "epsilon_prv": status.spent_prv,
        "epsilon_masks_broken": status.spent_alone,
        "epsilon_replace_one": {"epsilon": twice, "delta": more},
        "used": status.used,
        "entries": [
            {
                "entry": entry,
                "state": state,
                "releases": [_release(p) for p in planned],
            }
            for entry, state, planned in ledger.entries(name)
        ],
    }


_LEGEND = (
    "unit: what a budget protects. counted: the epsilon of private runs, as the filter of the budget counts it; "
    "truly spent: by the privacy loss of all releases together. used: the share of the budget as the filter adds it "
    "up. Epsilon does not grow in proportion to it; at 100 % it is the budget's epsilon. one replaced: epsilon if "
    "one record is replaced by another, instead of added or removed."
)


def _shown(
    collections: Sequence[Json], counts: Mapping[str, Unprotected], shared: bool, entries: bool
) -> Iterator[str | TextTable]:
    """Show what was spent, and updates that the spending does not cover.

    shared: other homes may use the ledger.
    """
    if collections:
        yield _sentence(collections)
        yield _collections(collections)
        if OUT.is_terminal:
            yield _LEGEND
    else:
        yield "Nothing is registered in this home's ledger: run `silo ledger register --data REF`."
    for c in collections:
        if c["epsilon_masks_broken"] > c["epsilon"]:
            yield (
                f"{c['collection']}: noise was shared out with other hospitals under masks; if the masks were "
                f"broken, epsilon {c['epsilon_masks_broken']:.4f} is spent"
            )
    yield from (f"{name}: {count.sentence()}" for name, count in counts.items() if count.updates)
    if shared:
        yield "Updates without privacy of other homes with this ledger are not included: look them up in those homes."
    if entries:
        yield _entries(collections)


def _collections(collections: Sequence[Json]) -> TextTable:
    return TextTable(
        "Privacy budgets",
        ("collection", "unit", "budget", "filter", "counted", "actually spent", "used", "one replaced"),
        [
            (
                c["collection"],
                c["unit"],
                "none" if c["budget"] is None else f"epsilon {c['budget']['epsilon']:g} at {c['delta']:g}",
                "-" if c["budget"] is None else c["budget"]["filter"],
                f"{c['epsilon']:.4f}",
                f"{c['epsilon_prv']:.3f}",
                "-" if c["used"] is None else f"{100 * c['used']:.1f} %",
                f"{c['epsilon_replace_one']['epsilon']:.4f}",
            )
            for c in collections
        ],
        headings=True,
    )


def _sentence(collections: Sequence[Json]) -> str:
    """Summarise the table in one sentence."""
    limited = [c for c in collections if c["budget"] is not None]
    if not limited:
        return "No collection has a budget, so private runs are refused: set one with `silo ledger budget set`."
    most = max(limited, key=lambda c: c["used"] or 0.0)
    others = len(collections) - len(limited)
    return (
        f"Of the budgets of {len(limited)} {'collection' if len(limited) == 1 else 'collections'} at most "
        f"{100 * (most['used'] or 0.0):.1f} % is spent ({most['collection']})"
        + (
            f"; {others} without a budget {'takes' if others == 1 else 'take'} part in no private run."
            if others
            else "."
        )
    )


def _entries(collections: Iterable[Json]) -> TextTable:
    return TextTable(
        "Entries",
        ("entry", "state", "for", "noise", "rate", "steps"),
        [
            (e["entry"], e["state"], r["purpose"], f"{r['noise']:.4g}", f"{r['rate']:.4g}", str(r["steps"]))
            for c in collections
            for e in c["entries"]
            for r in e["releases"]
        ],
        headings=True,
    )
