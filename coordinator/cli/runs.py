"""Commands over the wire, with the lead's own certificate: a run from its submission to its model, and the silos.

Hydra and torch are imported by the commands that need them: `status` answers in a second.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from coordinator import console
from coordinator.api import measured
from coordinator.cli.options import Home, Json, home_of
from coordinator.lead_client import LeadClient
from fl_core.errors import ConfigError
from protos.consilium.v1 import federation_pb2 as pb
from protos.console import local_time, make_table, print_json

Run = Annotated[str, typer.Argument(help="A run's id or name, or `latest`.")]


@contextmanager
def _client(home: Path | None) -> Iterator[LeadClient]:
    client = LeadClient.open(home_of(home))
    try:
        yield client
    finally:
        client.close()


def run(
    overrides: Annotated[list[str] | None, typer.Argument(help="method=fedmr data=isic2019 rounds=50 ...")] = None,
    home: Home = None,
    detach: Annotated[bool, typer.Option(help="Submit and return; follow it later with `watch`.")] = False,
    as_json: Json = False,
) -> None:
    """Compose a run, submit it to the running service and follow it. Ctrl-C leaves it running."""
    from coordinator.config.hydra_config import compose_spec

    spec = compose_spec(overrides or [])
    if spec.data.get("path") is not None:
        raise ConfigError(
            "E-CFG-23",
            "expected no data.path in a run of hospitals, found one: it is for `coordinator simulate`; each hospital "
            "names its own images (silo serve --data)",
        )
    with _client(home) as client:
        info = client.submit(spec.to_json(), uuid.uuid4().hex)
        if not as_json:
            console.ERR.print(f"submitted {info.run_id} ({info.rounds} rounds); manifest {info.manifest_digest[:16]}")
            if form := console.private_form(client.show(info.run_id).manifest_json):
                console.ERR.print(form)
        if detach:
            _show_info(info, as_json)
            return
        _follow(client, info.run_id, as_json)


def watch(run: Run = "latest", home: Home = None, as_json: Json = False) -> None:
    """Follow a run, also after `run` was interrupted; ends when the run does."""
    with _client(home) as client:
        _follow(client, run, as_json)


def _follow(client: LeadClient, run: str, as_json: bool) -> None:
    try:
        if as_json:
            for event in client.watch(run):
                if event.kind != "silo":
                    print_json(_event_json(event))
        else:
            with console.Watcher() as watcher:
                for event in client.watch(run):
                    watcher.show(event)
    except KeyboardInterrupt:
        console.ERR.print(f"the run goes on; follow it again with: coordinator watch {run}")
        raise typer.Exit(130) from None
    info = client.show(run).info
    _show_info(info, as_json)
    if info.state != "finished":
        raise typer.Exit(1)


def _event_json(event: pb.Event) -> dict[str, object]:
    line: dict[str, object] = {
        "event": event.kind,
        "number": event.number,
        "at": event.at_unix,
        "run": event.run_id,
        "round": event.round,
    }
    if event.silo:
        line["silo"] = event.silo
    if event.text:
        line["text"] = event.text
    if event.HasField("closed"):
        line["closed"] = console.round_json(event.closed)
    return line


def _show_info(info: pb.RunInfo, as_json: bool) -> None:
    if as_json:
        print_json(console.run_json(info))
    else:
        console.OUT.print(console.runs_table([info]))
        if info.reason:
            console.OUT.print(info.reason, soft_wrap=True)


def status(home: Home = None, as_json: Json = False) -> None:
    """Show the silos and the runs that are not over."""
    with _client(home) as client:
        silos, runs = client.silos(), [r for r in client.runs() if r.state in ("waiting", "running")]
    if as_json:
        print_json(
            {
                "silos": [console.silo_json(s) for s in silos.silos],
                "invitations": [{"name": i.name, "expires": i.expires_unix} for i in silos.invitations],
                "runs": [console.run_json(r) for r in runs],
            }
        )
        return
    console.OUT.print(console.silos_table(silos.silos))
    console.OUT.print(console.runs_table(runs) if runs else "no run is under way")


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
        print_json({**console.run_json(detail.info), "round": rounds, "manifest": detail.manifest_json})
        return
    console.OUT.print(console.runs_table([detail.info]))
    if form := console.private_form(detail.manifest_json):
        console.OUT.print(form)
    rows = []
    for r in detail.rounds:
        rows.append(
            (
                console.round_text(r.round, r.kind),
                pb.TaskKind.Name(r.kind).lower(),
                measured.of_round(r).text(),
                ", ".join(r.included),
                "; ".join(f"{k}: {v}" for k, v in r.missing.items()) or "-",
                str(r.clipped),
            )
        )
    head = ("round", "kind", "accuracy before it", "took part", "missing", "clipped")
    console.OUT.print(make_table("Rounds", head, rows))


def abort(run: Run, home: Home = None, as_json: Json = False) -> None:
    """Stop a run in any state; what was trained so far stays."""
    with _client(home) as client:
        _show_info(client.abort(run), as_json)


def resume(
    run: Run,
    home: Home = None,
    detach: Annotated[bool, typer.Option(help="Let it go on and return; follow it later with `watch`.")] = False,
    as_json: Json = False,
) -> None:
    """Let a failed run go on at its last closed round, once what stopped it is repaired, and follow it.

    A run that a crash or a stop of the service cut short needs no command: it goes on when the service is started.
    """
    with _client(home) as client:
        info = client.resume(run)
        if not as_json:
            console.ERR.print(f"{info.run_id} goes on after {info.closed} of {info.rounds} rounds")
        if detach:
            _show_info(info, as_json)
            return
        _follow(client, info.run_id, as_json)


def export(
    run: Run = "latest",
    out: Annotated[Path, typer.Option(help="Folder for the model and its card.")] = Path("models"),
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write a run's newest model as safetensors, with a model card."""
    from coordinator.cli.export import export_model

    with _client(home) as client, TemporaryDirectory() as scratch:
        detail = client.show(run)
        if not detail.info.model_object:
            raise ConfigError(
                "E-RUN-11", f"expected a run with a closed round, found {run!r} in state {detail.info.state}"
            )
        state = Path(scratch) / "state"
        client.fetch(detail.info.model_object, state)
        tensors, card = export_model(detail, state, out)
    if as_json:
        print_json({"model": str(tensors), "card": str(card), "model_digest": detail.info.model_digest})
    else:
        console.OUT.print(f"wrote {tensors} and {card}", soft_wrap=True)


def silos(home: Home = None, as_json: Json = False) -> None:
    """List the enrolled hospitals, who is here, and open invitations."""
    with _client(home) as client:
        found = client.silos()
    if as_json:
        print_json(
            {
                "silos": [console.silo_json(s) for s in found.silos],
                "invitations": [{"name": i.name, "expires": i.expires_unix} for i in found.invitations],
            }
        )
        return
    console.OUT.print(console.silos_table(found.silos))
    for invitation in found.invitations:
        console.OUT.print(f"{invitation.name} is invited until {local_time(invitation.expires_unix)}")
