"""FedRS: the restricted softmax (RS-1 to RS-4) and its limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_core.methods.disjoint.fedrs import FedRS, restricted_ce, scaling
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from tests.support.federations import FED, SCHEMA, Given, same_bundle, shares

H = torch.tensor([[1, 2]], dtype=torch.float64)
W = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
COUNTS = torch.tensor([3, 4, 0], dtype=torch.float64)  # O = {0, 1}
Y = torch.tensor([1])


def grads(alpha: float, start: Tensor = W) -> tuple[float, Tensor, Tensor]:
    h, w = H.clone().requires_grad_(), start.clone().requires_grad_()
    loss = restricted_ce(h @ w.T, Y, scaling(COUNTS, alpha)).sum()
    dw, dh = torch.autograd.grad(loss, (w, h))
    return float(loss.detach()), dw, dh


def test_rs_1_softmax() -> None:
    loss, dw, _ = grads(1.0)
    assert loss == pytest.approx(1.4076060, abs=1e-6)
    assert dw[2].tolist() == pytest.approx([0.66524096, 1.33048191], abs=1e-7)


def test_rs_1_restricted() -> None:
    loss, dw, dh = grads(0.5)
    p = torch.softmax((H @ W.T) * scaling(COUNTS, 0.5), dim=1)
    assert p[0].tolist() == pytest.approx([0.18632372, 0.50648039, 0.30719589], abs=1e-7)
    assert loss == pytest.approx(0.6802697, abs=1e-6)
    assert dw.flatten().tolist() == pytest.approx(
        [0.18632372, 0.37264745, -0.49351961, -0.98703922, 0.15359794, 0.30719589], abs=1e-7
    )
    assert dh[0].tolist() == pytest.approx([0.33992167, -0.33992167], abs=1e-7)


def test_rs_1_alpha_zero_fixes_missing_rows() -> None:
    loss, dw, _ = grads(0.0)
    assert loss == pytest.approx(0.4076060, abs=1e-6)
    assert torch.equal(dw[2], torch.zeros(2, dtype=torch.float64))


def test_rs_2_at_zero_weights_the_gradient_is_alpha_times_the_softmax_one() -> None:
    _, half, _ = grads(0.5, torch.zeros_like(W))
    _, full, _ = grads(1.0, torch.zeros_like(W))
    assert half[2].tolist() == pytest.approx([1 / 6, 1 / 3], abs=1e-12)
    assert full[2].tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-12)
    assert torch.equal(half[:2], full[:2])


def test_rs_3_soft() -> None:
    a = scaling(torch.tensor([30, 10, 0], dtype=torch.float64), 0.5, "soft")
    assert a.tolist() == pytest.approx([1, 2 / 3, 1 / 2], abs=1e-12)
    assert float(restricted_ce(H @ W.T, Y, a)) == pytest.approx(1.0639835, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_rs_4_a_silo_with_all_classes_has_the_plain_softmax(alpha: float) -> None:
    g = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y, a = torch.tensor([0, 1, 2, 3, 1]), scaling(torch.tensor([1.0, 9.0, 2.0, 5.0]), alpha)
    ours, plain = restricted_ce(g, y, a), cross_entropy(g, y, reduction="none")
    assert torch.equal(ours, plain)
    assert torch.equal(torch.autograd.grad(ours.sum(), g)[0], torch.autograd.grad(plain.sum(), g)[0])


def test_alpha_zero_keeps_the_rows_of_missing_classes_in_training() -> None:
    share, context = shares()[1], FED.for_silo(1, 0)  # classes 1 and 2
    model = build_model("digits_cnn", {"head_bias": False}, SCHEMA, 0)
    msg = {"w": tensor_maps.copy_state(model)}
    data = PlainLocalData(
        RoundData(share.train, share.test, TrainConfig(lr=0.05, batch_size=4, epochs=2, weight_decay=0.0), context)
    )
    FedRS(alpha=0.0).local(model, msg, {}, data, context)
    rests = [
        torch.equal(a, b)
        for a, b in zip(tensor_maps.copy_state(model)["head.weight"], msg["w"]["head.weight"], strict=True)
    ]
    assert rests == [True, False, False, True]


def test_observed_classes_are_those_of_the_whole_set_and_not_of_the_batch() -> None:
    x, y = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0] * 4 + [3] * 4)
    context, model = FED.for_silo(0, 0), build_model("digits_cnn", {}, SCHEMA, 0)
    data = PlainLocalData(RoundData(Given(x, y), Given(x, y), TrainConfig(), context))
    loss = FedRS(alpha=0.5).objective(model, {}, data, context)
    a = torch.tensor([1.0, 0.5, 0.5, 1.0])
    expected = cross_entropy(a * model(x[:4]), y[:4], reduction="none")
    assert torch.equal(loss(model, x[:4], y[:4]).per_example, expected)


def test_evaluation_and_traffic_are_those_of_fedavg() -> None:
    share, context = shares()[0], FED.for_silo(0, 0)
    whole = Given(share.train.batch(torch.arange(4))[0], torch.arange(4))  # all classes: the softmax is plain
    bundles, msg = [], {"w": tensor_maps.copy_state(build_model("digits_cnn", {}, SCHEMA, 0))}
    for method in (FedRS(), FedAvg(weights="uniform")):
        data = PlainLocalData(RoundData(whole, whole, TrainConfig(), context))
        bundles.append(method.local(build_model("digits_cnn", {}, SCHEMA, 0), msg, {}, data, context).bundle)
    assert same_bundle(*bundles)
    x = torch.ones(1, 1, 8, 8)
    models = [m.global_model(build_model("digits_cnn", {}, SCHEMA, 0), msg) for m in (FedRS(), FedAvg())]
    assert torch.equal(models[0](x), models[1](x))
