"""Analytic on Fed-ISIC2019's images seen by two frozen networks, each alone and side by side.

    python -m benchmarks.frozen.bodies --features LITE0-160.npz LITE2-224.npz --out runs/bodies
    python -m benchmarks.frozen.bodies                                          the table of the stored runs

Four centres, the split by lesion of each seed, the same share for each diagnosis. Lambda follows from the sums (GCV),
or is chosen on validation images, for each seed alone: a fifth of the lesions that train are set apart, the head is
solved from the others, and the lambda of `GRID` with the best balanced accuracy on that fifth is taken, of equal ones
the largest. The head is then solved from all images that train. Test images choose nothing. Runs are kept in
bodies.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from sklearn.metrics import balanced_accuracy_score

from benchmarks import run_store
from benchmarks.comparison import report, study
from benchmarks.comparison.study import Trial
from benchmarks.frozen import isic
from benchmarks.run_store import Run
from fl_core.methods.disjoint.analytic import entries
from fl_core.methods.shared import closed_forms

FOLDER = Path(__file__).parent
STORE, TABLE = "bodies.jsonl", "bodies.md"
SEEDS = range(10)
GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Lambda, in units of the features' mean square."""
BODIES: Mapping[str, type[isic.Features]] = {
    "Lite0, 160 pixels": isic.Features,
    "Lite2, 224 pixels": isic.Second,
    "both": isic.Both,
}
HEADS = ("ridge", "lda")
WORDS = (
    "federation=benchmarks.frozen.isic:Centers model=benchmarks.frozen.isic:Head method=analytic "
    "method.class_weights=balanced rounds=2 metrics=clinical threads=1"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What every lambda of the grid reaches on a seed's validation images."""

    body: str
    seed: int

    @property
    def key(self) -> str:
        about = ["lambda", self.body, self.seed, GRID]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:20]

    def __str__(self) -> str:
        return f"{self.body}, lambda of seed {self.seed}"


def scored(choice: Choice) -> Run:
    start, found = time.process_time(), isic.read()
    held_out = isic.validation(found["lesion"], choice.seed)
    z, y, lesion = (found[name][~held_out] for name in ("z", "y", "lesion"))
    z, apart = torch.from_numpy(z[:, BODIES[choice.body].columns]), isic.validation(lesion, choice.seed)
    fits, classes = torch.from_numpy(~apart), torch.from_numpy(y)
    one_hot = torch.nn.functional.one_hot(classes[fits], len(isic.CLASSES)).double()
    root = closed_forms.balanced(one_hot.sum(0))
    weighed = entries(z[fits], root[classes[fits]])
    A, B, weights = weighed.T @ weighed, (one_hot * root).T @ weighed, root.square() * one_hot.sum(0)
    scores = {}
    for head in HEADS:
        for ridge in GRID:
            W = (
                closed_forms.solve_ridge(A, B, ridge)
                if head == "ridge"
                else closed_forms.solve_lda(A, B, weights, ridge)
            )
            answers = (z[~fits].double() @ W[:, :-1].T + W[:, -1]).argmax(1).numpy()
            scores[f"{head} {ridge:g}"] = round(float(balanced_accuracy_score(y[apart], answers)), 5)
    return {
        "key": choice.key,
        "body": choice.body,
        "seed": choice.seed,
        "scores": scores,
        "device": run_store.kind_of_machine(),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def chosen(run: Run, head: str) -> float:
    scores = run["scores"]
    assert isinstance(scores, Mapping)
    return max(reversed(GRID), key=lambda ridge: scores[f"{head} {ridge:g}"])


def trial(body: str, head: str, seed: int, ridge: float) -> Trial:
    """Compose a run; ridge: lambda, 0 for the one that follows from the sums."""
    data = f"data=benchmarks.frozen.isic:{BODIES[body].__name__}"
    words = (data, *WORDS.split(), f"method.head={head}", *([f"method.ridge={ridge:g}"] if ridge else []))
    (made,) = study.trials(f"{body}, {head}, lambda {ridge:g}", words, [0.1], [seed], None)
    return made


def table(stored: Mapping[str, Run]) -> str:
    rows = []
    for body in BODIES:
        for head in HEADS:
            of_grid = {s: chosen(stored[c.key], head) for s in SEEDS if (c := Choice(body, s)).key in stored}
            for rule, ridges in (("GCV", dict.fromkeys(SEEDS, 0.0)), ("validation", of_grid)):
                runs = [stored[t.key] for s, r in ridges.items() if (t := trial(body, head, s, r)).key in stored]
                if len(runs) < 2:
                    continue
                shown = [report.spread([100 * study.curve(run, name)[-1] for run in runs]) for name in _MEASURES]
                often = (
                    ""
                    if rule == "GCV"
                    else ", ".join(f"{r:g} ({n})" for r, n in sorted(Counter(ridges.values()).items()))
                )
                cpu = f"{fmean(float(str(run['cpu_seconds'])) for run in runs):.0f}"
                rows.append([body, head, rule, *shown, often, str(len(runs)), cpu])
    head_row = ["features", "head", "lambda by", *_MEASURES.values(), "lambda (seeds)", "seeds", "CPU seconds"]
    made = f"`{WORDS}` [made by `python -m benchmarks.frozen.bodies`]"
    return "\n".join(["# Fed-ISIC2019 in closed form: two bodies", "", made, "", *report.table(head_row, rows), ""])


_MEASURES = {"balanced": "balanced accuracy, %", "ga": "accuracy, %", "auc": "AUC, %"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frozen.bodies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--features", type=Path, nargs=2, help="what benchmarks.frozen.extract wrote, of both bodies")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the store and the table")
    given = parser.parse_args()
    store = given.out / STORE
    if given.features:
        isic.use(given.features)
        for body in BODIES:
            choices = [Choice(body, seed) for seed in SEEDS]
            scores = run_store.complete(choices, store, scored, -1)
            wanted = [
                trial(body, head, c.seed, ridge)
                for head in HEADS
                for c in choices
                for ridge in (0.0, chosen(scores[c.key], head))
            ]
            run_store.complete(wanted, store, study.measure, -1)
    text = table(run_store.read(store))
    (given.out / TABLE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
