"""Whole rounds of each method against its paper's equations (tests/oracles/rounds.py), in float64, averaged.

Three silos of unequal size with two of four classes each, several batches a round in the order that the silo drew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from consilium.testing.federation import MadeUp, merged_total
from fl_core import rng
from fl_core.converter import Option
from fl_core.methods import METHODS, build_method
from fl_core.methods.disjoint.fedgela import frame_of
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.shared import feature_generator
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, LossFn, RoundContext, SgdOptions, State
from tests.oracles import personal_rounds as personal
from tests.oracles import rounds as oracle
from tests.oracles.rounds import Silo, Weights
from tests.support.federations import SCHEMA

ROUNDS, CLOSE = 3, 1e-6
SIZES = (14, 10, 6)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute all in float64, also what the project narrows to the dtype of models."""
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    yield
    torch.set_default_dtype(torch.float32)


class Watched(MadeUp):
    """Examples that note which of them each pass of training reads."""

    passes: list[list[Tensor]] | None = None

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        if self.passes is not None:
            self.passes[-1].append(index.clone())
        return super().batch(index, augment)


class WatchedData(PlainLocalData):
    def __init__(self, data: RoundData, silo: Silo) -> None:
        super().__init__(data)
        assert isinstance(data.train, Watched)
        self._watched, self._silo = data.train, silo
        silo.batches.append([])

    def sgd(self, model: torch.nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        self._silo.batches[-1].append([])
        self._watched.passes = self._silo.batches[-1]
        taken = super().sgd(model, loss, options)
        self._watched.passes = None
        return taken


def federation() -> list[Silo]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for k, n in enumerate(SIZES):
        y = torch.tensor([k, k + 1]).repeat(n // 2)
        x = torch.rand(n, 1, 8, 8, generator=draw)
        x[torch.arange(n), 0, 2 * y] += 1.0
        found.append(Silo(x, y))
    return found


class Played:
    """The project's own rounds of a method, without grid or network."""

    def __init__(self, name: str, options: Mapping[str, Option], momentum: float = oracle.MOMENTUM) -> None:
        self.method = method = build_method(name, options)
        assert isinstance(method, FedAvg)
        config = TrainConfig(lr=oracle.LR, momentum=momentum, weight_decay=oracle.DECAY, batch_size=5, epochs=2)
        self.silos = federation()
        self.start = {k: v.clone() for k, v in self._model().state_dict().items()}
        context = RoundContext(len(SIZES), oracle.CLASSES, ROUNDS, 0, len(SIZES))
        self.first: State = method.init_server(self._model(), context)
        server, self.states = self.first, [method.init_silo(self._model(), context) for _ in SIZES]
        self.servers: list[State] = []
        self.bundles = []
        for t in range(ROUNDS):
            context = RoundContext(len(SIZES), oracle.CLASSES, ROUNDS, t, len(SIZES))
            answers = []
            for k, silo in enumerate(self.silos):
                examples = Watched(silo.x, silo.y)
                at = context.for_silo(k, 0)
                data = WatchedData(RoundData(examples, examples, config, at), silo)
                answers.append(method.local(self._model(), method.broadcast(server), self.states[k], data, at))
            self.states = [answer.state for answer in answers]
            self.bundles.append([answer.bundle for answer in answers])
            server = method.merge(server, merged_total(method, self.bundles[-1]), context)
            self.servers.append(server)
        self.server = server

    @staticmethod
    def _model() -> torch.nn.Module:
        return build_model("digits_linear", {}, SCHEMA, 0)


def close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Assert that both have the same numbers; buffers and weights that only one of them has must be named."""
    assert ours, "nothing to compare"
    for name, value in ours.items():
        wanted = theirs[name].reshape(value.shape)
        assert value.dtype == torch.float64, name
        assert float((value - wanted).abs().max()) < CLOSE, name


SOLVED = ("analytic",)
"""Methods of one round, which is a solved system: disjoint/test_analytic.py."""


def test_every_method_has_a_transcription_of_its_rounds() -> None:
    text = Path(__file__).read_text()
    assert not [name for name in METHODS if name not in SOLVED and f'"{name}"' not in text]


SIMPLE: Mapping[str, tuple[Mapping[str, Option], Callable[[Weights, list[Silo]], Weights]]] = {
    "fedavg": ({}, oracle.fedavg),
    "fedprox": ({"mu": 0.3}, lambda w, s: oracle.fedprox(w, s, 0.3)),
    "fedlc": ({"tau": 0.5}, lambda w, s: oracle.fedlc(w, s, 0.5)),
    "fedrs": ({"alpha": 0.3}, lambda w, s: oracle.fedrs(w, s, 0.3)),
    "moon": ({"mu": 2.0, "tau": 0.5}, lambda w, s: oracle.moon(w, s, 2.0, 0.5)),
    "fednova": ({}, oracle.fednova),
    "fedvls": ({"lam": 0.5, "mu": 0.2}, lambda w, s: oracle.fedvls(w, s, 0.5, 0.2)),
    "fedbabu": ({}, personal.fedbabu),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_a_round_is_the_papers(name: str) -> None:
    options, equations = SIMPLE[name]
    played = Played(name, options)
    assert any(len(s.batches[0][0]) != len(played.silos[0].batches[0][0]) for s in played.silos)
    close(played.server["w"], equations(played.start, played.silos))


@pytest.mark.parametrize("least", [0, 5])
def test_a_round_of_scaffold_is_the_papers_with_all_control_variates(least: int) -> None:
    played = Played("scaffold", {"least_steps": least}, momentum=0.0)
    w, c, own = oracle.scaffold(played.start, played.silos, least)
    close(played.server["w"], w)
    close(played.server["c"], c)
    for state, mine in zip(played.states, own, strict=True):
        close(state["c"], mine)


def test_a_round_of_feddyn_is_the_papers_for_the_cloud_and_the_average() -> None:
    played = Played("feddyn", {"alpha": 0.1})
    cloud, average = oracle.feddyn(played.start, played.silos, 0.1)
    close(played.server["w"], average)
    close({k: played.server["w"][k] + m for k, m in played.server["m"].items()}, cloud)


def test_a_round_of_feddc_is_the_papers_for_the_cloud_and_the_average() -> None:
    played = Played("feddc", {"alpha": 0.1})
    cloud, average = oracle.feddc(played.start, played.silos, 0.1)
    close(played.server["w"], average)
    close({k: played.server["w"][k] + m for k, m in played.server["m"].items()}, cloud)


def test_a_round_of_fedproc_is_the_papers_with_its_prototypes() -> None:
    played = Played("fedproc", {})
    w, g = oracle.fedproc(played.start, played.silos, ROUNDS)
    close(played.server["w"], w)
    close({"g": played.server["prototypes"]["g"]}, {"g": g})


def test_rounds_of_fedper_and_fedrep_are_the_papers_with_private_heads() -> None:
    for name, alternate in (("fedper", False), ("fedrep", True)):
        played = Played(name, {"head_epochs": 1} if alternate else {})
        body, heads = personal.fedper(played.start, played.silos, alternate)
        close(played.server["w"], body)
        for state, head in zip(played.states, heads, strict=True):
            close(state["head"], head)


def test_rounds_of_ditto_are_the_papers_with_personal_models() -> None:
    played = Played("ditto", {"lambda_v": 0.5})
    w, own = personal.ditto(played.start, played.silos, 0.5)
    close(played.server["w"], w)
    for state, v in zip(played.states, own, strict=True):
        close(state["v"], v)


def test_rounds_of_fedproto_and_local_training_are_the_papers() -> None:
    played = Played("fedproto", {"lambda_p": 0.7})
    g, models = personal.fedproto(played.start, played.silos, 0.7)
    close({"g": played.server["prototypes"]["g"]}, {"g": g})
    alone = Played("local", {})
    for states, wanted in ((played.states, models), (alone.states, personal.local(alone.start, alone.silos))):
        for state, w in zip(states, wanted, strict=True):
            (own,) = state.values()
            close(own, w)


def test_rounds_of_fedphp_and_map_are_the_papers_with_inherited_models() -> None:
    php = Played("fedphp", {"lam": 0.3, "tau": 2.0})
    both = Played("map", {"alpha": 0.3, "lam": 0.3, "tau": 2.0})
    found = personal.fedphp(php.start, php.silos, 0.3, 2.0), personal.map_(both.start, both.silos, 0.3, 0.3, 2.0)
    for silo in both.silos:
        steps = 2 * -(-silo.n // 5)  # two epochs in batches of five
        assert [[len(stage) for stage in passes] for passes in silo.batches] == [[-(-steps // 2), steps // 2]] * ROUNDS
    for played, (w, own) in zip((php, both), found, strict=True):
        close(played.server["w"], w)
        for state, theta in zip(played.states, own, strict=True):
            (group,) = [g for g in state.values() if oracle.P in g]
            close(group, theta)


def test_a_round_of_fedrod_is_the_papers_at_the_server_and_in_the_private_heads() -> None:
    played = Played("fedrod", {})
    w, private = personal.fedrod(played.start, played.silos)
    close(played.server["w"], w)
    for state, head in zip(played.states, private, strict=True):
        close(state["phi"], {"weight": head["Q"], "bias": head["q"]})


def test_a_round_of_fedloge_is_the_papers_at_the_server_and_in_the_private_heads() -> None:
    played = Played("fedloge", {})
    w, private = personal.fedloge(played.start, played.silos, played.first["frame"]["w"])
    close(played.server["w"], w)
    for state, head in zip(played.states, private, strict=True):
        close(state["phi"], {"weight": head["Q"], "bias": head["q"]})


def test_a_round_of_creff_is_the_papers_with_its_features_and_classifier() -> None:
    played = Played("creff", {"features": 3, "feature_steps": 2, "epochs": 2, "batch": 5})
    seed, m, d = int(played.first["seed"]["s"]), 3, 16

    def draw(t: int) -> tuple[tuple[Tensor, Tensor], list[list[Tensor]]]:
        stream = rng.stream(seed, "round", t, "classifier")
        start = [(2 * torch.rand(shape, generator=stream) - 1) / d**0.5 for shape in ((4, d), (4,))]
        orders = [list(torch.split(torch.randperm(4 * m, generator=stream), 5)) for _ in range(2)]
        return (start[0], start[1]), orders

    options = {"steps": 2, "rate": 0.1, "epochs": 2, "psi_rate": 0.01}
    w, made, psi = oracle.creff(played.start, played.silos, played.first["features"]["v"], draw=draw, **options)
    close(played.server["w"], w)
    close(played.server["features"], {"v": made})
    close(played.server["head"], {"weight": psi[0], "bias": psi[1]})


@pytest.mark.parametrize(
    ("form", "mu1", "mu2"), [("mean", 1.0, 0.1), ("paper", 1e-3, 0.1), ("code", 0.1, 0.0), ("mean", 0.0, 0.3)]
)
def test_a_round_of_fedmr_is_the_papers_with_its_prototypes(form: str, mu1: float, mu2: float) -> None:
    played = Played("fedmr", {"intra": form, "mu1": mu1, "mu2": mu2, "eps": 1e-8})
    w, g = oracle.fedmr(played.start, played.silos, form, mu1, mu2)
    close(played.server["w"], w)
    if mu2:
        close({"g": played.server["prototypes"]["g"]}, {"g": g})


def test_a_round_of_fedgela_is_the_papers() -> None:
    played = Played("fedgela", {"logit_scale": 5.0})
    frame = frame_of(played.first["etf"])
    own = {k: v for k, v in played.start.items() if not k.startswith("head.")}
    close(played.server["w"], oracle.fedgela(own, played.silos, frame, 5.0))


def test_a_round_of_fednh_is_the_papers_with_its_prototypes_and_scale() -> None:
    played = Played("fednh", {"scale": 5.0, "rho": 0.7})
    rows = played.first["prototypes"]["w"]
    own = {k: v for k, v in played.start.items() if not k.startswith("head.")}
    w, scale, turned = oracle.fednh(own, played.silos, rows, 5.0, 0.7)
    found = dict(played.server["w"])
    (name,) = [k for k in found if k not in own]
    close({"s": found.pop(name)}, {"s": scale})
    close(found, w)
    close({"w": played.server["prototypes"]["w"]}, {"w": turned})


def test_a_round_of_fedgen_is_the_papers_with_its_generator() -> None:
    options = {"alpha": 1.0, "beta": 1.0, "made": 6, "noise": 3, "hidden": 8, "steps": 4, "lr": 0.01}
    played = Played("fedgen", options)
    seed = int(played.first["seed"]["s"])

    def draw(t: int, k: int | None) -> tuple[Callable[[Tensor], Tensor], Callable[[int], Tensor]]:
        path = ("round", t, "generator") if k is None else ("round", t, "silo", k, "noise")
        stream = rng.stream(seed if k is None else 0, *path)
        return (
            lambda known: feature_generator.draw_labels(6, known, stream),
            lambda n: feature_generator.draw_noise(n, 3, "normal", stream),
        )

    given = oracle.GeneratorOptions(1.0, 1.0, 6, 4, 0.01, 1e-2)
    w, v = oracle.fedgen(played.start, played.first["generator"], played.silos, given, draw)
    close(played.server["w"], w)
    close({k: x for k, x in played.server["generator"].items() if x.is_floating_point()}, v)


@pytest.mark.integration
@pytest.mark.parametrize("importance", ["none", "scaled"])
def test_fedcds_silos_train_as_the_paper_prints(importance: str) -> None:
    played = Played("fedcd", {"restarts": 2, "steps": 3, "fine": 2, "importance": importance, "lam": 0.3, "gamma": 0.2})
    given = oracle.FedcdOptions(2, 0.3, 0.2, 0.1, 1.0, 0.5)
    for t in range(1, ROUNDS):  # in the first round clusters are drawn
        server = played.servers[t - 1]
        w, points = dict(server["w"]), server["prototypes"]["p"]
        phi, count = w.pop("fine.weight"), server["prototypes"]["count"] * float(importance == "scaled")
        for silo, bundle in zip(played.silos, played.bundles[t], strict=True):
            mu, batches = 1 - (t + 1) / ROUNDS, silo.batches[t][0]
            found = oracle.fedcd_silo(w, phi, points, count, silo, batches, mu, given)
            moved = {k: found[k] - w[k] for k in w}
            close({k: v / silo.n for k, v in bundle["delta"].total.items()}, moved)
            close({"phi": bundle["fine"].total["fine.weight"]}, {"phi": found["phi"] - phi})
            held = bundle["prototypes"].weight > 0
            close({"P": bundle["prototypes"].mean()["p"][held]}, {"P": (found["P"] - points)[held]})


def test_fedcds_server_merges_prototypes_and_heads_as_the_paper_prints() -> None:
    played = Played("fedcd", {"restarts": 2, "steps": 3, "fine": 2, "importance": "none"})
    before = played.first
    for after, bundles in zip(played.servers, played.bundles, strict=True):
        head, points = before["w"]["fine.weight"], before["prototypes"]["p"]
        heads = [head + bundle["fine"].total["fine.weight"] for bundle in bundles]
        parts = [bundle["prototypes"] for bundle in bundles]
        own = [points + part.mean()["p"] for part in parts]
        merged_head, merged_points = oracle.fedcd_server(heads, own, [part.weight for part in parts], head, points)
        close({"head": after["w"]["fine.weight"]}, {"head": merged_head})
        close({"p": after["prototypes"]["p"]}, {"p": merged_points})
        before = after
