"""`silo peers`: whose keys this hospital accepts, and its consent to one that is held back."""

from __future__ import annotations

from typing import Annotated

import typer

from fl_core.errors import ConfigError
from service_core.console import print_json
from service_core.pki.identity import colons, identity_of
from silo.cli import console
from silo.cli.options import HomeOption, JsonOption
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home

app = typer.Typer(no_args_is_help=True, help="The other hospitals: whose keys are accepted, and who waits for consent.")


@app.command("show")
def show_peers(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show every member of the roster, its key's fingerprint, and whether this hospital accepts it."""
    pins = SiloIdentity(Home.at(home).path).pins()
    accepted = {name: identity_of(pem).fingerprint for name, pem in sorted(pins.accepted().items())}
    held = {name: member.fingerprint for name, member in sorted(pins.held().items())}
    if as_json:
        print_json({"accepted": accepted, "held": held})
        return
    rows = [(name, "accepted", colons(key)) for name, key in accepted.items()]
    rows += [(name, "held back", colons(key)) for name, key in held.items()]
    console.show_rows("Members of the roster", ("silo", "", "key"), rows)


@app.command()
def accept(
    name: Annotated[str, typer.Argument(help="The silo's name, as `silo peers show` has it.")],
    fingerprint: Annotated[
        str, typer.Argument(help="Its fingerprint, as that hospital reads it from its own machine.")
    ],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Consent to a key that is held back: a new member's, or another one of a member that could not prove the change.

    The consent holds for this key alone. A running `silo serve` follows it at once.
    """
    digest = fingerprint.replace(":", "").strip().lower()
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ConfigError(
            "E-ID-16",
            f"expected a whole fingerprint (64 hexadecimal digits, with colons or without), found {fingerprint!r}",
        )
    SiloIdentity(Home.at(home).path).pins().accept(name, digest)
    if as_json:
        print_json({"silo": name, "fingerprint": digest, "accepted": True})
        return
    console.show_facts([("accepted", name), ("key", colons(digest))])
