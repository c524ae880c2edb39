"""`coordinator leads`: who may start and end runs."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import Home, Place, SigningPlace
from coordinator.pki.authority import Authority
from coordinator.pki.leads import Leads
from coordinator.storage.records import Lead
from coordinator.storage.store import Store
from service_core.command_line import Json, command
from service_core.console import Reply, local_time, make_table

leads = typer.Typer(help="The leads of the consortium: list, add, renew, revoke. Without a command: list.")
Name = Annotated[str, typer.Argument(help="The lead's name in the consortium.")]


@leads.callback(invoke_without_command=True)
def _default(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    if context.invoked_subcommand is None:
        show(home=home, as_json=as_json)


def _opened(home: Path) -> closing[Store]:
    Authority.open(home)
    return closing(Store(home))


@leads.command("list")
@command
def show(home: Place) -> Reply:
    """List the leads, revoked ones included."""
    with _opened(home) as store:
        rows = Leads(home, store).all()
        alarms = {lead.name: store.members.alarm(lead.name) for lead in rows}
    table = [(lead.name, _state(lead), local_time(lead.until), lead.fingerprint[:23]) for lead in rows]
    return Reply(
        [_json(lead) | {"alarm": alarms[lead.name] or None} for lead in rows],
        [
            make_table("Leads", ("lead", "state", "certificate until", "fingerprint"), table),
            *(f"{name}: {alarm}" for name, alarm in alarms.items() if alarm),
        ],
    )


@leads.command()
@command
def add(name: Name, home: SigningPlace) -> Reply:
    """Certify a new lead; its key stays in the authority's folder. CONSILIUM_LEAD=NAME gives commands as this lead."""
    with _opened(home) as store:
        made = Leads(home, store).add(name)
    return _made(made, f"added the lead {name}; for its commands: CONSILIUM_LEAD={name}")


@leads.command()
@command
def renew(name: Name, home: SigningPlace) -> Reply:
    """Give a lead a new key and certificate, also after the old one has expired."""
    with _opened(home) as store:
        made = Leads(home, store).renew(name)
    return _made(made, f"renewed the lead {name}; its old certificate ends when the new one is used")


@leads.command()
@command
def revoke(
    name: Name,
    reason: Annotated[str, typer.Option(help="Why; who uses the certificate is told.")] = "revoked by the consortium",
    *,
    home: Place,
) -> Reply:
    """Exclude a lead: what it is watching ends within seconds, and its runs go on."""
    with _opened(home) as store:
        found = Leads(home, store)
        found.revoke(name, reason)
        left = [lead for lead in found.all() if lead.revoked is None]
    notes = [] if left else ["no lead is left: coordinator leads add NAME"]
    return Reply({"name": name, "revoked": True, "reason": reason}, [f"{name} is revoked: {reason}"], notes)


def _made(lead: Lead, text: str) -> Reply:
    return Reply(_json(lead), [text, f"certificate until {local_time(lead.until)}"])


def _json(lead: Lead) -> dict[str, object]:
    return {
        "name": lead.name,
        "state": _state(lead),
        "fingerprint": lead.fingerprint,
        "certificate_until": lead.until,
        "reason": lead.revoked,
    }


def _state(lead: Lead) -> str:
    if lead.revoked is not None:
        return "revoked"
    return "in force" if lead.until > time.time() else "expired"
