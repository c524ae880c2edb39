"""CReFF: gradient distance and class gradients (T-CRF-1, T-CRF-2), federated features, the classifier trained anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core import rng
from fl_core.methods.disjoint.creff import (
    CReFF,
    class_gradient,
    distance,
    matched,
    outer_gradient,
    train_head,
)
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from tests.support.federations import FED, SCHEMA, Given, manifest, same, shares

pytestmark = pytest.mark.integration

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)
SMALL = {"features": 6, "feature_steps": 5, "epochs": 4, "batch": 8}
PSI = {"weight": torch.eye(2, dtype=torch.float64), "bias": torch.zeros(2, dtype=torch.float64)}


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_t_crf_1_distance() -> None:
    a, b = rows([1, 0], [0, 2]), rows([1, 1], [0, 1])
    assert float(distance(a, b, bias=False)) == pytest.approx(0.2928942188, abs=1e-9)
    assert float(distance(a, a, bias=False)) == pytest.approx(1.25e-6, abs=1e-10)
    assert float(distance(a, -a, bias=False)) == pytest.approx(3.99999875, abs=1e-9)
    assert float(distance(a, rows([1, 0], [0, 0]), bias=False)) == pytest.approx(1, abs=2e-6)


def test_t_crf_2_class_gradients_and_what_they_give_away() -> None:
    zero = torch.tensor([0, 0])
    a = outer_gradient(rows([1, 0], [0, 1]), zero, PSI).mean(0)
    assert a[0].tolist() == pytest.approx([-0.1344707107, -0.3655292893, -0.5], abs=1e-9)
    assert a[1].tolist() == pytest.approx([0.1344707107, 0.3655292893, 0.5], abs=1e-9)
    assert (a[0, :2] / a[0, 2]).tolist() == pytest.approx([0.2689414214, 0.7310585786], abs=1e-9)
    b = outer_gradient(rows([2, 0]), zero[:1], PSI)[0]
    assert b[0].tolist() == pytest.approx([-0.2384058440, 0, -0.1192029220], abs=1e-9)
    assert (b[0, :2] / b[0, 2]).tolist() == pytest.approx([2, 0], abs=1e-9)  # one example: its very feature
    mean = (a + b) / 2
    assert mean[0].tolist() == pytest.approx([-0.1864382774, -0.1827646447, -0.3096014610], abs=1e-9)
    for feature, apart in (([0.5, 0.5], 0.0001238944), ([1.0, 0.0], 0.5718118133)):
        made = class_gradient(rows(feature, [0, 0]).unsqueeze(1), PSI)[0]
        assert float(distance(made, mean, bias=True)) == pytest.approx(apart, abs=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_equal_those_of_autograd(bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    head = {"weight": torch.randn(3, 4, generator=draw).double().requires_grad_()}
    if bias:
        head["bias"] = torch.randn(3, generator=draw).double().requires_grad_()
    z = torch.randn(3, 5, 4, generator=draw).double()
    made = class_gradient(z, head)
    for c in range(3):
        loss = cross_entropy(linear(z[c], head["weight"], head.get("bias")), torch.full((5,), c))
        slopes = torch.autograd.grad(loss, list(head.values()))
        expected = torch.cat([slopes[0], slopes[1].unsqueeze(1)], 1) if bias else slopes[0]
        assert torch.allclose(made[c], expected)
        assert torch.allclose(outer_gradient(z[c], torch.full((5,), c), head).mean(0), expected)


def test_features_move_towards_known_gradients_and_others_stay() -> None:
    draw = torch.Generator().manual_seed(0)
    head = {"weight": torch.randn(3, 4, generator=draw), "bias": torch.randn(3, generator=draw)}
    target = class_gradient(1 + torch.randn(3, 5, 4, generator=draw), head)
    z, known = torch.randn(3, 6, 4, generator=draw), torch.tensor([True, False, True])
    moved = matched(z, head, target, known, 50, 0.1)
    before, after = (distance(class_gradient(v, head), target, bias=True) for v in (z, moved))
    assert torch.equal(moved[1], z[1])
    assert bool((after[known] < 0.5 * before[known]).all())


@pytest.mark.parametrize("bias", [True, False])
def test_a_classifier_trained_anew_tells_the_features_apart(bias: bool) -> None:
    z = 3 * torch.eye(3, 5).unsqueeze(1) + 0.1 * torch.randn(3, 20, 5, generator=torch.Generator().manual_seed(0))
    head, again = (train_head(z, bias, 60, 0.1, 16, rng.stream(0, "x")) for _ in range(2))
    assert set(head) == ({"weight", "bias"} if bias else {"weight"})
    assert same(head, again)
    answers = linear(z.flatten(0, 1), head["weight"], head.get("bias")).argmax(1)
    assert torch.equal(answers, torch.arange(3).repeat_interleave(20))


def test_silos_measure_before_training_each_class_by_all_its_examples() -> None:
    method, model, share = CReFF(**SMALL), build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0), shares()[1]
    server = method.init_server(model, FED)
    psi = {name: v + 0.1 for name, v in server["head"].items()}
    context = FED.for_silo(1, 0)
    data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
    part = method.local(model, {**method.broadcast(server), "head": psi}, {}, data, context).bundle["class_gradients"]
    clean = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0).eval()
    x, y = share.train.batch(torch.arange(len(share.train)))
    assert part.weight.tolist() == [0, 1, 1, 0]
    for c in (1, 2):
        z = clean.features(x[y == c]).detach()
        expected = outer_gradient(z, y[y == c], psi).mean(0)
        assert torch.allclose(part.total["g"][c], expected, atol=1e-6)
    assert not part.total["g"][0].any()


def test_models_are_fedavgs_and_the_global_model_has_the_new_head() -> None:
    ours, plain = RoundHistory(), RoundHistory()
    final = simulate(RunSetup.of(manifest("creff", SMALL, train=TRAIN)), shares(), ours)
    fedavg = simulate(RunSetup.of(manifest(train=TRAIN)), shares(), plain)
    assert same(final["w"], fedavg["w"])
    assert ours.accuracies[0] == plain.accuracies[0]  # the first head is the model's own
    method, model = CReFF(**SMALL), build_model("digits_cnn", {}, SCHEMA, 0)
    used = tensor_maps.copy_state(method.global_model(model, method.broadcast(final)))
    assert same({n: used[f"head.{n}"] for n in ("weight", "bias")}, final["head"])
    assert same(
        {n: v for n, v in used.items() if not n.startswith("head.")},
        {n: v for n, v in fedavg["w"].items() if not n.startswith("head.")},
    )
    assert same(method.exported(final), used)
    assert not same(final["head"], {n: fedavg["w"][f"head.{n}"] for n in ("weight", "bias")})


def test_the_new_head_learns() -> None:
    history = RoundHistory()
    options = {"features": 30, "feature_steps": 100, "epochs": 100, "lr": 0.1, "batch": 32}
    simulate(RunSetup.of(manifest("creff", options, train=TRAIN, rounds=5)), shares(), history)
    assert max(history.accuracies[1:]) > history.accuracies[0] + 0.2


def test_a_round_without_any_class_changes_nothing() -> None:
    method, model = CReFF(**SMALL), build_model("digits_cnn", {}, SCHEMA, 0)
    server, share, context = method.init_server(model, FED), shares()[0], replace(FED, round=0).for_silo(0, 0)
    none = Given(share.train.batch(torch.arange(0))[0], torch.zeros(0).long())
    part = method._gradients(model, server["head"], PlainLocalData(RoundData(none, none, TRAIN, context)))
    assert not part.weight.any()
    assert not part.total["g"].any()
