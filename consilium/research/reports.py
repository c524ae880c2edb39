"""`coordinator compare` and `plot`: compare the results of runs, and draw their curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from consilium.report.comparison import MAX_RUNS, ComparedRun, RunComparison, comparison_json, score_rows
from consilium.report.comparison import compare as compare_runs
from coordinator.cli.options import Place
from coordinator.lead.client import LeadClient
from coordinator.lead.tables import size
from fl_core.errors import ConfigError
from privacy.accounting.measures import MEASURES
from privacy.accounting.uncertainty import NOTHING
from protos.consilium.v1 import federation_pb2 as pb
from service_core.command_line import command
from service_core.console import CommandResult, local_time, make_table

Runs = Annotated[list[str], typer.Argument(help="Ids or names of runs, or `latest`.")]
_NAMES = ", ".join(measure.name for measure in MEASURES)
_VALUE_CHARS = 60
_HEADS_CHARS = 40
"""Characters for run ids in a table's head: half the line of a narrow terminal."""


@command
def compare(runs: Runs, home: Place) -> CommandResult:
    """Show runs side by side: their configurations, their scores, and which scores differ by more than chance.

    Only the last evaluations (as in `show`) are compared, and only if they have the same hospitals and the same number
    of test images.
    """
    comparison = compare_runs([ComparedRun.of(detail) for detail in _details(home, runs)])
    return CommandResult(comparison_json(comparison), _compared(comparison))


def _compared(found: RunComparison) -> Iterator[str | Table]:
    ids = _heads([run.id for run in found.runs])
    yield from (f"{short}: {run.id}" for short, run in zip(ids, found.runs, strict=True) if short != run.id)
    yield make_table("Runs", ("", *ids), _facts(found.runs))
    rows = [(key, *map(_short, values)) for key, values in found.differences.items()]
    yield make_table("Differences", ("key", *ids), rows) if rows else "the configurations are the same"
    yield f"{found.standing.headline({run.id: short for short, run in zip(ids, found.runs, strict=True)})}."
    if scored := list(score_rows(found)):
        rows = [(measure, *texts) for measure, texts in scored]
        yield make_table("Scores: the last evaluation", ("measure", *ids), rows)
    if found.classes:
        classes = [(name, *(run.by_class.get(name, NOTHING).text() for run in found.runs)) for name in found.classes]
        yield make_table("Accuracy by class, at the end", ("class", *ids), classes)
    yield from (f"note: {note}" for note in found.notes)


def _heads(runs: Sequence[str]) -> list[str]:
    """Return column heads for runs: their ids, or letters if the ids leave no room for values."""
    fit = sum(map(len, runs)) <= _HEADS_CHARS
    return list(runs) if fit else [chr(ord("A") + k) for k in range(len(runs))]


_FACTS: Sequence[tuple[str, Callable[[ComparedRun], str]]] = (
    ("state", lambda run: run.info.state),
    ("method", lambda run: run.info.method),
    ("data", lambda run: run.info.data),
    ("rounds", lambda run: f"{run.info.closed}/{run.info.rounds}"),
    ("hospitals", lambda run: str(len(run.members))),
    ("up / down", lambda run: f"{size(run.info.bytes_up)} / {size(run.info.bytes_down)}"),
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


@command
def plot(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The plot to write: a .png or .svg file.")],
    measure: Annotated[
        list[str] | None,
        typer.Option(help=f"What to draw; may be repeated. One of {_NAMES}. Default: the first two."),
    ] = None,
    *,
    home: Place,
) -> CommandResult:
    """Draw the curves of runs into one plot. A curve has a gap if noise hides the value."""
    from consilium.research import plots

    drawn = plots.plot(_details(home, runs), measure or (), out)
    return CommandResult({"picture": str(out), "measures": drawn}, [f"wrote {out}: {', '.join(drawn)}"])


def _details(home: Path, runs: Sequence[str]) -> list[pb.RunDetail]:
    if len(runs) > MAX_RUNS:
        raise ConfigError("E-CFG-02", f"expected at most {MAX_RUNS} runs, found {len(runs)}: name fewer")
    with closing(LeadClient.open(home)) as client:
        return [client.show(run) for run in runs]
