"""Choose what a private release of analytic leaves to the program, on validation images alone.

    python -m benchmarks.frozen.private --out runs/private     computes what is missing there, and prints the choice
    python -m benchmarks.frozen.private                        the table of the stored runs

Training images of digits and of Fashion-MNIST (160 of each class); a fifth of them, by the hash of their bytes, is set
apart and measures. Test images are not read. The release is the method's own (`Analytic.local` and `merge`), with
Gaussian noise of the deviation that a run of six hospitals has. The search begins with `START`, goes once through
`GRID`, line by line, and takes of each line the value with the best mean over data sets, `CONDITIONS` and `SEEDS`; of
equal ones the first. Both heads are measured, and the better one counts; which one a run takes is chosen last, of
`THRESHOLDS` that are equal the middle one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks import run_store
from benchmarks.comparison import report
from benchmarks.paper import images
from benchmarks.run_store import Run
from fl_core import datasets, rng
from fl_core.methods import build_method
from fl_core.methods.disjoint import analytic
from fl_core.models import build_model
from fl_core.models.split_model import SplitModel, assemble
from fl_core.types.values import MomentSums, RoundContext, Tensors
from privacy.accounting.gaussian import mu_of
from privacy.accounting.shared_noise import SharedNoise
from privacy.mechanisms.record import moments

HOSPITALS, DELTA, CLASSES = 6, 1e-5, 10
CONDITIONS: Mapping[str, tuple[float, bool]] = {
    "shared, 8": (8.0, True),
    "shared, 1": (1.0, True),
    "shared, 0.5": (0.5, True),
    "local, 8": (8.0, False),
    "local, 1": (1.0, False),
}
"""Epsilon for each image, and whether the hospitals share the noise out."""
SEEDS = range(100, 103)
SETS = ("digits", "fmnist-160-val40")
START: Mapping[str, object] = {
    "body": "patches 1024",
    "RADIUS": 0.35,
    "OF_MEAN": 0.1,
    "NOISE": 0.5,
    "RIDGE_FEATURES": 256,
    "MIXED": 0.06,
}
"""The model's kind and width, and constants of `analytic`."""
GRID: Mapping[str, Sequence[object]] = {
    "body": ("patches 1024", "patches 288", "cosine 1024", "cosine 384"),
    "RADIUS": (0.25, 0.35, 0.5),
    "OF_MEAN": (0.05, 0.1, 0.2),
    "NOISE": (0.25, 0.5, 1.0),
    "RIDGE_FEATURES": (128, 256, 512),
    "MIXED": (0.03, 0.06, 0.12),
}
THRESHOLDS = (0.02, 0.03, 0.045, 0.06, 0.09, 0.13)
HEADS = ("ridge", "ncm")
FOLDER = Path(__file__).parent
STORE, TABLE = "private.jsonl", "private.md"


@dataclass(frozen=True)
class Images:
    """Features (n, d) float64 and classes (n,) of images that train and of those that measure."""

    z: Tensor
    y: Tensor
    measured: Tensor
    truth: Tensor


@lru_cache(maxsize=2)
def validation(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and classes that train, then those that measure; the digits' are the hospitals' of hospitals6."""
    if name == "digits":
        silos = [datasets.load(str(r)) for r in datasets.federation("digits", "hospitals6")]
        pooled = [silo.train.batch(torch.arange(len(silo.train))) for silo in silos]
        x, y = (torch.cat(parts) for parts in zip(*pooled, strict=True))
        apart = torch.tensor([images.is_validation((image * 16).byte().numpy()) for image in x])
        return x[~apart], y[~apart], x[apart], y[apart]
    root = images.root_of([f"images={name}"], None)
    data = datasets.load("fmnist/iid-1/0", data_root=root)
    both = (split.batch(torch.arange(len(split))) for split in (data.train, data.test))
    return tuple(t for pair in both for t in pair)  # type: ignore[return-value]


@lru_cache(maxsize=12)
def prepared(name: str, body: tuple[tuple[str, object], ...], seed: int) -> Images:
    x, y, measured, truth = validation(name)
    schema = datasets.schema_of(name.partition("-")[0])
    net = build_model("random_features", dict(body), schema, seed).eval()
    assert isinstance(net, SplitModel)
    with torch.no_grad():
        z, of_measured = (torch.cat([net.features(part) for part in torch.split(v, 512)]) for v in (x, measured))
    return Images(z.double(), y, of_measured.double(), truth)


class NoisySums:
    """The sums of all hospitals' records, with the noise of all of them: what a method's `local` reads."""

    def __init__(self, data: Images, noise: float, seed: int) -> None:
        self.data, self.noise = data, noise
        self.draw = rng.stream(seed, "private choice")

    def size(self) -> float:
        return float(len(self.data.y))

    def sum(self, query: MomentSums) -> Tensors:
        u = query.vectors(self.data.z, self.data.y)
        u = u / u.norm(dim=1, keepdim=True).clamp(min=1.0)
        y = torch.zeros_like(self.data.y) if query.joint else self.data.y
        std = self.noise * moments.sensitivity(query) / math.sqrt(query.share)
        a = torch.zeros(query.width, query.width, dtype=torch.float64)
        b = torch.zeros(query.n_classes, query.width, dtype=torch.float64).index_add_(0, y, u)
        if query.second:
            drawn = torch.randn(a.shape, generator=self.draw, dtype=torch.float64) * std
            a = u.T @ u + torch.tril(drawn, -1) / math.sqrt(2) + torch.tril(drawn, -1).T / math.sqrt(2)
            a += torch.diag(drawn.diagonal())
        rows = 1 if query.joint else query.n_classes
        b[:rows] += torch.randn(b[:rows].shape, generator=self.draw, dtype=torch.float64) * std
        return {"a": a, "b": b, "variance": torch.tensor(std**2, dtype=torch.float64)}


def noise_of(epsilon: float, *, shared: bool) -> float:
    """Return the noise multiplier of the sum over `HOSPITALS`, as `privacy.profiles.form_for_noise` does."""
    z = 1 / mu_of(epsilon, DELTA)
    return SharedNoise(HOSPITALS, HOSPITALS, 1).of_all(z) if shared else z * math.sqrt(HOSPITALS)


def accuracy(data: Images, options: Mapping[str, object], noise: float, seed: int) -> float:
    """Release once and return the share of right answers, in %."""
    method = build_method("analytic", {"release": "centred", **options})
    model = assemble(nn.Identity(), data.z.shape[1], (), CLASSES, head_bias=True)
    sums = NoisySums(data, noise, seed)
    server = method.init_server(model, RoundContext(1, CLASSES, method.exchanges))
    for t in range(method.exchanges):
        now = RoundContext(1, CLASSES, method.exchanges, t, 1)
        sent = method.local(model, method.broadcast(server), {}, sums, now.for_silo(0, 0))  # type: ignore[arg-type]
        server = method.merge(server, sent.bundle, now)
    head, measured = server["w"], data.measured.float()
    answers = (measured @ head["head.weight"].T + head["head.bias"]).argmax(1)
    return 100 * float((answers == data.truth).double().mean())


@dataclass(frozen=True)
class Setting:
    """One point of the search: both heads under all conditions."""

    values: Mapping[str, object]

    @property
    def key(self) -> str:
        about = [dict(self.values), list(SETS), dict(CONDITIONS), list(SEEDS)]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items())

    @property
    def constants(self) -> dict[str, object]:
        return {name: value for name, value in self.values.items() if name != "body"}


def measure(setting: Setting) -> Run:
    """Return the accuracies by data set, head and condition, means over `SEEDS`, and the noise that decides heads."""
    kind, width = str(setting.values["body"]).split()
    start, by, noise_by = time.process_time(), dict[str, dict[str, list[float]]](), dict[str, list[float]]()
    with patch.multiple(analytic, **setting.constants):
        for name in SETS:
            of_seeds = {s: prepared(name, (("kind", kind), ("width", int(width))), s) for s in SEEDS}
            records, d = len(of_seeds[SEEDS[0]].y), of_seeds[SEEDS[0]].z.shape[1]
            by[name] = {head: [] for head in HEADS}
            noise_by[name] = []
            for epsilon, shared in CONDITIONS.values():
                noise = noise_of(epsilon, shared=shared)
                for head in HEADS:
                    asked = build_method("analytic", {"release": "centred", "head": head})
                    options = asked.for_noise(d, float(records), noise)
                    right = [accuracy(of_seeds[s], options, noise, s) for s in SEEDS]
                    by[name][head].append(round(fmean(right), 2))
                features = min(analytic.ridge_features(records, noise), d)
                noise_by[name].append(float(f"{analytic.ridge_noise(features, records, noise):.4g}"))
    facts = {"device": run_store.kind_of_machine(), "cpu_seconds": round(time.process_time() - start, 1)}
    return {"key": setting.key, "values": dict(setting.values), "accuracy": by, "noise": noise_by, **facts}


def score(run: Run, threshold: float | None = None) -> float:
    """Return the mean of the better heads, or of those that a threshold takes."""
    right: list[float] = []
    for name, heads in run["accuracy"].items():  # type: ignore[attr-defined]
        for ridge, ncm, noise in zip(heads["ridge"], heads["ncm"], run["noise"][name], strict=True):  # type: ignore[index]
            chosen = max(ridge, ncm) if threshold is None else ridge if noise < threshold else ncm
            right.append(chosen)
    return fmean(right)


def search(complete: Callable[[Sequence[Setting]], Mapping[str, Run]]) -> tuple[dict[str, object], list[list[str]]]:
    """Return what is chosen, and the table's rows; raises KeyError where a stored run is missing."""
    chosen, rows = dict(START), list[list[str]]()
    for name, values in GRID.items():
        asked = [Setting({**chosen, name: value}) for value in values]
        found = complete(asked)
        scores = {value: score(found[s.key]) for value, s in zip(values, asked, strict=True)}
        chosen[name] = max(values, key=scores.__getitem__)
        for value, setting in zip(values, asked, strict=True):
            run = found[setting.key]
            cells = [
                f"{max(pair):.1f}"
                for of in SETS
                for pair in zip(*run["accuracy"][of].values(), strict=True)  # type: ignore[index]
            ]
            shown = f"**{value}**" if value == chosen[name] else str(value)
            rows.append([name, shown, *cells, f"{scores[value]:.2f}"])
    last = complete([Setting(chosen)])[Setting(chosen).key]
    by_threshold = {value: score(last, value) for value in THRESHOLDS}
    best = max(by_threshold.values())
    equal = [value for value, right in by_threshold.items() if right == best]
    chosen["RIDGE_BELOW"] = equal[len(equal) // 2]  # the middle of equal ones
    for value, right in by_threshold.items():
        shown = f"**{value}**" if value == chosen["RIDGE_BELOW"] else str(value)
        rows.append(["RIDGE_BELOW", shown, *[""] * (len(SETS) * len(CONDITIONS)), f"{right:.2f}"])
    return chosen, rows


def table(stored: Mapping[str, Run]) -> str:
    _, rows = search(lambda asked: {s.key: stored[s.key] for s in asked})
    columns = [f"{name.partition('-')[0]}, {condition}" for name in SETS for condition in CONDITIONS]
    head = ["choice", "value", *columns, "mean"]
    made = "[made by `python -m benchmarks.frozen.private`], accuracy on validation images in %, of the better head"
    return "\n".join(["# What a private release chooses", "", made, "", *report.table(head, rows), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frozen.private",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the store and the table")
    given = parser.parse_args()
    store = given.out / STORE
    if given.out != FOLDER:
        torch.set_num_threads(1)
        print(search(lambda asked: run_store.complete(asked, store, measure, -1))[0])
    text = table(run_store.read(store))
    (given.out / TABLE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
