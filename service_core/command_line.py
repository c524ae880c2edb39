"""What both command lines have in common: `--version`, and which words are being completed."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated, Any

import typer

from service_core.version import PROTOCOL, software


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{software()}, protocol {PROTOCOL}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def made_command(app: typer.Typer) -> Any:  # noqa: ANN401 - of Click, which Typer has within itself
    """Make what runs an application. Its help names no type beside a flag: Typer's "<bool>" looks like a value."""
    command = typer.main.get_command(app)
    _leave_out_types_of_flags(command)
    return command


def _leave_out_types_of_flags(command: Any) -> None:  # noqa: ANN401
    for parameter in command.get_params(command.context_class(command)):  # with --help
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _leave_out_types_of_flags(inner)


def command_words(program: str) -> list[str]:
    """Return the words after the program's name: those of this call, or those that a shell wants completed."""
    if f"_{program.upper()}_COMPLETE" not in os.environ:
        return sys.argv[1:]
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    try:
        return shlex.split(typed)[1:]
    except ValueError:  # an open quotation mark
        return typed.split()[1:]
