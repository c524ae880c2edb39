"""FedROD: both losses (T-ROD-1 to T-ROD-5), gradients that stay apart, both phases, both kinds of private head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.methods.disjoint.fedlc import balanced_softmax
from fl_core.methods.personal.fedrod import (
    FedROD,
    GeneratedHead,
    TwoHeads,
    both_losses,
    linear,
    private_loss,
    shares_of,
)
from fl_core.models import build_model
from fl_core.models.split_model import SplitModel
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import LocalResult, State
from tests.support.federations import FED, SCHEMA, Given, manifest, same, shares, simulated

pytestmark = pytest.mark.integration

CONFIG = TrainConfig(lr=0.05, momentum=0.9, weight_decay=0.1, batch_size=4, epochs=2)


def bsm(g: list[float], y: int, n: list[float], gamma: float = 1.0) -> tuple[float, list[float]]:
    logits = torch.tensor([g], dtype=torch.float64, requires_grad=True)
    loss = balanced_softmax(logits, torch.tensor([y]), torch.tensor(n, dtype=torch.float64), gamma).sum()
    (slope,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), slope[0].tolist()


@pytest.mark.parametrize(("y", "loss"), [(0, 0.1053605157), (1, 2.3025850930)])
def test_t_rod_1_without_evidence_the_prior_decides(y: int, loss: float) -> None:
    assert bsm([0, 0, 0], y, [90, 10, 0])[0] == pytest.approx(loss, abs=1e-6)


def test_t_rod_2_a_missing_class_has_no_part() -> None:
    loss, slope = bsm([1, 2, 3], 1, [90, 10, 0])
    assert loss == pytest.approx(1.4611501717, abs=1e-6)
    assert slope == pytest.approx([0.7680306833, -0.7680306833, 0], abs=1e-6)


@pytest.mark.parametrize(("gamma", "loss"), [(0, 1.4076059644), (0.5, 1.0862814128), (1, 1.5222977606)])
def test_t_rod_3_strength_of_the_prior(gamma: float, loss: float) -> None:
    assert bsm([1, 2, 3], 1, [90, 10, 1], gamma)[0] == pytest.approx(loss, abs=1e-6)


def test_t_rod_4_the_private_loss_moves_the_private_head_alone() -> None:
    z = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    generic = torch.tensor([[1.0, 0], [0, 1], [0, 0]], dtype=torch.float64, requires_grad=True)
    phi = linear({"weight": torch.zeros(3, 2, dtype=torch.float64)}).double()
    loss = private_loss(z, z @ generic.T, torch.tensor([1]), phi).sum()
    assert float(loss.detach()) == pytest.approx(0.4076059644, abs=1e-6)
    slopes = torch.autograd.grad(loss, (phi.weight, z, generic), allow_unused=True)
    assert slopes[1] is None
    assert slopes[2] is None
    assert slopes[0].flatten().tolist() == pytest.approx(
        [0.2447284711, 0.4894569421, -0.3347590442, -0.6695180885, 0.0900305732, 0.1800611463], abs=1e-6
    )


def test_t_rod_5_equal_counts_are_plain_cross_entropy() -> None:
    g, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 3
    found = balanced_softmax(g, y, torch.full((3,), 7.0), 1.0)
    torch.testing.assert_close(found, cross_entropy(g, y, reduction="none"))


def test_neither_loss_has_a_gradient_for_the_others_parameters() -> None:
    x, y = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 2
    counts = torch.tensor([3.0, 2.0, 0.0, 0.0])

    def slopes(per_example: Tensor, both: TwoHeads) -> dict[str, Tensor]:
        both.zero_grad()
        per_example.mean().backward()  # type: ignore[no-untyped-call]
        return {n: p.grad.clone() for n, p in both.named_parameters() if p.grad is not None}

    model = build_model("digits_cnn", {}, SCHEMA, 0)
    both = TwoHeads(model, linear(tensor_maps.copy_state(model.head)))
    together = slopes(both_losses(counts, 1.0)(both, x, y).per_example, both)
    generic = slopes(balanced_softmax(model(x), y, counts), both)
    z = model.features(x)
    private = slopes(private_loss(z, model.head(z), y, both.private), both)
    assert all(n.startswith("model.") for n in generic)
    assert all(n.startswith("private.") for n in private)
    assert same(together, generic | private)


def played(
    method: FedROD, *, config: TrainConfig = CONFIG, norm: str = "batch", k: int = 0
) -> tuple[SplitModel, State, State, PlainLocalData, LocalResult]:
    share, context = shares()[k], FED.for_silo(k, 0)
    model = build_model("digits_cnn", {"norm": norm}, SCHEMA, 0)
    msg = method.broadcast(method.init_server(model, FED))
    silo = method.init_silo(model, FED)
    data = PlainLocalData(RoundData(share.train, share.test, config, context))
    return model, msg, silo, data, method.local(model, msg, silo, data, context)


@pytest.mark.parametrize(
    ("variant", "phase", "norm"),
    [
        ("linear", "together", "group"),
        ("linear", "separate", "batch"),
        ("hyper", "together", "batch"),
        ("hyper", "separate", "group"),
    ],
)
def test_gamma_zero_averages_fedavgs_models_bit_for_bit(variant: str, phase: str, norm: str) -> None:
    finals = [
        simulated(
            name,
            options,
            train=TrainConfig(batch_size=4, epochs=1, clip_norm=0.5),
            rounds=2,
            model_options={"norm": norm},
        )
        for name, options in (
            ("fedavg", {}),
            ("fedrod", {"gamma": 0.0, "variant": variant, "phase": phase}),
            ("fedrod", {"variant": variant, "phase": phase}),
        )
    ]
    assert same(finals[0]["w"], finals[1]["w"])
    assert not same(finals[0]["w"], finals[2]["w"])


@pytest.mark.parametrize("phase", ["together", "separate"])
def test_the_private_head_moves_by_plain_steps_from_a_copy_of_the_initial_head(phase: str) -> None:
    """One step on the whole set: phi - lr dL_P/dphi, without the schedule's momentum and decay."""
    config = TrainConfig(lr=0.05, momentum=0.9, weight_decay=0.1, batch_size=14, epochs=1)
    model, msg, silo, _, outcome = played(FedROD(phase=phase), config=config, norm="group")
    before = build_model("digits_cnn", {"norm": "group"}, SCHEMA, 0)
    assert same(silo["phi"], tensor_maps.copy_state(before.head))
    tensor_maps.load_state(before, msg["w"] if phase == "together" else tensor_maps.copy_state(model))
    share, phi = shares()[0], linear(silo["phi"])
    assert isinstance(share.train, Given)
    z = before.features(share.train.x)
    private_loss(z, before.head(z), share.train.labels, phi).mean().backward()  # type: ignore[no-untyped-call]
    assert phi.weight.grad is not None
    torch.testing.assert_close(outcome.state["phi"]["weight"], (phi.weight - 0.05 * phi.weight.grad).detach())


def test_from_zero_the_first_personal_model_decides_as_the_generic_one() -> None:
    method = FedROD(private_init="zero", personal_body="received")
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    silo, msg = method.init_silo(model, FED), method.broadcast(method.init_server(model, FED))
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    share, context = shares()[0], FED.for_silo(0, 0)
    own = method.personal(
        model, msg, silo, PlainLocalData(RoundData(share.train, share.test, CONFIG, context)), context
    )
    assert torch.equal(own(x), build_model("digits_cnn", {}, SCHEMA, 0)(x))


@pytest.mark.parametrize("variant", ["linear", "hyper"])
@pytest.mark.parametrize("body", ["local", "received"])
def test_the_personal_model_decides_by_both_heads(variant: str, body: str) -> None:
    method = FedROD(variant=variant, personal_body=body)
    model, msg, silo, data, outcome = played(method)
    left = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    tensor_maps.load_state(left, tensor_maps.copy_state(model) if body == "local" else msg["w"])
    own = method.personal(model, msg, outcome.state, data, FED.for_silo(0, 0)).eval()
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    left.eval()
    z = left.features(x)
    if variant == "linear":
        phi = outcome.state["phi"]
        private = z @ phi["weight"].T + phi["bias"]
        assert not same(phi, silo["phi"])
    else:  # the head that nu gives after its last step, or the received nu
        nu = msg["hyper"]
        if body == "local":
            nu = tensor_maps.add(nu, outcome.bundle["hyper"].mean())
        shares_ = data.class_counts() / data.size()
        hidden = torch.relu(nu["0.weight"] @ shares_ + nu["0.bias"])
        private = z @ (nu["2.weight"] @ hidden + nu["2.bias"]).view(64, 4)
    torch.testing.assert_close(own(x), left.head(z) + private)


@pytest.mark.parametrize(("classes", "d", "numbers"), [(10, 192, 372_672), (100, 192, 3_724_992), (10, 512, 2_632_192)])
def test_the_hypernetwork_has_the_published_size(classes: int, d: int, numbers: int) -> None:
    assert tensor_maps.count(tensor_maps.copy_state(GeneratedHead(classes, d, d, torch.zeros(classes)).nu)) == numbers


def test_the_hypernetwork_is_averaged_and_drawn_from_the_runs_seed() -> None:
    run = manifest("fedrod", {"variant": "hyper", "hidden": 8}, rounds=1)
    start, final = RunSetup.of(run).initial_state(), simulate(RunSetup.of(run), shares(), RoundHistory())
    assert same(start["hyper"], RunSetup.of(run).initial_state()["hyper"])
    other = manifest("fedrod", {"variant": "hyper", "hidden": 8}, seed=1)
    assert not same(start["hyper"], RunSetup.of(other).initial_state()["hyper"])
    assert run.layout["hyper"].shapes["0.weight"] == (8, 4)
    assert not same(final["hyper"], start["hyper"])
    assert set(manifest("fedrod").layout) == {"delta", "metrics"}


def test_shares_of_noisy_counts_stay_shares() -> None:
    assert shares_of(torch.tensor([3.0, -2.0, 1.0])).tolist() == [0.75, 0.0, 0.25]
    assert shares_of(torch.tensor([-1.0, 0.0])).tolist() == [0.0, 0.0]


def test_a_silo_with_one_class_trains_its_private_head_alone() -> None:
    """L_G is 0 there, and with it the gradient of everything that travels."""
    only = Given(torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.full((5,), 2))
    context = FED.for_silo(0, 0)
    method, model = FedROD(), build_model("digits_cnn", {}, SCHEMA, 0)
    config = TrainConfig(lr=0.05, weight_decay=0.0, batch_size=4, epochs=1)
    silo, msg = method.init_silo(model, FED), method.broadcast(method.init_server(model, FED))
    outcome = method.local(model, msg, silo, PlainLocalData(RoundData(only, only, config, context)), context)
    assert not any(v.any() for v in outcome.bundle["delta"].total.values())
    assert not same(outcome.state["phi"], silo["phi"])


def test_the_hypernetwork_lacks_gradients_per_example() -> None:
    assert set(FedROD(variant="hyper").unsupported) == {Capability.DIFFERENTIAL_PRIVACY}
    assert not FedROD().unsupported


def test_head_without_bias_gives_a_private_head_without_bias() -> None:
    model = build_model("digits_cnn", {"head_bias": False}, SCHEMA, 0)
    built = linear(FedROD().init_silo(model, FED)["phi"])
    assert isinstance(built, nn.Linear)
    assert built.bias is None
