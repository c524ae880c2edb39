"""FedGELA: GE-2 to GE-6, its parts alone, and what leaves a silo."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from consilium.research.engines.in_process import RoundHistory, SiloShare, simulate
from fl_core.methods.disjoint.fedgela import FRAME, FedGELA, adaptation, frame_of
from fl_core.methods.shared import class_vectors
from fl_core.models import build_model
from fl_core.models.split_model import SplitModel
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import Method, RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import LocalResult, RoundContext
from tests.support.federations import FED, SCHEMA, Given, manifest, same, shares

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)
FLOAT64 = {"dtype": torch.float64}


def model_of(seed: int = 0) -> SplitModel:
    return build_model("digits_cnn", {"norm": "batch"}, SCHEMA, seed)


def played(
    method: Method, share: SiloShare, k: int = 0
) -> tuple[SplitModel, LocalResult, PlainLocalData, RoundContext]:
    """Train one silo for one round from the start of a run."""
    model, context = model_of(), FED.for_silo(k, 0)
    server = method.init_server(model_of(), FED)
    data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
    outcome = method.local(model, method.broadcast(server), method.init_silo(model_of(), FED), data, context)
    return model, outcome, data, context


@pytest.mark.parametrize(
    ("c", "s", "loss"), [(3, 1, 0.3689811), (3, 10, 6.11805e-7), (10, 1, 1.3769349), (10, 10, 1.344990e-4)]
)
def test_ge_2_loss_at_a_collapsed_feature(c: int, s: float, loss: float) -> None:
    frame = class_vectors.etf(c, 84, seed=3)
    logits = s * frame[:1] @ frame.T
    assert float(logits[0, 0]) == pytest.approx(s)
    assert logits[0, 1:].tolist() == pytest.approx([-s / (c - 1)] * (c - 1))
    found = float(cross_entropy(logits, torch.tensor([0])))
    assert found == pytest.approx(loss, rel=1e-6)
    assert found == pytest.approx(math.log1p((c - 1) * math.exp(-s * c / (c - 1))), rel=1e-9)


def test_ge_3_missing_class_has_logit_0() -> None:
    frame, phi = class_vectors.etf(3, 84, seed=3), torch.tensor([1.5, 1.5, 0.0], **FLOAT64)
    logits = frame[:1] @ frame.T * phi
    assert logits[0].tolist() == pytest.approx([1.5, -0.75, 0.0])
    assert float(cross_entropy(logits, torch.tensor([0]))) == pytest.approx(0.2840726, abs=1e-7)


def test_ge_4_adaptation_averages_to_the_frame_where_classes_are_balanced() -> None:
    a, b = torch.tensor([25.0, 15, 0, 0]), torch.tensor([0.0, 10, 25, 25])
    assert adaptation(a).tolist() == pytest.approx([2.5, 1.5, 0, 0])
    assert adaptation(b).tolist() == pytest.approx([0, 2 / 3, 5 / 3, 5 / 3])
    mean = 0.4 * adaptation(a) + 0.6 * adaptation(b)
    assert mean.tolist() == pytest.approx([1, 1, 1, 1])
    frame = class_vectors.etf(4, 10, seed=0).float()
    adapted = 0.4 * adaptation(a)[:, None] * frame + 0.6 * adaptation(b)[:, None] * frame
    assert torch.allclose(adapted, frame, atol=1e-6)
    a, b = torch.tensor([30.0, 10, 0, 0]), torch.tensor([0.0, 20, 30, 10])
    assert (0.4 * adaptation(a) + 0.6 * adaptation(b)).tolist() == pytest.approx([1.2, 1.2, 1.2, 0.4])


def test_ge_5_a_centre_of_isic() -> None:
    counts = torch.tensor([166.0, 349, 0, 0, 140, 0, 0, 0])
    assert adaptation(counts).tolist() == pytest.approx([2.0275, 4.2626, 0, 0, 1.7099, 0, 0, 0], abs=5e-5)


def test_noisy_counts_give_a_usable_adaptation() -> None:
    assert adaptation(torch.tensor([3.0, -1.5, 1.0])).tolist() == pytest.approx([2.25, 0, 0.75])
    assert adaptation(torch.tensor([-3.0, -1.5])).tolist() == [0, 0]


def test_ge_6_backward_reaches_the_features_alone() -> None:
    method, model = FedGELA(), model_of()
    share, context = shares()[0], FED.for_silo(0, 0)
    msg = method.broadcast(method.init_server(model, FED))
    data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
    net = method.global_model(model, msg)
    loss = method.objective(net, msg, data, context)
    x, y = share.train.batch(torch.arange(6))
    loss(net, x, y).objective().backward()
    assert all(p.grad is not None for p in model.body.parameters())
    assert all(p.grad is None for p in model.head.parameters())
    assert not any(name.startswith(("classifier", "scale")) for name, _ in net.named_parameters())
    assert not dict(net.named_buffers())["classifier"].requires_grad


def test_ge_6_equal_silos_average_to_the_same_features() -> None:
    method, share = FedGELA(), shares()[0]
    server = method.init_server(model_of(), FED)
    _, outcome, _, _ = played(method, share)
    part = outcome.bundle["delta"]
    both = method.merge(server, {"delta": part + part}, FED)
    assert same(both["w"], method.merge(server, {"delta": part}, FED)["w"])


def test_ge_6_frame_is_made_again_from_its_seed_bit_for_bit() -> None:
    server = FedGELA().init_server(model_of(), FED)
    assert {name: v.numel() for name, v in server[FRAME].items()} == {"seed": 1, "shape": 2}
    silo = FedGELA().global_model(model_of(7), FedGELA().broadcast(server))
    wanted = class_vectors.etf(4, 64, class_vectors.seed_of(model_of())).float()
    assert torch.equal(dict(silo.named_buffers())["classifier"], wanted)
    assert torch.equal(frame_of(server[FRAME]).float(), wanted)


def test_frame_does_not_move_and_no_classifier_is_sent() -> None:
    run = manifest("fedgela", train=TRAIN)
    final = simulate(RunSetup.of(run), shares(), RoundHistory())
    start = FedGELA().init_server(build_model("digits_cnn", {}, SCHEMA, 0), FED)
    assert same(final[FRAME], start[FRAME])
    assert not same(final["w"], start["w"])
    assert set(run.layout) == {"delta", "metrics"}
    assert not any(name.startswith(("head", "classifier", "scale")) for name in run.layout["delta"].shapes)


def test_local_loss_uses_the_adapted_frame() -> None:
    method, share, context = FedGELA(logit_scale=5.0), shares()[0], FED.for_silo(0, 0)
    model = model_of()
    msg = method.broadcast(method.init_server(model, FED))
    data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
    net = method.global_model(model, msg).eval()
    x, y = share.train.batch(torch.arange(6))
    z = model.features(x)
    by_hand = 5.0 * (z / z.norm(dim=1, keepdim=True)) @ frame_of(msg[FRAME]).float().T * torch.tensor([2.0, 2, 0, 0])
    wanted = cross_entropy(by_hand, y, reduction="none")
    assert torch.allclose(method.objective(net, msg, data, context)(net, x, y).per_example, wanted, atol=1e-5)


def balanced() -> SiloShare:
    x = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    given = Given(x, torch.arange(4).repeat(4))
    return SiloShare(given, given)


@pytest.mark.parametrize("etf", [True, False])
def test_adaptation_changes_nothing_at_a_balanced_silo(etf: bool) -> None:
    adapted, plain = (played(FedGELA(etf=etf, adapt=adapt), balanced())[1].bundle["delta"] for adapt in (True, False))
    assert same(adapted.total, plain.total)


@pytest.mark.parametrize("etf", [True, False])
def test_a_missing_class_is_trained_only_through_the_others(etf: bool) -> None:
    method = FedGELA(etf=etf)
    model, outcome, data, context = played(method, shares()[0])
    msg = method.broadcast(method.init_server(model_of(), FED))
    personal = method.personal(model, msg, outcome.state, data, context).eval()
    x, _ = shares()[0].test.batch(torch.arange(5))
    assert torch.equal(personal(x)[:, 2:], torch.zeros(5, 2))
    if not etf:  # the rows of classes that are not there get no gradient, only weight decay
        before, after = msg["w"]["head.weight"][2:], model.head.weight.detach()[2:]
        assert torch.allclose(before, after, atol=1e-4)


def test_personal_model_is_the_local_one_and_can_leave_out_missing_classes() -> None:
    method = FedGELA(mask_missing=True)
    model, outcome, data, context = played(method, shares()[1], 1)
    msg = method.broadcast(method.init_server(model_of(), FED))
    personal = method.personal(model, msg, outcome.state, data, context).eval()
    x, _ = shares()[1].test.batch(torch.arange(7))
    logits = personal(x)
    assert torch.isneginf(logits[:, [0, 3]]).all()
    z = model.features(x)
    wanted = 2 * 1.0 * (z / z.norm(dim=1, keepdim=True)) @ frame_of(msg[FRAME]).float().T
    assert torch.allclose(logits[:, 1:3], wanted[:, 1:3], atol=1e-4)
    assert not same(tensor_maps.copy_state(model.body), tensor_maps.copy_state(model_of().body))


def test_batch_norm_features_travel_and_stay_with_the_personal_model() -> None:
    method = FedGELA(feature_norm="batch", logit_scale=1.0)
    model, outcome, data, context = played(method, shares()[0])
    assert "norm.running_mean" in outcome.bundle["delta"].total
    msg = method.broadcast(method.init_server(model_of(), FED))
    personal = method.personal(model, msg, outcome.state, data, context).eval()
    delta = outcome.bundle["delta"].mean()
    trained = {name: msg["w"][name] + delta[name] for name in msg["w"]}
    fresh = method.global_model(model_of(), {**msg, "w": trained}).eval()
    x, _ = shares()[0].test.batch(torch.arange(5))
    assert torch.allclose(personal(x), fresh(x) * torch.tensor([2.0, 2, 0, 0]), atol=1e-3)
