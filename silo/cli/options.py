"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protos.operations.logs import VARIABLE, LogFormat

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="The silo's folder. Default: $CONSILIUM_SILO_HOME, else ~/.consilium/silo."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option("--log-format", help=f"Log to standard error, as text or JSON, instead. Default: ${VARIABLE}."),
]
DataRootOption = Annotated[
    Path | None,
    typer.Option("--data-root", help="Where named data sets lie. Default: $CONSILIUM_DATA_ROOT."),
]


def label_space(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]
