"""Rounds of our engine on Ray, one for each line that it reads: `others.Other`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.simulate.others import DONE, READY, say, wait_for_turn
from consilium.research.engines.ray import Cluster, simulate_ray
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State


class _Gate(Observer):
    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:  # noqa: ARG002
        if kind is TaskKind.TRAIN:
            if context.round == 0:
                say(READY)
            wait_for_turn()

    def closed(self, record: RoundRecord, server: State) -> None:  # noqa: ARG002
        if record.kind is TaskKind.TRAIN:
            say(DONE)


if __name__ == "__main__":
    manifest, shares = torch.load(sys.argv[1], weights_only=False)
    run = RunSetup.of(RunManifest.from_json(manifest))
    simulate_ray(run, shares, _Gate(), Cluster(actors=int(sys.argv[2])))
