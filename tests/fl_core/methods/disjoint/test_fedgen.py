"""FedGen: coefficients, the generator's two terms (T-GEN-1 to T-GEN-4), both modes, and where it is FedAvg."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core import rng
from fl_core.errors import ConfigError
from fl_core.methods.disjoint.fedgen import FedGen, coefficient, head_tensors
from fl_core.methods.shared import feature_generator
from fl_core.methods.shared.feature_generator import Generator, GeneratorConfig, SiloClassifiers
from fl_core.models import build_model
from fl_core.rounds import capabilities
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, Part
from tests.support.federations import FED, SCHEMA, Given, manifest, same, shares, simulated

pytestmark = pytest.mark.integration

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)
SMALL = {"made": 8, "noise": 4, "hidden": 16, "steps": 5}


@pytest.mark.parametrize(
    ("t", "value"), [(0, 10), (1, 9.8), (50, 3.6416968009), (100, 1.3261955589), (570, 1e-4), (9999, 1e-4)]
)
def test_t_gen_1_coefficient(t: int, value: float) -> None:
    assert coefficient(10, t) == pytest.approx(value, abs=1e-9)
    assert coefficient(0, t) == 0


def test_t_gen_2_diversity() -> None:
    e, z = torch.tensor([[0.0, 0], [1, 1]]).double(), torch.tensor([[0.0, 0], [2, 4]]).double()
    assert float(feature_generator.diversity(e, z)) == pytest.approx(0.2231301601, abs=1e-9)


def test_t_gen_3_direction_of_the_divergence() -> None:
    """T-GEN-3: KL((.7,.2,.1)||(.5,.25,.25)) = 0.0992727822 enters the loss, not 0.1166224525 of the reverse."""

    class Fixed(torch.nn.Module):
        """Answers p for examples and q for features, whatever they are."""

        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 3)
            self.feature_dim, self.n_classes = 2, 3
            tensor_maps.load_state(
                self.head, {"weight": torch.zeros(3, 2), "bias": torch.tensor([0.7, 0.2, 0.1]).log()}
            )
            self.shift = torch.nn.Parameter(torch.tensor([0.5, 0.25, 0.25]).log())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shift.expand(len(x), 3)

    caught: list[torch.Tensor] = []

    class Catching(PlainLocalData):
        def sgd(self, model, loss, options=AS_SCHEDULED):  # type: ignore[no-untyped-def]
            caught.append(loss(model, torch.zeros(1, 1, 8, 8), torch.tensor([1])).per_example)
            return 0

    model, context = Fixed(), replace(FED, n_classes=3, round=3)
    for beta in (10.0, 0.0):
        method = FedGen(beta=beta, alpha=0, mode="secagg", **SMALL)
        state = method.init_server(model, context)  # type: ignore[arg-type]
        state = {**state, "labels": {"n": torch.ones(3)}}
        method.local(
            model,
            method.broadcast(state),
            {},
            Catching(RoundData(*2 * [shares()[0].train], TRAIN, context.for_silo(0, 0))),
            context.for_silo(0, 0),
        )
    divergence = (caught[0] - caught[1]) / coefficient(10, 3)
    assert float(divergence.detach()) == pytest.approx(0.0992727822, abs=1e-6)


def test_t_gen_4_classifiers() -> None:
    v = feature_generator.shares(torch.tensor([[31.0, 1], [11, 21]]).double())
    assert v.flatten().tolist() == pytest.approx([0.7380952381, 0.0454545455, 0.2619047619, 0.9545454545], abs=1e-9)
    losses = torch.tensor([[0.2, 2.0], [1.0, 0.1]], dtype=torch.float64)
    assert float(feature_generator.weighted_loss(losses, v, torch.tensor([0, 1]))) == pytest.approx(
        0.2979437229, abs=1e-9
    )


def test_classifiers_ask_each_classifier() -> None:
    draw = torch.Generator().manual_seed(0)
    w, b, z = (torch.randn(s, generator=draw) for s in ((2, 3, 4), (2, 3), (5, 4)))
    y, v = torch.tensor([0, 2, 2, 1, 0]), feature_generator.shares(torch.tensor([[4.0, 0, 1], [1, 0, 3]]))
    expected = sum(v[k, y[i]] * cross_entropy(linear(z[i], w[k], b[k]), y[i]) for k in range(2) for i in range(5)) / 5
    assert float(SiloClassifiers(w, b, v).loss(z, y)) == pytest.approx(float(expected))
    assert v[:, 1].tolist() == [0, 0]


def test_the_published_generator_has_19_744_parameters() -> None:
    assert tensor_maps.count(tensor_maps.trainable(Generator(10, 32, 256, 32))) == 19_744


def test_labels_are_drawn_of_those_that_somebody_has() -> None:
    drawn = feature_generator.draw_labels(4000, torch.tensor([3.0, 0, 1, 0, 500]), rng.stream(0))
    counts = torch.bincount(drawn, minlength=5).tolist()
    assert (counts[1], counts[3]) == (0, 0)
    assert all(1200 < counts[c] < 1470 for c in (0, 2, 4))  # equally likely, whatever their counts
    assert float(feature_generator.draw_noise(500, 2, "uniform", rng.stream(0)).min()) >= 0
    assert float(feature_generator.draw_noise(500, 2, "normal", rng.stream(0)).min()) < -1


def test_training_lowers_the_loss_goes_on_with_its_moments_and_needs_no_global_randomness() -> None:
    config = GeneratorConfig(30, 1e-2, 1e-2, 16, 4, "normal", 1.0)
    classifiers = SiloClassifiers(torch.eye(3, 6).unsqueeze(0), torch.zeros(1, 3), torch.ones(1, 3))
    made, known = feature_generator.seeded(0, 3, 4, 16, 6), torch.ones(3)
    y, e = torch.arange(3).repeat(20), torch.randn(60, 4, generator=rng.stream(1))

    def loss() -> float:
        return float(classifiers.loss(made.eval()(y, e), y).detach())

    before, seen = loss(), torch.get_rng_state()
    first = feature_generator.train(made, config, classifiers, known, rng.stream(0, "a"))
    middle = loss()
    half = tensor_maps.copy_state(made)
    second = feature_generator.train(made, config, classifiers, known, rng.stream(0, "b"), first)
    assert before > middle > loss()
    assert (float(first["step"]["t"]), float(second["step"]["t"])) == (30, 60)
    assert torch.equal(torch.get_rng_state(), seen)
    alone = feature_generator.seeded(0, 3, 4, 16, 6)
    tensor_maps.load_state(alone, half)
    feature_generator.train(alone, config, classifiers, known, rng.stream(0, "b"))
    assert not same(tensor_maps.copy_state(alone), tensor_maps.copy_state(made))  # moments matter


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "secagg"])
def test_round_0_is_fedavg_and_so_is_a_run_without_its_terms(mode: str) -> None:
    start, fedgen = RoundHistory(), {"mode": mode, **SMALL}
    ours = simulate(RunSetup.of(manifest("fedgen", fedgen, train=TRAIN, rounds=1)), shares(), start)
    assert same(ours["w"], simulated(train=TRAIN, rounds=1)["w"])
    off = simulated("fedgen", {**fedgen, "alpha": 0.0, "beta": 0.0}, train=TRAIN)
    plain = simulated(train=TRAIN)
    assert same(off["w"], plain["w"])
    for term in ({"alpha": 0.0}, {"beta": 0.0}):
        on = simulated("fedgen", {**fedgen, **term}, train=TRAIN)
        assert not same(on["w"], plain["w"])


@pytest.mark.parametrize("mode", ["plain", "secagg"])
def test_the_generator_learns_what_the_classifiers_know(mode: str) -> None:
    """After some rounds the aggregated head recognises made-up features of every class that somebody has."""
    options = {"mode": mode, "alpha": 1.0, "beta": 1.0, "made": 8, "noise": 4, "hidden": 32, "steps": 60, "lr": 1e-2}
    final = simulated("fedgen", options, train=TRAIN, rounds=4)
    made = feature_generator.seeded(0, 4, 4, 32, 64)
    tensor_maps.load_state(made, final["generator"])
    y = torch.arange(4).repeat(25)
    z = made.eval()(y, torch.randn(100, 4, generator=rng.stream(0)))
    answers = linear(z, final["w"]["head.weight"], final["w"]["head.bias"]).argmax(1)
    assert float((answers == y).float().mean()) > (0.9 if mode == "plain" else 0.6)
    assert final["labels"]["n"].tolist() == [7, 14, 14, 7]


def test_only_the_plain_mode_shows_single_classifiers() -> None:
    plain, masked = FedGen(), FedGen(mode="secagg")
    assert (plain.unsummed_parts, plain.sends) == ({"heads"}, ("delta", "heads"))
    assert (masked.unsummed_parts, masked.sends) == (
        set(),
        ("delta", "generator", "labels"),
    )
    with pytest.raises(ConfigError, match="mode=secagg") as caught:
        capabilities.check_supported(plain, [Capability.SECURE_AGGREGATION])
    assert caught.value.code == "E-CFG-08"
    capabilities.check_supported(masked, [Capability.SECURE_AGGREGATION])


def test_one_silo_gives_both_modes_the_same_first_generator() -> None:
    """With one silo its share is 1, and the average of one difference is that difference; only the noise is apart."""
    run = manifest("fedgen", {**SMALL, "mode": "secagg"}, train=TRAIN, rounds=1, names=("north",))
    ours = simulate(RunSetup.of(run), shares()[:1], RoundHistory())
    method, start = FedGen(mode="secagg", **SMALL), RunSetup.of(run).initial_state()
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    tensor_maps.load_state(model, ours["w"])
    head = head_tensors(model)
    counts = torch.tensor([7.0, 7, 0, 0])
    made = feature_generator.seeded(0, 4, 4, 16, 64)
    tensor_maps.load_state(made, start["generator"])
    classifiers = SiloClassifiers(
        head["weight"].unsqueeze(0), head["bias"].unsqueeze(0), (counts > 0).float().unsqueeze(0)
    )
    feature_generator.train(
        made, method.generator_config(0), classifiers, counts, rng.stream(0, "round", 0, "generator")
    )
    assert all(
        torch.allclose(v, ours["generator"][name], atol=1e-6) for name, v in tensor_maps.copy_state(made).items()
    )


def test_a_head_without_bias_and_a_single_class_take_part() -> None:
    only = Given(torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.full((5,), 2))
    model = build_model("digits_cnn", {"head_bias": False}, SCHEMA, 0)
    method = FedGen(**SMALL)
    server, fed = method.init_server(model, FED), replace(FED, cohort=1)
    for t in range(2):
        turn = replace(fed, round=t).for_silo(0, 0)
        bundle = method.local(
            model, method.broadcast(server), {}, PlainLocalData(RoundData(only, only, TRAIN, turn)), turn
        ).bundle
        heads = bundle["heads"]
        total = {
            **bundle,
            "heads": Part({k: v.unsqueeze(0) for k, v in heads.total.items()}, heads.weight.unsqueeze(0)),
        }
        server = method.merge(server, total, turn)
    assert all(tensor_maps.all_finite(values) for values in server.values())
    assert server["labels"]["n"].tolist() == [0, 0, 5, 0]
