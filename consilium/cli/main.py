"""The command line for an exported model: `consilium`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from service_core import startup

if TYPE_CHECKING:
    from service_core.command_line import Program

COMMANDS = {"consilium.model.commands": ("predict", "calibrate", "page")}


def program() -> Program:
    from service_core.command_line import Program

    summary = "Use an exported model on this machine: nothing is sent, and no membership is needed."
    return Program("consilium", summary, COMMANDS, COMMANDS["consilium.model.commands"], lambda _: Path())


def main() -> None:
    startup.begin()
    program().main()


if __name__ == "__main__":
    main()
