"""The results of the demo: tables, `summary.json`, a picture and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from coordinator.demo import tables
from coordinator.demo.budgets import Spending
from coordinator.demo.tables import LABELS, MILESTONE, PLAIN, PRIVATE, REPAIRED, SHORT, ResultTable
from coordinator.lead import accuracy, console
from fl_core.errors.extras import require
from fl_core.types.records import judgements
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import make_table, open_file, print_json
from service_core.web.chart import Chart, Series
from service_core.web.rendering import make_environment

COLOURS = {PLAIN: "#8a8a8a", REPAIRED: "#0b6e4f", PRIVATE: "#b5562b"}


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
        "rounds_to_milestone": {name: tables.first_round(d) for name, d in details.items()},
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
        "updates": {m: {"aggregator": d.aggregator, **judgements(d.rounds)} for m, d in details.items()},
        "mtls": True,
        "bytes_up": ours.info.bytes_up,
        "bytes_down": ours.info.bytes_down,
        "seconds": round(seconds, 1),
        "model": {method: tables.model_name(d) for method, d in details.items()},
        "model_digest": {method: d.info.model_digest for method, d in details.items()},
        "accuracy_by_round": {method: [e.point for e in tables.series(d)] for method, d in details.items()},
        "hospital_accuracy": {method: dict(s) for method, s in scores.items()},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _picture(out / "accuracy.png", details)
    found = [
        tables.by_run(details),
        tables.by_class(details),
        tables.by_hospital(details, scores, silos),
        tables.spending(spent),
    ]
    page = out / "index.html"
    curves = {SHORT[m]: [e.point for e in tables.series(d)] for m, d in details.items()}
    write_page(page, *_headline(ours, plain), curves, found)
    if quiet:
        print_json(summary)
        return
    for table in found:
        console.OUT.print(make_table(*table))
    written = ", ".join(str(out / name) for name in ("summary.json", "accuracy.png", "index.html"))
    console.OUT.print(f"{seconds:.0f} s; wrote {written}", soft_wrap=True)
    open_file(page)


def _headline(ours: pb.RunDetail, plain: pb.RunDetail) -> tuple[str, str]:
    """Say what this run of the demo showed, whichever way it went."""
    best, other = accuracy.newest(ours.info), accuracy.newest(plain.info)
    return (
        "Six hospitals trained one model, and no image left any of them",
        "None of them has seen more than two of the ten digits. After "
        f"{ours.info.rounds} rounds the model classifies {best.text()} of all their test images correctly with "
        f"FedGELA, {other.text()} with FedAvg.",
    )


def _picture(path: Path, details: Mapping[str, pb.RunDetail]) -> None:
    mpl = require("matplotlib", "plots", "the picture of the demo")
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for method, detail in details.items():
        series = tables.series(detail)
        low, middle, high = (
            [math.nan if (v := getattr(e, end)) is None else 100 * v for e in series]
            for end in ("low", "point", "high")
        )
        label = f"{LABELS[method]}: {series[-1].text()} at the end"
        axes.plot(range(len(series)), middle, color=COLOURS[method], linewidth=2, label=label)
        if any(not e.exact for e in series):  # what is withheld is a gap
            axes.fill_between(range(len(series)), low, high, color=COLOURS[method], alpha=0.15, linewidth=0)
    axes.set(xlabel="rounds of training", ylabel="test images classified correctly (%)", ylim=(0, 100))
    axes.set_title("Six hospitals train one model; none has seen more than two of the ten digits")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ---- the page --------------------------------------------------------------------------------------------------------

_FOLDER = Path(__file__).parent / "templates"
_STYLE = Path(__file__).parents[2] / "service_core/web/static/page.css"


def write_page(
    file: Path, headline: str, below: str, curves: Mapping[str, Sequence[float | None]], tables: Sequence[ResultTable]
) -> None:
    """Write the page. curves: a model's name -> its accuracy (0 to 1, None: withheld) before round 1 and after each."""
    rounds = max(map(len, curves.values()))
    drawn = Chart(
        "Test images classified correctly (%)",
        "rounds of training",
        range(rounds),
        [Series(name, [None if v is None else 100 * v for v in values]) for name, values in curves.items()],
        (0.0, 100.0),
    )
    template = make_environment([_FOLDER]).get_template("demo.html")
    style = Markup(_STYLE.read_text(encoding="utf-8"))  # noqa: S704 - our own file, in a style element
    file.write_text(
        template.render(headline=headline, below=below, curves=drawn, tables=tables, style=style), encoding="utf-8"
    )
