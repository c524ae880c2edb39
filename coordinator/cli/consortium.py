"""Commands on the coordinator's own machine: init, invite, revoke, serve. They need the authority's folder."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from contextlib import closing
from datetime import timedelta
from typing import Annotated

import typer

from coordinator import console
from coordinator.cli.options import Home, Json, home_of
from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership
from coordinator.storage.store import Store
from fl_core.errors import ConfigError
from protos.console import local_time, print_json
from protos.pki.identity import check_name, colons
from protos.version import software

LEAD = "lead"


def init(
    consortium: Annotated[str, typer.Argument(help="The consortium's name: lower-case letters, digits, hyphens.")],
    address: Annotated[
        list[str], typer.Option(help="HOST:PORT under which hospitals reach this service; may be repeated.")
    ],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Create the consortium: its certificate authority, the service's certificate and the lead's. Once."""
    place = home_of(home)
    authority = Authority.create(place, consortium, address)
    authority.issue_lead(LEAD)
    if as_json:
        print_json({"consortium": consortium, "home": str(place), "fingerprint": authority.fingerprint()})
        return
    console.OUT.print(f"created the consortium {consortium} in {place}", soft_wrap=True)
    console.OUT.print(f"authority  {colons(authority.fingerprint())}", soft_wrap=True)
    console.OUT.print("next: coordinator serve, and coordinator invite NAME for each hospital")


def invite(
    name: Annotated[str, typer.Argument(help="The hospital's name in the consortium.")],
    hours: Annotated[float, typer.Option(help="How long the invitation may be used.", min=0.01)] = 72,
    again: Annotated[
        bool,
        typer.Option("--again", help="For a member that joins again, for instance with an expired certificate."),
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Print a one-time token with which a hospital joins. Send it over a channel you trust."""
    place = home_of(home)
    authority = Authority.open(place)
    check_name(name)
    with closing(Store(place)) as store:
        if not again and store.members.is_member(name):
            raise ConfigError(
                "E-ID-30",
                f"expected a name that is not taken, found the member {name!r}: a silo renews its certificate by "
                f"itself; if that one has expired: coordinator invite {name} --again; if its machine is lost or its "
                f"key in other hands: coordinator revoke {name}",
            )
        made = Membership(place, store).invite(name, timedelta(hours=hours))
    if as_json:
        print_json(
            {
                "name": name,
                "token": made.token,
                "expires": made.expires.timestamp(),
                "authority_fingerprint": authority.fingerprint(),
            }
        )
        return
    typer.echo(made.token)
    console.ERR.print(f"for {name}, once, until {local_time(made.expires.timestamp())}: silo join TOKEN")
    console.ERR.print(f"tell them the authority's fingerprint by another way: {colons(authority.fingerprint())}")


def revoke(
    name: Annotated[str, typer.Argument(help="The hospital to exclude.")],
    reason: Annotated[str, typer.Option(help="Why; the hospital and the roster will say it.")] = "revoked by the lead",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Exclude a hospital: effective on its next call and heartbeat, without a restart, touching nobody else."""
    place = home_of(home)
    Authority.open(place)
    with closing(Store(place)) as store:
        Membership(place, store).revoke(name, reason)
    if as_json:
        print_json({"name": name, "revoked": True, "reason": reason})
    else:
        console.OUT.print(f"{name} is revoked: {reason}")


def serve(
    bind: Annotated[str, typer.Option(help="Address to listen on; port 0 lets the system choose.")] = "0.0.0.0:8443",
    home: Home = None,
) -> None:
    """Run the service until it is told to stop (SIGTERM, Ctrl-C). Runs that were under way continue."""
    from coordinator.api.server import CoordinatorServer, Settings
    from coordinator.config.manifest_builder import build_manifest

    place = home_of(home)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    server = CoordinatorServer(place, bind, build_manifest, Settings(software=software()))
    port = server.start()
    console.ERR.print(f"serving on {bind.rsplit(':', 1)[0]}:{port}; stop with Ctrl-C")
    while not stop.wait(3600):
        pass
    console.ERR.print("stopping: runs continue when the service is started again")
    server.stop()
