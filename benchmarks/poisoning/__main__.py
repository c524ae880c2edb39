"""python -m benchmarks.poisoning [--federation hospitals6] [--rounds 20] [--aggregators mean,...] [--json].

Trains FedAvg on digits with one bad hospital, by aggregator and attack, and prints the mean accuracy of the last five
models in percent; who was refused or cut follows in brackets (rounds).
"""

from __future__ import annotations

import argparse
import json

from benchmarks.poisoning.attacks import ATTACKS, BadSilo, with_bad_data
from coordinator.config.hydra_config import compose_spec
from coordinator.simulation.runner import build_simulation
from fl_core.aggregation.options import AGGREGATORS
from fl_core.aggregation.update_check import DeclaredSize
from fl_core.simulation.in_process import RoundHistory, SiloShare, local_ports
from fl_core.types.interfaces import SiloPort
from privacy.compiled_run import CompiledRun


def measure(federation: str, aggregator: str, attack: str, rounds: int, seed: int, bad: int) -> dict[str, object]:
    """Run once and say how it ended."""
    words = [f"federation={federation}", f"aggregator={aggregator}", f"rounds={rounds}", f"seed={seed}", "quorum=1"]
    manifest, sets = build_simulation(compose_spec(["method=fedavg", "data=digits", *words]))
    run, classes = CompiledRun.of(manifest), len(manifest.schema.classes)
    honest = [SiloShare(s.train, s.test) for s in sets]
    sizes = {m.name: DeclaredSize(len(s.train), len(s.test)) for m, s in zip(manifest.members, honest, strict=True)}
    ports: list[SiloPort] = list(local_ports(run, with_bad_data(honest, attack, bad, classes)))
    ports[bad], history, name = BadSilo(ports[bad], ATTACKS[attack]), RoundHistory(), manifest.members[bad].name
    run.round_loop(ports, 1, sizes).run(run.initial_state(), history)
    training, last = history.records[:-1], history.accuracies[-5:]
    others = {other for r in training for other in (*r.missing, *r.cut) if other != name}
    return {
        "federation": federation,
        "aggregator": aggregator,
        "attack": attack,
        "bad": name,
        "seed": seed,
        "accuracy": round(100 * sum(last) / len(last), 1),
        "refused": sum(name in r.missing for r in training),
        "cut": sum(name in r.cut for r in training),
        "others_touched": sorted(others),
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
            fate = f"refused {found['refused']}, cut {found['cut']}, others {found['others_touched']}"
            line = f"{attack:<20} {aggregator:<17} {found['accuracy']:>5} %  {fate}"
            print(json.dumps(found) if args.json else line, flush=True)


if __name__ == "__main__":
    main()
