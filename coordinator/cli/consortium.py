"""Commands on the coordinator's own machine: init, invite, revoke, serve. They need the authority's folder."""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.options import Extensions, LogFormatOption, MetricsOption, Place, SigningPlace
from coordinator.lead.client import MAIN_LEAD
from coordinator.pki import passphrase
from coordinator.pki.authority import FOLDER, Authority
from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ConfigError
from fl_core.errors.extras import require_installed
from service_core import startup
from service_core.command_line import command
from service_core.console import CommandResult, local_time
from service_core.operations import checks, logs
from service_core.operations.exit_status import HANGUP, READY, STOPPING, ShutdownSignals, notify
from service_core.pki.identity import check_name, format_fingerprint
from service_core.storage import private_files, unfinished
from service_core.storage.unfinished import UnfinishedMarker

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)
_POLL_S = 0.2


@command
def init(
    consortium: Annotated[str, typer.Argument(help="The consortium's name: lower-case letters, digits, hyphens.")],
    address: Annotated[
        list[str], typer.Option(help="HOST:PORT at which hospitals reach this service; may be repeated.")
    ],
    with_passphrase: Annotated[
        bool,
        typer.Option("--ca-passphrase", help="Encrypt the authority's key with a passphrase. The command asks for it."),
    ] = False,
    *,
    home: SigningPlace,
) -> CommandResult:
    """Create the consortium, once: its certificate authority, the service's certificate and the lead's.

    Run an interrupted `init` again.
    """
    Authority.require_none(home)
    secret = None
    if with_passphrase or passphrase.SOURCE.named:
        secret = passphrase.SOURCE.read("passphrase of the new authority", repeat=True)
    again = ["coordinator", "init", consortium, *(word for a in address for word in ("--address", a))]
    marker = UnfinishedMarker("coordinator init", shlex.join([*again, "--home", str(home)]))
    with unfinished.filling(
        private_files.private_home(home), marker, partial(shutil.rmtree, home / FOLDER, ignore_errors=True)
    ):
        authority = Authority.create(home, consortium, address, secret=secret)
        authority.issue_lead(MAIN_LEAD)
    return CommandResult(
        {"consortium": consortium, "home": str(home), "fingerprint": authority.fingerprint()},
        [
            f"created the consortium {consortium} in {home}",
            f"authority  {format_fingerprint(authority.fingerprint())}",
            "next: coordinator serve, and coordinator invite NAME for each hospital",
        ],
    )


@command
def invite(
    name: Annotated[str, typer.Argument(help="The hospital's name in the consortium.")],
    hours: Annotated[float, typer.Option(help="Validity of the invitation in hours.", min=0.01)] = 72,
    again: Annotated[
        bool,
        typer.Option("--again", help="Invite a member again, for example after its certificate expired."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the token to this file, readable by its owner only, instead of printing it."),
    ] = None,
    validation_only: Annotated[
        bool,
        typer.Option("--validation-only", help="The hospital only evaluates models; its silo refuses to train."),
    ] = False,
    *,
    home: SigningPlace,
) -> CommandResult:
    """Create a one-time token with which a hospital joins. Send it over a channel you trust."""
    authority = Authority.open(home)
    check_name(name)
    with closing(CoordinatorStore(home)) as store:
        if not again and store.members.is_member(name):
            raise ConfigError(
                "E-ID-30",
                f"{name!r} is a member already. A silo renews its certificate by itself. If the certificate has "
                f"expired: coordinator invite {name} --again. If the machine is lost, or somebody else has the key: "
                f"coordinator revoke {name}",
            )
        made = Membership(home, store).invite(name, timedelta(hours=hours), validation_only)
    if out is not None:
        private_files.replace_file(out, f"{made.token}\n".encode(), 0o600)
    expires, fingerprint = made.expires.timestamp(), authority.fingerprint()
    alone = ", only to evaluate models" if validation_only else ""
    where = {"token": made.token} if out is None else {"file": str(out)}
    how = "silo join --token-file FILE" if out is None else f"silo join --token-file {out.name}"
    return CommandResult(
        {
            "name": name,
            **where,
            "expires": expires,
            "authority_fingerprint": fingerprint,
            "validation_only": validation_only,
        },
        [made.token] if out is None else [],
        [
            f"{name} can use this invitation once, before {local_time(expires)}{alone}: {how}",
            f"tell the hospital the authority's fingerprint over another channel: {format_fingerprint(fingerprint)}",
        ],
    )


@command
def revoke(
    name: Annotated[str, typer.Argument(help="The hospital to exclude.")],
    reason: Annotated[
        str, typer.Option(help="Reason, shown to the hospital and in the roster.")
    ] = "revoked by the lead",
    *,
    home: Place,
) -> CommandResult:
    """Exclude a hospital. Its next call is refused, and its open connections end within 5 s."""
    Authority.open(home)
    with closing(CoordinatorStore(home)) as store:
        Membership(home, store).revoke(name, reason)
    return CommandResult({"name": name, "revoked": True, "reason": reason}, [f"{name} is revoked: {reason}"])


@command
def serve(
    bind: Annotated[str, typer.Option(help="Address to listen on; port 0 lets the system choose.")] = "0.0.0.0:8443",
    metrics: MetricsOption = None,
    extension: Extensions = None,
    round_trip: Annotated[
        float,
        typer.Option(
            "--round-trip",
            metavar="MS",
            min=0,
            help="Longest network round trip to a hospital, in ms. From 8 ms on, the service uses more memory per "
            "upload to reach 1 Gbit/s.",
        ),
    ] = 0.0,
    log_format: LogFormatOption = None,
    *,
    home: SigningPlace,
) -> None:
    """Run the service until it is stopped (SIGTERM, Ctrl-C). Unfinished runs continue."""
    startup.end_on_interrupt()
    require_installed("torch", "torch", "coordinator serve, whose workers compute runs")
    from service_core.loopback import LoopbackAddress

    metrics_at = None if metrics is None else LoopbackAddress.parse(metrics)
    from coordinator.api.limits import Limits
    from coordinator.api.server import CoordinatorServer, Settings

    checks.host_and_port(bind)
    Authority.open(home).unlock()
    logs.set_up(logs.chosen_format(log_format) or logs.LogFormat.TEXT, home)
    with ShutdownSignals(service=True) as signals:
        settings = Settings(metrics=metrics_at, extensions=extension or (), limits=Limits.over(round_trip))
        server = CoordinatorServer(home, bind, settings=settings)
        port = server.start()
        notify(READY)
        log.info("serving on %s:%d; stop with Ctrl-C", bind.rsplit(":", 1)[0], port)
        while not signals.received:
            if signals.hung_up():
                log.info(HANGUP)
            time.sleep(_POLL_S)
        notify(STOPPING)
        log.info("stopping: runs continue when the service is started again")
        server.stop()
