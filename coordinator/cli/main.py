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
"""The commands of each module. Loading all modules takes seconds and 800 MB."""
_CLASSES = 'data=folder "data.classes=[melanoma,nevus]"'
PANELS = {
    "First steps": {
        "init": "skin-study --address consilium.example.org:8443",
        "serve": "--bind 0.0.0.0:8443",
        "invite": "north --out north.token",
        "silos": "",
        "run": f"method=analytic {_CLASSES} data.image_size=64",
        "watch": "latest",
        "show": "latest",
        "export": "latest --out models",
        "explain": "E-TLS-05",
    },
    "Runs": {
        "status": "",
        "runs": "",
        "page": "",
        "logs": "latest --follow",
        "compare": "first second",
        "plot": "first second --out curves.png",
        "evaluate": "first --on north,south",
        "survey": f"classes ages:5 {_CLASSES}",
        "card verify": "models/first-1a2b.card.json",
        "card write": "models/first-1a2b.card.json --out documents",
        "abort": "latest",
        "resume": "latest --quorum 2",
        "exclude": "latest south",
        "extend": "latest --hours 12",
    },
    "Simulations": {
        "demo": "",
        "simulate": "method=fedmr data=digits federation=p5c2 rounds=20",
        "methods": "--papers",
        "models": "data=isic2019",
        "data split": "data=digits federation=p5c2 --plot split.png",
        "privacy preview": "data=digits federation=p5c2 privacy=dp_record privacy.epsilon=4",
    },
    "People and certificates": {
        "revoke": 'south --reason "the study is over"',
        "leads list": "",
        "leads add": "maria",
        "leads renew": "maria",
        "leads revoke": 'maria --reason "left the hospital"',
    },
    "Look after the service": {
        "doctor": "",
        "health": "",
        "log show": "--since 2026-11-23 --refused",
        "log verify": "",
        "backup": "/backup/monday",
        "restore": "/backup/monday",
    },
    "Rare": {
        "withdraw": "south --preview",
        "ablation": "scale=smoke",
        "ca service": "--out service-files",
        "ca sign": "north.request north",
        "ca roster": "",
        "ca passphrase": "",
        "ca admit": "north.admission",
    },
}
"""The panels of the help: each command, in order, with the words of an example."""
_WRITING = ("coordinator.cli.consortium", "coordinator.cli.operations", "coordinator.cli.authority")
READING = {command for module, commands in COMMANDS.items() if module not in _WRITING for command in commands}
READING = READING - {"export"} | {"serve", "leads list", "doctor", "health", "log"}
"""Commands without a line in the audit log: they change nothing here, or the service logs it."""


def program() -> Program:
    from service_core.command_line import Program

    return Program(
        "coordinator",
        "Run a federation of hospitals. Every error has a code, which `coordinator explain CODE` explains.",
        COMMANDS,
        PANELS,
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
