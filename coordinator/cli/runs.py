"""Commands of a lead to the service: a run from its submission to its model, and the silos.

Hydra and torch are imported only by the commands that need them: `status` answers in a second.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from coordinator.cli.options import Home, Place, Trackers, home_of
from coordinator.lead import accuracy, tables
from coordinator.lead.as_json import detail_json, event_json, run_json, silos_json
from coordinator.lead.client import LeadClient
from coordinator.lead.watcher import RunReader, Watcher, show_events
from coordinator.lead.withdrawals import outcome, withdrawal_json, withdrawal_lines
from fl_core.errors import ConfigError
from fl_core.errors.extras import load
from fl_core.kinds import kind_of
from fl_core.types.class_coverage import LEFT_OUT
from fl_core.types.records import update_outcomes
from protos.consilium.v1 import federation_pb2 as pb
from service_core.command_line import Depends, Json, command
from service_core.console import ERR, CommandResult, local_time, pluralize, print_json

_NAMED = 20
Run = Annotated[str, typer.Argument(help="A run's id or name, or `latest`.")]


def _connected(home: Home = None) -> Iterator[LeadClient]:
    with closing(LeadClient.open(home_of(home))) as client:
        yield client


Client = Annotated[LeadClient, Depends(_connected)]
"""Connected to the service that runs on the home."""


@command
def run(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the run, such as method=fedmr data=isic2019 rounds=50.")
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Start from the last model of this run, with its configuration and the hospitals that are connected "
            "now.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option(help="Submit and return; follow it later with `watch`.")] = False,
    as_json: Json = False,
    *,
    home: Place,
) -> CommandResult:
    """Compose a run, submit it to the running service and follow it. Ctrl-C leaves it running."""
    from coordinator.lead.submission import RunSubmission, spec_of

    parent: pb.RunDetail | None = None
    if start_from is not None:
        with closing(LeadClient.open(home)) as client:
            parent = client.show(start_from)
    request = RunSubmission.of(spec_of(overrides or [], parent), parent)
    with closing(LeadClient.open(home)) as client:
        return follow_submitted(client, request.submit(client), request.parent_manifest, detach, as_json)


def follow_submitted(client: LeadClient, info: pb.RunInfo, parent: str, detach: bool, as_json: bool) -> CommandResult:
    """Print the submitted run, and follow it. parent: manifest (JSON) of the run that it continues, if any."""
    if not as_json:
        print_submitted(client, info, parent)
    return _reply(info) if detach else _follow(client, info.run_id, as_json)


def print_submitted(client: LeadClient, info: pb.RunInfo, parent: str) -> None:
    """Print a submitted run and its consequences for the hospitals on stderr. parent: as `follow_submitted`."""
    manifest = client.show(info.run_id).manifest_json
    kind, digest = kind_of(info.method, info.rounds), info.manifest_digest[:16]
    holds = {silo.name: silo.data.holds for silo in client.silos().silos}
    notes = (
        f"submitted {info.run_id}: {kind.length(info.rounds)}, {_listed(manifest)}; manifest {digest}",
        tables.started_from(manifest, parent),
        tables.private_form(manifest),
        tables.unmasked(manifest),
        tables.aggregator_warning(manifest, holds) if kind.trains else "",
        tables.feature_hint(manifest) if kind.trains else "",
    )
    for text in filter(None, notes):
        ERR.print(text, soft_wrap=True)


def _listed(manifest: str) -> str:
    """Name the hospitals of a run: only those that were online."""
    names = [member["name"] for member in json.loads(manifest)["members"]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{pluralize(len(names), 'hospital')}: {', '.join(names[:_NAMED])}{more}"


@command
def watch(run: Run = "latest", tracker: Trackers = None, as_json: Json = False, *, client: Client) -> CommandResult:
    """Follow a run until it ends, for instance after an interrupted `run`. Closed rounds are shown again."""
    if not tracker:
        return _follow(client, run, as_json)
    info = client.show(run).info
    tracking = load("consilium.research.trackers:tracking_of", "--tracker")(tracker, info)
    return _follow(client, info.run_id, as_json, tracking)


def follow(client: LeadClient, run: str, quiet: bool) -> None:
    """Follow a run to its end, with a line per event unless `quiet`; Ctrl-C leaves it running, and exits."""
    try:
        show_events(client.watch(run), quiet)
    except KeyboardInterrupt:
        raise _interrupted(run) from None


def _interrupted(run: str) -> typer.Exit:
    ERR.print(f"the run continues; follow it again with: coordinator watch {run}")
    return typer.Exit(130)


def _follow(client: LeadClient, run: str, as_json: bool, tracking: RunReader | None = None) -> CommandResult:
    try:
        with nullcontext() if as_json else Watcher() as watcher:
            for event in client.watch(run):
                if watcher is not None:
                    watcher.show(event)
                elif event.kind != "silo":
                    print_json(event_json(event))
                if tracking is not None and event.HasField("closed"):
                    tracking.note(event.closed)
    except KeyboardInterrupt:
        raise _interrupted(run) from None
    info = client.show(run).info
    if tracking is not None:
        tracking.end(info.state)
    if info.state == "paused" and info.reason.startswith(LEFT_OUT) and sys.stdin.isatty() and not as_json:
        ERR.print(info.reason, soft_wrap=True)
        if typer.confirm("Continue without these classes?"):
            return _follow(client, client.resume(info.run_id, 0).run_id, as_json)
    return _reply(info, status=int(info.state != "finished"))


def _reply(info: pb.RunInfo, status: int = 0) -> CommandResult:
    return CommandResult(run_json(info), _run_lines(info), status=status)


def _run_lines(info: pb.RunInfo) -> list[str | Table]:
    notes = (*accuracy.coverage(info).lines(), *info.reason.splitlines(), *tables.waiting_lines(info))
    return [tables.runs_table([info]), *filter(None, notes)]


@command
def status(client: Client) -> CommandResult:
    """Show the silos and the unfinished runs."""
    silos, runs = client.silos(), [r for r in client.runs() if r.state in ("waiting", "running", "paused")]
    shown: list[str | Table] = [tables.silos_table(silos.silos), *tables.alarms(silos.silos)]
    shown += [tables.runs_table(runs) if runs else "no run is under way"]
    shown += [f"{info.run_id}: {line}" for info in runs for line in tables.waiting_lines(info)]
    return CommandResult({**silos_json(silos), "runs": [run_json(r) for r in runs]}, shown)


@command
def runs(client: Client) -> CommandResult:
    """List all runs, newest first."""
    infos = client.runs()
    shown = tables.runs_table(infos) if infos else "no run yet: coordinator run method=fedmr ..."
    return CommandResult([run_json(r) for r in infos], [shown])


@command
def show(run: Run = "latest", *, client: Client) -> CommandResult:
    """Show one run round by round, with the hospitals that took part."""
    detail = client.show(run)
    return CommandResult(detail_json(detail), detail_lines(detail))


def detail_lines(detail: pb.RunDetail) -> Iterator[str | Table]:
    yield from _run_lines(detail.info)
    form, made = tables.private_form(detail.manifest_json), tables.software_text(detail.software)
    read = tables.unmasked(detail.manifest_json)
    yield from filter(None, (tables.started_from(detail.manifest_json), form, read, made and f"software: {made}"))
    yield from (f"{one.silo} withdrew from {one.run_id}: {outcome(one)}" for one in detail.withdrawals)
    kind = kind_of(detail.info.method, detail.info.rounds)
    if kind.measures and (text := tables.aggregator_text(detail.aggregator, update_outcomes(detail.rounds))):
        yield text
    yield tables.rounds_table(detail.rounds, measures=kind.measures)
    if how := kind.how_to_read(detail.info.run_id):
        yield f"The answers: {how}"
    if kind.measures and detail.rounds:
        manifest = json.loads(detail.manifest_json)
        classes, metrics = manifest["schema"]["classes"], manifest.get("metrics", "")
        yield from tables.clinical_tables(detail.rounds[-1], classes, metrics)
        yield from tables.hospital_tables(detail)


@command
def abort(run: Run, client: Client) -> CommandResult:
    """Stop a run in any state; trained rounds are kept."""
    return _reply(client.abort(run))


@command
def resume(
    run: Run,
    quorum: Annotated[
        int, typer.Option(help="Number of updates that close a round from now on. 0 keeps the current number.")
    ] = 0,
    detach: Annotated[bool, typer.Option(help="Resume and return; follow it later with `watch`.")] = False,
    as_json: Json = False,
    *,
    home: Place,
) -> CommandResult:
    """Resume a paused or failed run after its last closed round, and follow it. Silos that refused are asked again.

    A run that was interrupted by a crash or a stop of the service continues by itself when the service starts.
    """
    if quorum < 0:
        raise ConfigError("E-CFG-02", f"expected --quorum of 0 or more, found {quorum}: correct it")
    with closing(LeadClient.open(home)) as client:
        info = client.resume(run, quorum)
        if not as_json:
            ERR.print(f"{info.run_id} continues after {info.closed} of {info.rounds} rounds")
        return _reply(info) if detach else _follow(client, info.run_id, as_json)


@command
def exclude(
    run: Run,
    silo: Annotated[str, typer.Argument(help="The hospital's name.")],
    readmit: Annotated[bool, typer.Option("--readmit", help="Ask the hospital again from the next round on.")] = False,
    *,
    client: Client,
) -> CommandResult:
    """Exclude a hospital: the run no longer waits for it and sends it no further tasks. The quorum does not change."""
    return _reply(client.exclude(run, silo, readmit))


@command
def withdraw(
    silo: Annotated[str, typer.Argument(help="The hospital's name.")],
    preview: Annotated[bool, typer.Option("--preview", help="Show the effect without doing anything.")] = False,
    *,
    client: Client,
) -> CommandResult:
    """Remove a hospital's data from the models, and list the runs that must be trained again.

    With `analytic`, removal is exact: the new model equals that of a run without the hospital. For this the hospital
    sends its sums once more, from the same records. Run the command again to see progress.
    """
    return CommandResult(*withdrawn(client, silo, preview))


def withdrawn(client: LeadClient, silo: str, preview: bool) -> tuple[list[dict[str, object]], list[str]]:
    """Withdraw a hospital, or only preview it; return what became of each model, as JSON and for people."""
    retrained = [(one, anew(one)) for one in client.withdraw(silo, preview)]
    replies = [{**withdrawal_json(one), "retrain": command or None} for one, command in retrained]
    return replies, [line for one, command in retrained for line in withdrawal_lines(one, command)]


def anew(withdrawal: pb.Withdrawal) -> str:
    """Return the command that trains a run anew without a hospital; empty if no words compose its configuration."""
    from coordinator.config.hydra_config import words_of
    from coordinator.config.run_spec import RunSpec

    try:
        words = words_of(replace(RunSpec.from_json(withdrawal.spec_json), silos=tuple(withdrawal.left)))
    except ConfigError:
        return ""
    return shlex.join(["coordinator", "run", *words]) if words and withdrawal.left else ""


@command
def extend(
    run: Run, hours: Annotated[float, typer.Option(help="How many hours longer to wait.")], client: Client
) -> CommandResult:
    """Wait longer in the open round, for all hospitals that have not delivered."""
    return _reply(client.extend(run, hours))


@command
def silos(client: Client) -> CommandResult:
    """List the enrolled hospitals, their connections, and open invitations."""
    reply = client.silos()
    invited = [f"{i.name} is invited until {local_time(i.expires_unix)}" for i in reply.invitations]
    return CommandResult(silos_json(reply), [tables.silos_table(reply.silos), *tables.alarms(reply.silos), *invited])
