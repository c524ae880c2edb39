"""The round loop: who takes part, what is said of a round, and what a resumed run computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from consilium.research.engines.in_process import InProcessSilo, local_ports
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds import sampling
from fl_core.rounds.engine import Observer
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import SiloRuntime
from fl_core.rounds.updates import PlainSums
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import LocalData, SiloPort
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, LocalResult, Part, RoundContext, State
from tests.support.federations import NAMES, SCHEMA, Failing, Kept, go, manifest, same, shares


def test_rounds_evaluate_what_they_broadcast_and_end_with_an_evaluation() -> None:
    final, kept = go(manifest(rounds=3))
    assert [(r.round, r.kind) for r in kept.records] == [
        (0, TaskKind.TRAIN),
        (1, TaskKind.TRAIN),
        (2, TaskKind.TRAIN),
        (3, TaskKind.EVALUATE),
    ]
    assert same(kept.states[2]["w"], final["w"])
    assert sum(kept.records[0].examples) == sum(len(s.test) for s in shares())
    assert len(kept.accuracies) == 4
    assert kept.seen[0] == (0, TaskKind.TRAIN, NAMES)
    assert kept.came.count("north") == 4


def test_accuracy_is_over_the_union_of_the_test_sets() -> None:
    record = RoundRecord(0, TaskKind.TRAIN, (3.0, 0.0, 1.0), (4.0, 0.0, 6.0), ("a",))
    assert record.accuracy == 0.4
    assert record.class_accuracy() == [0.75, None, 1 / 6]
    assert RoundRecord(0, TaskKind.TRAIN, (0.0,), (0.0,), ()).accuracy == -1


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedmr"])
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_resumed_run_equals_the_straight_run_bit_for_bit(method: str, start: int) -> None:
    run = manifest(method, rounds=3, cohort=2)
    straight, kept = go(run)
    resumed, again = go(run, start=start, state=kept.states[start - 1])
    assert all(same(resumed[group], straight[group]) for group in straight)
    assert again.accuracies == kept.accuracies[start:]


def test_parallel_ports_give_the_same_bits() -> None:
    run = manifest("fedmr")
    # Ports of one runtime share a scratch model, so each gets a runtime of its own.
    ports = [local_ports(RunSetup.of(run), shares())[k] for k in range(3)]
    assert same(go(run, ports, parallel=3)[0]["w"], go(run)[0]["w"])


def test_cohorts_are_sampled_without_replacement_and_repeat() -> None:
    drawn = [sampling.sample_cohort(3, t, 10, 4) for t in range(50)]
    assert drawn == [sampling.sample_cohort(3, t, 10, 4) for t in range(50)]
    assert all(len(set(ids)) == 4 and ids == sorted(ids) for ids in drawn)
    assert {k for ids in drawn for k in ids} == set(range(10))
    assert len({tuple(ids) for ids in drawn}) > 20
    assert sampling.sample_cohort(3, 0, 5, 0) == sampling.sample_cohort(3, 0, 5, 5) == list(range(5))
    with pytest.raises(ConfigError) as caught:
        sampling.sample_cohort(0, 0, 3, 4)
    assert caught.value.code == "E-CFG-02"


def test_only_the_cohort_trains_and_all_silos_are_evaluated_at_the_end() -> None:
    _, kept = go(manifest(cohort=2, rounds=4))
    asked = [names for _, _, names in kept.seen]
    assert all(len(names) == 2 for names in asked[:4])
    assert asked[4] == NAMES
    assert len(set(asked[:4])) > 1


def test_values_that_the_grid_cuts_off_are_reported() -> None:
    run = manifest(rounds=1, aggregator="mean")
    ports: list[SiloPort] = list(local_ports(RunSetup.of(run), shares()))

    class Huge(Failing):
        def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
            bundle = dict(self._inner.round(msg, context, kind))
            if kind is TaskKind.TRAIN:
                total = {k: v.clone() for k, v in bundle["delta"].total.items()}
                total["head.bias"] = torch.full_like(total["head.bias"], 1e12)
                bundle["delta"] = Part(total, bundle["delta"].weight)
            return bundle

    ports[0] = Huge(ports[0], [])
    _, kept = go(run, ports)
    assert [r.clipped for r in kept.records] == [4, 0]


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """Keeps the number of rounds that its silo believes to be part of, and shows each one its own sum."""

    server_tracks_state: ClassVar[bool] = True

    @property
    def unsummed_parts(self) -> frozenset[str]:
        return frozenset({"rounds"})

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:
        del model, context
        return {"own": {"rounds": torch.zeros(1)}}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        done = {"own": {"rounds": silo["own"]["rounds"] + 1}}
        bundle = super().local(model, msg, silo, data, context).bundle
        return LocalResult({**bundle, "rounds": Part.of(done["own"], 1.0 + context.silo)}, done)

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        seen = {**server, "seen": {"rounds": total["rounds"].total["rounds"], "weight": total["rounds"].weight}}
        return super().merge(seen, total, context)


@pytest.mark.parametrize("tracked", [True, False])
def test_a_tracked_silo_state_is_committed_only_when_the_round_names_the_silo(tracked: bool) -> None:
    method = type("Sub", (Counting,), {"server_tracks_state": tracked})()
    run = manifest("fedavg", rounds=4)
    runtime = RunSetup.of(run).silo_runtime()
    layout = derive_layout(method, runtime.model, SCHEMA)
    ports = [
        InProcessSilo(run, k, shares()[k], SiloRuntime(method, runtime.model, layout)) for k in range(len(run.members))
    ]
    spoilt = [ports[0], Failing(ports[1], [1], spoil=True), ports[2]]  # an update that was made, and was not included
    sums = PlainSums(unsummed=method.unsummed_parts)
    engine = replace(RunSetup.of(replace(run, layout=layout, quorum=2)).round_loop(spoilt, 1), method=method, sums=sums)
    final = engine.run(method.init_server(runtime.model, engine_fed(run)), Observer())
    rounds = final["seen"]["rounds"].flatten() / final["seen"]["weight"]
    assert rounds.tolist() == ([4, 3, 4] if tracked else [4, 4, 4])
    assert final["seen"]["weight"].tolist() == [1, 2, 3]  # one by one, in the roster's order


def engine_fed(run: RunManifest) -> RoundContext:
    return RoundContext(len(run.members), len(run.schema.classes), run.rounds)


class Keeping(FedAvg):
    """FedAvg whose server keeps the mean as it gets it."""

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        return {**super().merge(server, total, context), "mean": total["delta"].mean()}


def test_a_server_state_holds_tensors_and_nothing_deferred() -> None:
    run, kept = manifest(rounds=1), Kept()
    engine = replace(RunSetup.of(run).round_loop(local_ports(RunSetup.of(run), shares()), 1), method=Keeping())
    before = RunSetup.of(run).initial_state()
    engine.run(before, kept)
    mean = kept.states[0]["mean"]
    assert isinstance(mean, dict)
    for name, value in kept.states[0]["w"].items():
        assert torch.equal(value, before["w"][name] + mean[name])
