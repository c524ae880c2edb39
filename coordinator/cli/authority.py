"""`coordinator ca` and `leads`: what the authority signs, and who may start and end runs.

For an authority whose key stays on a machine that no hospital reaches, see docs/offline-authority.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import Home, Place, SigningPlace
from coordinator.pki.authority import Authority
from coordinator.pki.leads import Leads
from coordinator.pki.membership import Membership, export_roster, import_roster, sign_request
from coordinator.pki.passphrase import PassphraseSource
from coordinator.storage.records import Lead
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ConfigError
from fl_core.text import read_text
from service_core.command_line import Json, command
from service_core.console import CommandResult, local_time, make_table
from service_core.pki.identity import certificate_fingerprint, format_fingerprint
from service_core.pki.offline_signing import Admission, SigningRequest
from service_core.pki.roster import Roster
from service_core.storage import private_files

Out = Annotated[
    Path | None, typer.Option(help="Output file. Default: NAME.admission or roster.admission in the current folder.")
]

ca = typer.Typer(
    no_args_is_help=True,
    help="Keep the authority's key on a separate machine: sign files there, then import them into the service.",
)


@contextmanager
def _authority(home: Path) -> Iterator[tuple[Authority, Membership, CoordinatorStore]]:
    authority = Authority.open(home)
    with closing(CoordinatorStore(home)) as store:
        yield authority, Membership(home, store), store


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise ConfigError("E-ID-31", f"cannot read {file}: {error}. Check the path and its permissions") from None


@ca.command()
@command
def service(
    out: Annotated[Path, typer.Option(help="Folder to write. Copy it to the service's machine as HOME/pki.")],
    home: SigningPlace,
) -> CommandResult:
    """Write the files for the service's machine: a new certificate, but not the authority's key."""
    with _authority(home) as (authority, _, _):
        authority.write_service(out)
        fingerprint = authority.fingerprint()
    shown = f"wrote {out}: copy it to the service's machine as HOME/pki, and delete it here"
    return CommandResult({"folder": str(out), "authority_fingerprint": fingerprint}, [shown])


@ca.command()
@command
def sign(
    request: Annotated[Path, typer.Argument(help="The file that `silo request` wrote.")],
    name: Annotated[
        str, typer.Argument(help="The hospital's name in the consortium; the request does not contain it.")
    ],
    out: Out = None,
    *,
    home: SigningPlace,
) -> CommandResult:
    """Certify a hospital's key. Give the file it writes to the hospital and to the service (`coordinator ca admit`)."""
    with _authority(home) as (authority, members, _):
        answer = sign_request(authority, members, name, SigningRequest.from_json(_read(request)))
    return _written(answer, out or Path(f"{name}.admission"))


@ca.command()
@command
def roster(out: Out = None, *, home: SigningPlace) -> CommandResult:
    """Write the newest list of members, for instance after `coordinator revoke` on this machine."""
    with _authority(home) as (authority, members, _):
        answer = export_roster(authority, members)
    return _written(answer, out or Path("roster.admission"))


@ca.command("passphrase")
@command
def change_passphrase(
    new_file: Annotated[Path | None, typer.Option("--new-file", help="The file with the new passphrase.")] = None,
    new_env: Annotated[
        str | None, typer.Option("--new-env", help="The environment variable with the new passphrase.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the passphrase.")] = False,
    *,
    home: SigningPlace,
) -> CommandResult:
    """Set or change the passphrase of the authority's key. Without a file or variable the command asks for it.

    Then restart a running service, because it needs the new passphrase.
    """
    authority = Authority.open(home)
    authority.unlock()
    new = None if remove else PassphraseSource(new_file, new_env).read("new passphrase", repeat=True)
    authority.change_passphrase(new)
    shown = "the authority's key has " + ("no passphrase now" if remove else "its new passphrase")
    return CommandResult({"passphrase": new is not None}, [shown])


def _written(answer: Admission, out: Path) -> CommandResult:
    private_files.write_public(out, answer.to_json().encode())
    fingerprint = certificate_fingerprint(answer.ca_pem)
    return CommandResult(
        {"file": str(out), "authority_fingerprint": fingerprint},
        [f"wrote {out}; on the service's machine: coordinator ca admit {out.name}"],
        [f"read the authority's fingerprint to a new hospital: {format_fingerprint(fingerprint)}"],
    )


@ca.command()
@command
def admit(
    file: Annotated[Path, typer.Argument(help="The file that `coordinator ca sign` or `ca roster` wrote.")],
    home: Place,
) -> CommandResult:
    """Import a file that the authority signed into the service on this machine, also while the service runs."""
    with _authority(home) as (_, _, store):
        admitted: Roster = import_roster(home, store, Admission.from_json(_read(file)))
    names = [member.name for member in admitted.members]
    shown = f"members by roster {admitted.version}: {', '.join(names) or 'none'}"
    return CommandResult({"version": admitted.version, "members": names}, [shown])


# ---- leads -----------------------------------------------------------------------------------------------------------

leads = typer.Typer(help="The leads of the consortium: list, add, renew, revoke. Without a command: list.")
Name = Annotated[str, typer.Argument(help="The lead's name in the consortium.")]


@leads.callback(invoke_without_command=True)
def _default(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    if context.invoked_subcommand is None:
        show(home=home, as_json=as_json)


def _opened(home: Path) -> closing[CoordinatorStore]:
    Authority.open(home)
    return closing(CoordinatorStore(home))


@leads.command("list")
@command
def show(home: Place) -> CommandResult:
    """List the leads, including revoked ones."""
    with _opened(home) as store:
        rows = Leads(home, store).all()
        alarms = {lead.name: store.members.alarm(lead.name) for lead in rows}
    table = [(lead.name, _state(lead), local_time(lead.until), lead.fingerprint[:23]) for lead in rows]
    return CommandResult(
        [_json(lead) | {"alarm": alarms[lead.name] or None} for lead in rows],
        [
            make_table("Leads", ("lead", "state", "certificate until", "fingerprint"), table),
            *(f"{name}: {alarm}" for name, alarm in alarms.items() if alarm),
        ],
    )


@leads.command()
@command
def add(name: Name, home: SigningPlace) -> CommandResult:
    """Certify a new lead; its key stays in the authority's folder. Use CONSILIUM_LEAD=NAME to act as this lead."""
    with _opened(home) as store:
        made = Leads(home, store).add(name)
    return _made(made, f"added the lead {name}; for its commands: CONSILIUM_LEAD={name}")


@leads.command()
@command
def renew(name: Name, home: SigningPlace) -> CommandResult:
    """Give a lead a new key and certificate, also after the old one has expired."""
    with _opened(home) as store:
        made = Leads(home, store).renew(name)
    return _made(made, f"renewed the lead {name}; the old certificate stays valid until the new one is used")


@leads.command()
@command
def revoke(
    name: Name,
    reason: Annotated[
        str, typer.Option(help="Reason, shown to the user of the certificate.")
    ] = "revoked by the consortium",
    *,
    home: Place,
) -> CommandResult:
    """Exclude a lead. Its open `watch` commands end within seconds; its runs continue."""
    with _opened(home) as store:
        of_home = Leads(home, store)
        of_home.revoke(name, reason)
        remaining = [lead for lead in of_home.all() if lead.revoked is None]
    notes = [] if remaining else ["no lead is left: coordinator leads add NAME"]
    return CommandResult({"name": name, "revoked": True, "reason": reason}, [f"{name} is revoked: {reason}"], notes)


def _made(lead: Lead, text: str) -> CommandResult:
    return CommandResult(_json(lead), [text, f"certificate until {local_time(lead.until)}"])


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
