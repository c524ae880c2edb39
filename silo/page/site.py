"""The hospital's page as a site: which facts go into which template, and what its buttons do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from silo.identity.identity import SiloIdentity
from silo.storage.home import Home
from web.site import Parameters, Site, View

TEMPLATES = Path(__file__).parent / "templates"
COMMAND = "silo page"
FILE = "page.html"
"""In the home: leads to the page of a running `silo serve --page`."""


def make_site(home: Home) -> Site:
    """Make the page of a home; raises as `SiloIdentity.load` where it has not joined."""
    own = SiloIdentity(home.path).load().identity

    def facts(_: Parameters) -> Mapping[str, object]:
        return {"headline": f"The page of {own.name}", "own": own}

    return Site(
        title=f"{own.name}, {own.consortium}",
        command=COMMAND,
        templates=TEMPLATES,
        views={"/": View("home.html", facts)},
        version=lambda: str(own),
    )
