"""The consortium's command line: `coordinator`."""

from __future__ import annotations

import sys

from protos.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
if "serve" not in sys.argv[1:2]:
    silence_grpc_logs()  # the service's log keeps the core's lines: they say why a handshake was refused

import gc  # noqa: E402
import importlib  # noqa: E402

import typer  # noqa: E402

from fl_core.errors import ConfigError, DataError, FederationError  # noqa: E402

MODULES = {
    "consortium": ("init", "invite", "revoke", "serve"),
    "authority": ("ca",),
    "runs": ("run", "watch", "status", "runs", "show", "abort", "resume", "export", "silos"),
    "research": ("simulate", "demo", "methods", "models", "explain"),
    "data": ("data",),
    "privacy": ("privacy",),
}
"""Which module of `coordinator.cli` holds which command: one command loads one module, so that it starts fast."""


def build(words: list[str]) -> typer.Typer:
    """Make the application with the command that is called, or with all of them for the help."""
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
    return app


def main() -> None:
    """Run the command line; expected errors end with one line on stderr, with status 2 for what the user can change."""
    try:
        build(sys.argv[1:])()
    except FederationError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, ConfigError | DataError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()  # else the interpreter looks at all that torch has made before it ends: most of a second


if __name__ == "__main__":
    main()
