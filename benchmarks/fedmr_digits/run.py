"""FedMR and FedAvg on p5c2 digits: five silos, two classes each, no class in two of them; 20 rounds.

    python -m benchmarks.fedmr_digits                     everything that results.json lacks, then the tables
    python -m benchmarks.fedmr_digits --seeds 0 1 --lrs 0.03 --arms fedavg fedmr --out quick.json

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
LRS = (0.003, 0.01, 0.03, 0.1)
SILOS = [f"hospital{k}" for k in range(5)]

SETTING = ("data=digits", "federation=p5c2", "model=digits_cnn", "rounds=20", "threads=1",
           "train.batch_size=32", "train.epochs=1", "train.momentum=0.9", "train.weight_decay=1e-5")  # fmt: skip
"""What all runs share, written out so that a changed default cannot change the study unseen."""

TUNED = ("method=fedmr", "method.mu1=1e-4", "method.mu2=0.01")
ARMS: Mapping[str, tuple[str, ...]] = {
    "fedavg": ("method=fedavg",),
    "fedmr": TUNED,
    "intra alone": (*TUNED, "method.mu2=0"),
    "inter alone": (*TUNED, "method.mu1=0"),
    "fedmr 1e-5 0.1": ("method=fedmr", "method.mu1=1e-5", "method.mu2=0.1"),
}
"""The methods compared; the last one has the method's defaults. The README says how TUNED was chosen."""


def spec_of(arm: str, lr: float, seed: int) -> RunSpec:
    """Compose one run of the study."""
    words = [*SETTING, *ARMS[arm], f"seed={seed}", f"train.lr={lr}"]
    return replace(compose_spec(words), name="fedmr_digits")


def measure(arm: str, lr: float, seed: int) -> dict[str, object]:
    """Simulate one run and keep what the tables need."""
    start = time.process_time()
    result = simulate(spec_of(arm, lr, seed))
    found = result.summary()
    return {
        "arm": arm,
        "lr": lr,
        "seed": seed,
        "best": found["best_global_accuracy"],
        "last": found["global_accuracy"],
        "by_round": found["accuracy_by_round"],
        "cpu_seconds": round(time.process_time() - start, 2),
        "model": found["model_digest"],
    }


def study(
    out: Path, arms: Sequence[str], lrs: Sequence[float], seeds: Sequence[int], jobs: int
) -> list[dict[str, object]]:
    """Run what `out` lacks, saving after every run, and return the runs asked for."""
    kept: dict[str, dict[str, object]] = json.loads(out.read_text())["runs"] if out.exists() else {}
    asked = {
        manifest_from(spec_of(*p), SILOS).digest(): p for p in ((a, lr, s) for s in seeds for a in arms for lr in lrs)
    }
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
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--lrs", type=float, nargs="+", default=LRS)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    given = parser.parse_args()
    runs = study(given.out, given.arms, given.lrs, given.seeds, given.jobs)
    for field in ("best", "last"):
        print("\n" + table(runs, given.arms, given.lrs, field))
