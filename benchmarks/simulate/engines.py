"""Rounds of one federation by every engine of this machine, and by Flower's simulator, in turn.

python -m benchmarks.simulate.engines --silos 100 --rounds 9 --ray .venv/bin/python --flower flower/bin/python
python -m benchmarks.simulate.engines --large --rounds 5 ...        # ResNet18 (11 million parameters), four silos

A round of one way, then a round of the next; another one first every time. Seconds are by the clock (what one waits
for) and of the processor over all processes of a way (what other load on the machine does not change). The first round
of each way is not counted. Ratios are medians of those within a turn.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks import timing
from benchmarks.simulate.others import Other, cpu_seconds
from benchmarks.simulate.plain import Plain
from benchmarks.timing import Timed
from consilium.research.engines.in_process import RoundHistory, SiloShare, local_ports, thread_count
from consilium.research.engines.workers import WorkerPool, cores
from consilium.research.simulate.runner import build_simulation
from coordinator.config.hydra_config import compose_simulation
from fl_core.rounds.engine import RoundLoop
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
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

    def accuracy(self) -> float:
        return self._plain.evaluate()


def measure(words: Sequence[str], workers: int, ray: str = "", flower: str = "") -> timing.Found:
    """Run each way's rounds in turn; medians of seconds per round. ray, flower: interpreters that have them."""
    manifest, sets = build_simulation(compose_simulation(words))
    shares, run = [SiloShare(s.train, s.test, s.public) for s in sets], RunSetup.of(manifest)
    timed, loads = dict[str, Timed](), list[float]()
    with ExitStack() as stack:
        stack.enter_context(thread_count(1))
        pool = stack.enter_context(WorkerPool(run, shares, workers, 1))
        ways: dict[str, Callable[[int], None]] = {
            "one_process": Rounds(run.round_loop(local_ports(run, shares), 1), run),
            f"workers_{workers}": Rounds(run.round_loop(local_ports(run, shares), 1, exchange=pool.exchange), run),
            "plain": (plain := PlainRounds(manifest, shares)),
        }
        local = [psutil.Process(), *psutil.Process().children()]
        work = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work.pt"
        torch.save((manifest.to_json(), shares), work)
        folder, others = Path(__file__).parent, dict[str, Other]()
        for name, command in (
            (f"ray_{workers}", (ray, str(folder / "ray_rounds.py"), str(work), str(workers))),
            ("flower", (flower, str(folder / "flower.py"), str(work))),
        ):
            if command[0]:
                others[name] = Other(command)
                stack.callback(others[name].close)
        for t in range(manifest.rounds):
            loads.append(psutil.getloadavg()[0])
            every = {**ways, **others}
            for name in sorted(every, key=lambda name, t=t: (list(every).index(name) + t) % len(every)):
                used = others[name].cpu_seconds if name in others else partial(_cpu_seconds, local)
                wall, cpu = time.perf_counter(), used()
                every[name](t)
                found = timed.setdefault(name, Timed())
                found.wall.append(time.perf_counter() - wall)
                found.cpu.append(used() - cpu)
    for found in timed.values():
        del found.wall[0], found.cpu[0]
    return {
        **timing.machine(),
        "silos": len(shares),
        "rounds": manifest.rounds,
        "accuracy": round(plain.accuracy(), 4),
        "parameters": sum(v.numel() for v in run.model.parameters()),
        "load": [round(min(loads), 1), round(median(loads), 1), round(max(loads), 1)],
        "seconds": {name: round(median(found.wall), 3) for name, found in timed.items()},
        "cpu_seconds": {name: round(median(found.cpu), 3) for name, found in timed.items()},
        **({"flower_to_ours": _to_ours(timed)} if flower else {}),
    }


def _to_ours(timed: Mapping[str, Timed]) -> dict[str, timing.Found]:
    """Return how many times as long Flower's round took as each other way's in the same turn, with the range."""
    found: dict[str, timing.Found] = {}
    for name in timed:
        if name != "flower":
            each = sorted(a / b for a, b in zip(timed["flower"].wall, timed[name].wall, strict=True))
            ends = {"least": round(each[0], 2), "most": round(each[-1], 2)}
            found[name] = {**timing.ratio(timed["flower"], timed[name]), **ends}
    return found


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(cpu_seconds(process) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=0, help="100, with --large 4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(2, cores()))
    parser.add_argument("--large", action="store_true", help="ResNet18 on made-up photographs")
    parser.add_argument("--ray", default="", help="an interpreter that has Ray, for our engine on Ray")
    parser.add_argument("--flower", default="", help="an interpreter that has Flower's simulator and what this needs")
    parser.add_argument("--words", nargs="*", default=[], help="more of the run's configuration, KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    given = parser.parse_args()
    silos = given.silos or (4 if given.large else 100)
    data = ["data=benchmarks.simulate.photos:Photos", "train.batch_size=32"] if given.large else ["data=digits"]
    words = ["method=fedavg", *data, f"federation=iid-{silos}", f"rounds={given.rounds}", "threads=1"]
    words += [f"train.epochs={given.epochs}", *given.words]
    timing.show(measure(words, given.workers, given.ray, given.flower), given.json)


if __name__ == "__main__":
    main()
