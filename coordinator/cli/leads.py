"""`coordinator leads`: who may start and end runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import CaPassphraseEnv, CaPassphraseFile, Home, Json, home_of, use_passphrase
from coordinator.lead import console
from coordinator.pki.authority import Authority
from coordinator.pki.leads import Leads
from coordinator.storage.records import Lead
from coordinator.storage.store import Store
from service_core.console import local_time, make_table, print_json

leads = typer.Typer(help="The leads of the consortium: list, add, renew, revoke. Without a command: list.")
Name = Annotated[str, typer.Argument(help="The lead's name in the consortium.")]


@contextmanager
def _leads(home: Path | None) -> Iterator[Leads]:
    place = home_of(home)
    Authority.open(place)
    with closing(Store(place)) as store:
        yield Leads(place, store)


@leads.callback(invoke_without_command=True)
def _default(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    if context.invoked_subcommand is None:
        show(home, as_json)


@leads.command("list")
def show(home: Home = None, as_json: Json = False) -> None:
    """List the leads, revoked ones included."""
    with _leads(home) as found:
        rows = found.all()
        alarms = {lead.name: found.store.members.alarm(lead.name) for lead in rows}
    if as_json:
        print_json([_json(lead) | {"alarm": alarms[lead.name] or None} for lead in rows])
        return
    table = [(lead.name, _state(lead), local_time(lead.until), lead.fingerprint[:23]) for lead in rows]
    console.OUT.print(make_table("Leads", ("lead", "state", "certificate until", "fingerprint"), table))
    for name, alarm in alarms.items():
        if alarm:
            console.OUT.print(f"{name}: {alarm}", soft_wrap=True)


@leads.command()
def add(
    name: Name,
    passphrase_file: CaPassphraseFile = None,
    passphrase_env: CaPassphraseEnv = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Certify a new lead; its key stays in the authority's folder. CONSILIUM_LEAD=NAME gives commands as this lead."""
    use_passphrase(passphrase_file, passphrase_env)
    with _leads(home) as found:
        made = found.add(name)
    _show(made, f"added the lead {name}; for its commands: CONSILIUM_LEAD={name}", as_json)


@leads.command()
def renew(
    name: Name,
    passphrase_file: CaPassphraseFile = None,
    passphrase_env: CaPassphraseEnv = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Give a lead a new key and certificate, also after the old one has expired."""
    use_passphrase(passphrase_file, passphrase_env)
    with _leads(home) as found:
        made = found.renew(name)
    _show(made, f"renewed the lead {name}; its old certificate ends when the new one is used", as_json)


@leads.command()
def revoke(
    name: Name,
    reason: Annotated[str, typer.Option(help="Why; who uses the certificate is told.")] = "revoked by the consortium",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Exclude a lead: what it is watching ends within seconds, and its runs go on."""
    with _leads(home) as found:
        found.revoke(name, reason)
        left = [lead for lead in found.all() if lead.revoked is None]
    if as_json:
        print_json({"name": name, "revoked": True, "reason": reason})
        return
    console.OUT.print(f"{name} is revoked: {reason}")
    if not left:
        console.ERR.print("no lead is left: coordinator leads add NAME")


def _show(lead: Lead, text: str, as_json: bool) -> None:
    if as_json:
        print_json(_json(lead))
    else:
        console.OUT.print(text, soft_wrap=True)
        console.OUT.print(f"certificate until {local_time(lead.until)}")


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
