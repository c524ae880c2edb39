"""FedMR and FedAvg on p5c2 digits: five silos, two classes each, no class in two of them; 20 rounds.

    python -m benchmarks.fedmr_digits                     everything that results.json lacks, then the tables
    python -m benchmarks.fedmr_digits --setting "group norm"
    python -m benchmarks.fedmr_digits --seeds 0 1 --lrs 0.2 --arms fedavg fedmr --out quick.json

Every run is what `coordinator simulate method=... data=digits federation=p5c2 seed=...` computes. Results are kept
run by run under the digest of the run's manifest, so an interrupted study goes on where it stopped, and a changed
setting is run anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import torch

from coordinator.config import compose_spec
from coordinator.plan import manifest_from
from coordinator.simulation import run as simulate
from coordinator.spec import RunSpec

HERE = Path(__file__).parent
SEEDS = (0, 1, 2, 3, 4)
SILOS = [f"hospital{k}" for k in range(5)]

SHARED = ("data=digits", "federation=p5c2", "model=digits_cnn", "rounds=20", "threads=1",
          "train.batch_size=32", "train.epochs=1", "train.weight_decay=1e-5")  # fmt: skip
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "plain": (*SHARED, "model.norm=none", "train.momentum=0"),
    "group norm": (*SHARED, "model.norm=group", "train.momentum=0.9"),
}
"""What the runs of a table share, written out so that a changed default cannot change the study unseen."""
LRS: Mapping[str, tuple[float, ...]] = {"plain": (0.05, 0.1, 0.2, 0.3), "group norm": (0.003, 0.01, 0.03, 0.1)}

PLAIN = ("method=fedmr", "method.mu1=0.03", "method.mu2=0.1", "method.eps=0.1")
GROUP = ("method=fedmr", "method.mu1=1e-4", "method.mu2=0.01", "method.eps=1e-8")
ARMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plain": {
        "fedavg": ("method=fedavg",),
        "fedmr": PLAIN,
        "intra alone": (*PLAIN, "method.mu2=0"),
        "inter alone": (*PLAIN, "method.mu1=0"),
    },
    "group norm": {
        "fedavg": ("method=fedavg",),
        "fedmr": GROUP,
        "intra alone": (*GROUP, "method.mu2=0"),
        "inter alone": (*GROUP, "method.mu1=0"),
        "fedmr 1e-5 0.1": (*GROUP, "method.mu1=1e-5", "method.mu2=0.1"),
    },
}
"""The methods compared in each setting. The README says how their weights were chosen."""

Point = tuple[str, str, float, int]
"""Setting, arm, learning rate, seed."""


def spec_of(setting: str, arm: str, lr: float, seed: int) -> RunSpec:
    """Compose one run of the study."""
    words = [*SETTINGS[setting], *ARMS[setting][arm], f"seed={seed}", f"train.lr={lr}"]
    return replace(compose_spec(words), name="fedmr_digits")


def measure(setting: str, arm: str, lr: float, seed: int) -> dict[str, object]:
    """Simulate one run and keep what the tables need."""
    start = time.process_time()
    result = simulate(spec_of(setting, arm, lr, seed))
    found = result.summary()
    return {
        "setting": setting,
        "arm": arm,
        "lr": lr,
        "seed": seed,
        "best": found["best_global_accuracy"],
        "last": found["global_accuracy"],
        "by_round": found["accuracy_by_round"],
        "cpu_seconds": round(time.process_time() - start, 2),
        "model": found["model_digest"],
    }


def study(out: Path, points: Sequence[Point], jobs: int) -> list[dict[str, object]]:
    """Run what `out` lacks, saving after every run, and return the runs asked for."""
    kept: dict[str, dict[str, object]] = json.loads(out.read_text())["runs"] if out.exists() else {}
    asked = {manifest_from(spec_of(*point), SILOS).digest(): point for point in points}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(measure, *point): key for key, point in asked.items() if key not in kept}
        for done in as_completed(running):
            found = kept[running[done]] = done.result()
            print(f"{found['arm']:14} lr {found['lr']} seed {found['seed']}: best {found['best']:.3f}", flush=True)
            out.write_text(json.dumps({"machine": machine(), "runs": kept}, indent=1, sort_keys=True) + "\n")
    return [kept[key] for key in asked]


def machine() -> dict[str, str]:
    """Describe what the numbers were computed on."""
    return {"processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}


def spread(values: Sequence[float]) -> str:
    """Write mean and standard deviation over seeds, in percent."""
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f}" if len(values) > 1 else f"{100 * values[0]:.1f}"


def table(runs: Sequence[Mapping[str, object]], arms: Sequence[str], lrs: Sequence[float], field: str) -> str:
    """Write one Markdown table: arms by learning rates."""
    rows = [f"| {field} accuracy, % | " + " | ".join(f"lr {lr}" for lr in lrs) + " |", "|---" * (len(lrs) + 1) + "|"]
    for arm in arms:
        cells = []
        for lr in lrs:
            values = [float(str(r[field])) for r in runs if r["arm"] == arm and r["lr"] == lr]
            cells.append(spread(values) if values else "")
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--setting", choices=list(SETTINGS), default="plain")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--lrs", type=float, nargs="+", help="by default those of the setting's table")
    parser.add_argument("--arms", nargs="+", help="by default those of the setting's table")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    given = parser.parse_args()
    setting, lrs, arms = given.setting, given.lrs or LRS[given.setting], given.arms or list(ARMS[given.setting])
    if unknown := set(arms) - set(ARMS[setting]):
        parser.error(f"--arms: expected some of {list(ARMS[setting])}, found {sorted(unknown)}")
    runs = study(given.out, [(setting, a, lr, s) for s in given.seeds for a in arms for lr in lrs], given.jobs)
    for field in ("best", "last"):
        print("\n" + table(runs, arms, lrs, field))
