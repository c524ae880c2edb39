"""FedPHP: the private model's momentum (PHP-1), the transfer losses (PHP-2, PHP-3), its statistics and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal import inherited_model
from fl_core.methods.personal.fedphp import FedPHP
from fl_core.methods.personal.inherited_model import asymmetric_terms, kd_terms, mmd
from fl_core.models import build_model
from fl_core.models.split_model import frozen_copy
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import LocalResult, RoundContext, State
from tests.support.federations import FED, SCHEMA, Given, same, same_bundle, shares

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=1)


class Number(nn.Module):
    """A model that is one number and needs no data."""

    has_batch_norm = False

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value], dtype=torch.float64))


def model_of(norm: str = "batch", seed: int = 0) -> nn.Module:
    return build_model("digits_cnn", {"norm": norm}, SCHEMA, seed)


def data_of(k: int = 0, train: TrainConfig = TRAIN) -> PlainLocalData:
    return PlainLocalData(RoundData(shares()[k].train, shares()[k].test, train, FED.for_silo(k, 0)))


def step(method: FedAvg, silo: State, model: nn.Module, train: TrainConfig = TRAIN) -> LocalResult:
    msg = method.broadcast(method.init_server(model, FED))
    return method.local(model, msg, silo, data_of(train=train), FED.for_silo(0, 0))


def inherited(values: list[float], context: RoundContext, method: FedPHP) -> list[float]:
    silo: State = {}
    path = []
    for value in values:
        silo = method.inherit(Number(value), silo, data_of(), context.for_silo(0, 0))
        path.append(float(silo["inherited"]["w"]))
    assert float(silo["participations"]["n"]) == len(values)
    return path


def test_php_1_momentum() -> None:
    context = RoundContext(n_silos=10, n_classes=2, rounds=20, cohort=2)  # Q T = 4
    method = FedPHP()
    assert [method.momentum(n, context) for n in range(1, 8)] == pytest.approx([0, 0.225, 0.45, 0.675, 0.9, 1, 1])
    assert FedPHP(mu_max=0.9).momentum(7, context) == pytest.approx(0.9)
    for silos, cohort, rounds, pairs in (
        (10, 1, 1000, ((2, 0.009), (51, 0.45), (101, 0.9))),
        (100, 20, 150, ((2, 0.03), (11, 0.3), (31, 0.9))),
    ):
        context = RoundContext(n_silos=silos, n_classes=2, rounds=rounds, cohort=cohort)
        for n, mu in pairs:
            assert method.momentum(n, context) == pytest.approx(mu, abs=1e-12)


def test_php_1_private_model() -> None:
    context = RoundContext(n_silos=10, n_classes=2, rounds=20, cohort=2)
    path = inherited([1, 2, 3, 4, 5, 60, 70], context, FedPHP())
    expected = [1, 1.775, 2.44875, 2.95290625, 3.157615625]
    assert path[:5] == pytest.approx(expected, abs=1e-12)
    assert path[5] == path[6] == path[4]  # mu = 1: nothing new comes in


def test_php_1_fewer_than_one_expected_round_counts_as_one() -> None:
    context = RoundContext(n_silos=100, n_classes=2, rounds=20, cohort=1)
    assert FedPHP().momentum(2, context) == pytest.approx(0.9)


def test_php_2_distillation() -> None:
    o, o_p = torch.tensor([[2.0, 0.0]], dtype=torch.float64), torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    assert torch.softmax(o_p / 4, 1)[0].tolist() == pytest.approx([0.37754067, 0.62245933], abs=1e-8)
    assert float(kd_terms(o, o_p, 4.0, scaled=False)) == pytest.approx(0.1224593, abs=1e-7)
    assert float(kd_terms(o, o_p, 4.0)) == pytest.approx(1.9593493, abs=1e-7)
    assert float(asymmetric_terms(o, o_p, 4.0)) == pytest.approx(1.3718467, abs=1e-7)
    assert float(kd_terms(o, o.clone(), 4.0)) == 0.0


def test_php_3_mmd() -> None:
    def rows(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).unsqueeze(1)

    assert float(mmd(rows(0, 1), rows(2, 3))) == pytest.approx(4.5797964, abs=1e-6)
    assert float(mmd(rows(0), rows(1))) == pytest.approx(6.1862764, abs=1e-6)
    assert float(mmd(rows(0, 1), rows(0, 1))) == 0.0


def test_mmd_equals_a_loop_over_pairs_and_gives_finite_gradients_at_equal_points() -> None:
    draw = torch.Generator().manual_seed(0)
    h, h_p = (torch.randn(4, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    x = torch.cat([h, h_p])
    d = [[float((a - b).square().sum()) for b in x] for a in x]
    b = sum(map(sum, d)) / (8 * 8 - 8) + 1e-8

    def k(i: int, j: int) -> float:
        return sum(math.exp(-d[i][j] / (b * 2.0**e)) for e in (-2, -1, 0, 1, 2))

    slow = sum(k(i, j) + k(4 + i, 4 + j) - k(i, 4 + j) - k(4 + i, j) for i in range(4) for j in range(4)) / 16
    assert float(mmd(h, h_p)) == pytest.approx(slow, abs=1e-12)
    assert float(mmd(h, h_p)) >= 0
    moving = h.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mmd(moving, h), moving)
    assert bool(torch.isfinite(slope).all())


def test_first_round_is_fedavg() -> None:
    plain, ours = step(FedAvg(weights="uniform"), {}, model_of()), step(FedPHP(lam=0.5), {}, model_of())
    assert same_bundle(plain.bundle, ours.bundle)


@pytest.mark.parametrize("form", ["kl", "plain_kl", "ce_asym", "mmd"])
def test_loss_is_the_mixture_with_the_private_model_s_lesson(form: str) -> None:
    options = {
        "kl": {},
        "plain_kl": {"kd_tau2": False},
        "ce_asym": {"kd": "ce_asym"},
        "mmd": {"transfer": "mmd"},
    }[form]
    method = FedPHP(lam=0.3, **options)  # type: ignore[arg-type]
    silo = {"inherited": tensor_maps.copy_state(model_of(seed=4)), "participations": {"n": torch.tensor([1.0])}}
    student, teacher = model_of().eval(), model_of(seed=4).eval()
    x, y = shares()[0].train.batch(torch.arange(5))
    loss = method.transfer_loss(model_of(), silo)(student, x, y)
    ce = 0.7 * cross_entropy(student(x), y, reduction="none")
    if form == "mmd":
        assert method.coupling is Coupling.BATCH
        assert loss.coupled is not None
        assert torch.allclose(loss.per_example, ce)
        assert torch.allclose(loss.coupled, 0.3 * mmd(student.features(x), teacher.features(x)))  # type: ignore[operator]
        return
    kl = (
        torch.softmax(teacher(x) / 4, 1) * (torch.log_softmax(teacher(x) / 4, 1) - torch.log_softmax(student(x) / 4, 1))
    ).sum(1)
    lesson = {
        "kl": 16 * kl,
        "plain_kl": kl,
        "ce_asym": -(torch.softmax(teacher(x) / 4, 1) * torch.log_softmax(student(x), 1)).sum(1),
    }[form]
    assert method.coupling is Coupling.EXAMPLE
    assert loss.coupled is None
    assert torch.allclose(loss.per_example, ce + 0.3 * lesson, atol=1e-6)


def test_second_round_is_taught_and_the_teacher_is_left_alone() -> None:
    method = FedPHP(lam=0.5)
    first = step(method, {}, model_of())
    before = {name: v.clone() for name, v in first.state["inherited"].items()}
    second = step(method, first.state, model_of())
    assert not same_bundle(first.bundle, second.bundle)
    assert same(first.state["inherited"], before)
    assert float(second.state["participations"]["n"]) == 2


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_private_model_of_the_second_round_is_the_mean_with_statistics_of_its_own(norm: str) -> None:
    method = FedPHP(lam=0.5)
    first = step(method, {}, model_of(norm))
    trained = model_of(norm)
    second = step(method, first.state, trained)
    mu = method.momentum(2, FED)
    assert 0 < mu < 1
    mixed = {
        name: mu * first.state["inherited"][name] + (1 - mu) * v for name, v in tensor_maps.copy_state(trained).items()
    }
    stats = {name for name in mixed if "running_" in name}
    assert bool(stats) is (norm == "batch")
    assert all(torch.equal(v, mixed[name]) for name, v in second.state["inherited"].items() if name not in stats)
    off = step(FedPHP(lam=0.5, recompute_bn=False), first.state, model_of(norm)).state["inherited"]
    assert same(off, mixed)
    heir = frozen_copy(trained, mixed)
    inherited_model.recompute(heir, data_of())
    assert same(second.state["inherited"], tensor_maps.copy_state(heir))


def test_a_first_model_has_its_statistics_measured_only_where_asked() -> None:
    trained = model_of("batch")
    plain = step(FedPHP(), {}, trained).state["inherited"]
    assert same(plain, tensor_maps.copy_state(trained))
    measured = step(FedPHP(recompute_first=True), {}, model_of("batch")).state["inherited"]
    heir = frozen_copy(trained, plain)
    inherited_model.recompute(heir, data_of())
    assert same(measured, tensor_maps.copy_state(heir))
    assert not same(measured, plain)


def test_recomputed_statistics_are_those_of_the_training_set() -> None:
    model, x = model_of(), shares()[0].train.batch(torch.arange(14))[0]
    before = tensor_maps.copy_state(model)
    inherited_model.recompute(model, data_of())
    after = tensor_maps.copy_state(model)
    weights = {name for name in before if "running_" not in name}
    assert all(torch.equal(before[name], after[name]) for name in weights)
    assert not any(m.training for m in model.modules())
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    seen: list[tuple[nn.BatchNorm2d, Tensor]] = []
    hooks = [m.register_forward_pre_hook(lambda m, args: seen.append((m, args[0]))) for m in layers]
    with torch.no_grad():
        model(x)  # the 14 examples as one batch, as the model answers in use
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(layers) == 2
    for layer, given in seen:
        assert torch.allclose(layer.running_mean, given.mean((0, 2, 3)), atol=1e-6)  # type: ignore[arg-type]
        assert torch.allclose(layer.running_var, given.var((0, 2, 3)), rtol=1e-5)  # type: ignore[arg-type]
    assert [m.momentum for m in layers] == [0.1, 0.1]


def test_statistics_over_several_batches_weigh_examples_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_core.training.local_data.EVAL_BATCH", 4)
    model, x = model_of(), shares()[0].train.batch(torch.arange(14))[0]
    inherited_model.recompute(model, data_of())  # 4 + 4 + 4 + 2
    with torch.no_grad():
        seen = model_of().body[0](x)  # type: ignore[index,operator]
    assert torch.allclose(model.body[1].running_mean, seen.mean((0, 2, 3)), atol=1e-6)  # type: ignore[index,union-attr,arg-type]
    assert torch.allclose(model.body[1].running_var, seen.var((0, 2, 3)), rtol=1e-4)  # type: ignore[index,union-attr,arg-type]


def test_recomputed_statistics_do_not_depend_on_the_order_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted by class, the batches of the last layer's normalisation held one class each."""
    monkeypatch.setattr("fl_core.training.local_data.EVAL_BATCH", 4)
    given, found = shares()[0].train, []
    x, y = given.batch(torch.arange(14))
    for order in (torch.argsort(y, stable=True), torch.arange(14), torch.arange(14).flip(0)):
        model, mine = model_of(), Given(x[order], y[order])
        inherited_model.recompute(model, PlainLocalData(RoundData(mine, mine, TRAIN, FED.for_silo(0, 0))))
        found.append(tensor_maps.copy_state(model))
    for other in found[1:]:
        assert all(torch.allclose(v, other[name], rtol=1e-5, atol=1e-6) for name, v in found[0].items())


def test_a_lone_example_leaves_the_statistics_as_they_are() -> None:
    only = Given(torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([2]))
    model = model_of()
    inherited_model.recompute(model, PlainLocalData(RoundData(only, only, TRAIN, FED.for_silo(0, 0))))
    assert same(tensor_maps.copy_state(model), tensor_maps.copy_state(model_of()))


def test_personal_model_is_the_private_one_and_before_it_exists_the_model_at_hand() -> None:
    method, context = FedPHP(), FED.for_silo(0, 0)
    assert method.has_personal_model
    silo: State = {}
    for _ in range(2):
        trained = model_of()
        silo = step(method, silo, trained).state
    left = tensor_maps.copy_state(trained)
    personal = method.personal(trained, {}, silo, data_of(), context)
    assert same(tensor_maps.copy_state(personal), silo["inherited"])
    assert not same(tensor_maps.copy_state(personal), left)
    assert same(
        tensor_maps.copy_state(method.personal(model_of(seed=8), {}, {}, data_of(), context)),
        tensor_maps.copy_state(model_of(seed=8)),
    )


def test_lost_state_begins_anew_and_a_lost_upload_does_not_matter() -> None:
    method = FedPHP()
    first = step(method, {}, model_of())
    assert float(first.state["participations"]["n"]) == 1
    assert not method.server_tracks_state
    again = step(method, {}, model_of())
    assert same(again.state["inherited"], first.state["inherited"])
