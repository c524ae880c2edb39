"""FedLC and the calibrated losses: T-LC-1 to T-LC-3, balanced softmax, missing classes, and tau = 0."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_core.methods.disjoint.fedlc import FedLC, balanced_softmax, calibrated_ce, margin_shift, published_ce
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from tests.support.federations import FED, SCHEMA, Given, same, shares

COUNTS = torch.tensor([1, 16, 81, 256, 10000], dtype=torch.float64)
G = torch.tensor([[2, 1, 0.5, 0, -1]], dtype=torch.float64)


def label(c: int) -> Tensor:
    return torch.tensor([c])


def test_t_lc_1_losses_and_gradient() -> None:
    assert torch.allclose(-margin_shift(COUNTS, 1.0), torch.tensor([1, 0.5, 1 / 3, 0.25, 0.1], dtype=torch.float64))
    for y, calibrated, published, plain in (
        (0, 0.8961247967, 0.3716256878, 0.5744379396),
        (4, 2.9961247967, 2.9448521571, 3.5744379396),
    ):
        assert float(calibrated_ce(G, label(y), COUNTS, 1.0)) == pytest.approx(calibrated, abs=1e-9)
        assert float(published_ce(G, label(y), COUNTS, 1.0)) == pytest.approx(published, abs=1e-9)
        assert float(calibrated_ce(G, label(y), COUNTS, 0.0)) == pytest.approx(plain, abs=1e-9)
    g = G.clone().requires_grad_()
    (slope,) = torch.autograd.grad(calibrated_ce(g, label(0), COUNTS, 1.0).sum(), g)
    expected = [-0.5918517434, 0.2475544313, 0.1773805011, 0.1169364333, 0.0499803777]
    assert slope[0].tolist() == pytest.approx(expected, abs=1e-9)


def test_t_lc_2_missing_class_is_left_out_or_floored() -> None:
    counts = torch.tensor([100, 0, 400], dtype=torch.float64)
    g = torch.tensor([[1, 5, 0]], dtype=torch.float64, requires_grad=True)
    value = calibrated_ce(g, label(0), counts, 1.0)
    (slope,) = torch.autograd.grad(value.sum(), g)
    assert float(value.detach()) == pytest.approx(0.3390265509, abs=1e-9)
    assert slope[0].tolist() == pytest.approx([-0.2875364677, 0, 0.2875364677], abs=1e-9)
    assert slope[0, 1] == 0.0
    assert float(calibrated_ce(g.detach(), label(0), counts.clamp_min(1), 1.0)) == pytest.approx(3.3659081921, abs=1e-9)


def test_t_lc_3_equal_counts_are_plain_cross_entropy() -> None:
    for y in range(5):
        value = calibrated_ce(G, label(y), torch.full((5,), 30.0), 0.7)
        assert float(value.detach()) == pytest.approx(float(cross_entropy(G, label(y))), abs=1e-9)


def test_published_form_is_log_of_exp_minus_one_with_a_constant_slope() -> None:
    g = (3 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).requires_grad_()
    y = torch.tensor([0, 1, 2, 3, 4, 0])
    published = published_ce(g, y, COUNTS, 1.0)
    assert torch.allclose(published, torch.log(torch.expm1(calibrated_ce(g, y, COUNTS, 1.0))), atol=1e-9)
    (slope,) = torch.autograd.grad(published.sum(), g)
    assert torch.allclose(slope.gather(1, y.unsqueeze(1)), torch.full((6, 1), -1.0, dtype=torch.float64))
    assert torch.isfinite(published_ce(torch.tensor([[900.0, -900.0, 0, 0, 0]]), label(1), COUNTS, 1.0)).all()


def test_a_class_alone_has_a_loss_of_zero_without_gradient_in_both_forms() -> None:
    g, counts = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True), torch.tensor([0.0, 10.0, 0.0])
    for of in (calibrated_ce, published_ce):
        value = of(g, label(1), counts, 1.0)
        (slope,) = torch.autograd.grad(value.sum(), g)
        assert float(value.detach()) == 0.0
        assert torch.equal(slope, torch.zeros(1, 3))


def test_noisy_counts_cannot_take_an_example_its_own_class() -> None:
    g, counts = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([40.0, -3.0, 0.0])
    as_one = torch.tensor([40.0, 1.0, 0.0])
    for of in (calibrated_ce, published_ce, balanced_softmax):
        assert torch.equal(of(g, label(1), counts, 1.0), of(g, label(1), as_one, 1.0))
        assert torch.isfinite(of(g, label(1), counts, 1.0)).all()


@pytest.mark.parametrize(("missing", "rests"), [("mask", True), ("floor", False)])
def test_rows_of_missing_classes_rest_under_the_mask(missing: str, rests: bool) -> None:
    share, context = shares()[0], FED.for_silo(0, 0)  # classes 0 and 1 of 4
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    msg = {"w": tensor_maps.copy_state(model)}
    data = PlainLocalData(
        RoundData(share.train, share.test, TrainConfig(lr=0.05, batch_size=4, epochs=1, weight_decay=0.0), context)
    )
    FedLC(missing=missing).local(model, msg, {}, data, context)
    moved = (tensor_maps.copy_state(model)["head.weight"] - msg["w"]["head.weight"]).abs().sum(1)
    assert bool((moved[:2] > 0).all())
    assert bool((moved[2:] == 0).all()) is rests


@pytest.mark.parametrize(
    ("form", "missing", "learns"),
    [
        ("calibrated", "mask", False),
        ("published", "mask", False),
        ("calibrated", "floor", True),
    ],
)
def test_silo_with_one_class_learns_nothing_under_the_mask_and_is_warned(
    form: str, missing: str, learns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    only = Given(torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.full((5,), 2))
    context, model = FED.for_silo(0, 0), build_model("digits_cnn", {}, SCHEMA, 0)
    msg = {"w": tensor_maps.copy_state(model)}
    with caplog.at_level(logging.WARNING):
        data = PlainLocalData(RoundData(only, only, TrainConfig(weight_decay=0.0), context))
        FedLC(form=form, missing=missing).local(model, msg, {}, data, context)
    assert same(tensor_maps.copy_state(model), msg["w"]) is not learns
    assert ("only one class" in caplog.text) is not learns


def test_evaluation_sees_plain_logits() -> None:
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    msg, x = {"w": tensor_maps.copy_state(model)}, torch.ones(1, 1, 8, 8)
    assert torch.equal(FedLC().global_model(model, msg)(x), FedAvg().global_model(model, msg)(x))
