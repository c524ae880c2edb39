"""FedNova on problem Q (T-NOV-1 to T-NOV-3), its limits, and prototypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fl_core.errors import ConfigError
from fl_core.methods.drift.fednova import FedNova
from fl_core.methods.drift.fedprox import FedProx
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Bundle, Part, RoundContext, State
from tests.support.federations import FED, SCHEMA, QData, Scalar, play, same, shares, simulated, total_of


def bundle(n: float, delta: Sequence[float], a: float) -> Bundle:
    return {
        "delta": Part.of({"w": torch.tensor(delta) / a}, n),
        "buffers": Part.of({}, n),
        "steps": Part.of({"tau": torch.tensor([a])}, n),
    }


@pytest.mark.parametrize(("start", "after"), [((0.0, 0.0), (-5, 3.75)), ((1.0, 1.0), (-4, 4.75))])
def test_t_nov_1_update_is_a_product_of_two_means(start: tuple[float, float], after: tuple[float, float]) -> None:
    """FedAvg would go to (-5, 4.5); dividing by the sum of scales to (-4, 3); from (1, 1) naive averages miss w^t."""
    total = total_of([bundle(10, (-2, 0), 2), bundle(30, (-6, 6), 6)])
    assert float(total["steps"].mean()["tau"]) == 5
    merged = FedNova().merge({"w": {"w": torch.tensor(start)}}, total, RoundContext(2, 2))
    assert merged["w"]["w"].tolist() == pytest.approx(after, abs=1e-6)


def heavy(steps: int, a: float, b: float, n: float) -> QData:
    return QData(a, b, n=n, steps=steps, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(("steps", "avg", "nova"), [((5, 5), 1.185315, 1.185315), ((2, 5), 1.185315, 0.9543656503)])
def test_t_nov_2_heavy_ball(steps: tuple[int, int], avg: float, nova: float) -> None:
    silos = (heavy(steps[0], 1, 0, 1), heavy(steps[1], 4, 1, 3))
    assert play(FedAvg(), silos, 1).path == pytest.approx([avg], abs=1e-6)
    assert play(FedNova(), silos, 1).path == pytest.approx([nova], abs=1e-6)
    model = Scalar()
    silos[1].sgd(model, FedAvg.loss)
    assert float(model.w.detach()) == pytest.approx(1.58042, abs=1e-6)


def fixed_point(method: FedAvg, silos: Sequence[QData]) -> float:
    """Find where a round moves nothing by secants: a round on Q is affine in w."""

    def moved(w: float) -> float:
        context, msg = RoundContext(2, 2), {"w": {"w": torch.tensor([w], dtype=torch.float64)}}
        bundles = [method.local(Scalar(), msg, {}, data, context.for_silo(k, 0)).bundle for k, data in enumerate(silos)]
        return float(method.merge(msg, total_of(bundles), context)["w"]["w"]) - w

    w, x = 0.0, 1.0
    for _ in range(4):
        at_w, at_x = moved(w), moved(x)
        w, x = x, (x - at_x * (x - w) / (at_x - at_w) if at_x != at_w else x)
    return x


@pytest.mark.parametrize(
    ("eta", "avg", "nova", "tolerance"),
    [
        (0.1, 0.7741648270, 0.4067400179, 1e-6),
        (0.001, 0.8327773157, 0.4990005020, 1e-6),
        (1e-6, 10 / 12, 0.5, 2e-6),  # the limit of small rates; 0.5 is the true optimum
    ],
)
def test_t_nov_3_fixed_points_with_unequal_steps(eta: float, avg: float, nova: float, tolerance: float) -> None:
    silos = (QData(1, 0, steps=2, lr=eta), QData(1, 1, steps=10, lr=eta))
    assert fixed_point(FedAvg(), silos) == pytest.approx(avg, abs=tolerance)
    assert fixed_point(FedNova(), silos) == pytest.approx(nova, abs=tolerance)


def only_steps(method: FedNova, data: QData) -> float:
    msg: State = {"w": {"w": torch.zeros(1, dtype=torch.float64)}}
    part = method.local(Scalar(), msg, {}, data, RoundContext(1, 2).for_silo(0, 0)).bundle["steps"]
    return float(part.mean()["tau"])


def test_pull_counts_in_the_steps_with_momentum_too() -> None:
    """eta mu = 0.1, rho = 0.9, K = 5: 10.2916, where the authors' recursion has 14.37895."""
    assert only_steps(FedNova(mu=1.0), QData(1, 0, steps=5, lr=0.1, momentum=0.9)) == pytest.approx(10.2916, abs=1e-4)
    assert only_steps(FedNova(mu=1.0), QData(1, 0, steps=5, lr=0.1)) == pytest.approx(4.0951, abs=1e-6)
    assert only_steps(FedNova(mu=1.0, tau="steps"), QData(1, 0, steps=5, lr=0.1)) == 5


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.5)])
def test_equal_steps_are_fedavg_or_fedprox(momentum: float, mu: float) -> None:
    train = TrainConfig(lr=0.05, batch_size=4, epochs=1, momentum=momentum)
    other = ("fedprox", {"mu": mu}) if mu else ("fedavg", {})
    plain, nova = (
        simulated(name, options, train=train, model_options={"norm": "batch"})["w"]
        for name, options in (other, ("fednova", {"mu": mu}))
    )
    assert all(torch.allclose(nova[name], v, rtol=1e-5, atol=2e-6) for name, v in plain.items())


def test_unequal_steps_are_not_fedavg_and_buffers_are_averaged_plainly() -> None:
    """One silo with more batches: weights differ from FedAvg's, buffers after one round do not."""
    given = [*shares()[:2], shares(n=28)[2]]
    train = TrainConfig(lr=0.05, batch_size=4, epochs=1)
    avg, nova = (
        simulated(name, train=train, rounds=1, model_options={"norm": "batch"}, given=given)["w"]
        for name in ("fedavg", "fednova")
    )
    buffers = {name: v for name, v in avg.items() if "running" in name}
    assert buffers
    assert same(buffers, {name: nova[name] for name in buffers})
    assert not any(torch.equal(nova[name], v) for name, v in avg.items() if name not in buffers)


def test_server_momentum_adds_up_updates_and_an_empty_round_keeps_it() -> None:
    method, context = FedNova(server_momentum=0.5), RoundContext(2, 2)
    server = method.init_server(Scalar(), context)
    step = bundle(1, (2.0,), 2)
    once = method.merge(server, step, context)
    twice = method.merge(once, step, context)
    assert [float(s["w"]["w"]) for s in (once, twice)] == [2, 2 + (2 + 1)]
    empty = {name: Part(tensor_maps.zeros(part.total), torch.zeros(())) for name, part in step.items()}
    assert method.merge(twice, empty, context) is twice
    assert "momentum" not in FedNova().init_server(Scalar(), context)


def test_momentum_of_sgd_is_no_obstacle_but_adam_is() -> None:
    share, context = shares()[0], FED.for_silo(0, 0)
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    adam = PlainLocalData(
        RoundData(share.train, share.test, TrainConfig(batch_size=4, epochs=1, optimizer="adam"), context)
    )
    with pytest.raises(ConfigError) as caught:
        FedNova().local(model, {"w": tensor_maps.copy_state(model)}, {}, adam, context)
    assert caught.value.code == "E-CFG-08"


def test_mu_zero_has_no_pull() -> None:
    silos = (QData(1, 0), QData(4, 1))
    assert play(replace(FedNova(), mu=0.0), silos, 2).path == pytest.approx(play(FedAvg(), silos, 2).path, abs=1e-6)
    assert play(FedNova(mu=1.0), silos, 2).path == pytest.approx(play(FedProx(mu=1.0), silos, 2).path, abs=1e-6)
