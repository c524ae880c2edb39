"""FedPer: the scalar network (T-PER-1), and a head that stays where it is."""

from __future__ import annotations

import pytest
import torch

from consilium.research.engines.in_process import RoundHistory, local_ports, simulate
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.fedper import FedPer
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import RoundContext, State
from tests.support.federations import FED, SCHEMA, Pair, PairData, manifest, same, shares


def played(method: FedAvg, rounds: int = 1) -> tuple[State, list[tuple[float, float]], list[State]]:
    """Play rounds of two silos, y = 1 and 3; return the server's state, both (u_k, v_k) and the silos' states."""
    context, data = RoundContext(2, 2), (PairData(1), PairData(3))
    server = method.init_server(Pair(), context)
    silos = [method.init_silo(Pair(), context) for _ in data]
    for _ in range(rounds):
        models, parts = [Pair(), Pair()], []
        for k in range(2):
            done = method.local(models[k], method.broadcast(server), silos[k], data[k], context.for_silo(k, 0))
            silos[k] = done.state
            parts.append(done.bundle["delta"])
        server = method.merge(server, {"delta": parts[0] + parts[1]}, context)
    return server, [m.values for m in models], silos


def test_t_per_1_one_step() -> None:
    server, silos, states = played(FedPer())
    assert silos == [pytest.approx((1, 1)), pytest.approx((1.2, 1.2))]
    assert float(server["w"]["body.w"]) == pytest.approx(1.1, abs=1e-6)
    assert [float(s["head"]["head.w"]) for s in states] == pytest.approx([1, 1.2])
    averaged, _, _ = played(FedAvg())
    assert float(averaged["w"]["head.w"]) == pytest.approx(1.1, abs=1e-6)


def test_a_round_goes_on_from_the_own_head() -> None:
    _, silos, _ = played(FedPer(), rounds=2)
    u, v = 1.1, 1.2  # silo 2 in round 2
    error = u * v - 3
    assert silos[1] == pytest.approx((u - 0.1 * error * v, v - 0.1 * error * u), abs=1e-6)


def test_no_tensor_of_the_head_travels_and_the_first_body_is_fedavgs() -> None:
    finals = {}
    for name in ("fedavg", "fedper"):
        run = manifest(name, rounds=1, model_options={"norm": "batch"})
        finals[name] = simulate(RunSetup.of(run), shares(), RoundHistory())
    assert [n for n in run.layout["delta"].shapes if n.startswith("head")] == []
    assert any("running_mean" in n for n in run.layout["delta"].shapes)
    body = {n: v for n, v in finals["fedavg"]["w"].items() if not n.startswith("head")}
    assert same(finals["fedper"]["w"], body)


def test_the_global_model_has_the_initial_head() -> None:
    run = manifest("fedper")
    final, initial = simulate(RunSetup.of(run), shares(), RoundHistory()), build_model("digits_cnn", {}, SCHEMA, 0)
    model = FedPer().global_model(build_model("digits_cnn", {}, SCHEMA, 0), FedPer().broadcast(final))
    assert torch.equal(model.head.weight, initial.head.weight)  # type: ignore[union-attr]
    assert same(FedPer().exported(final), tensor_maps.copy_state(model))
    assert "head" not in FedPer().broadcast(final)


def test_heads_differ_by_silo_and_grow_old_with_silos_that_are_not_asked() -> None:
    run = manifest("fedper", rounds=1, cohort=2)
    ports = local_ports(RunSetup.of(run), shares())
    RunSetup.of(run).round_loop(ports, 1).run(RunSetup.of(run).initial_state(), RoundHistory())
    heads = [None if p.state is None else p.state["head"] for p in ports]
    asked = [h for h in heads if h is not None]
    assert len(asked) == 2
    assert not same(*asked)


def test_the_personal_model_is_what_local_training_left() -> None:
    share, context = shares()[0], FED.for_silo(0, 0)
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    msg = {"w": {n: v for n, v in tensor_maps.copy_state(model).items() if not n.startswith("head")}}
    silo = {"head": {n: v + 1 for n, v in tensor_maps.copy_state(model).items() if n.startswith("head")}}
    data = PlainLocalData(RoundData(share.train, share.test, TrainConfig(batch_size=4, epochs=1), context))
    outcome = FedPer().local(model, msg, silo, data, context)
    own = tensor_maps.copy_state(FedPer().personal(model, msg, outcome.state, data, context))
    assert same({n: own[n] for n in silo["head"]}, outcome.state["head"])
    expected = tensor_maps.add(msg["w"], outcome.bundle["delta"].mean())
    assert all(torch.allclose(own[n], v, atol=1e-6) for n, v in expected.items())
    moved = tensor_maps.squared_distance(outcome.state["head"], silo["head"])
    assert 0 < float(moved) < 1  # from the silo's head, not from the initial one
