"""FedAvg on problem Q (T-AVG-1 to T-AVG-3) and its limits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Part
from fl_core.validate import UnitInterval
from tests.support.federations import FED, SCHEMA, QData, play, same, shares

Q = (QData(1, 0), QData(4, 1))


def test_t_avg_1_mean_is_weighed_by_examples() -> None:
    zero = {"w": torch.zeros(1)}
    total = Part.of({"w": torch.tensor([2.0])}, 1) + Part.of({"w": torch.tensor([6.0])}, 3)
    assert FedAvg().merge({"w": zero}, {"delta": total}, FED)["w"]["w"].tolist() == [5.0]
    sized = (QData(1, 2, n=1, steps=400), QData(1, 6, n=3, steps=400))  # each goes to its own optimum
    assert play(FedAvg(), sized, 1).path == pytest.approx([5], abs=1e-6)


def test_t_avg_2_on_q_drifts_to_the_wrong_point() -> None:
    path = play(FedAvg(), Q, 60).path
    assert path[:4] == pytest.approx([0.4969766912, 0.5851217339, 0.6007553616, 0.6035281814], abs=1e-6)
    r = [(1 - 0.1 * a) ** 10 for a in (1, 4)]
    limit = (1 - r[1]) / ((1 - r[0]) + (1 - r[1]))
    assert limit == pytest.approx(0.6041260077)
    assert path[-1] == pytest.approx(limit, abs=1e-6)


def test_t_avg_3_identical_silos_are_centralised_training() -> None:
    w = 0.0
    for _ in range(10):
        w -= 0.1 * 4 * (w - 1)
    assert play(FedAvg(), [QData(4, 1)] * 3, 1).path == pytest.approx([w], abs=1e-7)


def test_one_silo_with_real_images_is_plain_sgd() -> None:
    share, context = shares()[0], FED.for_silo(0, 3)
    config = TrainConfig(lr=0.05, batch_size=4, epochs=2)
    start = tensor_maps.copy_state(build_model("digits_cnn", {}, SCHEMA, 0))
    model, server = build_model("digits_cnn", {}, SCHEMA, 1), {"w": start}
    data = PlainLocalData(RoundData(share.train, share.test, config, context))
    bundle = FedAvg().local(model, server, {}, data, context).bundle
    after = FedAvg().merge(server, bundle, FED)["w"]
    alone = build_model("digits_cnn", {}, SCHEMA, 0)
    PlainLocalData(RoundData(share.train, share.test, config, context)).sgd(alone, FedAvg.loss)
    assert all(torch.allclose(after[name], v, atol=1e-6) for name, v in tensor_maps.copy_state(alone).items())
    assert not same(after, start)


def test_personal_model_is_the_locally_trained_one() -> None:
    share, context = shares()[0], FED.for_silo(0, 3)
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    msg = {"w": tensor_maps.copy_state(model)}

    def data() -> PlainLocalData:
        return PlainLocalData(RoundData(share.train, share.test, TrainConfig(batch_size=4, epochs=1), context))

    left = FedAvg().local(model, msg, {}, data(), context).state
    personal = tensor_maps.copy_state(FedAvg().personal(model, msg, left, data(), context))
    tensor_maps.load_state(model, msg["w"])
    data().sgd(model, FedAvg.loss)
    assert same(personal, tensor_maps.copy_state(model))


def test_a_wrong_option_of_a_method_of_ones_own_is_named_after_its_class() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Smoothed(FedAvg):
        smoothing: UnitInterval = 0.1

    with pytest.raises(ConfigError, match=r"Smoothed\.smoothing: expected a number from 0 to 1"):
        Smoothed(smoothing=2)
