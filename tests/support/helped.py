"""A program that does rounds alone and with two helpers, and prints what came of both as JSON.

A program of its own, since helpers are forked from a process with one thread: `python -m tests.support.helped`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from consilium.testing.federation import NAMES, merged_total, shares
from consilium.testing.methods import CONTEXT, MethodCase
from fl_core.errors import ConfigError
from fl_core.methods import METHODS
from fl_core.rounds.manifest import NamedOptions, make_members
from fl_core.rounds.silo_round import SiloRound, run_silo_round
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData, Team
from fl_core.types.records import TrainConfig
from fl_core.types.values import Bundle, Progress, State, Tensors
from privacy.compiled_run import CompiledRun
from privacy.release_log import InMemoryReleaseLog
from silo.training.helpers import Helpers, HelpersRound, undivided
from tests.support.federations import METHOD_OPTIONS

TRAIN = TrainConfig(lr=0.05, batch_size=5, micro_batch=2, epochs=1, clip_norm=5.0)
"""Batches of five, in parts of two, two and one."""
PRIVATE = NamedOptions("dp_record", {"rng": "test", "epsilon": 8.0, "physical_batch": 8})
"""Samples of about twelve of fourteen records, in chunks of eight."""


def outcome(run: CompiledRun, helpers: Helpers) -> Mapping[str, object]:
    """Say how a run's steps are computed: shared, with both results and how many parts helpers did, or why not."""
    _ = run.silo_runtime()  # refuses what cannot be divided
    at_once = run.profile.made_up_step(0, CONTEXT.for_silo(0, 0), torch.device("cpu")).training
    if reason := undivided(run, at_once):
        return {"alone": reason}
    give_up(run, helpers)
    counted = Counted(helpers)
    first = [_round(run, broadcast(run), None, k, None).bundle for k in range(3)]
    alone, shared = two_rounds(run, first, None), two_rounds(run, first, counted)
    return {"shared": [alone, shared], "parts": counted.parts}


def give_up(run: CompiledRun, helpers: Helpers) -> None:
    """Have helpers begin a round that ends in its first step."""

    def stop(*_: int) -> None:
        raise TimeoutError

    with suppress(TimeoutError):
        _round(run, broadcast(run), None, 0, Counted(helpers), stop)


class Counted(Team):
    """Helpers, and the number of parts that they were given."""

    def __init__(self, helpers: Helpers) -> None:
        self.helpers, self.size, self.parts = helpers, helpers.size, 0
        self.collect, self.finish = helpers.collect, helpers.finish  # type: ignore[method-assign]

    def deal(self, params, parts) -> None:  # type: ignore[no-untyped-def]
        self.parts += len(parts)
        self.helpers.deal(params, parts)


def broadcast(run: CompiledRun, first: Sequence[Bundle] = ()) -> State:
    """Make the message of the first round, or after the first updates that of the second."""
    server = run.method.init_server(run.new_model(), CONTEXT)
    return run.method.broadcast(run.method.merge(server, merged_total(run.method, first), CONTEXT) if first else server)


def two_rounds(run: CompiledRun, first: Sequence[Bundle], team: Counted | None) -> list[dict[str, str]]:
    """Do a silo's rounds after those first updates; the second one has the state that the first one left."""
    msg, state = broadcast(run, first), None
    digests = []
    for _ in range(2):
        done = _round(run, msg, state, 0, team)
        state = done.state
        groups: dict[str, Tensors] = {part: {**p.total, "weight": p.weight} for part, p in done.bundle.items()}
        digests.append({name: tensor_maps.digest(values) for name, values in {**groups, **state}.items()})
    return digests


def _round(
    run: CompiledRun, msg: State, state: State | None, k: int, team: Counted | None, progress: Progress | None = None
) -> SiloRound:
    share, context, train = shares()[k], CONTEXT.for_silo(k, 0), run.manifest.train
    runtime, opened = replace(run.silo_runtime(), guards=()), run.profile.data_factory(k, InMemoryReleaseLog())
    data = opened(RoundData(share.train, share.test, train, context, progress=progress, team=team or Team()))
    if team is not None:
        private = run.profile.private_form
        round = HelpersRound(runtime, msg, state, train, context, TaskKind.TRAIN, 1, private, grouped=False)
        data = team.helpers.begin(data, round)
    return run_silo_round(runtime, msg, state, data, context, TaskKind.TRAIN)


def main() -> None:
    torch.set_num_threads(1)
    helpers = Helpers.fork(3, "cpu")
    assert helpers is not None
    outcomes: dict[str, object] = {}
    for name in METHODS:
        written = MethodCase(name, METHOD_OPTIONS.get(name, {})).manifest()
        try:
            outcomes[name] = outcome(CompiledRun.of(replace(written, train=TRAIN)), helpers)
        except ConfigError as error:
            outcomes[name] = {"refused": str(error)}
    train, members = replace(TRAIN, micro_batch=0, batch_size=12), make_members(NAMES, 3, 1.0, [14] * 3)
    for name in ("fedavg", "fedprox", "fedgela", "ditto"):
        written = MethodCase(name, METHOD_OPTIONS.get(name, {})).manifest()
        run = CompiledRun.of(replace(written, train=train, members=members, privacy=PRIVATE))
        outcomes[f"private {name}"] = outcome(run, helpers)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
