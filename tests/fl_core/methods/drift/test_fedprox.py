"""FedProx on problem Q (T-PRX-1 to T-PRX-3) and mu = 0."""

from __future__ import annotations

import itertools

import pytest
import torch

from fl_core.methods.drift.fedprox import FedProx
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import RoundContext
from tests.support.federations import FED, SCHEMA, Exact, QData, Scalar, play, shares


@pytest.mark.parametrize(("mu", "first", "limit"), [(1, 0.4, 8 / 13), (10, 0.1428571429, 0.7586206897)])
def test_t_prx_1_exact_solve(mu: float, first: float, limit: float) -> None:
    path = play(FedProx(mu=mu), (Exact(1, 0), Exact(4, 1)), 130).path
    assert path[0] == pytest.approx(first, abs=1e-6)
    assert path[-1] == pytest.approx(limit, abs=1e-6)


def test_t_prx_1_huge_mu_stays_at_the_global_model() -> None:
    assert play(FedProx(mu=1e6), (Exact(1, 0), Exact(4, 1)), 1).path[0] == pytest.approx(1.999992e-6, rel=1e-6)


@pytest.mark.parametrize(("mu", "first", "limit"), [(1, 0.399609375, 0.6416687560), (5, None, 0.7272935260)])
def test_t_prx_2_gradient_descent(mu: float, first: float | None, limit: float) -> None:
    path = play(FedProx(mu=mu), (QData(1, 0), QData(4, 1)), 90).path
    if first is not None:
        assert path[0] == pytest.approx(first, abs=1e-6)
    assert path[-1] == pytest.approx(limit, abs=1e-6)


def test_t_prx_3_large_mu_diverges_with_explicit_steps() -> None:
    data, context = QData(1, 1), RoundContext(1, 2)
    FedProx(mu=25).local(Scalar(), {"w": {"w": torch.zeros(1, dtype=torch.float64)}}, {}, data, context.for_silo(0, 0))
    fixed = 1 / 26  # of a (w - b) + mu w
    distances = [abs(w - fixed) for w in data.path]
    factors = [after / before for before, after in itertools.pairwise(distances)]
    assert factors == pytest.approx([1.6] * 9)  # 1 - 0.1 (1 + 25) = -1.6


def test_pull_leaves_buffers_alone_and_shortens_the_way() -> None:
    share, context = shares()[0], FED.for_silo(0, 0)
    model = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    msg = {"w": tensor_maps.copy_state(model)}

    def moved(method: FedAvg) -> float:
        data = PlainLocalData(RoundData(share.train, share.test, TrainConfig(lr=0.05, batch_size=4, epochs=3), context))
        method.local(model, msg, {}, data, context)
        start = {name: msg["w"][name] for name in tensor_maps.trainable(model)}
        return float(tensor_maps.squared_distance(start, tensor_maps.copy_state(model)))

    assert moved(FedProx(mu=1.0)) < moved(FedAvg())
    assert any("running_mean" in name for name in msg["w"])
