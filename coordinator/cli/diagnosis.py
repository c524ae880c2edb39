"""`coordinator logs` and `explain`: the history of a run, and the meaning of an error code."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.options import Place
from coordinator.cli.runs import Client
from coordinator.lead import run_log
from fl_core.errors.catalogue import EXPLANATIONS, explain_text
from service_core.command_line import Json, command
from service_core.console import make_table, print_json, show
from service_core.progress import silent_from_now


@command
def logs(
    run: Annotated[str, typer.Argument(help="A run's id or name, or `latest`.")] = "latest",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run has ended.")] = False,
    as_json: Json = False,
    *,
    home: Place,
    client: Client,
) -> None:
    """Show a run's history, oldest first: its events and its lines in the audit log."""
    rounds = client.show(run).info.rounds
    if follow:
        silent_from_now()
    try:
        for line in run_log.run_lines(client, home, run, follow):
            if as_json:
                print_json(run_log.line_json(line))
            else:
                show(run_log.line_text(line, rounds))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@command
def explain(
    code: Annotated[str | None, typer.Argument(help="An error code such as E-TLS-01. Default: list all.")] = None,
) -> None:
    """Explain an error code: what it means, why it happens, what to do. Works offline."""
    if code is None:
        rows = [(c, e.title) for c, e in sorted(EXPLANATIONS.items())]
        show(make_table("Error codes", ("code", "meaning"), rows))
        return
    for line in explain_text(code).splitlines():
        show(line)
