"""The consortium's command line: `coordinator`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from service_core import startup

if TYPE_CHECKING:
    from service_core.command_line import Program

COMMANDS = {
    "coordinator.cli.consortium": ("init", "invite", "revoke", "serve"),
    "coordinator.cli.operations": ("backup", "restore", "doctor", "health", "log"),
    "consilium.pages.lead.command": ("page",),
    "coordinator.cli.authority": ("ca", "leads"),
    "coordinator.cli.runs": (
        *("run", "watch", "status", "runs", "show", "abort", "resume"),
        *("exclude", "extend", "withdraw", "silos"),
    ),
    "consilium.report.lead": ("export", "card"),
    "coordinator.cli.survey": ("survey",),
    "coordinator.cli.evaluation": ("evaluate",),
    "consilium.research.commands": ("simulate", "demo", "methods", "models", "data"),
    "consilium.research.simulate.ablation.program": ("ablation",),
    "consilium.research.reports": ("compare", "plot"),
    "consilium.research.preview": ("privacy",),
    "coordinator.cli.diagnosis": ("logs", "explain"),
}
"""The commands of each module, in the order of the help. Loading all modules takes seconds and 800 MB."""
_WRITING = ("coordinator.cli.consortium", "coordinator.cli.operations", "coordinator.cli.authority")
READING = {command for module, commands in COMMANDS.items() if module not in _WRITING for command in commands}
READING = READING - {"export"} | {"serve", "leads list", "doctor", "health", "log"}
"""Commands without a line in the audit log: they change nothing here, or the service logs it."""


def program() -> Program:
    from service_core.command_line import Program

    return Program(
        "coordinator",
        "Run a federation of hospitals: identities, runs, simulation. Every error has a code; see `explain`.",
        COMMANDS,
        READING,
        _place_of,
    )


def _place_of(home: Path | None) -> Path:
    from coordinator.cli.options import place_of

    return place_of(home)


def main() -> None:
    startup.begin()
    program().main(grpc_logs="serve" in sys.argv[1:2])


if __name__ == "__main__":
    main()
