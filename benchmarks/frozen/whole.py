"""Train all of EfficientNet-Lite0 on Fed-ISIC2019's centres, from the weights that make the frozen features.

    python -m benchmarks.frozen.whole --data-root ROOT --weights efficientnet-lite0-57934424.pth --out runs/whole

FedAvg, one local epoch in each round, and `analytic` on the frozen network, on one seed's split by lesion: the one that
the frozen features' tables have. A round takes some seven CPU minutes, so this is one seed of one rate, without a
table. Runs are kept in OUT/whole.jsonl and go on where they stopped.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import run_store
from benchmarks.comparison import study
from benchmarks.frozen import isic
from benchmarks.frozen.extract import MODEL
from benchmarks.run_store import Run
from consilium.research.simulate import runner
from consilium.research.simulate.checkpoints import Checkpoints
from consilium.research.simulate.engine import SimulationEngine
from coordinator.config.hydra_config import compose_simulation
from fl_core import datasets
from fl_core.datasets.image_files import ImageExamples
from fl_core.datasets.sources import isic2019
from fl_core.errors import DataError

SEED = 0
STORE = "whole.jsonl"
WORDS = ("data=isic2019", "data.image_size=160", f"model={MODEL}", "metrics=clinical", "threads=1", f"seed={SEED}")
WAYS = {
    "analytic, frozen": ("method=analytic", "method.ridge=0.01", "rounds=2"),
    "FedAvg, whole network": (
        "method=fedavg",
        "rounds=8",
        "train.lr=0.01",
        "train.momentum=0.9",
        "train.weight_decay=1e-4",
        "train.batch_size=32",
        "train.epochs=1",
    ),
}


def split(root: Path, target: Path, seed: int) -> list[int]:
    """Write FLamby's layout with a seed's split by lesion in place of FLamby's own; return the centres that are there.

    The images stay where they are, behind a link.
    """
    names, lesions, centers = list[str](), list[str](), list[int]()
    for center in range(isic2019.CENTERS):
        try:
            data = datasets.load(f"isic2019/center{center}", data_root=root)
        except DataError as error:
            print(f"center {center}: left out, {error}")
            continue
        for examples in (data.train, data.test):
            assert isinstance(examples, ImageExamples)
            assert examples.groups is not None
            names += [path.stem for path in examples.paths]
            lesions += examples.groups
            images = examples.paths[0].parent
        centers.append(center)
    held_out = dict(zip(names, isic.validation(np.asarray(lesions, np.str_), seed).tolist(), strict=True))
    source, target = images.parent, target / "isic2019"
    target.mkdir(parents=True, exist_ok=True)
    for name, place in ((isic2019.IMAGES, images), (isic2019.GROUP_FILE, source / isic2019.GROUP_FILE)):
        (target / name).unlink(missing_ok=True)
        (target / name).symlink_to(place.absolute())
    with (source / isic2019.SPLIT_FILE).open(newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["image"] in held_out]
    with (target / isic2019.SPLIT_FILE).open("w", newline="") as out:
        lines = csv.DictWriter(out, ["image", "target", "center", "fold"], extrasaction="ignore", lineterminator="\n")
        lines.writeheader()
        lines.writerows({**row, "fold": "test" if held_out[row["image"]] else "train"} for row in rows)
    return centers


def measure(way: str, words: Sequence[str], weights: Path, root: Path, checkpoints: Path) -> Run:
    start, spec = time.process_time(), compose_simulation([*words, f"model.weights={weights}"])
    result = runner.run(spec, root, engine=SimulationEngine(workers=1, checkpoints=Checkpoints(checkpoints, every=1)))
    return {
        "key": way,
        "words": list(words),
        **study.measured(spec, result),
        "device": run_store.machine(),
        "cpu_seconds": round(time.process_time() - start, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frozen.whole",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    root = given.out / "data"
    present = ",".join(map(str, split(given.data_root, root, SEED)))
    for way, own in WAYS.items():
        if way not in run_store.read(given.out / STORE):
            words = (*WORDS, f"federation.centers=[{present}]", *own)
            run_store.append(given.out / STORE, measure(way, words, given.weights, root, given.out / way))
        print(run_store.read(given.out / STORE)[way], flush=True)


if __name__ == "__main__":
    main()
