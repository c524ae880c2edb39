"""MAP: its two stages (MAP-1 to MAP-5), what leaves the silo, and its limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_core.methods.disjoint.fedrs import FedRS, restricted_ce, scaling
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.map_ import Map
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, LocalResult, SgdOptions, State
from tests.support.federations import FED, SCHEMA, same, same_bundle, shares

TURN = FED.for_silo(0, 0)
TRAIN = TrainConfig(lr=0.05, batch_size=5, epochs=2)  # 14 examples: 3 batches an epoch


def model_of(norm: str = "batch") -> nn.Module:
    return build_model("digits_cnn", {"norm": norm, "head_bias": False}, SCHEMA, 0)


class Watched(PlainLocalData):
    """Notes every pass: its steps, rate, and the model after it."""

    def __init__(self, train: TrainConfig = TRAIN) -> None:
        super().__init__(RoundData(shares()[0].train, shares()[0].test, train, TURN))
        self.passes: list[tuple[int, float, dict[str, Tensor], Tensor]] = []

    def sgd(self, model: nn.Module, loss: Any, options: SgdOptions = AS_SCHEDULED) -> int:
        x, y = shares()[0].train.batch(torch.arange(14))
        model.eval()
        value = loss(model, x, y).per_example.detach()
        taken = super().sgd(model, loss, options)
        self.passes.append((taken, options.lr_scale, tensor_maps.copy_state(model), value))
        return taken


def play(method: FedAvg, silo: State | None = None, train: TrainConfig = TRAIN, norm: str = "batch"):  # type: ignore[no-untyped-def]
    model, data = model_of(norm), Watched(train)
    msg = method.broadcast(method.init_server(model_of(norm), FED))
    return method.local(model, msg, silo or {}, data, TURN), data, tensor_maps.copy_state(model), msg["w"]


def uploaded(outcome: LocalResult, start: State | Any) -> dict[str, Tensor]:
    return tensor_maps.add(start, outcome.bundle["delta"].mean())


@pytest.mark.parametrize(
    ("train", "stages", "steps"),
    [
        (TRAIN, "paper", [3, 3]),
        (replace(TRAIN, epochs=1), "paper", [2, 1]),
        (replace(TRAIN, max_steps=3), "paper", [2, 1]),
        (replace(TRAIN, max_steps=1), "paper", [1]),
        (TRAIN, "code", [6, 5]),
        (replace(TRAIN, epochs=20), "code", [60, 6]),
    ],
)
def test_map_1_steps_of_the_stages(train: TrainConfig, stages: str, steps: list[int]) -> None:
    _, data, _, _ = play(Map(stages=stages), train=train, norm="group")
    assert [taken for taken, *_ in data.passes] == steps
    assert [rate for _, rate, *_ in data.passes] == [1.0, 0.2 if stages == "code" else 1.0][: len(steps)]


def test_map_1_the_first_stage_is_restricted_and_the_second_is_not() -> None:
    _, data, _, start = play(Map(alpha=0.5))
    model, (x, y) = model_of().eval(), shares()[0].train.batch(torch.arange(14))
    a = scaling(torch.tensor([7.0, 7.0, 0.0, 0.0]), 0.5)
    tensor_maps.load_state(model, start)
    assert torch.allclose(data.passes[0][3], restricted_ce(model(x), y, a))
    tensor_maps.load_state(model, data.passes[0][2])
    plain = restricted_ce(model(x), y, torch.ones(4))
    assert torch.allclose(data.passes[1][3], plain)
    assert not torch.allclose(data.passes[1][3], restricted_ce(model(x), y, a))


def test_map_2_uploads_the_snapshot_with_its_statistics_and_nothing_later() -> None:
    outcome, data, left, start = play(Map())
    snapshot = data.passes[0][2]
    sent = uploaded(outcome, start)
    assert set(outcome.bundle) == {"delta"}
    assert all(torch.allclose(sent[name], v, atol=1e-6) for name, v in snapshot.items())
    assert all(not torch.allclose(v, left[name], atol=1e-6) for name, v in sent.items() if "running_" in name)
    exact = {name: v - start[name] for name, v in snapshot.items()}
    assert same(outcome.bundle["delta"].total, exact)  # weight 1: the delta itself
    assert not same(snapshot, left)


def test_map_2_a_teacher_changes_what_is_kept_and_not_what_is_sent() -> None:
    first = play(Map())[0]
    taught, alone = play(Map(lam=0.9), first.state)[0], play(Map(lam=0.0), first.state)[0]
    assert same_bundle(taught.bundle, alone.bundle)
    assert not same(taught.state["inherited"], alone.state["inherited"])


def test_map_3_without_restriction_and_transfer_it_sends_fedavg_of_half_the_epochs() -> None:
    sent = play(Map(alpha=1.0, lam=0.0))[0].bundle
    assert same_bundle(sent, play(FedAvg(weights="uniform"), train=replace(TRAIN, epochs=1))[0].bundle)
    assert not same_bundle(sent, play(Map(alpha=0.5, lam=0.0))[0].bundle)
    restricted = play(FedRS(alpha=0.5), train=replace(TRAIN, epochs=1))[0].bundle
    assert same_bundle(play(Map(alpha=0.5))[0].bundle, restricted)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_map_4_first_private_model_is_the_trained_one_bitwise(norm: str) -> None:
    outcome, _, left, _ = play(Map(), norm=norm)
    assert same(outcome.state["inherited"], left)
    assert float(outcome.state["participations"]["n"]) == 1


def test_map_5_a_class_counts_as_observed_from_its_first_example() -> None:
    assert scaling(torch.tensor([50.0, 50.0, 0.0]), 0.3).tolist() == pytest.approx([1, 1, 0.3])
    assert scaling(torch.tensor([1.0, 99.0, 0.0]), 0.3).tolist() == pytest.approx([1, 1, 0.3])


def test_every_stage_has_an_optimizer_of_its_own() -> None:
    """With momentum, two passes of one step differ from one pass of two: the second starts at rest."""
    train = TrainConfig(lr=0.05, batch_size=14, epochs=2, momentum=0.9, weight_decay=0.0)
    _, _, left, start = play(Map(alpha=1.0, lam=0.0), train=train, norm="group")
    model = model_of("group")
    tensor_maps.load_state(model, start)
    data = Watched(train)
    data.sgd(model, FedAvg.loss, SgdOptions(steps=1))
    data.sgd(model, FedAvg.loss, SgdOptions(steps=1))
    assert same(left, tensor_maps.copy_state(model))


def test_personal_model_is_the_private_one() -> None:
    method = Map()
    outcome, data, _, _ = play(method, play(method)[0].state)
    personal = method.personal(model_of(), {}, outcome.state, data, TURN)
    assert method.has_personal_model
    assert same(tensor_maps.copy_state(personal), outcome.state["inherited"])
