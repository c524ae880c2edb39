"""Commands over the wire, with the lead's own certificate: a run from its submission to its model, and the silos.

Hydra and torch are imported by the commands that need them: `status` answers in a second.
"""

from __future__ import annotations

import json
import uuid
from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.options import Extensions, Home, Json, Trackers, home_of
from coordinator.lead import accuracy, console
from coordinator.lead.client import LeadClient
from coordinator.lead.start import start_json, started_from
from fl_core.errors import ConfigError
from fl_core.types.records import judgements
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import counted, local_time, make_table, print_json

if TYPE_CHECKING:
    from coordinator.lead.trackers import Tracking

_NAMED = 20
Run = Annotated[str, typer.Argument(help="A run's id or name, or `latest`.")]


def _client(home: Path | None) -> closing[LeadClient]:
    return closing(LeadClient.open(home_of(home)))


def run(
    overrides: Annotated[list[str] | None, typer.Argument(help="method=fedmr data=isic2019 rounds=50 ...")] = None,
    home: Home = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Start from the last model of this run, with its configuration and the hospitals that are here now.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option(help="Submit and return; follow it later with `watch`.")] = False,
    as_json: Json = False,
) -> None:
    """Compose a run, submit it to the running service and follow it. Ctrl-C leaves it running."""
    from coordinator.config import weights
    from coordinator.config.hydra_config import compose_from, compose_spec
    from coordinator.config.run_spec import RunSpec

    parent: pb.RunDetail | None = None
    if start_from is not None:
        with _client(home) as client:
            parent = client.show(start_from)
    words = overrides or []
    spec = compose_spec(words) if parent is None else compose_from(RunSpec.from_json(parent.spec_json), words)
    if spec.data.get("path") is not None:
        raise ConfigError(
            "E-CFG-23",
            "expected no data.path in a run of hospitals, found one: it is for `coordinator simulate`; each hospital "
            "names its own images (silo serve --data)",
        )
    spec, taken = weights.take(spec)
    with _client(home) as client:
        if taken is not None:
            with weights.written(taken) as file:
                client.send_weights(taken.named.object, file)
        info = client.submit(spec.to_json(), uuid.uuid4().hex, "" if parent is None else parent.info.run_id)
        if not as_json:
            manifest = client.show(info.run_id).manifest_json
            what = f"{counted(info.rounds, 'round')} with {_listed(manifest)}"
            console.ERR.print(f"submitted {info.run_id}: {what}; manifest {info.manifest_digest[:16]}", soft_wrap=True)
            holds = {silo.name: silo.data.holds for silo in client.silos().silos}
            notes = (
                started_from(manifest, "" if parent is None else parent.manifest_json),
                console.private_form(manifest),
                console.aggregator_warning(manifest, holds),
            )
            for text in notes:
                if text:
                    console.ERR.print(text, soft_wrap=True)
        if detach:
            _show_info(info, as_json)
            return
        _follow(client, info.run_id, as_json)


def _listed(manifest: str) -> str:
    """Name the hospitals that take part: only those that were online do."""
    names = [member["name"] for member in json.loads(manifest)["members"]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{counted(len(names), 'hospital')}: {', '.join(names[:_NAMED])}{more}"


def watch(
    run: Run = "latest",
    tracker: Trackers = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Follow a run, also after `run` was interrupted; ends when the run does. Closed rounds are told again."""
    from coordinator.lead.trackers import Tracking, open_tracker

    with _client(home) as client:
        info = client.show(run).info
        about = {"name": info.name, "method": info.method, "data": info.data, "manifest": info.manifest_digest}
        opened = [open_tracker(where, info.run_id, about) for where in tracker or ()]
        tracking = Tracking(opened, lambda text: console.ERR.print(text, soft_wrap=True))
        _follow(client, info.run_id if tracker else run, as_json, tracking)


def _follow(client: LeadClient, run: str, as_json: bool, tracking: Tracking | None = None) -> None:
    try:
        with nullcontext() if as_json else console.Watcher() as watcher:
            for event in client.watch(run):
                if watcher is not None:
                    watcher.show(event)
                elif event.kind != "silo":
                    print_json(console.event_json(event))
                if tracking is not None and event.HasField("closed"):
                    tracking.note(event.closed)
    except KeyboardInterrupt:
        console.ERR.print(f"the run goes on; follow it again with: coordinator watch {run}")
        raise typer.Exit(130) from None
    info = client.show(run).info
    if tracking is not None:
        tracking.end(info.state)
    _show_info(info, as_json)
    if info.state != "finished":
        raise typer.Exit(1)


def _show_info(info: pb.RunInfo, as_json: bool) -> None:
    if as_json:
        print_json(console.run_json(info))
    else:
        console.OUT.print(console.runs_table([info]))
        for line in (info.reason, *console.waiting_lines(info)):
            if line:
                console.OUT.print(line, soft_wrap=True)


def _silos_json(found: pb.SiloList) -> dict[str, object]:
    invitations = [{"name": i.name, "expires": i.expires_unix} for i in found.invitations]
    return {"silos": [console.silo_json(s) for s in found.silos], "invitations": invitations}


def status(home: Home = None, as_json: Json = False) -> None:
    """Show the silos and the runs that are not over."""
    with _client(home) as client:
        silos, runs = client.silos(), [r for r in client.runs() if r.state in ("waiting", "running", "paused")]
    if as_json:
        print_json({**_silos_json(silos), "runs": [console.run_json(r) for r in runs]})
        return
    console.OUT.print(console.silos_table(silos.silos))
    console.show_alarms(silos.silos)
    console.OUT.print(console.runs_table(runs) if runs else "no run is under way")
    for info in runs:
        for line in console.waiting_lines(info):
            console.OUT.print(f"{info.run_id}: {line}", soft_wrap=True)


def runs(home: Home = None, as_json: Json = False) -> None:
    """List all runs, newest first."""
    with _client(home) as client:
        found = client.runs()
    if as_json:
        print_json([console.run_json(r) for r in found])
    else:
        console.OUT.print(console.runs_table(found) if found else "no run yet: coordinator run method=fedmr ...")


def show(run: Run = "latest", home: Home = None, as_json: Json = False) -> None:
    """Show one run round by round, with who took part."""
    with _client(home) as client:
        detail = client.show(run)
    if as_json:
        rounds = [console.round_json(r) for r in detail.rounds]
        start = start_json(detail.manifest_json)
        rule = {"aggregator": detail.aggregator or None, **judgements(detail.rounds)}
        own = {"start": start, "round": rounds, "manifest": detail.manifest_json}
        software = {"software": console.software_json(detail.software)}
        print_json({**console.run_json(detail.info), **rule, **own, **software})
        return
    _show_info(detail.info, as_json)
    form, made = console.private_form(detail.manifest_json), console.software_text(detail.software)
    for text in (started_from(detail.manifest_json), form, made and f"software: {made}"):
        if text:
            console.OUT.print(text, soft_wrap=True)
    console.OUT.print(console.aggregator_text(detail.aggregator, judgements(detail.rounds)), soft_wrap=True)
    rows = [
        (
            console.round_text(r.round, r.kind),
            pb.TaskKind.Name(r.kind).lower(),
            accuracy.of_round(r).text(),
            ", ".join(r.included),
            "; ".join(f"{k}: {v}" for k, v in console.judged_updates(r)) or "-",
            str(r.clipped),
        )
        for r in detail.rounds
    ]
    head = ("round", "kind", "accuracy before it", "took part", "missing or cut", "clipped")
    console.OUT.print(make_table("Rounds", head, rows))
    if detail.rounds:
        manifest = json.loads(detail.manifest_json)
        classes, metrics = manifest["schema"]["classes"], manifest.get("metrics", "")
        for shown in console.clinical_tables(detail.rounds[-1], classes, metrics):
            console.OUT.print(shown, soft_wrap=True)


def abort(run: Run, home: Home = None, as_json: Json = False) -> None:
    """Stop a run in any state; what was trained so far stays."""
    with _client(home) as client:
        _show_info(client.abort(run), as_json)


def resume(
    run: Run,
    quorum: Annotated[int, typer.Option(help="Updates that close a round from now on; 0 leaves what it is.")] = 0,
    home: Home = None,
    detach: Annotated[bool, typer.Option(help="Let it go on and return; follow it later with `watch`.")] = False,
    as_json: Json = False,
) -> None:
    """Let a paused or failed run go on at its last closed round, and follow it. Silos that refused are asked again.

    A run that a crash or a stop of the service cut short needs no command: it goes on when the service is started.
    """
    if quorum < 0:
        raise ConfigError("E-CFG-02", f"expected --quorum of 0 or more, found {quorum}: correct it")
    with _client(home) as client:
        info = client.resume(run, quorum)
        if not as_json:
            console.ERR.print(f"{info.run_id} goes on after {info.closed} of {info.rounds} rounds")
        if detach:
            _show_info(info, as_json)
            return
        _follow(client, info.run_id, as_json)


def exclude(
    run: Run,
    silo: Annotated[str, typer.Argument(help="The hospital's name.")],
    readmit: Annotated[bool, typer.Option("--readmit", help="Ask it again, from the next round on.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Go on without a hospital: it is awaited no longer and asked for no further round. The quorum stays."""
    with _client(home) as client:
        _show_info(client.exclude(run, silo, readmit), as_json)


def extend(
    run: Run,
    hours: Annotated[float, typer.Option(help="How much longer.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Wait longer in the open round, for everybody who has not delivered."""
    with _client(home) as client:
        _show_info(client.extend(run, hours), as_json)


def export(
    run: Run = "latest",
    out: Annotated[Path, typer.Option(help="Folder for the model and its card.")] = Path("models"),
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="Also as onnx, or as torch (a program of plain torch); may be repeated."),
    ] = None,
    licence: Annotated[str, typer.Option(help="Of the model, in your words, for the files of --format.")] = "",
    extension: Extensions = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write a run's newest model as safetensors, with a model card; with --format also for other programs."""
    from coordinator.cli.export import check_detail, export_model, state_limit
    from coordinator.lead import portable
    from fl_core.extensions import loading

    loading.load_distributions(extension)
    more = [name for name in formats or () if name != "safetensors"]
    portable.require(more)

    with _client(home) as client, TemporaryDirectory() as scratch:
        detail = client.show(run)
        if not detail.info.model_object:
            raise ConfigError(
                "E-RUN-11", f"expected a run with a closed round, found {run!r} in state {detail.info.state}"
            )
        state = Path(scratch) / "state"
        client.fetch(detail.info.model_object, state, state_limit(check_detail(detail)))
        tensors, card, others = export_model(detail, state, out, more, licence)
    if as_json:
        files = {"model": str(tensors), "card": str(card), "others": [str(file) for file in others]}
        print_json({**files, "model_digest": detail.info.model_digest})
    else:
        console.OUT.print(f"wrote {', '.join(map(str, (tensors, *others)))} and {card}", soft_wrap=True)


def silos(home: Home = None, as_json: Json = False) -> None:
    """List the enrolled hospitals, who is here, and open invitations."""
    with _client(home) as client:
        found = client.silos()
    if as_json:
        print_json(_silos_json(found))
        return
    console.OUT.print(console.silos_table(found.silos))
    console.show_alarms(found.silos)
    for invitation in found.invitations:
        console.OUT.print(f"{invitation.name} is invited until {local_time(invitation.expires_unix)}")
