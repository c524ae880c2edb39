"""The same work in Flower's simulator, with its own strategy and messages; run with an interpreter that has Flower.

python -m benchmarks.simulate.engines --write work.pt   # ours: silos, model, batches and steps
PYTHONPATH=. .../python benchmarks/simulate/flower.py work.pt

Prints a line of JSON: the median wall seconds of a round and the processor seconds of a round over all of its
processes, both without the first round, and the accuracy after the last one. Each silo also evaluates what it
received, as in the federation.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from functools import cache
from statistics import median

import psutil
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.simulate.plain import Plain
from fl_core.rounds.manifest import RunManifest

WORK = "CONSILIUM_FLOWER_WORK"
client, server = ClientApp(), ServerApp()


@cache
def loop() -> Plain:
    """Build data and model once per process."""
    torch.set_num_threads(1)
    manifest, shares = torch.load(os.environ[WORK], weights_only=False)
    return Plain(RunManifest.from_json(manifest), shares)


@client.train()
def train(message: Message, context: Context) -> Message:
    """Evaluate the received model on the silo's test images, train it, and send it back with the number of examples."""
    silo, plain = int(context.node_config["partition-id"]), loop()
    t = int(message.content["config"]["server-round"]) - 1
    plain.weights = message.content["arrays"].to_torch_state_dict()
    correct, examples = plain.evaluate_at(silo)
    plain.train_at(t, silo)
    counts = {"num-examples": len(plain.shares[silo].train), "correct": correct, "tests": examples}
    answer = RecordDict({"arrays": ArrayRecord(plain.model.state_dict()), "metrics": MetricRecord(counts)})
    return Message(content=answer, reply_to=message)


class Timed(FedAvg):
    """Flower's FedAvg, with the time of each round."""

    def __init__(self) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0)
        self.at, self.cpu = [time.perf_counter()], [cpu_seconds()]

    def aggregate_train(self, server_round, replies):  # noqa: ANN001, ANN201 - as in Flower
        """Note when the round was over."""
        found = super().aggregate_train(server_round, replies)
        self.at.append(time.perf_counter())
        self.cpu.append(cpu_seconds())
        return found


def cpu_seconds() -> float:
    """Sum the processor seconds of all processes that this one started."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


@server.main()
def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 - as Flower calls it
    plain, strategy = loop(), Timed()
    result = strategy.start(grid, ArrayRecord(plain.weights), num_rounds=plain.rounds, timeout=3600)
    plain.weights = result.arrays.to_torch_state_dict()
    took = [b - a for a, b in zip(strategy.at, strategy.at[1:], strict=False)][1:]
    used = [b - a for a, b in zip(strategy.cpu, strategy.cpu[1:], strict=False)][1:]
    found = {"flower_seconds": round(median(took), 3), "flower_cpu_seconds": round(median(used), 3)}
    print(json.dumps(found | {"flower_accuracy": round(plain.evaluate(), 4)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work")
    given = parser.parse_args()
    os.environ[WORK] = os.path.abspath(given.work)  # noqa: PTH100 - of a worker that starts elsewhere
    logging.getLogger("flwr").setLevel(logging.ERROR)
    # As Ray's workers import them: what is in __main__ cannot be sent there.
    from benchmarks.simulate import flower

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(flower.server, flower.client, len(loop().shares), backend_config=resources)
