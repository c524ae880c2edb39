"""The hospital's command line: `silo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from service_core import startup

if TYPE_CHECKING:
    from service_core.command_line import Program

COMMANDS = {
    "silo.cli.membership": ("join", "request", "fingerprint", "peers"),
    "silo.cli.service": ("serve", "log"),
    "silo.cli.status": ("status",),
    "silo.cli.policy": ("approve", "policy"),
    "silo.cli.ledger": ("ledger",),
    "silo.cli.data": ("data",),
    "consilium.pages.hospital.command": ("page",),
    "consilium.audit.command": ("audit",),
    "consilium.report.hospital": ("card",),
    "silo.cli.operations": ("backup", "restore", "doctor", "health"),
}
"""The commands of each module."""
PANELS = {
    "First steps": {
        "data check": "folder:images --classes melanoma,nevus",
        "data describe": "folder:images",
        "data fetch": '"dicomweb:https://pacs.example/dicom-web?labels=labels.csv:diagnosis"',
        "join": "--token-file north.token",
        "fingerprint": "",
        "serve": "--data folder:images",
        "approve": "latest",
        "status": "",
        "page": "",
    },
    "Runs": {
        "policy show": "",
        "policy check": "policy.toml",
        "ledger show": "",
        "ledger register": "--data folder:images --name skin",
        "ledger budget set": 'skin --epsilon 4 --delta 1e-5 --reason "ethics board, 3 May"',
        "ledger verify": "",
        "ledger release": "first-1a2b/0/train/0",
        "ledger restore": "--acknowledge-spend",
        "ledger place": "/safe/ledger.db --key /other/ledger.key",
        "card verify": "first-1a2b.card.json",
        "card write": "first-1a2b.card.json --out documents",
    },
    "People and certificates": {
        "peers show": "",
        "peers accept": f"south {'ab:' * 31}ab",
    },
    "Look after the service": {
        "doctor": "--data folder:images",
        "health": "--connected",
        "log show": "--last 20",
        "log verify": "",
        "backup": "/backup/monday",
        "restore": "/backup/monday",
    },
    "Rare": {
        "audit": "--data folder:images --out audit",
        "request": "--out north.request",
    },
}
"""The panels of the help: each command, in order, with the words of an example."""
READING = frozenset(
    (
        "serve",
        "status",
        "doctor",
        "health",
        "page",
        "fingerprint",
        "audit",
        "card",
        "data",
        "log",
        "ledger show",
        "ledger verify",
        "policy",
        "peers show",
    )
)
"""Commands without a line in the audit log: they change nothing here, or the service logs it."""


def program() -> Program:
    from service_core.command_line import Program

    return Program(
        "silo",
        "One hospital's part of a federation: join, serve data that never leaves, see the results. "
        "`coordinator explain CODE` explains every error.",
        COMMANDS,
        PANELS,
        READING,
        _place_of,
    )


def _place_of(home: Path | None) -> Path:
    from silo.storage.home import Home

    return Home.at(home).path


def run(words: list[str]) -> int:
    """Run one command line in this process and return its exit status."""
    return program().run(words)


def main() -> None:
    startup.begin()
    program().main()


if __name__ == "__main__":
    main()
