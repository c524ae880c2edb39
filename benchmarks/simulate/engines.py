"""Rounds of one federation by every engine of this machine, in turn: one process, workers, one tensor, a plain loop.

python -m benchmarks.simulate.engines --silos 100 --rounds 9
python -m benchmarks.simulate.engines --words model=resnet18 ... --rounds 3
python -m benchmarks.simulate.engines --write work.pt       # the same work for benchmarks/simulate/flower.py

Seconds are by the clock (what one waits for) and of the processor over all processes (what other load on the machine
does not change). The first round of each way is not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks import timing
from benchmarks.simulate.plain import Plain
from coordinator.config.hydra_config import compose_spec
from coordinator.simulation.runner import build_simulation
from fl_core.errors import ConfigError
from fl_core.rounds.engine import RoundLoop
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.batched import BatchedCohort
from fl_core.simulation.in_process import RoundHistory, SiloShare, local_ports, thread_count
from fl_core.simulation.workers import WorkerPool, cores
from fl_core.types.enums import TaskKind


class Rounds:
    """A loop that keeps its state between rounds."""

    def __init__(self, loop: RoundLoop, run: RunSetup) -> None:
        self._loop, self.server, self.history = loop, run.initial_state(), RoundHistory()

    def __call__(self, t: int) -> None:
        self.server = self._loop.round(self.server, t, TaskKind.TRAIN, self.history)[0]


class PlainRounds:
    """The plain loop, which evaluates at every silo as the federation does."""

    def __init__(self, manifest: RunManifest, shares: Sequence[SiloShare]) -> None:
        self._plain = Plain(manifest, shares)

    def __call__(self, t: int) -> None:
        self._plain.evaluate()
        self._plain.round(t)


def measure(words: Sequence[str], workers: int) -> timing.Found:
    """Run each way's rounds in turn, another one first every time; medians of seconds per round."""
    manifest, sets = build_simulation(compose_spec(words))
    shares, run = [SiloShare(s.train, s.test, s.public) for s in sets], RunSetup.of(manifest)
    wall, cpu = dict[str, list[float]](), dict[str, list[float]]()
    with ExitStack() as stack:
        stack.enter_context(thread_count(1))
        pool = stack.enter_context(WorkerPool(run, shares, workers, 1))
        ways: dict[str, Callable[[int], None]] = {
            "one_process": Rounds(run.round_loop(local_ports(run, shares), 1), run),
            f"workers_{workers}": Rounds(run.round_loop(local_ports(run, shares), 1, exchange=pool.exchange), run),
            "plain": PlainRounds(manifest, shares),
        }
        try:
            cohort = BatchedCohort(run, torch.device("cpu"))
            ways["batched"] = Rounds(run.round_loop(local_ports(run, shares), 1, exchange=cohort.exchange), run)
        except ConfigError as error:
            print(error.message)
        for t in range(manifest.rounds):
            for name in sorted(ways, key=lambda name, t=t: (list(ways).index(name) + t) % len(ways)):
                began, used = time.perf_counter(), _cpu_seconds()
                ways[name](t)
                wall.setdefault(name, []).append(time.perf_counter() - began)
                cpu.setdefault(name, []).append(_cpu_seconds() - used)
    return {
        **timing.machine(),
        "silos": len(shares),
        "rounds": manifest.rounds,
        "load": [round(x, 1) for x in psutil.getloadavg()],
        "seconds": _medians(wall),
        "cpu_seconds": _medians(cpu),
    }


def _medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: round(median(values[1:]), 3) for name, values in found.items()}


def _cpu_seconds() -> float:
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(2, cores()))
    parser.add_argument("--words", nargs="*", default=[], help="more of the run's configuration, KEY=VALUE")
    parser.add_argument("--write", type=Path, help="write manifest and silos for flower.py, and measure nothing")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    given = parser.parse_args()
    words = ["method=fedavg", "data=digits", f"federation=iid-{given.silos}", f"rounds={given.rounds}", "threads=1"]
    words += [f"train.epochs={given.epochs}", *given.words]
    if given.write:
        manifest, sets = build_simulation(compose_spec(words))
        torch.save((manifest.to_json(), [SiloShare(s.train, s.test, s.public) for s in sets]), given.write)
        return
    timing.show(measure(words, given.workers), given.json)


if __name__ == "__main__":
    main()
