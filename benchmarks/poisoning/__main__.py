"""python -m benchmarks.poisoning [--federation hospitals6] [--rounds 20] [--aggregators mean,...] [--json].

Trains FedAvg on digits with one bad hospital, by aggregator and attack, and prints the mean accuracy of the last five
models in percent, on the test images of the other hospitals and on those of all; then who was refused or cut.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.poisoning.attacks import ATTACKS, BadSilo, with_bad_data
from consilium.research.engines.in_process import RoundHistory, SiloShare, local_ports
from consilium.research.simulate.runner import build_simulation
from coordinator.config.hydra_config import compose_spec
from fl_core.aggregation.options import AGGREGATORS
from fl_core.aggregation.update_check import DeclaredSize
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.evaluation import ConcatExamples, evaluate
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData, SiloPort
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State
from privacy.compiled_run import CompiledRun

LAST = 5
"""Models whose accuracies are averaged."""


class LastModels(RoundHistory):
    """Keeps the records of all rounds and the server's state after each of the last ones."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._from, self.states = rounds - LAST, list[State]()

    def closed(self, record: RoundRecord, server: State) -> None:
        super().closed(record, server)
        if self._from <= len(self.records) - 1 < self._from + LAST:
            self.states.append({group: dict(tensors) for group, tensors in server.items()})


def accuracy(run: RunSetup, states: list[State], shares: list[SiloShare]) -> float:
    """Return the mean accuracy of the models of some states on the test images of some hospitals, in percent."""
    manifest, runtime = run.manifest, run.silo_runtime()
    tests, classes = ConcatExamples([share.test for share in shares]), len(manifest.schema.classes)
    context = RoundContext(len(shares), classes, manifest.rounds).for_silo(0, manifest.seed)
    data, found = PlainLocalData(RoundData(tests, tests, manifest.train, context)), []
    for state in states:
        model = runtime.method.global_model(runtime.reset_model(), runtime.method.broadcast(state))
        part = evaluate(model, data, classes)
        found.append(float(part.total["correct"].sum() / part.weight.sum()))
    return round(100 * sum(found) / len(found), 1)


def measure(federation: str, aggregator: str, attack: str, rounds: int, seed: int, bad: int) -> dict[str, object]:
    """Run once and say how it ended."""
    words = [f"federation={federation}", f"aggregator={aggregator}", f"rounds={rounds}", f"seed={seed}", "quorum=1"]
    manifest, sets = build_simulation(compose_spec(["method=fedavg", "data=digits", "secagg=off", *words]))
    run, classes = CompiledRun.of(manifest), len(manifest.schema.classes)
    honest = [SiloShare(s.train, s.test) for s in sets]
    sizes = {m.name: DeclaredSize(len(s.train), len(s.test)) for m, s in zip(manifest.members, honest, strict=True)}
    ports: list[SiloPort] = list(local_ports(run, with_bad_data(honest, attack, bad, classes)))
    ports[bad], history, name = BadSilo(ports[bad], ATTACKS[attack]), LastModels(rounds), manifest.members[bad].name
    run.round_loop(ports, 1, sizes).run(run.initial_state(), history)
    training = history.records[:-1]
    return {
        "federation": federation,
        "aggregator": aggregator,
        "attack": attack,
        "bad": name,
        "seed": seed,
        "accuracy_of_others": accuracy(run, history.states, [s for k, s in enumerate(honest) if k != bad]),
        "accuracy_of_all": accuracy(run, history.states, honest),
        "refused": sum(name in r.missing for r in training),
        "cut": sum(name in r.cut for r in training),
        "others_refused": sum(len(set(r.missing) - {name}) for r in training),
        "others_cut": sum(len(set(r.cut) - {name}) for r in training),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.poisoning", description=__doc__)
    parser.add_argument("--federation", default="hospitals6")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bad", type=int, default=1, help="which silo, from 0")
    parser.add_argument("--aggregators", default=",".join(AGGREGATORS))
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for attack in args.attacks.split(","):
        for aggregator in args.aggregators.split(","):
            found = measure(args.federation, aggregator, attack, args.rounds, args.seed, args.bad)
            both = f"{found['accuracy_of_others']:>5} % {found['accuracy_of_all']:>5} %"
            fate = f"refused {found['refused']}, cut {found['cut']}; "
            fate += f"others {found['others_refused']}, {found['others_cut']}"
            line = f"{attack:<20} {aggregator:<17} {both}  {fate}"
            print(json.dumps(found) if args.json else line, flush=True)


if __name__ == "__main__":
    main()
