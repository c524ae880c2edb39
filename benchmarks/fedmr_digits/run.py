"""FedMR and FedAvg on p5c2 digits: five silos, two classes each, no class in two of them; 20 rounds.

    python -m benchmarks.fedmr_digits                     everything that results.json lacks, then the tables
    python -m benchmarks.fedmr_digits --setting "fresh seeds"
    python -m benchmarks.fedmr_digits --seeds 0 1 --lrs 0.2 --arms fedavg fedmr --out quick.json

Every run is what `coordinator simulate method=... data=digits federation=p5c2 seed=...` computes. Results are kept
run by run under the partition and the SHA-256 of the run's manifest, so an interrupted study goes on where it stopped,
and a changed setting is run anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev

from benchmarks import timing
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from coordinator.config.run_spec import RunSpec
from coordinator.simulation.runner import run as simulate
from coordinator.simulation.sweep import in_processes

HERE = Path(__file__).parent
SEEDS = (0, 1, 2, 3, 4)
FRESH = tuple(range(200, 212))
"""Seeds that nothing had seen when the setting was fixed."""
SILOS: Mapping[str, int] = {"p5c2": 5, "p10c2": 10, "p10c3": 10, "hospitals6": 6}

SHARED = ("data=digits", "model=digits_cnn", "rounds=20", "threads=1", "train.weight_decay=1e-5")
DIGITS = (*SHARED, "train.batch_size=32", "train.epochs=1")
PLAIN = ("model.norm=none", "train.momentum=0")
FEDMR = ("method=fedmr", "method.mu1=0.03", "method.mu2=0.1", "method.eps=0.1")
GROUP = ("method=fedmr", "method.mu1=1e-4", "method.mu2=0.01", "method.eps=1e-8")
FEDAVG: Mapping[str, tuple[str, ...]] = {"fedavg": ("method=fedavg",)}
BOTH: Mapping[str, tuple[str, ...]] = {**FEDAVG, "fedmr": FEDMR}


@dataclass(frozen=True)
class Setting:
    """One table: what its runs share, written out so that a changed default cannot change the study unseen."""

    words: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...] = SEEDS
    federation: str = "p5c2"


def _eps(eps: str, *weights: str) -> dict[str, tuple[str, ...]]:
    """Make FedMR's first loss alone with another eps, at several weights."""
    shared = ("method=fedmr", "method.mu2=0", f"method.eps={eps}")
    return {f"intra alone, eps {eps}, mu1 {w}": (*shared, f"method.mu1={w}") for w in weights}


def _weights() -> dict[str, tuple[str, ...]]:
    grid = [(mu1, mu2, eps) for mu1 in ("0.03", "0.1") for mu2 in ("0", "0.3") for eps in ("0.1", "0.3")]
    return {
        f"mu1 {a}, mu2 {b}, eps {c}": ("method=fedmr", f"method.mu1={a}", f"method.mu2={b}", f"method.eps={c}")
        for a, b, c in grid
    }


INTRA, INTER = (*FEDMR, "method.mu2=0"), (*FEDMR, "method.mu1=0")
SETTINGS: Mapping[str, Setting] = {
    "plain": Setting((*DIGITS, *PLAIN), {**BOTH, "intra alone": INTRA, "inter alone": INTER}, (0.05, 0.1, 0.2, 0.3)),
    "fresh seeds": Setting((*DIGITS, *PLAIN), {**BOTH, "intra alone": INTRA}, (0.1, 0.15, 0.2, 0.3), FRESH),
    "eps": Setting(
        (*DIGITS, *PLAIN),
        {**FEDAVG, **_eps("0.01", "3e-4", "1e-3", "3e-3"), **_eps("1e-8", "7e-6", "4e-5", "2.4e-4")},
        (0.2,),
    ),
    "weights": Setting((*DIGITS, *PLAIN), {**FEDAVG, **_weights()}, (0.2,)),
    "batches of 16": Setting((*SHARED, *PLAIN, "train.batch_size=16", "train.epochs=1"), BOTH, (0.1, 0.2)),
    "two epochs": Setting((*SHARED, *PLAIN, "train.batch_size=32", "train.epochs=2"), BOTH, (0.1, 0.2)),
    **{f: Setting((*DIGITS, *PLAIN), BOTH, (0.1, 0.2, 0.3), federation=f) for f in ("p10c2", "p10c3", "hospitals6")},
    "group norm": Setting(
        (*DIGITS, "model.norm=group", "train.momentum=0.9"),
        {
            **FEDAVG,
            "fedmr": GROUP,
            "intra alone": (*GROUP, "method.mu2=0"),
            "inter alone": (*GROUP, "method.mu1=0"),
            "fedmr 1e-5 0.1": (*GROUP, "method.mu1=1e-5", "method.mu2=0.1"),
        },
        (0.003, 0.01, 0.03, 0.1),
    ),
}
"""The tables of the README, which says how the weights were chosen."""

Point = tuple[str, str, float, int]
"""Setting, arm, learning rate, seed."""


def spec_of(setting: str, arm: str, lr: float, seed: int) -> RunSpec:
    chosen = SETTINGS[setting]
    words = [*chosen.words, f"federation={chosen.federation}", *chosen.arms[arm], f"seed={seed}", f"train.lr={lr}"]
    return replace(compose_spec(words), name="fedmr_digits")


def measure(point: Point) -> dict[str, object]:
    setting, arm, lr, seed = point
    start = time.process_time()
    result = simulate(spec_of(*point))
    found = result.summary()
    return {
        **{"setting": setting, "arm": arm, "lr": lr, "seed": seed},
        "best": found["best_global_accuracy"],
        "last": found["global_accuracy"],
        "by_round": found["accuracy_by_round"],
        "cpu_seconds": round(time.process_time() - start, 2),
        "model": found["model_digest"],
    }


def key(point: Point) -> str:
    """Return what a point is kept under: its partition, of which a manifest says nothing, and its manifest."""
    federation = SETTINGS[point[0]].federation
    silos = [f"hospital{k}" for k in range(SILOS[federation])]
    return f"{federation} {hashlib.sha256(manifest_from(spec_of(*point), silos).to_json().encode()).hexdigest()}"


def study(out: Path, points: Sequence[Point], jobs: int) -> list[dict[str, object]]:
    """Run what `out` lacks, saving after every run, and return the runs asked for."""
    kept: dict[str, dict[str, object]] = json.loads(out.read_text())["runs"] if out.exists() else {}
    asked = {key(point): point for point in points}
    missing = {point: name for name, point in asked.items() if name not in kept}
    for point, found in in_processes(measure, list(missing), jobs, threads=1):
        kept[missing[point]] = found
        print(f"{found['arm']:14} lr {found['lr']} seed {found['seed']}: best {found['best']:.3f}", flush=True)
        out.write_text(json.dumps({"machine": timing.machine(), "runs": kept}, indent=1, sort_keys=True) + "\n")
    return [kept[name] | dict(zip(("setting", "arm"), point[:2], strict=True)) for name, point in asked.items()]


def spread(values: Sequence[float]) -> str:
    """Write mean and standard deviation over seeds, in percent."""
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f}" if len(values) > 1 else f"{100 * values[0]:.1f}"


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """Write the paired difference of two arms, seed by seed, in points: mean (standard error), smallest to largest."""
    gaps = [100 * (a - b) for a, b in zip(values, others, strict=True)]
    error = f" ({stdev(gaps) / len(gaps) ** 0.5:.1f}), {min(gaps):.1f} to {max(gaps):.1f}" if len(gaps) > 1 else ""
    return f"{mean(gaps):+.1f}{error}"


def of(runs: Sequence[Mapping[str, object]], arm: str, lr: float, field: str) -> list[float]:
    return [float(str(r[field])) for r in runs if r["arm"] == arm and r["lr"] == lr]


def grid(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [[title, *columns], ["---"] * (len(columns) + 1), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(runs: Sequence[Mapping[str, object]], arms: Sequence[str], lrs: Sequence[float], field: str) -> str:
    rows = {arm: [spread(of(runs, arm, lr, field)) for lr in lrs] for arm in arms}
    return grid(f"{field} accuracy, %", [f"lr {lr}" for lr in lrs], rows)


def gains(runs: Sequence[Mapping[str, object]], arms: Sequence[str], lrs: Sequence[float], field: str) -> str:
    """Write how far arms are ahead of FedAvg at the same rate and, last, each at the rate of its highest mean."""
    at = {arm: {lr: of(runs, arm, lr, field) for lr in lrs} for arm in arms}
    own = {arm: max((mean(values), lr) for lr, values in by_lr.items())[1] for arm, by_lr in at.items()}
    rows = {
        arm: [
            *(difference(at[arm][lr], at["fedavg"][lr]) for lr in lrs),
            f"{difference(at[arm][own[arm]], at['fedavg'][own['fedavg']])} (lr {own[arm]} - lr {own['fedavg']})",
        ]
        for arm in arms
        if arm != "fedavg"
    }
    return grid(f"{field} minus FedAvg's, points", [*(f"lr {lr}" for lr in lrs), "each at its own lr"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--setting", choices=list(SETTINGS), default="plain")
    parser.add_argument("--seeds", type=int, nargs="+", help="by default those of the setting's table, like the rest")
    parser.add_argument("--lrs", type=float, nargs="+")
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    given = parser.parse_args()
    chosen = SETTINGS[given.setting]
    lrs, arms, seeds = given.lrs or chosen.lrs, given.arms or list(chosen.arms), given.seeds or chosen.seeds
    if unknown := set(arms) - set(chosen.arms):
        parser.error(f"--arms: expected some of {list(chosen.arms)}, found {sorted(unknown)}")
    runs = study(given.out, [(given.setting, a, lr, s) for s in seeds for a in arms for lr in lrs], given.jobs)
    for field in ("best", "last"):
        print("\n" + table(runs, arms, lrs, field))
    for field in ("best", "last") if {"fedavg"} < set(arms) else ():
        print("\n" + gains(runs, arms, lrs, field))
    seconds = {arm: median(x for lr in lrs for x in of(runs, arm, lr, "cpu_seconds")) for arm in arms}
    print(f"\n{len(runs)} runs; CPU seconds per run, median: " + ", ".join(f"{a} {s:.1f}" for a, s in seconds.items()))
