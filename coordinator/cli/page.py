"""`coordinator page`: the lead's page, in a browser of this machine."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Annotated

import typer

from coordinator.cli.options import Home, Json, home_of
from coordinator.lead import console
from coordinator.lead.client import LEAD_ENV, LeadClient, credentials_of
from service_core.console import print_json
from service_core.operations.exit_status import ShutdownSignals

_FILE = "opened-page.html"


def page(
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where, on this machine's loopback. Default: an address of its own, and any free port.",
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in this machine's browser, where there is a screen.")
    ] = True,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show the lead's page until Ctrl-C: hospitals, runs, curves, who is awaited, what went wrong; models to download.

    It asks the running service as any other command does, as the lead that CONSILIUM_LEAD names, and goes on showing
    the last answers where the service is away. Only this user of this machine reaches it, through a link that works
    once; the file always holds a fresh one. Everything that its buttons do is a command, too.
    """
    from coordinator.lead.page.exports import Exporter
    from coordinator.lead.page.service_watch import ServiceWatch
    from coordinator.lead.page.site import LeadPage, own_certificates
    from service_core.console import open_file
    from service_core.web.serve import PageServer

    place = home_of(home)
    own, consortium = own_certificates(credentials_of(place))
    connect = partial(LeadClient.open, place, own.lead)
    watch, exporter = ServiceWatch(connect), Exporter(["--home", str(place)], {LEAD_ENV: own.lead})
    site = LeadPage(watch, connect, exporter, own, consortium).site()
    watch.start()
    try:
        with ShutdownSignals() as signals, PageServer(site, place, _FILE, bind) as server:
            _tell(server.link, str(server.file), server.host, as_json)
            if browser:
                open_file(server.file)
            wait = threading.Event()
            while not signals.received:
                wait.wait(0.2)
    finally:
        watch.stop()
        exporter.close()


def _tell(link: str, file: str, host: str, as_json: bool) -> None:
    if as_json:
        print_json({"link": link, "file": file, "address": host})
        return
    for name, value in (("page", link), ("or open", file), ("end", "Ctrl-C")):
        console.OUT.print(f"{name:<8} {value}", soft_wrap=True)
    sys.stdout.flush()
