"""python -m benchmarks.honest [--store FILE] [--methods fedavg,...] [--settings disjoint,...] [--seeds 0] [--table].

Simulates runs in which every hospital is honest, and counts the updates that were refused or cut. Each run is stored as
it ends, with the lengths of all of its updates, so that an interrupted battery goes on; then the table is printed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.run_store import Run, complete, read, seeded
from consilium.research.engines.in_process import RoundHistory, SiloShare, local_ports, thread_count
from consilium.research.simulate.runner import build_simulation
from coordinator.config.hydra_config import compose_spec
from fl_core import rng
from fl_core.aggregation.update_check import UpdateCheck, UpdateNorms
from fl_core.errors import FederationError
from fl_core.methods import METHODS
from fl_core.training.evaluation import ConcatExamples
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Capability, SiloPort
from fl_core.types.values import Bundle, Examples, RoundContext, State
from privacy.compiled_run import CompiledRun

SETTINGS = {
    "disjoint": "hospitals6",
    "dir0.1": "dirichlet-0.1-10",
    "dir0.3": "dirichlet-0.3-20",
    "sizes1:100": "iid-10",
}
COHORTS = (3, 5, 0)
RATES = (0.01, 0.1)
"""Learning rates: an ordinary one, and one with which training overshoots where classes are disjoint."""
MIN_SIZE, MAX_SIZE = 3, 300
"""Training examples of the smallest and of the largest hospital where sizes are uneven."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the battery; cohort 0 is everybody."""

    method: str
    setting: str
    cohort: int
    rate: float
    seed: int
    aggregator: str = "norm_clipped"
    model: str = "digits_linear"
    rounds: int = 20

    @property
    def words(self) -> list[str]:
        """What `coordinator simulate` is told, but for the sizes."""
        chosen = {
            "method": self.method,
            "data": "digits",
            "federation": SETTINGS[self.setting],
            "model": self.model,
            "train.lr": self.rate,
            "train.epochs": 1,
            "cohort": self.cohort,
            "rounds": self.rounds,
            "aggregator": self.aggregator,
            "seed": self.seed,
            "threads": 1,
        }
        return [f"{name}={value}" for name, value in chosen.items()]

    @property
    def key(self) -> str:
        return " ".join([self.setting, *self.words])

    def __str__(self) -> str:
        who = self.cohort or "all"
        return f"{self.method} {self.setting} cohort {who} lr {self.rate} seed {self.seed}"


class Some(Examples):
    """Some examples of others; index (n,): which."""

    def __init__(self, whole: Examples, index: Tensor) -> None:
        self._whole, self._index = whole, index
        self.labels, self.groups = whole.labels[index], None

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self._whole.batch(self._index[index], augment)


def uneven(shares: Sequence[SiloShare], seed: int) -> list[SiloShare]:
    """Deal the training examples again: from one hospital to the next the size grows by the same factor."""
    whole, last = ConcatExamples([share.train for share in shares]), len(shares) - 1
    sizes = [round(MIN_SIZE * (MAX_SIZE / MIN_SIZE) ** (k / last)) for k in range(len(shares))]
    order = torch.from_numpy(rng.numpy_stream(seed, "uneven").permutation(len(whole)))
    parts = torch.split(order[: sum(sizes)], sizes)
    return [SiloShare(Some(whole, part), share.test) for part, share in zip(parts, shares, strict=True)]


@dataclass
class Watched:
    """A silo whose updates are measured as the round's check measures them."""

    inner: SiloPort
    check: UpdateCheck
    seen: list[dict[str, UpdateNorms]]
    sizes: list[dict[str, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        sent = self.inner.round(msg, context, kind)
        if kind is TaskKind.TRAIN:
            while len(self.seen) <= context.round:
                self.seen.append({})
            self.seen[context.round][self.name] = self.check.check(sent)
        return sent

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        self.inner.settle(context, kind, included)


def measure(case: Case) -> Run:
    """Do one run of honest hospitals and say what became of their updates."""
    spec = seeded(compose_spec([*case.words, "secagg=off"]), case.seed)
    if takes_cohorts(case.method):
        spec = replace(spec, quorum=1)  # a run goes on after a refusal, and what follows is counted, too
    manifest, sets = build_simulation(spec)
    run, shares = CompiledRun.of(manifest), [SiloShare(s.train, s.test) for s in sets]
    if case.setting == "sizes1:100":
        shares = uneven(shares, case.seed)
    seen, history, ended = list[dict[str, UpdateNorms]](), RoundHistory(), ""
    ports = [Watched(port, run.update_check(), seen) for port in local_ports(run, shares)]
    with thread_count(1):
        try:
            run.round_loop(ports, 1).run(run.initial_state(), history)
        except FederationError as error:
            ended = str(error)
    training = [r for r in history.records if r.kind is TaskKind.TRAIN]
    return {
        "key": case.key,
        "method": case.method,
        "setting": case.setting,
        "cohort": case.cohort,
        "rate": case.rate,
        "model": case.model,
        "seed": case.seed,
        "aggregator": case.aggregator,
        "sizes": [len(share.train) for share in shares],
        "ended": ended,
        "updates": sum(map(len, seen)),
        "refused": [dict(r.missing) for r in training],
        "cut": [dict(r.cut) for r in training],
        "accuracy": [round(r.accuracy, 4) for r in history.records],
        "norms": [{name: _lengths(m) for name, m in found.items()} for found in seen],
    }


def _lengths(found: UpdateNorms) -> Mapping[str, object]:
    rows = {part: [round(v, 6) for v in row.nan_to_num(-1.0).tolist()] for part, row in found.rows.items()}
    return {"norms": {block: float(f"{v:.6g}") for block, v in found.norms.items()}, "rows": rows}


def table(runs: Iterable[Run]) -> list[str]:
    """Write how many updates were refused and cut, by method and setting, and by cohort below; "-": not done yet."""
    found = list(runs)
    lines = [f"| | {' | '.join(SETTINGS)} | updates |", "|---" * (len(SETTINGS) + 2) + "|"]
    groups: list[tuple[str, str, object]] = [(method, "method", method) for method in METHODS]
    groups += [(f"cohort {cohort or 'all'}", "cohort", cohort) for cohort in COHORTS] + [("all", "", None)]
    for label, name, value in groups:
        mine = [run for run in found if not name or run[name] == value]
        cells = [_cell([run for run in mine if run["setting"] == setting]) for setting in SETTINGS]
        lines.append(f"| {label} | {' | '.join(cells)} | {_count(mine, 'updates')} |")
    return lines


def _cell(runs: Sequence[Run]) -> str:
    """Write refused updates, and the share that was cut with each learning rate."""
    shares = []
    for rate in RATES:
        mine = [run for run in runs if run["rate"] == rate]
        updates = _count(mine, "updates")
        shares.append(f"{100 * _count(mine, 'cut') / updates:.1f} %" if updates else "-")
    return f"{_count(runs, 'refused')}; {', '.join(shares)}"


def _count(runs: Sequence[Run], what: str) -> int:
    found = [run[what] for run in runs]
    return sum(sum(map(len, of_run)) if isinstance(of_run, list) else int(str(of_run)) for of_run in found)


def cases(args: argparse.Namespace) -> list[Case]:
    asked = (args.seeds, args.cohorts, args.rates, args.settings, args.methods)
    found = [
        Case(method, setting, int(cohort), float(rate), int(seed), args.aggregator, args.model)
        for seed, cohort, rate, setting, method in itertools.product(*(text.split(",") for text in asked))
    ]
    return [case for case in found if case.cohort == 0 or takes_cohorts(case.method)]


def takes_cohorts(method: str) -> bool:
    return Capability.PARTIAL_PARTICIPATION not in METHODS[method]().unsupported


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.honest", description=__doc__)
    parser.add_argument("--store", type=Path, default=Path("outputs/honest.jsonl"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--cohorts", default=",".join(map(str, COHORTS)))
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--model", default="digits_linear", help="digits_cnn takes ten times as long")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--aggregator", default="norm_clipped")
    parser.add_argument("--table", action="store_true", help="run nothing, print what the store holds")
    parser.add_argument("--jobs", type=int, default=-1)
    args = parser.parse_args()
    if not args.table:
        complete(cases(args), args.store, measure, args.jobs)
    print("\n".join(table(read(args.store).values())))


if __name__ == "__main__":
    main()
