"""`silo doctor` and `silo health`: what keeps this hospital's service from its work, and whether it is at work."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fl_core.errors import ConfigError
from service_core.console import local_time, print_json
from service_core.operations import checks
from silo.cli.options import DataRootOption, HomeOption, JsonOption, label_space
from silo.storage.home import Home


def doctor(
    data: Annotated[
        str | None, typer.Option("--data", help="Also look at this data, image by image.", metavar="REF")
    ] = None,
    data_root: DataRootOption = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="The label space, where the data needs it.", metavar="A,B,...")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Also look at this device: cpu, cuda, cuda:N or auto.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="Before joining: try the way with this invitation; - reads standard input."),
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look for what keeps this hospital from its work; changes nothing, also beside a running service. Status 1: found.

    Looks at versions, clock, disk, modes of files, certificate, database, the way to the coordinator, policy and
    ledger; before joining at as much of it as there is.
    """
    from silo.operations.doctor import Examination

    invitation = None
    if token_file is not None:
        from service_core.pki.invitation import InvitationToken

        invitation = InvitationToken.decode(_text(token_file).strip())
    patient = Examination(Home.at(home), data, data_root, label_space(classes), device, invitation)
    raise typer.Exit(checks.report(checks.run_checks(patient.checks()), as_json))


def health(
    connected: Annotated[
        bool, typer.Option("--connected", help="Ask for a session with the coordinator, too.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look whether this hospital's service lives, and is connected or trying; exit status 1 if not."""
    from silo.operations.heartbeat import Health

    found = Health.of(Home.at(home))
    if as_json:
        print_json(asdict(found))
        raise typer.Exit(int(not found.alive or (connected and not found.connected)))
    found.require(connected)
    typer.echo(f"{'connected' if found.connected else 'trying to connect'} since {local_time(found.since)}")


def _text(file: Path) -> str:
    if str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("E-CFG-02", f"expected text in the file {file}, found none: {error}") from None
