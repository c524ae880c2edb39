"""The consortium's command line: `coordinator`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from protos import startup

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "consortium": {
        "init": "Create the consortium: its certificate authority, the service's certificate and the lead's. Once.",
        "invite": "Make a one-time token with which a hospital joins. Send it over a channel you trust.",
        "revoke": "Exclude a hospital: from its next call, and within 5 s from what it has open. It touches "
        "nobody else.",
        "serve": "Run the service until it is told to stop (SIGTERM, Ctrl-C). Runs that were under way continue.",
    },
    "operations.backup": {
        "backup": "Copy the whole home as it is at one moment, also while the service runs and in the middle of "
        "a round.",
        "restore": "Bring a backup into an empty home; or let a home whose database lacks something go on with what is "
        "there.",
    },
    "authority": {
        "ca": "Keep the authority's key on a machine of its own: sign there, carry files, admit at the service."
    },
    "leads": {"leads": "The leads of the consortium: list, add, renew, revoke. Without a command: list."},
    "operations.log": {"log": "The audit log: who called or ordered what, when, and with which outcome."},
    "runs": {
        "run": "Compose a run, submit it to the running service and follow it. Ctrl-C leaves it running.",
        "watch": "Follow a run, also after `run` was interrupted; ends when the run does. Closed rounds are told "
        "again.",
        "status": "Show the silos and the runs that are not over.",
        "runs": "List all runs, newest first.",
        "show": "Show one run round by round, with who took part.",
        "abort": "Stop a run in any state; what was trained so far stays.",
        "resume": "Let a paused or failed run go on at its last closed round, and follow it. Silos that refused "
        "are asked "
        "again.",
        "exclude": "Go on without a hospital: it is awaited no longer and asked for no further round. The quorum "
        "stays.",
        "extend": "Wait longer in the open round, for everybody who has not delivered.",
        "export": "Write a run's newest model as safetensors, with a model card; with --format also for other "
        "programs.",
        "silos": "List the enrolled hospitals, who is here, and open invitations.",
    },
    "research": {
        "simulate": "Run a federation in this process, with the code that the hospitals run.",
        "demo": "Run a federation on this machine: a coordinator, six hospitals, mutual TLS; FedAvg, FedGELA, that in "
        "private.",
        "methods": "List the methods: what the server must see, whether the loss mixes examples, what a silo sends.",
        "models": "List the models with their parameter counts: as the papers use them, or those that take the "
        "chosen data.",
        "explain": "Explain an error code: what it means, why it happens, what to do. Works offline.",
    },
    "data": {"data": "Look at data before a run."},
    "operations.doctor": {
        "doctor": "Look for what keeps the service from its work; changes nothing, and needs no running service. "
        "Status 1: "
        "found.",
        "health": "Ask the service on this machine whether it can do its work: status 0 if so, else 1.",
    },
    "reports": {
        "compare": "Show runs side by side: how their configurations differ, and what their models reached.",
        "plot": "Draw the curves of runs into one picture. What noise hides is a gap.",
        "logs": "Show what happened in a run, oldest first: its events, and the lines of the audit log that name it.",
    },
    "page": {
        "page": "Show the lead's page until Ctrl-C: hospitals, runs, curves, who is awaited, what went wrong; models "
        "to download."
    },
    "privacy": {"privacy": "Look at privacy before a run."},
}
"""Which module of `coordinator.cli` holds which command, with the line that the help says of it: a command loads one
module and the help none, since all of them take seconds and 800 MB."""
_ASKING = ("runs", "reports", "page", "research", "data", "operations.doctor", "privacy", "operations.log")
READING = {command for module in _ASKING for command in COMMANDS[module]} - {"export"} | {"serve", "leads list"}
"""Commands without a line in the audit log: they change nothing here, or the service writes it."""


def build(words: list[str]) -> typer.Typer:
    """Make the application with the command that is called; for the help with the names of all of them."""
    import typer

    from protos.command_line import version_option

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Run a federation of hospitals: identities, runs, simulation. Every error has a code; see `explain`.",
    )
    app.callback()(version_option)
    wanted = next((word for word in words if not word.startswith("-")), None)
    module = next((name for name, commands in COMMANDS.items() if wanted in commands), None)
    if module is None:
        for commands in COMMANDS.values():
            for name, summary in commands.items():
                app.command(name=name, help=summary)(lambda: None)
        return app
    loaded = importlib.import_module(f"coordinator.cli.{module}")
    for command in COMMANDS[module]:
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

    from protos.command_line import command_words, made_command
    from protos.console import PrintableFormatter
    from protos.operations.exit_status import status_of
    from protos.tls.connect import require_tls13, silence_grpc_logs

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())

    require_tls13()  # before anything imports gRPC
    if "serve" not in sys.argv[1:2]:
        silence_grpc_logs()  # the service's log keeps the core's lines: they say why a handshake was refused
    application = build(command_words("coordinator"))
    startup.raise_on_interrupt()
    try:
        sys.exit(status_of(made_command(application)))
    finally:
        gc.freeze()  # else the interpreter looks at all that torch has made before it ends: most of a second


if __name__ == "__main__":
    main()
