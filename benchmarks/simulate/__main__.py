"""Measure a simulated federation of FedAvg on digits against a plain loop that does the same local steps.

python -m benchmarks.simulate --json
python -m benchmarks.simulate --epochs 1 --json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks import timing
from benchmarks.simulate.plain import Plain
from benchmarks.timing import Timed
from consilium.research.engines.in_process import RoundHistory, SiloShare, local_ports
from consilium.research.simulate.runner import build_simulation
from coordinator.config.hydra_config import compose_simulation
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.values import State


class Federated:
    """What `consilium.research.engines.in_process.simulate` does, round by round."""

    def __init__(self, manifest: RunManifest, shares: Sequence[SiloShare]) -> None:
        self.history = RoundHistory()
        run = RunSetup.of(manifest)
        self._engine = run.round_loop(local_ports(run, shares), parallel=1)
        self.server: State = run.initial_state()

    def round(self, t: int) -> None:
        """Run a training round: every silo evaluates, trains and sends; the bundles are summed and merged."""
        self.server = self._engine.round(self.server, t, TaskKind.TRAIN, self.history)[0]

    def close(self) -> None:
        rounds = self._engine.schedule.rounds
        self.server = self._engine.round(self.server, rounds, TaskKind.EVALUATE, self.history)[0]


def measure(words: Sequence[str]) -> timing.Found:
    """Run both, a round of one and a round of the other in turn, and compare what they took and where they end."""
    manifest, sets = build_simulation(compose_simulation(["method=fedavg", "data=digits", *words]))
    shares = [SiloShare(s.train, s.test, s.public) for s in sets]
    torch.set_num_threads(manifest.threads or torch.get_num_threads())
    times = {name: Timed() for name in ("federation", "plain", "plain_evaluation")}
    Federated(manifest, shares).round(0)  # warm up
    Plain(manifest, shares).round(0)
    federated, plain = _made(manifest, shares, times)
    accuracies: list[float] = []
    for t in range(manifest.rounds):
        times["plain_evaluation"].add(lambda: accuracies.append(plain.evaluate()))
        ways = [("federation", federated), ("plain", plain)]
        for name, way in ways if t % 2 else reversed(ways):
            times[name].add(lambda way=way, t=t: way.round(t))
    times["plain_evaluation"].add(lambda: accuracies.append(plain.evaluate()))
    times["federation"].add(federated.close)
    apart = max(float((plain.weights[name] - v).abs().max()) for name, v in federated.server["w"].items())
    return {
        **timing.machine(),
        "silos": len(shares),
        "rounds": manifest.rounds,
        "epochs": manifest.train.epochs,
        "steps": plain.steps,
        **_totals(times),
        "accuracy": round(federated.history.accuracies[-1], 4),
        "plain_accuracy": round(accuracies[-1], 4),
        "weights_apart": apart,
    }


def _made(manifest: RunManifest, shares: Sequence[SiloShare], times: dict[str, Timed]) -> tuple[Federated, Plain]:
    """Make both; that is part of their time."""
    federated, plain = list[Federated](), list[Plain]()
    times["federation"].add(lambda: federated.append(Federated(manifest, shares)))
    times["plain"].add(lambda: plain.append(Plain(manifest, shares)))
    return federated[0], plain[0]


def _totals(times: dict[str, Timed]) -> timing.Found:
    """Sum what both took from beginning to end; the first entry is the making, the federation's last the closing.

    ratio: against the loop's steps alone; ratio_evaluated: against the loop that evaluates as often as the federation.
    """
    found: dict[str, timing.Value] = {}
    for kind in ("wall", "cpu"):
        took: dict[str, list[float]] = {name: getattr(t, kind) for name, t in times.items()}
        suffix = "" if kind == "wall" else "_cpu"
        found |= {f"{name}{suffix}_seconds": round(sum(seconds), 3) for name, seconds in took.items()}
        ours, bare, evaluation = (sum(took[name]) for name in ("federation", "plain", "plain_evaluation"))
        prefix = "" if kind == "wall" else "cpu_"
        rounds = zip(took["federation"][1:], took["plain"][1:], strict=False)
        found[f"{prefix}ratio"] = round(ours / bare, 3)
        found[f"{prefix}ratio_of_rounds"] = round(median(a / b for a, b in rounds), 3)
        found[f"{prefix}ratio_evaluated"] = round(ours / (bare + evaluation), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=10, help="local epochs; the papers take ten")
    parser.add_argument("--words", nargs="*", default=[], help="more of the run's configuration, KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    given = parser.parse_args()
    setting = [f"federation=iid-{given.silos}", f"rounds={given.rounds}", f"train.epochs={given.epochs}", "threads=1"]
    timing.show(measure([*setting, *given.words]), given.json)


if __name__ == "__main__":
    main()
