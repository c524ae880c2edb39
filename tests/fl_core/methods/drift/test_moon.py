"""MOON: the contrast (T-MOO-1 to T-MOO-3), its frozen models, its silo state, and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fl_core.methods.disjoint.fedproc import FedProc
from fl_core.methods.drift.moon import Moon, model_contrast
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.models.split_model import CachedFeatures, frozen_copy
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, LocalResult, State
from tests.support.federations import FED, SCHEMA, same, same_bundle, shares

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)


def vectors(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def model_of(norm: str = "batch", seed: int = 0) -> nn.Module:
    return build_model("digits_cnn", {"norm": norm}, SCHEMA, seed)


def step(
    method: FedAvg, msg: State, silo: State, train: TrainConfig = TRAIN, model: nn.Module | None = None
) -> LocalResult:
    share, context = shares()[0], FED.for_silo(0, 0)
    return method.local(
        model or model_of(), msg, silo, PlainLocalData(RoundData(share.train, share.test, train, context)), context
    )


def start(method: FedAvg) -> State:
    return method.broadcast(method.init_server(model_of(), FED))


@pytest.mark.parametrize(("tau", "loss"), [(0.5, 0.2176217216), (0.1, 0.0008489652), (1.0, 0.4008335265)])
def test_t_moo_1(tau: float, loss: float) -> None:
    z = vectors((1, 0)).requires_grad_()
    value = model_contrast(z, vectors((1, 1)), vectors((0, 1)).unsqueeze(0), tau)
    assert float(value.detach()) == pytest.approx(loss, abs=1e-9)
    if tau == 0.5:
        (slope,) = torch.autograd.grad(value.sum(), z)
        assert torch.allclose(slope, vectors((0, 0.1145624396)), atol=1e-9)


def test_t_moo_2_and_a_batch_of_both() -> None:
    z = vectors((3, 4), (1, 0)).requires_grad_()
    values = model_contrast(z, vectors((1, 0), (1, 1)), vectors((0, 1), (0, 1)).unsqueeze(0), 0.5)
    assert float(values[0].detach()) == pytest.approx(0.9130152524, abs=1e-9)
    (slope,) = torch.autograd.grad(values[0], z, retain_graph=True)
    assert torch.allclose(slope[0], vectors((-0.2682120717, 0.2011590538))[0], atol=1e-9)
    assert float(values.mean().detach()) == pytest.approx(0.5653184870, abs=1e-9)


def test_t_moo_3_equal_references_pull_nowhere() -> None:
    z, other = vectors((1, 2, 3)).requires_grad_(), vectors((0.5, -1, 2))
    value = model_contrast(z, other, other.unsqueeze(0), 0.5)
    (slope,) = torch.autograd.grad(value.sum(), z)
    assert float(value.detach()) == pytest.approx(math.log(2), abs=1e-12)
    assert torch.equal(slope, torch.zeros_like(slope))


def test_t_moo_3_range_and_scale_invariance() -> None:
    z, away = vectors((1, 0)), vectors((-1, 0))
    assert float(model_contrast(z, z, away.unsqueeze(0), 0.5)) == pytest.approx(0.0181499279, abs=1e-9)
    assert float(model_contrast(z, away, z.unsqueeze(0), 0.5)) == pytest.approx(4.0181499279, abs=1e-9)
    draw = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(5, 7, generator=draw, dtype=torch.float64) for _ in range(3))
    plain = model_contrast(a, b, c.unsqueeze(0), 0.5)
    for triple in ((9 * a, b, c), (a, 0.1 * b, c), (a, b, 40 * c)):
        assert torch.allclose(plain, model_contrast(triple[0], triple[1], triple[2].unsqueeze(0), 0.5), atol=1e-12)


def test_zero_features_have_a_cosine_of_zero_and_a_finite_gradient() -> None:
    z = vectors((0, 0)).requires_grad_()
    value = model_contrast(z, vectors((1, 1)), vectors((0, 1)).unsqueeze(0), 0.5)
    (slope,) = torch.autograd.grad(value.sum(), z)
    assert float(value.detach()) == pytest.approx(math.log(2), abs=1e-12)
    assert bool(torch.isfinite(slope).all())


def test_several_last_models_share_the_denominator() -> None:
    draw = torch.Generator().manual_seed(1)
    z, g, a, b = (torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(4))
    e = [torch.exp(cosine_similarity(z, v) / 0.3) for v in (g, a, b)]
    expected = -torch.log(e[0] / (e[0] + e[1] + e[2]))
    assert torch.allclose(model_contrast(z, g, torch.stack([a, b]), 0.3), expected, atol=1e-12)


def test_first_round_of_a_silo_is_fedavg() -> None:
    outcome, plain = step(Moon(mu=5.0), start(Moon()), {}), step(FedAvg(), start(FedAvg()), {})
    assert same_bundle(outcome.bundle, plain.bundle)
    again = step(Moon(mu=5.0), start(Moon()), outcome.state)
    assert not same_bundle(again.bundle, outcome.bundle)


def test_silo_keeps_its_last_models_newest_first_whatever_became_of_its_upload() -> None:
    method, msg, state, trained = Moon(mu=0.5, last=2), start(Moon()), {}, []  # type: ignore[var-annotated]
    for _ in range(3):
        model = model_of()
        state = step(method, msg, state, model=model).state
        trained.append(tensor_maps.copy_state(model))
    assert list(state) == ["last_000", "last_001"]
    assert same(state["last_000"], trained[2])
    assert same(state["last_001"], trained[1])
    assert not method.server_tracks_state


def test_loss_is_the_mixture_plus_the_contrast() -> None:
    share, context, method = shares()[0], FED.for_silo(0, 0), Moon(mu=2.0, prototypes="mixture")
    last = tensor_maps.copy_state(model_of(seed=5))
    seen: list[Tensor] = []

    class Spy(PlainLocalData):
        def sgd(self, model, loss, options=AS_SCHEDULED):  # type: ignore[no-untyped-def]
            x, y = share.train.batch(torch.arange(6))
            model.eval()  # so that a second pass sees the same
            seen.append(loss(model, x, y).per_example)
            z = model.features(x)
            base = FedProc().objective(model, msg, self, context)(model, x, y).per_example
            glob, old = frozen_copy(model_of()).features(x), frozen_copy(model_of(), last).features(x)
            seen.append(base + 2.0 * model_contrast(z, glob, old.unsqueeze(0), 0.5))
            return 1

    msg = start(method)
    known = {"g": torch.randn(4, 64, generator=torch.Generator().manual_seed(2)), "known": torch.tensor([1.0, 1, 0, 1])}
    msg = {**msg, "prototypes": known}
    method.local(model_of(), msg, {"last_000": last}, Spy(RoundData(share.train, share.test, TRAIN, context)), context)
    assert torch.allclose(seen[0], seen[1], atol=1e-6)


def test_batch_norm_counts_a_batch_once_and_the_frozen_models_never() -> None:
    once, msg = TrainConfig(lr=0.05, batch_size=14, epochs=1), start(Moon())
    plain, contrasted = model_of(), model_of()
    last = tensor_maps.copy_state(model_of(seed=5))
    kept = {name: v.clone() for name, v in last.items()}
    step(FedAvg(), msg, {}, once, plain)
    step(Moon(mu=5.0), msg, {"last_000": last}, once, contrasted)
    stats = [name for name, v in plain.named_buffers() if v.is_floating_point()]
    assert stats
    assert all(torch.equal(plain.get_buffer(name), contrasted.get_buffer(name)) for name in stats)
    assert same(last, kept)


def test_frozen_copy_is_apart_in_eval_mode_and_without_gradients() -> None:
    model = model_of()
    twin = frozen_copy(model.train(), tensor_maps.copy_state(model_of(seed=3)))
    assert not any(m.training for m in twin.modules())
    assert not any(p.requires_grad for p in twin.parameters())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert same(tensor_maps.copy_state(model), tensor_maps.copy_state(model_of()))
    assert same(tensor_maps.copy_state(twin), tensor_maps.copy_state(model_of(seed=3)))


def test_seen_batch_gives_the_model_s_own_logits_and_gradients() -> None:
    model, x = model_of("group"), shares()[0].train.batch(torch.arange(3))[0]
    seen = CachedFeatures(model, model.features(x))  # type: ignore[operator]
    assert torch.equal(seen(x), model(x))
    grads = [torch.autograd.grad(m(x).square().sum(), list(model.parameters())) for m in (seen, model)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
