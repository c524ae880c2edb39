"""What training on pooled images reaches: heads on the same frozen features, and whole networks on the images.

    python -m benchmarks.frozen.limits --data-root ROOT --features LITE0.npz LITE2.npz --out runs/limits [ROW ...]
    python -m benchmarks.frozen.limits                                            the table of the stored runs

The linear head is a logistic regression, trained to its end; the other has 256 hidden units and is trained by Adam
until a tenth of its images gets no better. Features are standardised by the training images, and classes weighted
alike. A whole network trains for 40 epochs in batches of 32 by SGD with momentum 0.9, a weight decay of 5e-4 and a rate
that falls to 0 like a cosine, without augmentation. The weight decay of a head and the rate of a network are chosen for
each row on a fifth of the training images of two other seeds (of ISIC: of their lesions), by balanced accuracy; the
table's seeds then train on all. The closed form of pooled images is that of divided ones, to the bit, and is read from
the stores of the federated runs. Runs are kept in limits.jsonl and go on where they stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.neural_network import MLPClassifier
from sklearn.utils.class_weight import compute_sample_weight
from torch import Tensor
from torch.nn import functional

from benchmarks import run_store
from benchmarks.comparison import report, study
from benchmarks.frozen import isic, patches
from benchmarks.paper import images
from benchmarks.run_store import Run
from consilium.research.simulate import runner
from coordinator.config.run_spec import RunSpec
from fl_core import datasets, rng
from fl_core.datasets.examples import SiloDataset
from fl_core.models import build_model
from fl_core.models.split_model import SplitModel
from fl_core.types.records import Schema
from fl_core.types.values import Examples

FOLDER = Path(__file__).parent
STORE, TABLE = "limits.jsonl", "limits.md"
TUNING, SEEDS = (100, 101), range(10)
LINEAR, HIDDEN = "linear", "256 hidden units"
NETWORKS: Mapping[str, tuple[str, dict[str, object]]] = {
    "digits_cnn": ("digits_cnn", {}),
    "LeNet": ("lenet", {}),
    "LeNet, batch norm": ("lenet", {"norm": "batch"}),
}
GRIDS: Mapping[str, tuple[float, ...]] = {
    LINEAR: tuple(10.0**k for k in range(-1, 6)),
    HIDDEN: (0.1, 1.0, 10.0, 100.0),
    **dict.fromkeys(NETWORKS, (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)),
}
"""Weight decays, of the sum over images of their losses, halved: 1 / C of scikit-learn. With hidden units, over the 200
of a batch. Of whole networks: learning rates."""
EPOCHS, BATCH, MOMENTUM, DECAY = 40, 32, 0.9, 5e-4
Pool = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.str_]]
"""Features (n, d), classes (n,), and what may not be divided (n,)."""
Load = Callable[[int, Path | None], tuple[Pool, Pool]]
"""Seed and data root -> images that train and images that test."""


def of_isic(bodies: int, seed: int, root: Path | None) -> tuple[Pool, Pool]:  # noqa: ARG001
    found = isic.read()
    z, held_out = found["z"][:, : bodies * isic.WIDTH], isic.validation(found["lesion"], seed)
    train, test = ((z[at], found["y"][at], found["lesion"][at]) for at in (~held_out, held_out))
    return train, test


def of_patches(words: Sequence[str], seed: int, root: Path | None) -> tuple[Pool, Pool]:
    """Make the features of a run, by the filters of a seed, of all silos' images."""
    spec, silos = _silos(words, seed, root)
    options = {name: value for name, value in spec.model.items() if name != "name"}
    net = build_model("random_features", options, silos[0].schema, seed).eval()
    assert isinstance(net, SplitModel)
    with torch.no_grad():
        return _pooled(silos, net.features)


def of_pixels(words: Sequence[str], seed: int, root: Path | None) -> tuple[Pool, Pool]:
    """Return the images themselves, of all silos, as they enter a network."""
    return _pooled(_silos(words, seed, root)[1], lambda x: x)


def _silos(words: Sequence[str], seed: int, root: Path | None) -> tuple[RunSpec, Sequence[SiloDataset]]:
    (trial,) = study.trials("analytic", words, [0.1], [seed], root)
    spec = study.spec_of(trial)
    return spec, runner.read_silos(spec, images.root_of(trial.words, root), datasets.load_all)


def _pooled(silos: Sequence[SiloDataset], shown: Callable[[Tensor], Tensor]) -> tuple[Pool, Pool]:
    def pool(splits: Sequence[Examples]) -> Pool:
        batches = [split.batch(at)[0] for split in splits for at in torch.split(torch.arange(len(split)), 256)]
        z = torch.cat([shown(x) for x in batches]).numpy()
        return z, torch.cat([split.labels for split in splits]).numpy(), np.arange(len(z)).astype(np.str_)

    return pool([silo.train for silo in silos]), pool([silo.test for silo in silos])


@dataclass(frozen=True, slots=True)
class Row:
    """Images, what is shown of them (features, or pixels), how many numbers that is, and what trains on it."""

    name: str
    load: Load
    width: int
    heads: tuple[str, ...] = (LINEAR, HIDDEN)


DIGITS = ("method=analytic", "model=random_features", "federation=hospitals6", "data=digits")
_FMNIST, _CIFAR10 = "Fashion-MNIST, 64 images a class", "CIFAR-10, 500 images a class"
_LENETS = ("LeNet", "LeNet, batch norm")
ROWS = (
    Row("digits", partial(of_patches, DIGITS), 1008),
    Row(_FMNIST, partial(of_patches, (*patches.WORDS, *patches.ROWS[_FMNIST])), 1152),
    Row(_CIFAR10, partial(of_patches, (*patches.WORDS, *patches.ROWS[_CIFAR10])), 2304),
    Row("ISIC 2019, Lite0", partial(of_isic, 1), isic.WIDTH),
    Row("ISIC 2019, Lite0 + Lite2", partial(of_isic, 2), 2 * isic.WIDTH),
    Row("digits, pixels", partial(of_pixels, DIGITS), 64, ("digits_cnn",)),
    Row(f"{_FMNIST}, pixels", partial(of_pixels, (*patches.WORDS, *patches.ROWS[_FMNIST])), 784, _LENETS),
    Row(f"{_CIFAR10}, pixels", partial(of_pixels, (*patches.WORDS, *patches.ROWS[_CIFAR10])), 3072, _LENETS),
)


class Network:
    """A whole network of NETWORKS with scikit-learn's three names, and a training loop of its own."""

    def __init__(self, name: str, rate: float, seed: int) -> None:
        self.name, self.rate, self.seed = name, rate, seed
        self.n_iter_ = 0

    def fit(self, x: NDArray[np.float32], y: NDArray[np.int64]) -> Network:
        model, options = NETWORKS[self.name]
        schema = Schema(x.shape[1:], tuple(str(label) for label in np.unique(y)))
        self.net = build_model(model, options, schema, self.seed).train()
        steps = EPOCHS * (len(x) // BATCH)
        optimizer = torch.optim.SGD(self.net.parameters(), self.rate, momentum=MOMENTUM, weight_decay=DECAY)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        drawn = rng.stream(self.seed, "limits", "batches")
        for _ in range(EPOCHS):
            # The last, incomplete batch is left out, since batch norm cannot use a single image.
            for at in torch.randperm(len(x), generator=drawn)[: len(x) // BATCH * BATCH].split(BATCH):
                optimizer.zero_grad()
                functional.cross_entropy(self.net(torch.from_numpy(x)[at]), torch.from_numpy(y)[at]).backward()
                optimizer.step()
                falling.step()
                self.n_iter_ += 1
        return self

    def predict(self, x: NDArray[np.float32]) -> NDArray[np.int64]:
        self.net.eval()
        with torch.no_grad():
            return torch.cat([self.net(part).argmax(1) for part in torch.from_numpy(x).split(256)]).numpy()


@dataclass(frozen=True, slots=True)
class Fit:
    """One trained head or network; inner: of a tuning seed, on a fifth of whose training images it is measured.

    value: the weight decay, of a network the learning rate.
    """

    row: Row
    head: str
    value: float
    seed: int
    root: Path | None
    inner: bool

    @property
    def key(self) -> str:
        about = [self.row.name, self.row.width, self.value, self.seed, self.inner]
        about += [] if self.head == LINEAR else [self.head]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:20]

    def __str__(self) -> str:
        return f"{self.row.name}, {self.head}, {self.value:g}, seed {self.seed}"

    def fitted(self, z: NDArray[np.float32], y: NDArray[np.int64]) -> LogisticRegression | MLPClassifier | Network:
        if self.head in NETWORKS:
            return Network(self.head, self.value, self.seed).fit(z, y)
        if self.head == LINEAR:
            return LogisticRegression(C=1 / self.value, class_weight="balanced", max_iter=3000).fit(z, y)
        layer = MLPClassifier((256,), alpha=self.value, early_stopping=True, random_state=self.seed)
        return layer.fit(z, y, sample_weight=compute_sample_weight("balanced", y).astype(z.dtype))


@lru_cache(maxsize=1)
def _loaded(row: Row, seed: int, root: Path | None) -> tuple[Pool, Pool]:
    return row.load(seed, root)


def measure(fit: Fit) -> Run:
    (z, y, groups), (of_test, truth, _) = _loaded(fit.row, fit.seed, fit.root)
    start = time.process_time()
    if fit.inner:
        names = np.unique(groups)
        order = torch.randperm(len(names), generator=rng.stream(fit.seed, "limits", "validation")).numpy()
        apart = np.isin(groups, names[order[: len(names) // 5]])
        z, y, of_test, truth = z[~apart], y[~apart], z[apart], y[apart]
    # All pixels by one mean and spread, features each by its own.
    mean, spread = (z.mean(), z.std()) if fit.head in NETWORKS else (z.mean(0), z.std(0))
    spread = np.where(spread == 0, np.float32(1), spread)
    model = fit.fitted((z - mean) / spread, y)
    answers = model.predict((of_test - mean) / spread)
    return {
        "key": fit.key,
        "row": fit.row.name,
        "head": fit.head,
        "decay": fit.value,
        "seed": fit.seed,
        "inner": fit.inner,
        "balanced": round(float(balanced_accuracy_score(truth, answers)), 5),
        "ga": round(float((answers == truth).mean()), 5),
        "steps": int(np.max(model.n_iter_)),
        "device": run_store.kind_of_machine(),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def tuning(row: Row, head: str, root: Path | None) -> list[Fit]:
    return [Fit(row, head, value, seed, root, True) for seed in TUNING for value in GRIDS[head]]


def fits(row: Row, head: str, tuned: Mapping[str, Run], root: Path | None) -> list[Fit]:
    """Return the table's fits, at the value that is best on the tuning seeds; of equal ones the largest."""
    asked, grid = tuning(row, head, root), GRIDS[head]
    scores = {v: fmean(float(str(tuned[f.key]["balanced"])) for f in asked if f.value == v) for v in grid}
    best = max(reversed(grid), key=scores.__getitem__)
    return [Fit(row, head, best, seed, root, False) for seed in SEEDS]


def table(stored: Mapping[str, Run]) -> str:
    lines = []
    for row, head in ((r, h) for r in ROWS for h in r.heads):
        if any(fit.key not in stored for fit in tuning(row, head, None)):
            continue
        wanted = fits(row, head, stored, None)
        runs = [stored[fit.key] for fit in wanted if fit.key in stored]
        if len(runs) > 1:
            values = ([100 * float(str(run[name])) for run in runs] for name in ("balanced", "ga"))
            shown = [f"{fmean(v):.1f} ± {stdev(v):.1f}" for v in values]
            edge = "*" if wanted[0].value in (GRIDS[head][0], GRIDS[head][-1]) else ""
            lines.append([row.name, str(row.width), head, *shown, f"{wanted[0].value:g}{edge}", str(len(runs))])
    titles = ["images", "numbers", "trained", "balanced accuracy, %", "accuracy, %", "weight decay, or rate", "seeds"]
    made = "[made by `python -m benchmarks.frozen.limits`] *: an end of the grid"
    return "\n".join(
        ["# Training on pooled images: heads and whole networks", "", made, "", *report.table(titles, lines), ""]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frozen.limits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="begin with these words; all rows without any")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--features", type=Path, nargs="+", help="what benchmarks.frozen.extract wrote, for ISIC")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the store and the table")
    given = parser.parse_args()
    if given.features:
        isic.use(given.features)
    store = given.out / STORE
    if given.out != FOLDER:
        for row in ROWS:
            if not given.rows or any(row.name.startswith(begin) for begin in given.rows):
                for head in row.heads:
                    found = run_store.complete(tuning(row, head, given.data_root), store, measure, -1)
                    run_store.complete(fits(row, head, found, given.data_root), store, measure, -1)
    text = table(run_store.read(store))
    (given.out / TABLE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
