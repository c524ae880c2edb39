"""The consortium's command line: `coordinator`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from protos import startup

if TYPE_CHECKING:
    import typer

MODULES = {
    "consortium": ("init", "invite", "revoke", "serve"),
    "operations.backup": ("backup", "restore"),
    "authority": ("ca",),
    "leads": ("leads",),
    "operations.log": ("log",),
    "runs": ("run", "watch", "status", "runs", "show", "abort", "resume", "exclude", "extend", "export", "silos"),
    "research": ("simulate", "demo", "methods", "models", "explain"),
    "data": ("data",),
    "operations.doctor": ("doctor", "health"),
    "reports": ("compare", "plot", "logs"),
    "privacy": ("privacy",),
}
"""Which module of `coordinator.cli` holds which command: one command loads one module, so that it starts fast."""
_ASKING = ("runs", "reports", "research", "data", "operations.doctor", "privacy", "operations.log")
READING = {command for module in _ASKING for command in MODULES[module]} - {"export"} | {"serve", "leads list"}
"""Commands without a line in the audit log: they change nothing here, or the service writes it."""


def build(words: list[str]) -> typer.Typer:
    """Make the application with the command that is called, or with all of them for the help."""
    import typer

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        help="Run a federation of hospitals: identities, runs, simulation. Every error has a code; see `explain`.",
    )
    app.callback()(lambda: None)
    wanted = next((word for word in words if not word.startswith("-")), None)
    known = {command: module for module, commands in MODULES.items() for command in commands}
    for module in [known[wanted]] if wanted in known else MODULES:
        loaded = importlib.import_module(f"coordinator.cli.{module}")
        for command in MODULES[module]:
            found = getattr(loaded, command)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=command)
            else:
                app.command(name=command)(found)
    if wanted not in READING:
        from coordinator.cli.options import home_of
        from protos.audit_log.local_commands import record_commands

        record_commands(app, READING, home_of)
    return app


def main() -> None:
    startup.begin()
    import gc
    import logging

    from protos.console import PrintableFormatter
    from protos.operations.exit_status import status_of
    from protos.tls.connect import require_tls13, silence_grpc_logs

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())

    require_tls13()  # before anything imports gRPC
    if "serve" not in sys.argv[1:2]:
        silence_grpc_logs()  # the service's log keeps the core's lines: they say why a handshake was refused
    application = build(sys.argv[1:])
    startup.raise_on_interrupt()
    try:
        sys.exit(status_of(application))
    finally:
        gc.freeze()  # else the interpreter looks at all that torch has made before it ends: most of a second


if __name__ == "__main__":
    main()
