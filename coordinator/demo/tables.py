"""What the demo found, in tables: for the terminal and for the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.demo.budgets import COLLECTION, EPSILON, Spending
from coordinator.lead import accuracy, console
from fl_core.types.records import judgements
from privacy.accounting.uncertainty import Estimate
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import span

PLAIN, REPAIRED, PRIVATE = "fedavg", "fedgela", "fedgela-private"
"""The runs: FedAvg, a method made for hospitals that lack classes, and that under differential privacy."""
LABELS = {
    PLAIN: "FedAvg",
    REPAIRED: "FedGELA",
    PRIVATE: f"FedGELA, every image protected (epsilon {EPSILON:g})",
}
SHORT = {PLAIN: "FedAvg", REPAIRED: "FedGELA", PRIVATE: f"with epsilon {EPSILON:g}"}
MILESTONE = 0.8
"""The accuracy whose first round is shown."""


class ResultTable(NamedTuple):
    """A table of texts."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def model_name(detail: pb.RunDetail) -> str:
    return str(json.loads(detail.manifest_json)["model"]["name"])


def series(detail: pb.RunDetail) -> list[Estimate]:
    return [accuracy.of_round(r) for r in detail.rounds]


def first_round(detail: pb.RunDetail) -> int | None:
    """Return how many rounds were done when the accuracy first reached the milestone; None: never, or not known."""
    reached = (t for t, e in enumerate(series(detail)) if e.point is not None and e.exact and e.point >= MILESTONE)
    return next(reached, None)


def by_run(details: Mapping[str, pb.RunDetail]) -> ResultTable:
    rows = [
        (
            LABELS[m],
            accuracy.newest(d.info).text(),
            accuracy.best(d.info).text(),
            "never" if (first := first_round(d)) is None else f"round {first}",
            str(d.info.rounds),
            console.size(d.info.bytes_up),
            console.size(d.info.bytes_down),
            span(d.info.ended_unix - d.info.created_unix),
            f"{d.aggregator}: {console.judged_text(judgements(d.rounds))}",
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
        "updates",
    )
    model = " and ".join(sorted({model_name(d) for d in details.values()}))
    title = f"One model ({model}) for six hospitals; no image moved, no digit is at two hospitals"
    return ResultTable(title, head, rows)


def by_class(details: Mapping[str, pb.RunDetail]) -> ResultTable:
    last = {m: accuracy.by_class(d.rounds[-1]) for m, d in details.items()}
    names = json.loads(details[REPAIRED].manifest_json)["schema"]["classes"]
    rows = [(name, *(estimates[c].text() for estimates in last.values())) for c, name in enumerate(names)]
    return ResultTable("Images classified correctly, by digit", ("digit", *(LABELS[m] for m in last)), rows)


def by_hospital(
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    silos: Sequence[pb.SiloInfo],
) -> ResultTable:
    rows = [
        (
            s.name,
            f"silo://demo/{s.name}",
            s.fingerprint[:23],
            *(console.percent(-1 if scores[m][s.name] is None else float(scores[m][s.name] or 0)) for m in details),
        )
        for s in silos
    ]
    head = ("hospital", "certificate identity", "key fingerprint", *(LABELS[m] for m in details))
    return ResultTable("Accuracy by hospital, on its own test images", head, rows)


def spending(spent: Mapping[str, Spending]) -> ResultTable:
    rows = [
        (name, f"{s.noise:.3f}", f"{s.epsilon:.4f}", f"{s.projected:.4f}", f"{s.tight:.2f}", f"{s.delta:g}")
        for name, s in spent.items()
    ]
    head = ("hospital", "noise z", "epsilon by its ledger", "projected", "tighter bound", "delta")
    title = f"What the private run cost the training images ({COLLECTION}/train), budget epsilon {EPSILON:g}"
    return ResultTable(title, head, rows)
