"""Ditto on problem Q (T-DIT-1, T-DIT-2), and a global model that is FedAvg's."""

from __future__ import annotations

import pytest
import torch

from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.ditto import Ditto
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from tests.support.federations import FED, SCHEMA, Exact, QData, Scalar, same, shares


def number(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"w": {"w": torch.tensor([value], dtype=torch.float64)}}


def personal(method: Ditto, data: QData, v: float, w: float = 0.8) -> float:
    left = method.local(Scalar(), number(w), {"v": number(v)["w"]}, data, FED.for_silo(0, 0)).state
    return float(left["v"]["w"])


@pytest.mark.parametrize(
    ("strength", "first", "second"),
    [(0.75, 0.3428571429, 0.9684210526), (1, 0.4, 0.96), (1e6, 0.7999992000, 0.8000008000)],
)
def test_t_dit_1_exact_solve_around_the_received_model(strength: float, first: float, second: float) -> None:
    found = [personal(Ditto(lambda_v=strength), Exact(a, b), 0.0) for a, b in ((1, 0), (4, 1))]
    assert found == pytest.approx([first, second], abs=1e-6)


@pytest.mark.parametrize(("steps", "value"), [(1, 0.46), (2, 0.7015), (3, 0.8282875)])
def test_t_dit_2_steps_pull_to_the_received_model_not_to_the_trained_one(steps: int, value: float) -> None:
    assert personal(Ditto(lambda_v=0.75), QData(4, 1, steps=steps), 0.0) == pytest.approx(value, abs=1e-6)


def test_without_a_pull_the_personal_model_trains_alone() -> None:
    assert personal(Ditto(lambda_v=0), QData(4, 1), 0.0) == pytest.approx(0.9939533824, abs=1e-6)
    assert personal(Ditto(lambda_v=0), QData(4, 1), 0.5, w=7.0) == pytest.approx(1 - 0.5 * 0.0060466176, abs=1e-6)


def test_a_pull_beyond_the_step_size_diverges() -> None:
    assert abs(personal(Ditto(lambda_v=25), QData(1, 1), 0.0)) > 10  # 0.1 (1 + 25) > 2


def test_the_personal_model_has_its_own_buffers_and_epochs() -> None:
    share, context = shares()[0], FED.for_silo(0, 0)
    model = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    msg, silo = {"w": tensor_maps.copy_state(model)}, Ditto().init_silo(model, FED)
    states = {}
    for epochs in (0, 3):
        data = PlainLocalData(RoundData(share.train, share.test, TrainConfig(batch_size=4, epochs=1), context))
        method = Ditto(personal_epochs=epochs)
        states[epochs] = method.local(model, msg, silo, data, context).state["v"]
        own = method.personal(
            build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 1), msg, {"v": states[epochs]}, data, context
        )
        assert same(tensor_maps.copy_state(own), states[epochs])
    plain = FedAvg().local(
        model,
        msg,
        {},
        PlainLocalData(RoundData(share.train, share.test, TrainConfig(batch_size=4, epochs=1), context)),
        context,
    )
    buffer = "body.1.running_mean"
    assert buffer in states[0]
    assert not torch.equal(states[0][buffer], msg["w"][buffer])
    assert not torch.equal(states[0][buffer], tensor_maps.add(msg["w"], plain.bundle["delta"].mean())[buffer])
    assert not same(states[0], states[3])
    assert same(silo["v"], msg["w"])  # the stored one is not written over
