"""The results of the demo: tables, `summary.json` and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator import console
from coordinator.api import accuracy
from coordinator.demo.budgets import COLLECTION, EPSILON, Spending
from fl_core.errors.extras import require
from privacy.reports.uncertainty import Estimate
from protos.consilium.v1 import federation_pb2 as pb
from protos.console import make_table, print_json, span

PLAIN, REPAIRED, PRIVATE = "fedavg", "fedgela", "fedgela-private"
"""The runs: plain averaging, a method made for hospitals that lack classes, and that under differential privacy."""
LABELS = {
    PLAIN: "plain averaging (FedAvg)",
    REPAIRED: "FedGELA",
    PRIVATE: f"FedGELA, every image protected (epsilon {EPSILON:g})",
}
COLOURS = {PLAIN: "#8a8a8a", REPAIRED: "#0b6e4f", PRIVATE: "#b5562b"}
MILESTONE = 0.8
"""The accuracy whose first round is shown."""


def _model(detail: pb.RunDetail) -> str:
    return str(json.loads(detail.manifest_json)["model"]["name"])


def _series(detail: pb.RunDetail) -> list[Estimate]:
    return [accuracy.of_round(r) for r in detail.rounds]


def _first_round(detail: pb.RunDetail) -> int | None:
    """Return how many rounds were done when the accuracy first reached the milestone; None: never, or not known."""
    reached = (t for t, e in enumerate(_series(detail)) if e.point is not None and e.exact and e.point >= MILESTONE)
    return next(reached, None)


def _accuracies(prefix: str, info: pb.RunInfo) -> dict[str, object]:
    """Return a run's accuracies; null: withheld. Noisy ones have an interval."""
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
    spent: Mapping[str, Spending],
    silos: Sequence[pb.SiloInfo],
    seconds: float,
    quiet: bool,
) -> None:
    ours, plain, private = details[REPAIRED], details[PLAIN], details[PRIVATE]
    summary = {
        "method": REPAIRED,
        **_accuracies("", ours.info),
        **_accuracies("fedavg_", plain.info),
        **_accuracies("private_", private.info),
        "epsilon": {name: s.epsilon for name, s in spent.items()},
        "epsilon_projected": {name: s.projected for name, s in spent.items()},
        "delta": {name: s.delta for name, s in spent.items()},
        "rounds_to_milestone": {name: _first_round(d) for name, d in details.items()},
        "milestone": MILESTONE,
        "rounds": ours.info.rounds,
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
        "mtls": True,
        "bytes_up": ours.info.bytes_up,
        "bytes_down": ours.info.bytes_down,
        "seconds": round(seconds, 1),
        "model": {method: _model(d) for method, d in details.items()},
        "model_digest": {method: d.info.model_digest for method, d in details.items()},
        "accuracy_by_round": {method: [e.point for e in _series(d)] for method, d in details.items()},
        "hospital_accuracy": {method: dict(s) for method, s in scores.items()},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _picture(out / "accuracy.png", details)
    if quiet:
        print_json(summary)
        return
    _tables(details, scores, silos)
    _spending(spent)
    console.OUT.print(f"{seconds:.0f} s; wrote {out / 'summary.json'} and {out / 'accuracy.png'}", soft_wrap=True)


def _tables(
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    silos: Sequence[pb.SiloInfo],
) -> None:
    rows = [
        (
            LABELS[m],
            accuracy.newest(d.info).text(),
            accuracy.best(d.info).text(),
            "never" if (first := _first_round(d)) is None else f"round {first}",
            str(d.info.rounds),
            console.size(d.info.bytes_up),
            console.size(d.info.bytes_down),
            span(d.info.ended_unix - d.info.created_unix),
        )
        for m, d in details.items()
    ]
    reached = f"{MILESTONE:.0%} first after"
    head = ("trained by", "images told right", "at best", reached, "rounds", "bytes up", "bytes down", "time")
    model = " and ".join(sorted({_model(d) for d in details.values()}))
    title = f"One model ({model}) for six hospitals; no image moved, no digit is at two hospitals"
    console.OUT.print(make_table(title, head, rows))
    last = {m: accuracy.by_class(d.rounds[-1]) for m, d in details.items()}
    names = json.loads(details[REPAIRED].manifest_json)["schema"]["classes"]
    by_class = [(name, *(estimates[c].text() for estimates in last.values())) for c, name in enumerate(names)]
    console.OUT.print(make_table("Images told right, by digit", ("digit", *(LABELS[m] for m in last)), by_class))
    by_silo = [
        (
            s.name,
            f"silo://demo/{s.name}",
            s.fingerprint[:23],
            *(console.percent(-1 if scores[m][s.name] is None else float(scores[m][s.name] or 0)) for m in details),
        )
        for s in silos
    ]
    columns = ("hospital", "certificate identity", "key fingerprint", *(LABELS[m] for m in details))
    console.OUT.print(make_table("Accuracy by hospital, on its own test images", columns, by_silo))


def _spending(spent: Mapping[str, Spending]) -> None:
    rows = [
        (
            name,
            f"{s.noise:.3f}",
            f"{s.epsilon:.4f}",
            f"{s.projected:.4f}",
            f"{s.tight:.2f}",
            f"{s.delta:g}",
        )
        for name, s in spent.items()
    ]
    head = ("hospital", "noise z", "epsilon by its ledger", "projected", "tighter bound", "delta")
    title = f"What the private run cost the training images ({COLLECTION}/train), budget epsilon {EPSILON:g}"
    console.OUT.print(make_table(title, head, rows))


def _picture(path: Path, details: Mapping[str, pb.RunDetail]) -> None:
    mpl = require("matplotlib", "plots", "the picture of the demo")
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for method, detail in details.items():
        series = _series(detail)
        low, middle, high = (
            [math.nan if (v := getattr(e, end)) is None else 100 * v for e in series]
            for end in ("low", "point", "high")
        )
        label = f"{LABELS[method]}: {series[-1].text()} at the end"
        axes.plot(range(len(series)), middle, color=COLOURS[method], linewidth=2, label=label)
        if any(not e.exact for e in series):  # what is withheld is a gap
            axes.fill_between(range(len(series)), low, high, color=COLOURS[method], alpha=0.15, linewidth=0)
    axes.set(xlabel="rounds of training", ylabel="test images told right (%)", ylim=(0, 100))
    axes.set_title("Six hospitals train one model; none has seen more than two of the ten digits")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
