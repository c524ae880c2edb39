"""FedProto: the pull (T-PTO-1), two ways of averaging (T-PTO-2), and no model on the wire."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from consilium.research.engines.in_process import InProcessSilo, RoundHistory, local_ports, simulate
from fl_core.errors import ConfigError
from fl_core.methods.disjoint.fedproto import FedProto, NearestPrototype, pull
from fl_core.methods.shared import prototypes
from fl_core.models import build_model
from fl_core.models.split_model import SplitModel
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Part, RoundContext, State
from tests.support.federations import FED, SCHEMA, Given, manifest, same, shares

Z = torch.tensor([[1.0, 2], [3, 4], [0, 0]], dtype=torch.float64)
G = torch.tensor([[0.0, 0], [3, 2], [9, 9]], dtype=torch.float64)
KNOWN = torch.tensor([True, True, False])
CONFIG = TrainConfig(lr=0.05, batch_size=4, epochs=1)


class Flat(SplitModel):
    """Features and logits are the input."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), nn.Identity(), nn.Identity(), 2, 3)


def test_t_pto_1_pull_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = pull(Z, torch.arange(3), G, KNOWN)
    assert terms.tolist() == pytest.approx([2.5, 2.0, 0.0])
    assert float(terms.mean()) == pytest.approx(1.5, abs=1e-6)
    made_up = torch.full((3,), 0.7).double()
    monkeypatch.setattr("fl_core.methods.disjoint.fedproto.cross_entropy", lambda *_, **__: made_up)
    msg: State = {"w": {}, "prototypes": {"g": G, "known": KNOWN.double()}}
    loss = FedProto(lambda_p=0.1).objective(Flat(), msg, None, FED.for_silo(0, 0))  # type: ignore[arg-type]
    assert float(loss(Flat(), Z, torch.arange(3)).objective()) == pytest.approx(0.85, abs=1e-6)


@pytest.mark.parametrize(("weights", "mean"), [("samples", (3.25, 5.5)), ("uniform", (2.5, 4.0))])
def test_t_pto_2_averages_of_class_means(weights: str, mean: tuple[float, float]) -> None:
    """Means (1, 1) of one example and (4, 7) of three; the paper's literal (1.625, 2.75) is neither."""
    method, total = FedProto(weights=weights), None
    server: State = {"w": {}, prototypes.PROTOTYPES: prototypes.initial_prototypes(3, 2)}
    for rows in ([[1.0, 1.0]], [[4.0, 7.0], [3.0, 6.0], [5.0, 8.0]]):
        held = Given(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64))
        context = RoundContext(2, 3).for_silo(0, 0)
        part = method.extras(Flat(), server, PlainLocalData(RoundData(held, held, CONFIG, context)), context)[
            prototypes.PROTOTYPES
        ]
        total = part if total is None else total + part
    assert total is not None
    after = method.merge(server, {prototypes.PROTOTYPES: total}, RoundContext(2, 3))[prototypes.PROTOTYPES]
    assert after["g"][0].tolist() == pytest.approx(mean)
    assert after["known"].tolist() == [1, 0, 0]


def test_a_class_that_nobody_reports_keeps_its_prototype() -> None:
    server: State = {"w": {}, prototypes.PROTOTYPES: {"g": G.float(), "known": torch.tensor([1.0, 1.0, 0.0])}}
    part = Part.of({"offset": torch.ones(3, 2)}, torch.tensor([0.0, 2.0, 0.0]))
    after = FedProto().merge(server, {prototypes.PROTOTYPES: part}, FED)[prototypes.PROTOTYPES]
    assert after["g"].tolist() == [[0, 0], [4, 3], [9, 9]]
    assert after["known"].tolist() == [1, 1, 0]


def test_only_prototypes_travel_and_no_accuracy_is_made_up() -> None:
    run, history = manifest("fedproto"), RoundHistory()
    assert {part: set(spec.shapes) for part, spec in run.layout.items()} == {
        "metrics": {"correct"},
        "prototypes": {"offset"},
    }
    final = simulate(RunSetup.of(run), shares(), history)
    assert set(FedProto().broadcast(final)) == {"w", "prototypes"}
    assert final["w"] == {}
    assert final["prototypes"]["known"].tolist() == [1, 1, 1, 1]
    assert history.accuracies == [-1.0] * 4
    with pytest.raises(ConfigError) as caught:
        FedProto().exported(final)
    assert caught.value.code == "E-CFG-08"


def networks(name: str, options: dict[str, float], rounds: int) -> list[dict[str, Tensor]]:
    run = manifest(name, options, rounds=rounds, model_options={"norm": "batch"})
    ports, server = (
        local_ports(RunSetup.of(run), shares()),
        RunSetup.of(run).method.init_server(RunSetup.of(run).silo_runtime().model, FED),
    )
    for t in range(rounds):
        context = RoundContext(3, 4, rounds, t, 3)
        method = RunSetup.of(run).method
        bundles = [port.round(method.broadcast(server), context, TaskKind.TRAIN) for port in ports]
        total = bundles[0]
        for more in bundles[1:]:
            total = {part: p + more[part] for part, p in total.items()}
        server = method.merge(server, total, context)
        for port in ports:
            port.settle(context, TaskKind.TRAIN, True)
    return [state_of(port)["net"] for port in ports]


def state_of(port: InProcessSilo) -> State:
    assert port.state is not None
    return port.state


def test_without_a_pull_and_in_round_0_it_is_local_training_bit_for_bit() -> None:
    alone = networks("local", {}, 2)
    assert all(same(a, b) for a, b in zip(networks("fedproto", {"lambda_p": 0.0}, 2), alone, strict=True))
    assert not any(same(a, b) for a, b in zip(networks("fedproto", {}, 2), alone, strict=True))
    assert all(
        same(a, b) for a, b in zip(networks("fedproto", {}, 1), networks("local", {}, 1), strict=True)
    )  # no prototype is known yet


def test_prototypes_are_measured_with_the_final_weights_in_eval_mode() -> None:
    method, share, context = FedProto(), shares()[0], FED.for_silo(0, 0)
    model = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    msg = method.broadcast(method.init_server(model, FED))
    data = PlainLocalData(RoundData(share.train, share.test, CONFIG, context))
    outcome = method.local(model, msg, method.init_silo(model, FED), data, context)
    assert isinstance(share.train, Given)
    again = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 1)
    tensor_maps.load_state(again, outcome.state["net"])
    z = again.eval().features(share.train.x)
    for c in range(4):
        mine = z[share.train.labels == c]
        torch.testing.assert_close(outcome.bundle["prototypes"].total["offset"][c], mine.sum(0).detach())
        assert float(outcome.bundle["prototypes"].weight[c]) == len(mine)


def test_nearest_chooses_among_known_classes_alone() -> None:
    x = torch.tensor([[0.1, 0.1], [3.0, 2.5], [9.0, 9.0]])
    assert NearestPrototype(Flat(), G.float(), KNOWN)(x).argmax(1).tolist() == [0, 1, 1]
    assert NearestPrototype(Flat(), G.float(), torch.ones(3, dtype=torch.bool))(x).argmax(1).tolist() == [0, 1, 2]
    assert NearestPrototype(Flat(), G.float(), KNOWN)(x)[:, 2].tolist() == [float("-inf")] * 3


@pytest.mark.parametrize(
    ("options", "known", "kind"),
    [({}, True, NearestPrototype), ({}, False, SplitModel), ({"predict": "head"}, True, SplitModel)],
)
def test_the_personal_model_decides_as_the_option_says(
    options: dict[str, str], known: bool, kind: type[nn.Module]
) -> None:
    share, context = shares()[0], FED.for_silo(0, 0)
    state = {
        "g": torch.randn(4, 64, generator=torch.Generator().manual_seed(0)),
        "known": torch.full((4,), known * 1.0),
    }
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    data = PlainLocalData(RoundData(share.train, share.test, CONFIG, context))
    own = FedProto(**options).personal(model, {"w": {}, "prototypes": state}, {}, data, context)  # type: ignore[arg-type]
    assert isinstance(own, kind)


def test_own_classes_are_those_of_the_silo() -> None:
    share, context = shares()[1], FED.for_silo(1, 0)  # classes 1 and 2
    state = {"g": torch.zeros(4, 64), "known": torch.tensor([1.0, 1.0, 0.0, 1.0])}
    data = PlainLocalData(RoundData(share.train, share.test, CONFIG, context))
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    own = FedProto(own_classes=True).personal(model, {"w": {}, "prototypes": state}, {}, data, context)
    assert isinstance(own, NearestPrototype)
    assert own.known.tolist() == [False, True, False, False]


def test_a_silo_that_submits_no_prototypes_still_trains_with_them() -> None:
    method, share, context = FedProto(), shares()[0], FED.for_silo(0, 0, prototypes=False)
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    msg = method.broadcast(method.init_server(model, FED))
    data = PlainLocalData(RoundData(share.train, share.test, CONFIG, context))
    part = method.local(model, msg, method.init_silo(model, FED), data, context).bundle["prototypes"]
    assert not part.weight.any()
    assert not part.total["offset"].any()
