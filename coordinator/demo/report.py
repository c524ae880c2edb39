"""What the demo shows at its end: tables, `summary.json` and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator import display
from coordinator.demo.budgets import COLLECTION, EPSILON, Spending
from protos.consilium.v1 import federation_pb2 as pb

PRIVATE = "fedmr-private"
"""The name of the run under record-level differential privacy."""
LABELS = {"fedmr": "fedmr", "fedavg": "fedavg", PRIVATE: f"fedmr, epsilon {EPSILON:g}"}
COLOURS = {"fedmr": "#0b6e4f", "fedavg": "#8a8a8a", PRIVATE: "#b5562b"}


def _model(detail: pb.RunDetail) -> str:
    """Name the architecture of a run: rows of different ones are not to be compared without saying so."""
    return str(json.loads(detail.manifest_json)["model"]["name"])


def _series(detail: pb.RunDetail) -> list[float]:
    return [sum(r.correct) / max(sum(r.examples), 1) for r in detail.rounds]


def report(
    out: Path,
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    spent: Mapping[str, Spending],
    silos: Sequence[pb.SiloInfo],
    seconds: float,
    quiet: bool,
) -> None:
    """Write the summary and the picture, and print the tables."""
    ours, plain, private = details["fedmr"], details["fedavg"], details[PRIVATE]
    summary = {
        "method": "fedmr",
        "global_accuracy": ours.info.accuracy,
        "best_global_accuracy": ours.info.best_accuracy,
        "fedavg_global_accuracy": plain.info.accuracy,
        "fedavg_best_global_accuracy": plain.info.best_accuracy,
        "private_global_accuracy": private.info.accuracy,
        "private_best_global_accuracy": private.info.best_accuracy,
        "epsilon": {name: s.epsilon for name, s in spent.items()},
        "epsilon_projected": {name: s.projected for name, s in spent.items()},
        "delta": {name: s.delta for name, s in spent.items()},
        "submits_prototypes": {name: s.prototypes for name, s in spent.items()},
        "rounds": ours.info.rounds,
        "silos": [
            {"name": s.name, "identity": f"silo://demo/{s.name}", "fingerprint": s.fingerprint,
             "epsilon": spent[s.name].epsilon, "delta": spent[s.name].delta}
            for s in silos
        ],
        "mtls": True,
        "bytes_up": ours.info.bytes_up,
        "bytes_down": ours.info.bytes_down,
        "seconds": round(seconds, 1),
        "model": {method: _model(d) for method, d in details.items()},
        "model_digest": {method: d.info.model_digest for method, d in details.items()},
        "accuracy_by_round": {method: _series(d) for method, d in details.items()},
        "hospital_accuracy": {method: dict(s) for method, s in scores.items()},
    }  # fmt: skip
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _picture(out / "accuracy.png", details)
    if quiet:
        display.print_json(summary)
        return
    _tables(details, scores, silos)
    _spending(spent)
    display.OUT.print(f"{seconds:.0f} s; wrote {out / 'summary.json'} and {out / 'accuracy.png'}", soft_wrap=True)


def _tables(
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    silos: Sequence[pb.SiloInfo],
) -> None:
    rows = [
        (LABELS[m], _model(d), display.percent(d.info.accuracy), display.percent(d.info.best_accuracy),
         str(d.info.rounds), display.size(d.info.bytes_up), display.size(d.info.bytes_down),
         display.span(d.info.ended_unix - d.info.created_unix))
        for m, d in details.items()
    ]  # fmt: skip
    head = ("method", "model", "global accuracy", "best", "rounds", "bytes up", "bytes down", "time")
    display.OUT.print(display.table("One model for six hospitals, no image moved", head, rows))
    last = {m: d.rounds[-1] for m, d in details.items()}
    names = json.loads(details["fedmr"].manifest_json)["schema"]["classes"]
    by_class = [
        (name, *(display.percent(r.correct[c] / r.examples[c] if r.examples[c] else -1) for r in last.values()))
        for c, name in enumerate(names)
    ]
    display.OUT.print(display.table("Accuracy by class", ("class", *(LABELS[m] for m in last)), by_class))
    by_silo = [
        (s.name, f"silo://demo/{s.name}", s.fingerprint[:23],
         *(display.percent(-1 if scores[m][s.name] is None else float(scores[m][s.name] or 0)) for m in details))
        for s in silos
    ]  # fmt: skip
    columns = ("hospital", "certificate identity", "key fingerprint", *(LABELS[m] for m in details))
    display.OUT.print(display.table("Accuracy by hospital, on its own test images", columns, by_silo))


def _spending(spent: Mapping[str, Spending]) -> None:
    """Print what the private run cost each hospital, by its ledger."""
    rows = [
        (name, "yes" if s.prototypes else "no", f"{s.noise:.3f}", f"{s.epsilon:.4f}", f"{s.projected:.4f}",
         f"{s.tight:.2f}", f"{s.delta:g}")
        for name, s in spent.items()
    ]  # fmt: skip
    head = ("hospital", "sends prototypes", "noise z", "epsilon by its ledger", "projected", "tighter bound", "delta")
    title = f"What the private run cost the training images ({COLLECTION}/train), budget epsilon {EPSILON:g}"
    display.OUT.print(display.table(title, head, rows))


def _picture(path: Path, details: Mapping[str, pb.RunDetail]) -> None:
    """Draw accuracy by round."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for method, detail in details.items():
        values = _series(detail)
        label = f"{LABELS[method]} ({_model(detail)}): {100 * values[-1]:.1f} % at the end"
        axes.plot(range(len(values)), [100 * v for v in values], color=COLOURS[method], linewidth=2, label=label)
    axes.set(xlabel="round", ylabel="global accuracy (%)", ylim=(0, 100), title="Six hospitals, class-disjoint digits")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
