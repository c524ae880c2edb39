"""The consortium's command line: `coordinator`."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from service_core import startup

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "coordinator.cli.consortium": ("init", "invite", "revoke", "serve"),
    "coordinator.cli.operations": ("backup", "restore", "doctor", "health", "log", "page"),
    "coordinator.cli.authority": ("ca", "leads", "card"),
    "coordinator.cli.runs": (
        *("run", "watch", "status", "runs", "show", "abort", "resume"),
        *("exclude", "extend", "withdraw", "export", "silos"),
    ),
    "coordinator.cli.survey": ("survey",),
    "coordinator.cli.evaluation": ("evaluate",),
    "consilium.research.commands": ("simulate", "demo", "methods", "models", "explain", "data"),
    "consilium.research.reports": ("compare", "plot", "logs"),
    "coordinator.cli.privacy": ("privacy",),
}
"""Which module holds which command, in the order of the help: a command loads one module and the help none, since all
of them take seconds and 800 MB."""
_WRITING = ("coordinator.cli.consortium", "coordinator.cli.operations", "coordinator.cli.authority")
READING = {command for module, commands in COMMANDS.items() if module not in _WRITING for command in commands}
READING = READING - {"export"} | {"serve", "leads list", "card", "doctor", "health", "log", "page"}
"""Commands without a line in the audit log: they change nothing here, or the service writes it."""


def build(words: list[str]) -> typer.Typer:
    """Make the application with the command that is called; for the help with the names of all of them."""
    import typer

    from service_core.command_line import version_option

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Run a federation of hospitals: identities, runs, simulation. Every error has a code; see `explain`.",
    )
    app.callback()(version_option)
    wanted = next((word for word in words if not word.startswith("-")), None)
    module = next((name for name, commands in COMMANDS.items() if wanted in commands), None)
    if module is None:
        for name, commands in COMMANDS.items():
            summaries = _summaries(name)
            for command in commands:
                app.command(name=command, help=summaries[command])(lambda: None)
        return app
    loaded = importlib.import_module(module)
    for command in COMMANDS[module]:
        found = getattr(loaded, command)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=command)
        else:
            app.command(name=command)(found)
    if wanted not in READING:
        from coordinator.cli.options import place_of
        from service_core.audit_log.local_commands import record_commands

        record_commands(app, READING, place_of)
    return app


def _summaries(module: str) -> dict[str, str]:
    """Read what commands say of themselves off a module's source, without loading it.

    The first paragraph of a function's docstring, and `help` of a group of commands.
    """
    found = dict[str, str]()
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return {}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name)
        ):
            said = next((word.value for word in node.value.keywords if word.arg == "help"), None)
            if isinstance(said, ast.Constant):
                found[node.targets[0].id] = str(said.value)
    return found


def main() -> None:
    startup.begin()
    from service_core.command_line import command_words, made_command, run_program

    run_program(lambda: made_command(build(command_words("coordinator"))), grpc_logs="serve" in sys.argv[1:2])


if __name__ == "__main__":
    main()
