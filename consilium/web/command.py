"""Common code of the `page` commands: serve a site on loopback, print its link, and open it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service_core.console import CommandResult, KeyValues, show_reply
from service_core.operations.exit_status import ShutdownSignals

if TYPE_CHECKING:
    from consilium.web.site import Site

OPENED_PAGE = "opened-page.html"
"""The file in a home that opens the page while this command runs."""
Bind = Annotated[
    str | None,
    typer.Option(
        "--bind",
        metavar="HOST:PORT",
        help="Loopback address to listen on. Default: on Linux a random loopback address, elsewhere 127.0.0.1, and "
        "any free port.",
    ),
]
Browser = Annotated[
    bool, typer.Option("--browser/--no-browser", help="Open the page in this machine's browser, if it has a screen.")
]


def serve_until_stopped(
    site: Site,
    home: Path,
    bind: str | None,
    browser: bool,
    as_json: bool,
    words: Callable[[Sequence[tuple[str, str]]], Iterable[str | KeyValues]],
) -> None:
    """Serve a site until SIGTERM or Ctrl-C, print its link, and open it. words: formats the facts as text."""
    from consilium.web.serve import PageServer
    from service_core.console import open_file

    with ShutdownSignals() as signals, PageServer(site, home, OPENED_PAGE, bind) as server:
        facts = [("page", server.link), ("or open", str(server.file)), ("end", "Ctrl-C")]
        value = {"link": server.link, "file": str(server.file), "address": server.host}
        show_reply(CommandResult(value, words(facts)), as_json)
        sys.stdout.flush()
        if browser:
            open_file(server.file)
        wait = threading.Event()
        while not signals.received:
            wait.wait(0.2)
