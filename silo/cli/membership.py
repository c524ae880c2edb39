"""Becoming a member, and the keys that this hospital accepts: join, request, fingerprint, peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fl_core.errors import ConfigError
from service_core.command_line import command
from service_core.console import CommandResult, KeyValues, TextTable
from service_core.pki.identity import format_fingerprint, identity_of
from silo.cli.options import SiloHome, text_of
from silo.identity.identity import SiloIdentity


@command
def join(
    token: Annotated[
        str | None,
        typer.Argument(
            help="The invitation, one line that begins with consilium1. Other users of this machine can read "
            "arguments: prefer --token-file."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the invitation; - reads standard input.")
    ] = None,
    signed: Annotated[
        Path | None, typer.Option("--signed", help="The answer to `silo request`, instead of an invitation.")
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            "--authority", help="The authority's fingerprint, from the lead. A different authority is refused."
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Create a new key although this home has a certificate.")
    ] = False,
    *,
    home: SiloHome,
) -> CommandResult:
    """Join a consortium: create a key that never leaves this machine, and have the coordinator certify it.

    The lead creates the invitation (coordinator invite NAME). If the command is interrupted, run it again.
    """
    if [token, token_file, signed].count(None) != 2:
        raise ConfigError("E-CFG-02", "give one of TOKEN, --token-file FILE and --signed FILE")
    from silo.service import enrolment

    if signed is not None:
        peer = enrolment.install_signed(text_of(signed), home, fingerprint)
    else:
        text = token if token not in (None, "-") else text_of(token_file)
        peer = enrolment.join(text, home, again, fingerprint)
    authority = SiloIdentity(home.path).ca_fingerprint()
    value = {
        "silo": peer.identity.name,
        "identity": peer.identity.uri,
        "fingerprint": peer.fingerprint,
        "authority_fingerprint": authority,
        "certificate_until": peer.not_after.timestamp(),
        "home": str(home.path),
        "validation_only": home.validation_only,
    }
    takes_part = (
        "in evaluations only: nothing is ever trained here"
        if home.validation_only
        else "in runs, as policy.toml allows"
    )
    facts = [
        ("joined", str(peer.identity)),
        ("takes part", takes_part),
        ("home", str(home.path)),
        ("fingerprint", format_fingerprint(peer.fingerprint)),
        ("authority", format_fingerprint(authority)),
        ("certificate", f"until {peer.not_after:%Y-%m-%d %H:%M} UTC, renewed by `silo serve`"),
        ("next", "compare the authority's fingerprint with the lead's, then: silo serve --data REF"),
    ]
    return CommandResult(value, [KeyValues(facts)])


@command
def request(
    out: Annotated[Path, typer.Option("--out", help="The file to write, for the lead.")], home: SiloHome
) -> CommandResult:
    """Create a key that never leaves this machine, and a file with a certificate request.

    Use it if the consortium's authority is offline. The lead answers with a file for `silo join --signed`.
    """
    from silo.service.enrolment import write_request

    digest = write_request(home, out)
    facts = [("request", str(out)), ("fingerprint", format_fingerprint(digest)), ("next", "give the file to the lead")]
    return CommandResult({"file": str(out), "fingerprint": digest}, [KeyValues(facts)])


@command
def fingerprint(home: SiloHome) -> CommandResult:
    """Show the fingerprints of this hospital, the authority and every member, to compare them by telephone."""
    identity = SiloIdentity(home.path)
    certificate, authority = identity.load(), identity.ca_fingerprint()
    accepted = {name: identity_of(pem).fingerprint for name, pem in sorted(identity.peers().items())}
    return CommandResult(
        {
            "silo": certificate.identity.name,
            "fingerprint": certificate.fingerprint,
            "authority": authority,
            "roster": accepted,
        },
        [
            KeyValues(
                [
                    (certificate.identity.name, format_fingerprint(certificate.fingerprint)),
                    ("authority", format_fingerprint(authority)),
                ]
            ),
            TextTable(
                "Accepted peers", ("silo", "key"), [(name, format_fingerprint(key)) for name, key in accepted.items()]
            ),
        ],
    )


peers = typer.Typer(no_args_is_help=True, help="The other hospitals: accepted keys, and keys that wait for consent.")


@peers.command("show")
@command
def show_peers(home: SiloHome) -> CommandResult:
    """Show every member, the fingerprint of its key, and whether this hospital accepted and confirmed the key."""
    pins = SiloIdentity(home.path).pins()
    confirmed = pins.confirmed()
    accepted = {name: identity_of(pem).fingerprint for name, pem in sorted(pins.accepted().items())}
    unconfirmed = {name: member.fingerprint for name, member in sorted(pins.held().items())}
    how = {name: "confirmed by hand" if name in confirmed else "accepted" for name in accepted}
    rows = [(name, how[name], format_fingerprint(key)) for name, key in accepted.items()]
    rows += [(name, "not confirmed", format_fingerprint(key)) for name, key in unconfirmed.items()]
    value = {"accepted": accepted, "held": unconfirmed, "confirmed": sorted(confirmed)}
    return CommandResult(value, [TextTable("Members of the roster", ("silo", "", "key"), rows)])


@peers.command()
@command
def accept(
    name: Annotated[str, typer.Argument(help="The silo's name in `silo peers show`.")],
    fingerprint: Annotated[
        str, typer.Argument(help="The fingerprint of its key, as that hospital reads it out from its own machine.")
    ],
    home: SiloHome,
) -> CommandResult:
    """Confirm a member's key by its fingerprint. This also accepts a key that waits for consent.

    Keys wait for consent if they belong to a new member and the policy requires it, or if they changed without a
    signature of the old key. The confirmation covers this key and its renewals. A running `silo serve` applies it at
    once.
    """
    digest = fingerprint.replace(":", "").strip().lower()
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ConfigError(
            "E-ID-16",
            f"expected a whole fingerprint (64 hexadecimal digits, with colons or without), found {fingerprint!r}",
        )
    SiloIdentity(home.path).pins().accept(name, digest)
    facts = [("accepted", name), ("key", format_fingerprint(digest))]
    return CommandResult({"silo": name, "fingerprint": digest, "accepted": True}, [KeyValues(facts)])
