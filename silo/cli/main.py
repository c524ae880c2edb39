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
"""The commands of each module, in the order of the help."""
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
