"""FedProc (T-PRC-1 to T-PRC-3), and prototypes as an option of other methods (T-PP-1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods.disjoint.fedproc import FedProc
from fl_core.methods.drift.fedprox import FedProx
from fl_core.methods.drift.moon import Moon
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.prototype_aided import PrototypeAided, contrast
from fl_core.methods.shared.prototypes import update
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Part, RoundContext, State
from tests.support.federations import FED, SCHEMA, manifest, same, same_bundle, shares, simulated

PROTOTYPES = torch.tensor([[2, 0], [0, 3], [-1, -1]], dtype=torch.float64)
Z = torch.tensor([[0.6, 0.8], [1, 0]], dtype=torch.float64)
Y = torch.tensor([0, 1])
ALL = torch.tensor([True, True, True])


class Plane(nn.Module):
    """Features are the input; logits are such that cross entropy is 1.2 for every example."""

    feature_dim = 2

    def features(self, x: Tensor) -> Tensor:
        return x

    def head(self, z: Tensor) -> Tensor:
        # three classes, equal logits but for the label's: -g_y + log(e^g_y + 2) = 1.2
        g = torch.log(2 / torch.expm1(torch.tensor(1.2, dtype=torch.float64)))
        return torch.nn.functional.one_hot(Y, 3) * g

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def model_of() -> nn.Module:
    return build_model("digits_cnn", {}, SCHEMA, 0)


def data_of(context: RoundContext, k: int = 0) -> PlainLocalData:
    return PlainLocalData(
        RoundData(shares()[k].train, shares()[k].test, TrainConfig(lr=0.05, batch_size=4, epochs=1), context)
    )


def broadcast(known: list[float] | None = None) -> State:
    g = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    known = [1.0, 1.0, 1.0, 1.0] if known is None else known
    return {"w": tensor_maps.copy_state(model_of()), "prototypes": {"g": g, "known": torch.tensor(known)}}


def final(name: str, rounds: int = 3, **options: float | str) -> dict[str, Tensor]:
    return dict(simulated(name, options, rounds=rounds)["w"])


def test_t_prc_1_contrast() -> None:
    terms = contrast(Z, Y, PROTOTYPES, ALL, 1.0)
    assert terms.tolist() == pytest.approx([0.8859711722, 1.4377833848], abs=1e-9)
    assert float(terms.mean()) == pytest.approx(1.1618772785, abs=1e-9)


def test_t_prc_1_unknown_class_is_left_out_of_the_contrast() -> None:
    terms = contrast(Z, Y, PROTOTYPES, torch.tensor([True, True, False]), 1.0)
    assert terms.tolist() == pytest.approx([0.7981388694, 1.3132616875], abs=1e-9)
    garbage = PROTOTYPES.clone()
    garbage[2] = 1e6
    assert torch.equal(terms, contrast(Z, Y, garbage, torch.tensor([True, True, False]), 1.0))


def test_t_prc_1_example_of_an_unknown_class_has_no_contrast_and_still_counts() -> None:
    z = Z.clone().requires_grad_()
    terms = contrast(z, Y, PROTOTYPES, torch.tensor([True, False, True]), 1.0)
    (slope,) = torch.autograd.grad(terms.mean(), z)
    assert float(terms[1].detach()) == 0.0
    assert torch.equal(slope[1], torch.zeros(2, dtype=torch.float64))
    assert float(terms.mean().detach()) == pytest.approx(float(terms[0].detach()) / 2)


def test_t_prc_1_mixture_at_a_quarter_of_the_run() -> None:
    context = RoundContext(1, 3, rounds=100, round=25, cohort=1).for_silo(0, 0)
    msg = {"prototypes": {"g": PROTOTYPES, "known": torch.ones(3)}}
    loss = FedProc().objective(Plane(), msg, data_of(context), context)(Plane(), Z, Y)
    assert float(cross_entropy(Plane()(Z), Y)) == pytest.approx(1.2, abs=1e-12)
    assert float(loss.per_example.mean()) == pytest.approx(1.1714079589, abs=1e-9)
    assert loss.coupled is None


def test_t_prc_2_prototypes_are_weighed_by_examples() -> None:
    state = {"g": torch.tensor([[0.0, 0.0], [7.0, 7.0]]), "known": torch.tensor([0.0, 1.0])}
    first = Part({"offset": torch.tensor([[3.0, 1.0], [0, 0]])}, torch.tensor([2.0, 0.0]))
    second = Part({"offset": torch.tensor([[0.0, 6.0], [0, 0]])}, torch.tensor([6.0, 0.0]))
    after = update(state, first + second)
    assert after["g"][0].tolist() == pytest.approx([0.375, 0.875])
    assert after["g"][1].tolist() == [7.0, 7.0]  # nobody reported it: it stays, and stays known
    assert after["known"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("t", [7, 9])
def test_t_prc_3_from_the_last_round_on_it_is_a_step_of_fedavg(t: int) -> None:
    context = RoundContext(3, 4, rounds=7, round=t, cohort=3).for_silo(0, 0)
    ours = FedProc().local(model_of(), broadcast(), {}, data_of(context), context).bundle
    plain = FedAvg().local(model_of(), broadcast(), {}, data_of(context), context).bundle
    assert same_bundle({"delta": ours["delta"]}, plain)
    earlier = RoundContext(3, 4, rounds=7, round=1, cohort=3).for_silo(0, 0)
    before = FedProc().local(model_of(), broadcast(), {}, data_of(earlier), earlier).bundle
    plain = FedAvg().local(model_of(), broadcast(), {}, data_of(earlier), earlier).bundle
    assert not same_bundle({"delta": before["delta"]}, plain)


def test_first_round_is_fedavg_and_later_ones_are_not() -> None:
    assert same(final("fedproc", rounds=1), final("fedavg", rounds=1))
    assert not same(final("fedproc"), final("fedavg"))


@pytest.mark.integration
def test_t_pp_1_prototypes_make_fedavg_fedproc_bit_for_bit() -> None:
    expected = final("fedproc")
    assert same(final("fedprox", mu=0.0, prototypes="mixture"), expected)
    assert same(final("moon", mu=0.0, prototypes="mixture"), expected)
    run = manifest("fedproc", {}, rounds=3)
    aided, states = PrototypeAided(prototypes="mixture"), []
    for method in (aided, FedProc()):
        server = method.init_server(model_of(), FED)
        for t in range(3):
            context = RoundContext(3, 4, rounds=3, round=t, cohort=3)
            bundles = [
                method.local(
                    model_of(), method.broadcast(server), {}, data_of(context.for_silo(k, 0), k), context.for_silo(k, 0)
                ).bundle
                for k in range(3)
            ]
            server = method.merge(
                server, {p: bundles[0][p] + bundles[1][p] + bundles[2][p] for p in bundles[0]}, context
            )
        states.append(server)
    assert same(states[0]["w"], states[1]["w"])
    assert same(states[0]["prototypes"], states[1]["prototypes"])
    assert set(run.layout) == {"delta", "prototypes", "metrics"}


def test_additive_form_keeps_cross_entropy_whole() -> None:
    context, msg, model = FED.for_silo(0, 0), broadcast([1.0, 1.0, 0.0, 1.0]), model_of()
    x, y = shares()[0].train.batch(torch.arange(6))
    method = FedProx(prototypes="additive", lambda_p=0.3, tau_p=0.5)
    loss = method.objective(model, msg, data_of(context), context)(model, x, y).per_example
    z = model.features(x)  # type: ignore[operator]
    gpc = contrast(z, y, msg["prototypes"]["g"], msg["prototypes"]["known"] > 0, 0.5)
    assert torch.allclose(loss, cross_entropy(model(x), y, reduction="none") + 0.3 * gpc, atol=1e-6)
    assert same(final("fedprox", mu=0.0, prototypes="additive", lambda_p=0.0), final("fedavg"))
    assert not same(final("fedprox", mu=0.0, prototypes="additive"), final("fedavg"))


@pytest.mark.parametrize("method", [FedProx(mu=1.0, prototypes="mixture"), Moon(mu=1.0, prototypes="mixture")])
def test_a_method_s_own_term_keeps_its_strength(method: PrototypeAided) -> None:
    """At t >= T the mixture is cross entropy: what is left of the method is the method without prototypes."""
    context = RoundContext(3, 4, rounds=7, round=7, cohort=3).for_silo(0, 0)
    last = tensor_maps.copy_state(build_model("digits_cnn", {}, SCHEMA, 9))
    silo = {"last_000": last} if isinstance(method, Moon) else {}
    without = type(method)(mu=1.0)  # type: ignore[call-arg]
    ours, alone = (m.local(model_of(), broadcast(), silo, data_of(context), context).bundle for m in (method, without))
    plain = FedAvg().local(model_of(), broadcast(), {}, data_of(context), context).bundle
    assert same_bundle({"delta": ours["delta"]}, {"delta": alone["delta"]})
    assert not same_bundle(alone, plain)


def test_prototypes_are_the_trained_model_s_class_means_in_eval_mode() -> None:
    context, msg, model = FED.for_silo(0, 0), broadcast([0.0] * 4), model_of()
    msg = {**msg, "prototypes": {"g": torch.zeros(4, 64), "known": torch.zeros(4)}}
    part = FedProc().local(model, msg, {}, data_of(context), context).bundle["prototypes"]
    x, y = shares()[0].train.batch(torch.arange(14))
    with torch.no_grad():
        z = model.eval().features(x)  # type: ignore[operator]
    assert part.weight.tolist() == [7.0, 7.0, 0.0, 0.0]
    for c in (0, 1):
        assert torch.allclose(part.mean()["offset"][c], z[y == c].mean(0), atol=1e-5)
    assert torch.equal(part.total["offset"][2:], torch.zeros(2, 64))
