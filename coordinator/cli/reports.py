"""`coordinator compare`, `plot` and `logs`: what runs have brought, and how they went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import Home, Json, home_of
from coordinator.lead import console, run_log
from coordinator.lead.client import LeadClient
from coordinator.lead.comparison import COMPARED, MOST_RUNS, ComparedRun, Comparison, score_rows
from coordinator.lead.comparison import compare as compare_runs
from coordinator.lead.curves import MEASURES, Scores
from coordinator.lead.run_log import RunLine
from fl_core.errors import ConfigError
from privacy.accounting.uncertainty import NOTHING, Estimate
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import local_time, make_table, print_json, printable

Runs = Annotated[list[str], typer.Argument(help="Ids or names of runs, or `latest`.")]
_VALUE_CHARS = 60


def compare(runs: Runs, home: Home = None, as_json: Json = False) -> None:
    """Show runs side by side: how their configurations differ, what their models reached, and which are told apart.

    Compared is the mean of the last evaluations, at most 5, where all were made at the same hospitals on as many test
    images. `show` has all rounds of a run, with its final and its best value.
    """
    found = compare_runs([ComparedRun.of(detail) for detail in _details(home, runs)])
    if as_json:
        print_json(comparison_json(found))
        return
    ids = [run.id for run in found.runs]
    console.OUT.print(make_table("Runs", ("", *ids), _facts(found.runs)))
    rows = [(key, *map(_short, values)) for key, values in found.differences.items()]
    console.OUT.print(make_table("Differences", ("key", *ids), rows) if rows else "the configurations are the same")
    console.OUT.print(f"{found.standing.headline({run: run for run in ids})}.", soft_wrap=True)
    if scored := list(score_rows(found)):
        rows = [(measure, *texts) for measure, texts in scored]
        console.OUT.print(make_table(f"Scores: {found.standing.over}", ("measure", *ids), rows))
    if found.classes:
        classes = [(name, *(run.by_class.get(name, NOTHING).text() for run in found.runs)) for name in found.classes]
        console.OUT.print(make_table("Accuracy by class, at the end", ("class", *ids), classes))
    for note in found.notes:
        console.OUT.print(f"note: {note}", soft_wrap=True)


def plot(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The picture to write: a .png or a .svg file.")],
    measure: Annotated[
        list[str] | None,
        typer.Option(help=f"What to draw; may be repeated. One of {', '.join(MEASURES)}. Default: the first two."),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Draw the curves of runs into one picture. What noise hides is a gap."""
    from coordinator.lead import plots

    drawn = plots.plot(_details(home, runs), measure or (), out)
    if as_json:
        print_json({"picture": str(out), "measures": drawn})
    else:
        console.OUT.print(f"wrote {out}: {', '.join(drawn)}", soft_wrap=True)


def logs(
    run: Annotated[str, typer.Argument(help="A run's id or name, or `latest`.")] = "latest",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show what happened in a run, oldest first: its events, and the lines of the audit log that name it."""
    with closing(LeadClient.open(home_of(home))) as client:
        rounds = client.show(run).info.rounds
        try:
            for line in run_log.run_lines(client, home_of(home), run, follow):
                if as_json:
                    print_json(line_json(line))
                else:
                    console.OUT.print(line_text(line, rounds), soft_wrap=True)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _details(home: Path | None, runs: Sequence[str]) -> list[pb.RunDetail]:
    if len(runs) > MOST_RUNS:
        raise ConfigError("E-CFG-02", f"expected at most {MOST_RUNS} runs, found {len(runs)}: name fewer")
    with closing(LeadClient.open(home_of(home))) as client:
        return [client.show(run) for run in runs]


# ---- words of compare ----------------------------------------------------------------------------------------------

_FACTS: Sequence[tuple[str, Callable[[ComparedRun], str]]] = (
    ("state", lambda run: run.info.state),
    ("method", lambda run: run.info.method),
    ("data", lambda run: run.info.data),
    ("rounds", lambda run: f"{run.info.closed}/{run.info.rounds}"),
    ("hospitals", lambda run: str(len(run.members))),
    ("up / down", lambda run: f"{console.size(run.info.bytes_up)} / {console.size(run.info.bytes_down)}"),
    ("started", lambda run: local_time(run.info.created_unix)),
    ("ended", lambda run: local_time(run.info.ended_unix)),
    ("model", lambda run: run.info.model_digest[:16] or "-"),
)


def _facts(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    return [(name, *(text(run) for run in runs)) for name, text in _FACTS]


def _short(value: str | None) -> str:
    if value is None:
        return "-"
    return value if len(value) <= _VALUE_CHARS else f"{value[:_VALUE_CHARS]}..."


def comparison_json(found: Comparison) -> dict[str, object]:
    """Write a comparison for machines. Numbers that noise hides are null, others have their interval."""
    return {
        "runs": [
            {
                **console.run_json(run.info),
                "members": list(run.members),
                "scores": {measure: _scores_json(curve.scores) for measure, curve in run.curves.items()},
                "class_accuracy": {name: value.facts() for name, value in run.by_class.items()},
            }
            for run in found.runs
        ],
        "differences": {
            key: dict(zip((run.id for run in found.runs), values, strict=True))
            for key, values in found.differences.items()
        },
        "standing": {
            "measure": COMPARED,
            "evaluations": found.standing.rounds,
            "best": found.standing.best,
            "values": {
                run: {measure: _estimate_json(value) for measure, value in values.items()}
                for run, values in found.standing.values.items()
            },
            "ahead": {
                run: {**ahead._asdict(), "told_apart": ahead.told_apart} for run, ahead in found.standing.ahead.items()
            },
            "not_compared": dict(found.standing.excluded),
        },
        "notes": list(found.notes),
    }


def _scores_json(scores: Scores) -> dict[str, object]:
    found = {"final": scores.final, "best": scores.best, "mean_last": scores.last}
    return {name: _estimate_json(value) for name, value in found.items()}


def _estimate_json(value: Estimate) -> dict[str, object]:
    return {"value": value.point, "low": value.low, "high": value.high, "withheld": bool(value.withheld)}


# ---- words of logs -------------------------------------------------------------------------------------------------


def line_json(line: RunLine) -> dict[str, object]:
    """Write an event or a line of the audit log for machines; `source` says which."""
    if line.event is not None:
        return {"source": "event", **console.event_json(line.event)}
    assert line.audit is not None
    entry = line.audit.entry
    named = {name: getattr(entry, name) for name in ("who", "what", "about", "outcome", "code", "address", "bytes")}
    return {"source": "audit", "number": line.audit.number, "at": line.at, **{k: v for k, v in named.items() if v}}


def line_text(line: RunLine, rounds: int) -> str:
    """Write one for people. rounds: of the run."""
    if line.event is not None:
        event = line.event
        words = [event.kind, console.place(event, rounds), event.silo, event.text]
    else:
        assert line.audit is not None
        entry = line.audit.entry
        words = ["audit", entry.who, entry.what, entry.about, entry.outcome, entry.code]
    return "  ".join([local_time(line.at), *(printable(word) for word in words if word)])
