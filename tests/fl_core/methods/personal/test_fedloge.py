"""FedLoGe: the sparse frame, three heads that train apart, and both realignments against slow ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.fedloge import FRAME, PRIVATE, FedLoGe, sparse_frame
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, LossFn, RoundContext, SgdOptions, State
from tests.oracles.equations import slow_personal_logits
from tests.support.federations import FED, SCHEMA, manifest, same, shares

TRAIN = TrainConfig(lr=0.05, batch_size=5, epochs=2, momentum=0.5, weight_decay=0.01)


def model_of(norm: str = "none", **options: object) -> nn.Module:
    return build_model("digits_cnn", {"norm": norm, **options}, SCHEMA, 0)


def start(method: FedLoGe) -> State:
    return method.broadcast(method.init_server(model_of(), FED))


@settings(max_examples=15, deadline=None)
@given(
    size=st.sampled_from([(2, 8), (4, 12), (4, 64), (10, 64)]),
    sparsity=st.floats(0.0, 0.65),
    seed=st.integers(0, 10_000),
)
def test_a_sparse_frame_has_its_zeros_unit_rows_and_no_two_classes_alike(
    size: tuple[int, int], sparsity: float, seed: int
) -> None:
    w = sparse_frame(*size, sparsity, seed)
    assert ((w == 0).sum(1) >= round(sparsity * size[1])).all()
    assert torch.allclose(w.norm(dim=1), torch.ones(size[0], dtype=torch.float64), atol=1e-12)
    assert float((w @ w.T - 2 * torch.eye(size[0])).max()) < 0.6
    assert torch.equal(w, sparse_frame(*size, sparsity, seed))
    assert not torch.equal(w, sparse_frame(*size, sparsity, seed + 1))


@pytest.mark.parametrize(("classes", "d"), [(4, 64), (10, 64), (8, 256)])
def test_where_the_zeros_allow_it_the_angles_are_nearly_the_simplexs(classes: int, d: int) -> None:
    """-1/(C-1) is the least that the largest cosine of C vectors can be; zeros alone leave it far above."""
    w = sparse_frame(classes, d, 0.6, seed=1)
    cosines = w @ w.T - 2 * torch.eye(classes)
    assert -1 / (classes - 1) - 1e-9 <= float(cosines.max()) < -0.95 / (classes - 1)


def test_without_zeros_it_is_the_simplex_frame_itself() -> None:
    w = sparse_frame(5, 16, 0.0, seed=3)
    wanted = 5 / 4 * (torch.eye(5, dtype=torch.float64) - 0.2)
    assert torch.allclose(w @ w.T, wanted, atol=1e-12)


@pytest.mark.parametrize(("classes", "d", "sparsity"), [(10, 9, 0.9), (2, 1, 0.6), (6, 4, 0.5)])
def test_a_frame_that_cannot_tell_classes_apart_is_refused_with_the_remedy(
    classes: int, d: int, sparsity: float
) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-23.*model\.projection"):
        sparse_frame(classes, d, sparsity, seed=0)


def by_hand(msg: State, phi: State, batches: list[tuple[Tensor, Tensor]], train: TrainConfig) -> dict[str, Tensor]:
    """Train three groups of parameters with an optimiser each, as published; logits are written out."""
    model = model_of()
    tensor_maps.load_state(model, msg["w"])
    w, b = (phi[PRIVATE][name].clone().requires_grad_() for name in ("weight", "bias"))
    groups = (
        [p for n, p in model.named_parameters() if not n.startswith("head.")],
        list(model.head.parameters()),  # type: ignore[union-attr,operator]
        [w, b],
    )
    made = [
        torch.optim.SGD(group, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay)
        for group in groups
    ]
    model.train()
    for x, y in batches:
        z = model.features(x)  # type: ignore[operator]
        still = z.detach()
        losses = (
            cross_entropy(z @ msg[FRAME]["w"].T, y),
            cross_entropy(still @ model.head.weight.T + model.head.bias, y),  # type: ignore[union-attr,operator]
            cross_entropy(still @ w.T + b, y),
        )
        for optimizer, loss in zip(made, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in made:
            optimizer.step()
    return {**tensor_maps.copy_state(model), "phi.weight": w.detach(), "phi.bias": b.detach()}


class Watched(PlainLocalData):
    """Keeps the batches that training takes."""

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        self.batches: list[tuple[Tensor, Tensor]] = []

        def kept(model: nn.Module, x: Tensor, y: Tensor):  # type: ignore[no-untyped-def]
            self.batches.append((x, y))
            return loss(model, x, y)

        return super().sgd(model, kept, options)


def test_training_is_three_optimisers_that_do_not_know_of_each_other() -> None:
    method, share, context = FedLoGe(length=1.0), shares()[0], FED.for_silo(0, 0)
    msg, silo, model = start(method), method.init_silo(model_of(), FED), model_of()
    data = Watched(RoundData(share.train, share.test, TRAIN, context))
    outcome = method.local(model, msg, silo, data, context)
    wanted = by_hand(msg, silo, data.batches, TRAIN)
    assert len(data.batches) == 6
    for name, value in tensor_maps.copy_state(model).items():
        assert torch.allclose(value, wanted[name], atol=1e-6), name
        assert not torch.allclose(value, msg["w"][name], atol=1e-5), name
    for name, value in outcome.state[PRIVATE].items():
        assert torch.allclose(value, wanted[f"phi.{name}"], atol=1e-6)
        assert not torch.equal(value, silo[PRIVATE][name])


def test_what_is_sent_does_not_depend_on_the_private_head_and_has_fedavgs_layout() -> None:
    method, share, context = FedLoGe(length=1.0), shares()[0], FED.for_silo(0, 0)
    sent = []
    for factor in (1.0, -3.0):
        silo = {PRIVATE: tensor_maps.scale(method.init_silo(model_of(), FED)[PRIVATE], factor)}
        data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
        sent.append(method.local(model_of(), start(method), silo, data, context).bundle)
    assert set(sent[0]) == {"delta"}
    assert same(sent[0]["delta"].total, sent[1]["delta"].total)
    assert manifest("fedloge").layout == manifest("fedavg").layout
    assert method.coupling is Coupling.EXAMPLE


def test_the_frame_is_the_servers_and_no_round_moves_it() -> None:
    run = manifest("fedloge", train=TRAIN, rounds=2, model_options={"norm": "none"})
    first, final = FedLoGe().init_server(model_of(), FED), simulate(RunSetup.of(run), shares(), RoundHistory())
    assert same(final[FRAME], first[FRAME])
    assert not same(final["w"], first["w"])
    assert torch.allclose(first[FRAME]["w"].norm(dim=1), torch.full((4,), 0.1), atol=1e-6)


@pytest.mark.parametrize("norm", [0.0, 1.7])
def test_the_global_head_has_rows_of_one_length_and_the_averaged_one_keeps_its_own(norm: float) -> None:
    method, msg = FedLoGe(norm=norm), start(FedLoGe())
    before = {name: v.clone() for name, v in msg["w"].items()}
    found = tensor_maps.copy_state(method.global_model(model_of(), msg))
    lengths = [math.sqrt(sum(v * v for v in row)) for row in before["head.weight"].tolist()]
    wanted = torch.stack(
        [row * (norm / n if norm else 1.0) for row, n in zip(before["head.weight"], lengths, strict=True)]
    )
    assert torch.allclose(found["head.weight"], wanted, atol=1e-6)
    assert all(torch.equal(found[name], v) for name, v in before.items() if name != "head.weight")
    assert same(msg["w"], before)
    assert same(method.exported(msg), found)


def test_the_frame_as_classifier_gives_its_own_logits() -> None:
    method, msg = FedLoGe(classifier="frame"), start(FedLoGe())
    model, x = method.global_model(model_of(), msg).eval(), shares()[0].train.batch(torch.arange(5))[0]
    with torch.no_grad():
        assert torch.allclose(model(x), model.features(x) @ msg[FRAME]["w"].T, atol=1e-6)  # type: ignore[operator]
    assert same(method.exported(msg), tensor_maps.copy_state(model))


def test_personal_logits_are_the_slow_ones_and_missing_classes_are_never_chosen() -> None:
    method, share, context = FedLoGe(), shares()[0], FED.for_silo(0, 0)
    msg, draw = start(method), torch.Generator().manual_seed(2)
    phi = {"weight": torch.randn(4, 64, generator=draw), "bias": torch.randn(4, generator=draw)}
    data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
    own = method.personal(model_of(), msg, {PRIVATE: phi}, data, context).eval()
    x = share.train.batch(torch.arange(6))[0]
    with torch.no_grad():
        z, found = model_of().eval().features(x).tolist(), own(x)  # type: ignore[operator]
    averaged = (msg["w"]["head.weight"].tolist(), msg["w"]["head.bias"].tolist())
    private = (phi["weight"].tolist(), phi["bias"].tolist())
    held = (data.class_counts() > 0).tolist()
    assert held == [True, True, False, False]
    for row, logits in zip(z, found.tolist(), strict=True):
        assert logits == pytest.approx(slow_personal_logits(row, averaged, private, held), rel=1e-4, abs=1e-4)


def test_a_personal_model_is_of_the_received_body_whatever_training_left() -> None:
    method, share, context = FedLoGe(length=1.0), shares()[0], FED.for_silo(0, 0)
    data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
    model, msg, x = model_of(), start(method), share.test.batch(torch.arange(4))[0]
    silo = method.local(model, msg, method.init_silo(model_of(), FED), data, context).state
    with torch.no_grad():
        left, fresh = (method.personal(m, msg, silo, data, context).eval()(x) for m in (model, model_of()))
    assert torch.equal(left, fresh)


def test_a_head_without_a_bias_is_taken() -> None:
    model, context = model_of(head_bias=False), RoundContext(3, 4, cohort=3).for_silo(0, 0)
    for method in (FedLoGe(), FedLoGe(classifier="frame")):
        server, share = method.init_server(model, context), shares()[0]
        data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
        silo = method.local(model, method.broadcast(server), method.init_silo(model, context), data, context).state
        assert set(silo[PRIVATE]) == {"weight"}
        assert set(method.exported(server)) == set(FedAvg().init_server(model, context)["w"])
        own = method.personal(model, method.broadcast(server), silo, data, context)
        assert bool(torch.isfinite(own(share.test.batch(torch.arange(2))[0])[:, :2]).all())


def test_rows_of_an_averaged_head_that_are_zero_stay_zero() -> None:
    method, msg = FedLoGe(), start(FedLoGe())
    zero = {**msg, "w": {**msg["w"], "head.weight": torch.zeros_like(msg["w"]["head.weight"])}}
    assert not method.exported(zero)["head.weight"].any()
    assert normalize(torch.zeros(1, 3)).tolist() == [[0.0] * 3]
