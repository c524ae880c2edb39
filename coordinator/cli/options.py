"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

HOME_ENV = "CONSILIUM_COORDINATOR_HOME"

Home = Annotated[
    Path | None, typer.Option(help=f"The coordinator's folder; default ${HOME_ENV} or ~/.consilium/coordinator.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def home_of(given: Path | None) -> Path:
    """Return the coordinator's home folder."""
    return given or Path(os.environ.get(HOME_ENV) or Path.home() / ".consilium" / "coordinator")
