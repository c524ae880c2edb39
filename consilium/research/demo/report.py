"""The results of the demo: tables, `summary.json`, a plot and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from consilium.report.curves import curves
from consilium.research import plots
from consilium.research.demo.budgets import COLLECTION, EPSILON, PrivateRunSpending
from consilium.web.chart import Chart, Series
from consilium.web.rendering import STYLE, make_environment
from coordinator.lead import accuracy, tables
from fl_core.types.records import update_outcomes
from privacy.accounting.measures import ACCURACY, plain
from privacy.accounting.uncertainty import Estimate
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import CommandResult, format_duration, make_table
from service_core.storage.private_files import write_public

PLAIN, REPAIRED, CLOSED, PRIVATE = "fedavg", "fedgela", "analytic", "analytic-private"
"""The runs: FedAvg, a method for hospitals that lack classes, the closed form, and it with differential privacy."""
LABELS = {
    PLAIN: "FedAvg",
    REPAIRED: "FedGELA",
    CLOSED: "analytic",
    PRIVATE: f"analytic, every image protected (epsilon {EPSILON:g})",
}
SHORT = {PLAIN: "FedAvg", REPAIRED: "FedGELA", CLOSED: "analytic", PRIVATE: f"analytic, epsilon {EPSILON:g}"}
MILESTONE = 0.8
"""Accuracy; the tables show the first round that reaches it."""


def _accuracies(prefix: str, info: pb.RunInfo) -> dict[str, object]:
    """Return a run's accuracies: null if withheld, with an interval if noisy."""
    values: dict[str, object] = {}
    for name, estimate in (("global_accuracy", accuracy.newest(info)), ("best_global_accuracy", accuracy.best(info))):
        values[prefix + name] = estimate.point
        if estimate.withheld or not estimate.exact:
            values[f"{prefix}{name}_interval"] = None if estimate.low is None else [estimate.low, estimate.high]
    return values


def report(
    out: Path,
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    spent: Mapping[str, PrivateRunSpending],
    silos: Sequence[pb.SiloInfo],
    training_images: Mapping[str, Sequence[int]],
    seconds: float,
) -> CommandResult:
    """Write summary, plot and page, and return the terminal's output.

    training_images: counts by hospital and digit.
    """
    ours, private = details[REPAIRED], details[PRIVATE]
    summary = {
        "method": REPAIRED,
        **_accuracies("", ours.info),
        **_accuracies("fedavg_", details[PLAIN].info),
        **_accuracies("analytic_", details[CLOSED].info),
        **_accuracies("private_", private.info),
        "epsilon": {name: s.epsilon for name, s in spent.items()},
        "epsilon_projected": {name: s.projected for name, s in spent.items()},
        "delta": {name: s.delta for name, s in spent.items()},
        "rounds_to_milestone": {name: _first_round(d) for name, d in details.items()},
        "milestone": MILESTONE,
        "rounds": ours.info.rounds,
        "training_images": {name: list(counts) for name, counts in training_images.items()},
        "silos": [
            {
                "name": s.name,
                "identity": f"silo://demo/{s.name}",
                "fingerprint": s.fingerprint,
                "epsilon": spent[s.name].epsilon,
                "delta": spent[s.name].delta,
            }
            for s in silos
        ],
        "updates": {m: {"aggregator": d.aggregator, **update_outcomes(d.rounds)} for m, d in details.items()},
        "mtls": True,
        "bytes_up": ours.info.bytes_up,
        "bytes_down": ours.info.bytes_down,
        "seconds": round(seconds, 1),
        "model": {method: _model_name(d) for method, d in details.items()},
        "model_digest": {method: d.info.model_digest for method, d in details.items()},
        "accuracy_by_round": {method: [e.point for e in _series(d)] for method, d in details.items()},
        "hospital_accuracy": {method: dict(s) for method, s in scores.items()},
    }
    write_public(out / "summary.json", f"{json.dumps(summary, indent=2)}\n".encode())
    drawn = [curves(d.rounds) for d in details.values()]
    picture = plots.picture(["accuracy"], [LABELS[m] for m in details], drawn, "png")
    write_public(out / "accuracy.png", picture)
    tables = [_by_run(details), _by_class(details), _by_hospital(details, scores, silos), _spending(spent)]
    lines = {SHORT[m]: [e.point for e in _series(d)] for m, d in details.items()}
    write_page(out / "index.html", *_headline(details), Holdings(_classes(ours), training_images), lines, tables)
    link = f"The results, as a page: {(out / 'index.html').absolute().as_uri()}"
    written = f"{seconds:.0f} s. In the same folder: summary.json, accuracy.png, demo.log"
    return CommandResult(summary, [link, make_table(*_in_short(details, spent)), written])


def _headline(details: Mapping[str, pb.RunDetail]) -> tuple[str, str]:
    """Return the page's headline and the text below it, with the accuracies of this demo."""
    infos = {name: details[name].info for name in (CLOSED, REPAIRED, PLAIN)}
    rounds = {name: "1 round" if info.rounds == 1 else f"{info.rounds} rounds" for name, info in infos.items()}
    scores = [f"{accuracy.newest(info).text()} after {rounds[name]} of {SHORT[name]}" for name, info in infos.items()]
    return (
        "Six hospitals trained one model, and no image left any of them",
        "None of them has seen more than two of the ten digits. Correct on all their test images: "
        f"{', '.join(scores[:-1])}, and {scores[-1]}. Updates were masked: the coordinator read only their sums. "
        "If only one hospital has a digit, the sum for this digit is that hospital's part, without its name.",
    )


# ---- tables ---------------------------------------------------------------------------------------------------------


class ResultTable(NamedTuple):
    """A table of text cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def _model_name(detail: pb.RunDetail) -> str:
    return str(json.loads(detail.manifest_json)["model"]["name"])


def _classes(detail: pb.RunDetail) -> Sequence[str]:
    classes: list[str] = json.loads(detail.manifest_json)["schema"]["classes"]
    return classes


def _series(detail: pb.RunDetail) -> list[Estimate]:
    return [ACCURACY.estimate(accuracy.result_of(r)) for r in detail.rounds]


def _first_round(detail: pb.RunDetail) -> int | None:
    """Return the number of rounds after which the accuracy first reached the milestone; None: never, or unknown."""
    reached = (t for t, e in enumerate(_series(detail)) if e.point is not None and e.exact and e.point >= MILESTONE)
    return next(reached, None)


def _in_short(details: Mapping[str, pb.RunDetail], spent: Mapping[str, PrivateRunSpending]) -> ResultTable:
    """Build the table for the terminal; the page shows the others."""
    rows = [
        (
            SHORT[m],
            accuracy.newest(d.info).text(),
            str(d.info.rounds),
            tables.size(d.info.bytes_up),
            format_duration(d.info.ended_unix - d.info.created_unix),
            f"{max(s.epsilon for s in spent.values()):.2f}" if m == PRIVATE else "not bounded",
        )
        for m, d in details.items()
    ]
    head = ("trained by", "classified correctly", "rounds", "sent by hospitals", "time", "epsilon of an image")
    return ResultTable("Six hospitals, one model: no image moved, and no two hospitals have the same digit", head, rows)


def _by_run(details: Mapping[str, pb.RunDetail]) -> ResultTable:
    rows = [
        (
            LABELS[m],
            accuracy.newest(d.info).text(),
            accuracy.best(d.info).text(),
            "never" if (first := _first_round(d)) is None else f"round {first}",
            str(d.info.rounds),
            tables.size(d.info.bytes_up),
            tables.size(d.info.bytes_down),
            format_duration(d.info.ended_unix - d.info.created_unix),
            tables.outcomes_text(update_outcomes(d.rounds)) or "-",
        )
        for m, d in details.items()
    ]
    reached = f"{MILESTONE:.0%} first after"
    head = (
        "trained by",
        "classified correctly",
        "at best",
        reached,
        "rounds",
        "bytes up",
        "bytes down",
        "time",
        "updates refused or clipped",
    )
    model = " or ".join(sorted({_model_name(d) for d in details.values()}))
    title = f"The models ({model}) and how they were trained"
    return ResultTable(title, head, rows)


def _by_class(details: Mapping[str, pb.RunDetail]) -> ResultTable:
    last = {m: accuracy.result_of(d.rounds[-1]).by_class() for m, d in details.items()}
    rows = [
        (name, *(estimates[c].text() for estimates in last.values()))
        for c, name in enumerate(_classes(details[REPAIRED]))
    ]
    return ResultTable("Images classified correctly, by digit", ("digit", *(LABELS[m] for m in last)), rows)


def _by_hospital(
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    silos: Sequence[pb.SiloInfo],
) -> ResultTable:
    rows = [
        (
            s.name,
            f"silo://demo/{s.name}",
            s.fingerprint[:23],
            *(plain(-1 if scores[m][s.name] is None else float(scores[m][s.name] or 0)).text() for m in details),
        )
        for s in silos
    ]
    head = ("hospital", "certificate identity", "key fingerprint", *(LABELS[m] for m in details))
    return ResultTable("Accuracy by hospital, on its own test images", head, rows)


def _spending(spent: Mapping[str, PrivateRunSpending]) -> ResultTable:
    rows = [
        (name, f"{s.noise:.3f}", f"{s.epsilon:.4f}", f"{s.projected:.4f}", f"{s.tight:.2f}", f"{s.delta:g}")
        for name, s in spent.items()
    ]
    head = ("hospital", "noise multiplier", "epsilon in its ledger", "as planned", "tighter bound", "delta")
    title = (
        f"Privacy budget of the training images ({COLLECTION}/train): epsilon spent by the private run, "
        f"out of {EPSILON:g}"
    )
    return ResultTable(title, head, rows)


# ---- the page --------------------------------------------------------------------------------------------------------

_FOLDER = Path(__file__).parent / "templates"


class Holdings(NamedTuple):
    """Training images by hospital: a name -> counts in the order of `classes`."""

    classes: Sequence[str]
    training_images: Mapping[str, Sequence[int]]

    def level(self, count: int) -> int:
        """Return a colour level, from 0 for no images to 4 for the largest count."""
        return -(-4 * count // max(1, *(max(counts) for counts in self.training_images.values())))


def write_page(
    file: Path,
    headline: str,
    below: str,
    holdings: Holdings,
    curves: Mapping[str, Sequence[float | None]],
    tables: Sequence[ResultTable],
) -> None:
    """Write the page. curves: model name -> accuracy (0 to 1, None: withheld) before round 1 and after each round."""
    rounds = max(map(len, curves.values()))
    drawn = Chart(
        "Test images classified correctly (%)",
        "rounds of training",
        range(rounds),
        [
            Series(name, [*(None if v is None else 100 * v for v in values), *[None] * (rounds - len(values))], colour)
            for colour, (name, values) in enumerate(curves.items(), 1)
        ],
        (0.0, 100.0),
    )
    template = make_environment(_FOLDER).get_template("demo.html")
    style = Markup(STYLE.read_text(encoding="utf-8"))  # noqa: S704 - our own file, in a style element
    page = template.render(headline=headline, below=below, holdings=holdings, curves=drawn, tables=tables, style=style)
    write_public(file, page.encode())
