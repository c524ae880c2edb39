"""The command line `consilium`, for use on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from service_core import startup

if TYPE_CHECKING:
    from service_core.command_line import Program

COMMANDS = {
    "consilium.research.commands": ("demo",),
    "consilium.model.commands": ("predict", "calibrate", "page"),
}
"""Commands by module."""
PANELS = {
    "First steps": {"demo": ""},
    "Use a model": {
        "predict": "models/first-1a2b.safetensors images",
        "calibrate": "models/first-1a2b.safetensors --data folder:images",
        "page": "models/first-1a2b.safetensors",
    },
}
"""Panels of the help: their commands in order, each with the arguments of an example."""


def program() -> Program:
    from service_core.command_line import Program

    summary = "Try a federation, or use an exported model, on this machine. No membership is needed."
    reading = {name for names in COMMANDS.values() for name in names}
    return Program("consilium", summary, COMMANDS, PANELS, reading, lambda _: Path())


def main() -> None:
    startup.begin()
    program().main()


if __name__ == "__main__":
    main()
