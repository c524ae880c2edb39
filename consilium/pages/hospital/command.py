"""`silo page`, and the page of `silo serve --page`."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from consilium.web.command import Bind, Browser, serve_until_stopped
from service_core.command_line import Json, command
from service_core.console import KeyValues
from silo.cli.options import SiloHome
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home


@command
def page(
    bind: Bind = None,
    browser: Browser = True,
    audit: Annotated[
        Path | None,
        typer.Option("--audit", help="Also show the results that `silo audit --out FOLDER` wrote.", metavar="FOLDER"),
    ] = None,
    as_json: Json = False,
    *,
    home: SiloHome,
) -> None:
    """Show this hospital's page until Ctrl-C: data sent, budget spent, and runs that wait for a decision.

    It works with and without a running service. Only you, on this machine, can open it, with a link that works once and
    within ten minutes; the file always contains a new link. There is also a command for each button.
    """
    from consilium.pages.hospital.site import HospitalPage

    SiloIdentity(home.path).load()  # raises before anything is created in a folder that is no home
    with closing(HospitalPage(home.make(), audit)) as shown:
        shown.data.start_if_new()
        serve_until_stopped(shown.site(), home.path, bind, browser, as_json, lambda facts: [KeyValues(facts)])


def show_beside(home: Home, beside: ExitStack) -> Path:
    """Serve the hospital's page until `beside` is closed; return the HTML file that opens it."""
    from consilium.pages.hospital.site import FILE, HospitalPage
    from consilium.web.serve import PageServer

    shown = beside.enter_context(closing(HospitalPage(home)))
    server = beside.enter_context(PageServer(shown.site(), home.path, FILE))
    shown.data.start_if_new()
    return server.file
