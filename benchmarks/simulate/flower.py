"""The same work in Flower's simulator, with its own strategy and messages; run with an interpreter that has Flower.

PYTHONPATH=. .../python benchmarks/simulate/flower.py work.pt

It does a round for each line that it reads (`others.Other`). Each silo also evaluates what it received, as in the
federation. The accuracy of the model in the end goes to stderr.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.simulate.others import DONE, READY, say, wait_for_turn
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


class Gated(FedAvg):
    """Flower's FedAvg, which begins a round when it is asked to."""

    def configure_train(self, server_round, arrays, config, grid):  # noqa: ANN001, ANN201 - as in Flower
        """Wait, then ask all clients."""
        if server_round == 1:
            say(READY)
        wait_for_turn()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):  # noqa: ANN001, ANN201 - as in Flower
        """Say that the round is over."""
        found = super().aggregate_train(server_round, replies)
        say(DONE)
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 - as Flower calls it
    plain, strategy = loop(), Gated(fraction_train=1.0, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(plain.weights), num_rounds=plain.rounds, timeout=3600)
    plain.weights = result.arrays.to_torch_state_dict()
    print("accuracy in Flower:", round(plain.evaluate(), 4), file=sys.stderr, flush=True)


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
