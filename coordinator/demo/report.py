"""What the demo shows at its end: tables, `summary.json` and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator import display
from protos.consilium.v1 import federation_pb2 as pb


def _series(detail: pb.RunDetail) -> list[float]:
    return [sum(r.correct) / max(sum(r.examples), 1) for r in detail.rounds]


def report(
    out: Path,
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    silos: Sequence[pb.SiloInfo],
    seconds: float,
    quiet: bool,
) -> None:
    """Write the summary and the picture, and print the tables."""
    ours, plain = details["fedmr"], details["fedavg"]
    summary = {
        "method": "fedmr",
        "global_accuracy": ours.info.accuracy,
        "best_global_accuracy": ours.info.best_accuracy,
        "fedavg_global_accuracy": plain.info.accuracy,
        "fedavg_best_global_accuracy": plain.info.best_accuracy,
        "rounds": ours.info.rounds,
        "silos": [{"name": s.name, "identity": f"silo://demo/{s.name}", "fingerprint": s.fingerprint} for s in silos],
        "mtls": True,
        "bytes_up": ours.info.bytes_up,
        "bytes_down": ours.info.bytes_down,
        "seconds": round(seconds, 1),
        "model_digest": {method: d.info.model_digest for method, d in details.items()},
        "accuracy_by_round": {method: _series(d) for method, d in details.items()},
        "hospital_accuracy": {method: dict(s) for method, s in scores.items()},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _picture(out / "accuracy.png", {method: _series(d) for method, d in details.items()})
    if quiet:
        display.print_json(summary)
        return
    _tables(details, scores, silos)
    display.OUT.print(f"{seconds:.0f} s; wrote {out / 'summary.json'} and {out / 'accuracy.png'}", soft_wrap=True)


def _tables(
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    silos: Sequence[pb.SiloInfo],
) -> None:
    rows = [
        (m, display.percent(d.info.accuracy), display.percent(d.info.best_accuracy), str(d.info.rounds),
         display.size(d.info.bytes_up), display.size(d.info.bytes_down),
         display.span(d.info.ended_unix - d.info.created_unix))
        for m, d in details.items()
    ]  # fmt: skip
    head = ("method", "global accuracy", "best", "rounds", "bytes up", "bytes down", "time")
    display.OUT.print(display.table("One model for six hospitals, no image moved", head, rows))
    last = {m: d.rounds[-1] for m, d in details.items()}
    names = json.loads(details["fedmr"].manifest_json)["schema"]["classes"]
    by_class = [
        (name, *(display.percent(r.correct[c] / r.examples[c] if r.examples[c] else -1) for r in last.values()))
        for c, name in enumerate(names)
    ]
    display.OUT.print(display.table("Accuracy by class", ("class", *last), by_class))
    by_silo = [
        (s.name, f"silo://demo/{s.name}", s.fingerprint[:23],
         *(display.percent(-1 if scores[m][s.name] is None else float(scores[m][s.name] or 0)) for m in details))
        for s in silos
    ]  # fmt: skip
    columns = ("hospital", "certificate identity", "key fingerprint", *details)
    display.OUT.print(display.table("Accuracy by hospital, on its own test images", columns, by_silo))


def _picture(path: Path, series: Mapping[str, Sequence[float]]) -> None:
    """Draw accuracy by round."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (method, values), colour in zip(series.items(), ("#0b6e4f", "#8a8a8a"), strict=True):
        label = f"{method}, {100 * values[-1]:.1f} % at the end"
        axes.plot(range(len(values)), [100 * v for v in values], color=colour, linewidth=2, label=label)
    axes.set(xlabel="round", ylabel="global accuracy (%)", ylim=(0, 100), title="Six hospitals, class-disjoint digits")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
