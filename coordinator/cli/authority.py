"""`coordinator ca`: an authority whose key stays on a machine that no hospital reaches; docs/offline-authority.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import CaPassphraseEnv, CaPassphraseFile, Home, Json, home_of, use_passphrase
from coordinator.lead import console
from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership, export_roster, import_roster, sign_request
from coordinator.pki.passphrase import PassphraseSource
from coordinator.storage.store import Store
from fl_core.errors import ConfigError
from service_core.console import print_json
from service_core.pki.identity import certificate_fingerprint, colons
from service_core.pki.offline_signing import Admission, SigningRequest
from service_core.pki.roster import Roster
from service_core.storage import private_files

Out = Annotated[Path | None, typer.Option(help="Where to write; default NAME.admission or roster.admission here.")]

ca = typer.Typer(
    no_args_is_help=True,
    help="Keep the authority's key on a machine of its own: sign there, carry files, admit at the service.",
)


@contextmanager
def _authority(home: Path | None) -> Iterator[tuple[Authority, Membership, Store]]:
    place = home_of(home)
    authority = Authority.open(place)
    with closing(Store(place)) as store:
        yield authority, Membership(place, store), store


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("E-ID-31", f"expected a file that can be read at {file}, found none: {error}") from None


@ca.command()
def service(
    out: Annotated[Path, typer.Option(help="Folder to write; it becomes HOME/pki of the service.")],
    passphrase_file: CaPassphraseFile = None,
    passphrase_env: CaPassphraseEnv = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write what the service's machine needs, without the authority's key; its certificate is a new one each time."""
    use_passphrase(passphrase_file, passphrase_env)
    with _authority(home) as (authority, _, _):
        authority.write_service(out)
        fingerprint = authority.fingerprint()
    if as_json:
        print_json({"folder": str(out), "authority_fingerprint": fingerprint})
        return
    console.OUT.print(f"wrote {out}: copy it to the service's machine as HOME/pki, and delete it here", soft_wrap=True)


@ca.command()
def sign(
    request: Annotated[Path, typer.Argument(help="The file that `silo request` wrote.")],
    name: Annotated[str, typer.Argument(help="The hospital's name in the consortium: the request claims none.")],
    out: Out = None,
    passphrase_file: CaPassphraseFile = None,
    passphrase_env: CaPassphraseEnv = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Certify a hospital's key. The answer goes back to the hospital, and to the service (`coordinator ca admit`)."""
    use_passphrase(passphrase_file, passphrase_env)
    with _authority(home) as (authority, members, _):
        answer = sign_request(authority, members, name, SigningRequest.from_json(_read(request)))
    _write(answer, out or Path(f"{name}.admission"), as_json)


@ca.command()
def roster(
    out: Out = None,
    passphrase_file: CaPassphraseFile = None,
    passphrase_env: CaPassphraseEnv = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write the newest list of members, for instance after `coordinator revoke` on this machine."""
    use_passphrase(passphrase_file, passphrase_env)
    with _authority(home) as (authority, members, _):
        answer = export_roster(authority, members)
    _write(answer, out or Path("roster.admission"), as_json)


@ca.command("passphrase")
def change_passphrase(
    new_file: Annotated[Path | None, typer.Option("--new-file", help="The file with the new passphrase.")] = None,
    new_env: Annotated[str | None, typer.Option("--new-env", help="The environment variable that holds it.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Keep the key without a passphrase from now on.")] = False,
    passphrase_file: CaPassphraseFile = None,
    passphrase_env: CaPassphraseEnv = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Give the authority's key another passphrase, or a first one; without a file or variable it is asked for.

    A service that runs must be started again to know it.
    """
    use_passphrase(passphrase_file, passphrase_env)
    authority = Authority.open(home_of(home))
    authority.unlock()
    new = None if remove else PassphraseSource(new_file, new_env).read("new passphrase", repeat=True)
    authority.change_passphrase(new)
    if as_json:
        print_json({"passphrase": new is not None})
    else:
        console.OUT.print("the authority's key has " + ("no passphrase now" if remove else "its new passphrase"))


def _write(answer: Admission, out: Path, as_json: bool) -> None:
    private_files.write_public(out, answer.to_json().encode())
    fingerprint = certificate_fingerprint(answer.ca_pem)
    if as_json:
        print_json({"file": str(out), "authority_fingerprint": fingerprint})
        return
    console.OUT.print(f"wrote {out}; on the service's machine: coordinator ca admit {out.name}", soft_wrap=True)
    console.ERR.print(f"read the authority's fingerprint to a new hospital: {colons(fingerprint)}", soft_wrap=True)


@ca.command()
def admit(
    file: Annotated[Path, typer.Argument(help="The file that `coordinator ca sign` or `ca roster` wrote.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Let the service on this machine take over what its authority has signed; also while it runs."""
    with _authority(home) as (_, _, store):
        found: Roster = import_roster(home_of(home), store, Admission.from_json(_read(file)))
    names = [member.name for member in found.members]
    if as_json:
        print_json({"version": found.version, "members": names})
        return
    console.OUT.print(f"members by roster {found.version}: {', '.join(names) or 'none'}", soft_wrap=True)
