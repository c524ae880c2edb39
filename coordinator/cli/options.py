"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from service_core.command_line import COMMON, Depends
from service_core.operations.logs import VARIABLE, LogFormat
from service_core.storage.unfinished import require_finished

HOME_ENV = "CONSILIUM_COORDINATOR_HOME"

Home = Annotated[
    Path | None,
    typer.Option(
        help=f"The coordinator's folder. Default: ${HOME_ENV}, else ~/.consilium/coordinator.", rich_help_panel=COMMON
    ),
]
LogFormatOption = Annotated[
    LogFormat | None, typer.Option("--log-format", help=f"Format of log lines: text or JSON. Default: ${VARIABLE}.")
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Port for Prometheus metrics, on loopback only (for example 9464). Default: none.",
    ),
]
Extensions = Annotated[
    list[str] | None,
    typer.Option(
        "--extension",
        help="An installed package whose methods, models and data runs may use.",
        rich_help_panel=COMMON,
    ),
]
Trackers = Annotated[
    list[str] | None,
    typer.Option("--tracker", help="Also write the curves to tensorboard:DIR or mlflow:URI. May be repeated."),
]
CaPassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-passphrase-file",
        envvar="CONSILIUM_CA_PASSPHRASE_FILE",
        help="File with the passphrase of the authority's key, for use without a terminal.",
        rich_help_panel=COMMON,
    ),
]
CaPassphraseEnv = Annotated[
    str | None,
    typer.Option("--ca-passphrase-env", help="Environment variable with the passphrase.", rich_help_panel=COMMON),
]


def place_of(home: Home = None) -> Path:
    """Return the coordinator's folder, without checking it."""
    return home or Path(os.environ.get(HOME_ENV) or Path.home() / ".consilium" / "coordinator")


def home_of(home: Home = None) -> Path:
    """Return the coordinator's home; raises StateError (E-STATE-26) if a command on it was interrupted."""
    require_finished(place := place_of(home))
    return place


def use_passphrase(file: Path | None, variable: str | None) -> None:
    """Set where this process finds the passphrase of the authority's key."""
    from coordinator.pki import passphrase

    passphrase.SOURCE.file, passphrase.SOURCE.variable = file, variable


def _signing_place(
    passphrase_file: CaPassphraseFile = None, passphrase_env: CaPassphraseEnv = None, home: Home = None
) -> Path:
    use_passphrase(passphrase_file, passphrase_env)
    return place_of(home)  # the authority is not opened in a home with an interrupted command


Place = Annotated[Path, Depends(home_of)]
"""The coordinator's home."""
AnyPlace = Annotated[Path, Depends(place_of)]
"""Also accepts a home with an interrupted command, for commands that finish or inspect it."""
SigningPlace = Annotated[Path, Depends(_signing_place)]
"""The home, for commands that use the authority's key; its passphrase is available from then on."""
