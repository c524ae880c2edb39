"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="The silo's folder. Default: $CONSILIUM_SILO_HOME, else ~/.consilium/silo."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DataRootOption = Annotated[
    Path | None,
    typer.Option("--data-root", help="Where named data sets lie. Default: $CONSILIUM_DATA_ROOT."),
]
