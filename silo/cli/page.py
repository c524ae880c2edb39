"""`silo page`: the hospital's page, in a browser of this machine."""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from service_core.console import print_json
from service_core.operations.exit_status import ShutdownSignals
from silo.cli import console
from silo.cli.options import HomeOption, JsonOption
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home

FILE = "opened-page.html"
BindOption = Annotated[
    str | None,
    typer.Option(
        "--bind",
        metavar="HOST:PORT",
        help="Where, on this machine's loopback. Default: an address of its own, and any free port.",
    ),
]


def page(
    bind: BindOption = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in this machine's browser, where there is a screen.")
    ] = True,
    audit: Annotated[
        Path | None, typer.Option("--audit", help="Also show what `silo audit --out FOLDER` wrote.", metavar="FOLDER")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show this hospital's page until Ctrl-C: what leaves it, what was spent, and what waits for a decision.

    It works beside a running service and without one. Only this user of this machine reaches it: through a link that
    works once, within ten minutes; the file always holds a fresh one. Everything that its buttons do is a command, too.
    """
    from service_core.console import open_file
    from service_core.web.serve import PageServer
    from silo.page.site import HospitalPage

    silo_home = Home.at(home)
    SiloIdentity(silo_home.path).load()  # before anything is made in a home that is none
    with (
        closing(HospitalPage(silo_home.make(), audit)) as shown,
        ShutdownSignals() as signals,
        PageServer(shown.site(), silo_home.path, FILE, bind) as server,
    ):
        shown.data.start_if_new()
        facts = {"link": server.link, "file": str(server.file), "address": server.host}
        if as_json:
            print_json(facts)
        else:
            console.show_facts([("page", server.link), ("or open", str(server.file)), ("end", "Ctrl-C")])
            sys.stdout.flush()
        if browser:
            open_file(server.file)
        wait = threading.Event()
        while not signals.received:
            wait.wait(0.2)
