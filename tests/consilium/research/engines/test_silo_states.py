"""What a silo keeps of a round: private state survives a lost update, tracked and diverged state does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from consilium.research.engines.in_process import InProcessSilo, MemoryStateStore, RoundHistory, local_ports, simulate
from fl_core.errors import FederationError
from fl_core.methods import METHODS, build_method
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Method
from fl_core.types.records import TrainConfig
from fl_core.types.values import Bundle, Part, RoundContext, State
from protos.wire.tasks import TaskKey
from service_core.storage.object_store import ObjectStore
from silo.storage.outbox import Outbox, TrainingResult
from silo.storage.store import SiloStore
from silo.storage.tasks import LocalEvaluation
from tests.support.federations import FED, NAMES, manifest, same, shares

KEEPERS = ("local", "fedper", "fedrep", "ditto", "fedrod", "fedproto")
OPTIONS: Mapping[str, Mapping[str, int]] = {"fedrep": {"head_epochs": 1}}


class Deaf(InProcessSilo):
    """A silo whose update of round 1 is spoilt on its way."""

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        bundle = super().round(msg, context, kind)
        return {**bundle, "more": Part({}, torch.zeros(()))} if context.round == 1 else bundle


def state_of(port: InProcessSilo) -> State:
    state = port.state
    assert state is not None
    return state


class Watched(MemoryStateStore):
    """States of which the one that is staged can be looked at."""

    def staged(self, silo: int) -> State:
        return self._staged[silo]


@pytest.mark.parametrize("name", KEEPERS)
def test_private_state_of_a_lost_update_is_kept(name: str) -> None:
    run = manifest(name, OPTIONS.get(name, {}), rounds=2, quorum=2)
    ports = local_ports(RunSetup.of(run), shares())
    runtime = RunSetup.of(run).silo_runtime()
    ports[2] = Deaf(run, 2, shares()[2], runtime)
    server, seen = RunSetup.of(run).initial_state(), []
    for t in range(2):
        history = RoundHistory()
        server = RunSetup.of(run).round_loop(ports, 1).round(server, t, TaskKind.TRAIN, history)[0]
        seen.append(state_of(ports[2]))
    assert list(history.records[0].missing) == ["south"]
    group = next(iter(seen[0]))
    assert not same(seen[0][group], seen[1][group])


@pytest.mark.parametrize("name", KEEPERS)
def test_state_of_a_diverged_round_is_rolled_back(name: str) -> None:
    """The update is refused, and the silo goes on from what it had."""
    run = manifest(name, OPTIONS.get(name, {}), train=TrainConfig(batch_size=4, epochs=1, lr=0.01))
    port = local_ports(RunSetup.of(run), shares())[0]
    msg = RunSetup.of(run).method.broadcast(RunSetup.of(run).initial_state())
    port.round(msg, FED, TaskKind.TRAIN)
    port.settle(FED, TaskKind.TRAIN, True)
    before = state_of(port)
    port.manifest = replace(run, train=TrainConfig(batch_size=4, epochs=2, lr=1e30, momentum=0.0))
    port.round(msg, FED, TaskKind.TRAIN)
    port.settle(FED, TaskKind.TRAIN, False)
    assert all(same(state_of(port)[group], before[group]) for group in before)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("included", [True, False])
def test_the_real_silo_keeps_what_the_simulated_one_keeps(
    tmp_path: Path, included: bool, tracked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = manifest("ditto")
    port, states = local_ports(RunSetup.of(run), shares())[0], Watched()
    port.states = states
    method: Method = RunSetup.of(run).method
    monkeypatch.setattr(type(method), "server_tracks_state", tracked)
    outbox = Outbox(SiloStore(tmp_path / "silo.db"), ObjectStore(tmp_path / "objects"), NAMES[0])
    bundle = port.round(method.broadcast(RunSetup.of(run).initial_state()), FED, TaskKind.TRAIN)
    staged, key = states.staged(0), TaskKey("run-1", FED.round, TaskKind.TRAIN)
    outbox.begin(
        key, "a" * 64, "b" * 64, TrainingResult(bundle, staged, LocalEvaluation((), (), ()), method.server_tracks_state)
    ).finish()
    outbox.store.close(key, included)
    port.settle(FED, TaskKind.TRAIN, included)
    found = outbox.state("run-1")
    assert (found is None) is (states.get(0) is None) is (tracked and not included)
    assert found is None or same(found["v"], state_of(port)["v"])


@pytest.mark.integration
@pytest.mark.parametrize("name", METHODS)
def test_a_method_without_a_global_model_says_so_in_every_round(name: str) -> None:
    run, history = manifest(name, OPTIONS.get(name, {}), rounds=1), RoundHistory()
    simulate(RunSetup.of(run), shares(), history)
    measured = build_method(name, OPTIONS.get(name, {})).has_global_model
    assert measured is (name not in ("local", "fedproto"))
    assert [a >= 0 for a in history.accuracies] == [measured] * 2


def test_a_refusal_of_a_diverged_update_names_it() -> None:
    run = manifest("fedper", train=TrainConfig(batch_size=4, epochs=2, lr=1e30, momentum=0.0), rounds=1)
    with pytest.raises(FederationError, match="E-WIRE-05"):
        simulate(RunSetup.of(run), shares(), RoundHistory())
