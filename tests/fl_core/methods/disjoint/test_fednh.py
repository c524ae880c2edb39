"""FedNH: NH-2 to NH-5 (NH-1: test_geometry.py), its scale, and what leaves a silo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from consilium.research.engines.in_process import RoundHistory, simulate
from coordinator.config.hydra_config import compose_spec
from fl_core.methods.disjoint.fednh import FedNH, rotated_head
from fl_core.methods.shared import class_vectors
from fl_core.methods.shared.class_vectors import FixedHead
from fl_core.methods.shared.prototypes import PROTOTYPES
from fl_core.models import build_model
from fl_core.models.split_model import SplitModel
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.evaluation import weighted_accuracy
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, LocalResult, Part, RoundContext, SgdOptions, State
from tests.support.federations import FED, SCHEMA, manifest, same, shares

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)


def model_of(seed: int = 0) -> SplitModel:
    return build_model("digits_cnn", {}, SCHEMA, seed)


def played(
    method: FedNH, k: int = 0, prototypes: bool = True
) -> tuple[SplitModel, State, LocalResult, PlainLocalData, RoundContext]:
    """Train one silo for one round from the start of a run."""
    model, context, share = model_of(), FED.for_silo(k, 0, prototypes), shares()[k]
    msg = method.broadcast(method.init_server(model_of(), FED))
    data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
    outcome = method.local(model, msg, method.init_silo(model_of(), FED), data, context)
    return model, msg, outcome, data, context


def test_nh_2_server_step() -> None:
    w = torch.tensor([[1.0, 0.0]])
    clients = [Part.of({"w": torch.tensor([m])}, torch.tensor([n])) for n, m in ((30.0, [0.0, 1]), (10.0, [1.0, 0]))]
    assert rotated_head(w, clients[0] + clients[1], 0.9)[0].tolist() == pytest.approx([0.994855, 0.101307], abs=1e-6)
    equal = [Part.of({"w": p.mean()["w"]}, torch.tensor([1.0])) for p in clients]
    assert rotated_head(w, equal[0] + equal[1], 0.9)[0].tolist() == pytest.approx([0.997357, 0.072652], abs=1e-6)


def test_nh_2_the_silos_mean_is_brought_to_length_1_before_it_is_mixed_in() -> None:
    """Without that, the step would give (0.996729, 0.080816)."""
    a = normalize(torch.tensor([0.25, 0.75], dtype=torch.float64), dim=0)
    assert a.tolist() == pytest.approx([0.316228, 0.948683], abs=1e-6)
    mixed = 0.9 * torch.tensor([1.0, 0.0], dtype=torch.float64) + 0.1 * a
    assert mixed.tolist() == pytest.approx([0.931623, 0.0948683], abs=1e-6)
    bare = normalize(torch.tensor([0.925, 0.075], dtype=torch.float64), dim=0)
    assert bare.tolist() == pytest.approx([0.996729, 0.080816], abs=1e-6)
    part = Part({"w": torch.tensor([[10.0, 30.0]])}, torch.tensor([40.0]))
    assert rotated_head(torch.tensor([[1.0, 0.0]]), part, 0.9)[0].tolist() != pytest.approx(bare.tolist(), abs=1e-4)


def test_classes_that_nobody_reports_or_that_cancel_out_keep_their_prototype() -> None:
    w = normalize(torch.rand(3, 4), dim=1)
    part = Part({"w": torch.stack([torch.zeros(4), torch.ones(4), torch.zeros(4)])}, torch.tensor([0.0, 2.0, 2.0]))
    after = rotated_head(w, part, 0.0)
    assert torch.equal(after[[0, 2]], w[[0, 2]])
    assert torch.allclose(after[1], torch.full((4,), 0.5))


@pytest.mark.parametrize(("s", "loss"), [(1, 1.4611502), (20, 1.85504e-8), (30, 8.4219e-13)])
def test_nh_3_loss_at_orthogonal_prototypes(s: float, loss: float) -> None:
    w = class_vectors.orthogonal(10, 16, seed=0)
    found = float(cross_entropy(s * w[:1] @ w.T, torch.tensor([0])))
    assert found == pytest.approx(loss, rel=1e-4 if s == 30 else 1e-6)


def test_nh_4_personal_metrics() -> None:
    correct, count = torch.tensor([80.0, 50, 90]), torch.tensor([100.0, 100, 100])
    held = torch.tensor([30.0, 10, 0])
    assert weighted_accuracy(correct, count, held / held.sum()) == pytest.approx(0.725)
    assert weighted_accuracy(correct, count, (held > 0).float()) == pytest.approx(0.65)
    assert weighted_accuracy(correct, count, torch.ones(3)) == pytest.approx(0.733333, abs=1e-6)


def test_nh_5_learning_rate_falls_with_the_global_round() -> None:
    train, share = compose_spec(["experiment=fednh"]).train, shares()[0]
    assert train.clip_norm == 10
    for t, lr in ((1, 0.01), (2, 0.0099), (200, 0.00135333)):
        context = replace(FED, round=t - 1, rounds=200).for_silo(0, 0)
        assert PlainLocalData(RoundData(share.train, share.test, train, context)).lr == pytest.approx(lr, rel=1e-5)


def test_nh_5_prototypes_stay_in_local_training() -> None:
    class Watched(PlainLocalData):
        nets: list[FixedHead]

        def sgd(self, model: nn.Module, loss: object, options: SgdOptions = AS_SCHEDULED) -> int:  # type: ignore[override]
            assert isinstance(model, FixedHead)
            before = dict(model.named_buffers())["classifier"].clone()
            steps = super().sgd(model, loss, options)  # type: ignore[arg-type]
            after = dict(model.named_buffers())["classifier"]
            assert after.grad is None
            assert torch.equal(before, after)
            self.nets = [model]
            return steps

    share, context, method = shares()[0], FED.for_silo(0, 0), FedNH()
    msg = method.broadcast(method.init_server(model_of(), FED))
    data = Watched(RoundData(share.train, share.test, TRAIN, context))
    method.local(model_of(), msg, {}, data, context)
    assert len(data.nets) == 1
    assert torch.equal(dict(data.nets[0].named_buffers())["classifier"], msg[PROTOTYPES]["w"])


def test_directions_are_unit_means_of_unit_features_times_counts() -> None:
    method = FedNH()
    model, msg, outcome, _, _ = played(method)
    part, share = outcome.bundle[PROTOTYPES], shares()[0]
    x, y = share.train.batch(torch.arange(len(share.train)))
    model.eval()
    h = normalize(model.features(x), dim=1)
    for c in range(4):
        mean = h[y == c].sum(0)
        wanted = 7 * mean / mean.norm() if c < 2 else torch.zeros(64)
        assert torch.allclose(part.total["w"][c], wanted, atol=1e-5)
    assert part.weight.tolist() == [7, 7, 0, 0]
    assert bool((h >= 0).all())  # this model's features end in a ReLU, like the paper's
    assert msg[PROTOTYPES]["w"].shape == (4, 64)


def test_a_silo_that_submits_no_prototypes_sends_zeros_and_trains_all_the_same() -> None:
    _, _, with_them, _, _ = played(FedNH())
    _, _, without, _, _ = played(FedNH(), prototypes=False)
    assert float(without.bundle[PROTOTYPES].weight.sum()) == 0
    assert float(without.bundle[PROTOTYPES].total["w"].abs().sum()) == 0
    assert same(with_them.bundle["delta"].total, without.bundle["delta"].total)


def test_models_are_averaged_uniformly_by_default() -> None:
    _, _, outcome, _, _ = played(FedNH())
    assert float(outcome.bundle["delta"].weight) == 1
    _, _, outcome, _, _ = played(FedNH(weights="samples"))
    assert float(outcome.bundle["delta"].weight) == 14


def test_scale_is_trained_and_averaged_unless_it_is_fixed() -> None:
    run = manifest("fednh", {"scale": 5.0}, train=TRAIN)
    final = simulate(RunSetup.of(run), shares(), RoundHistory())
    assert float(final["w"]["scale.factor"]) != 5.0
    fixed = manifest("fednh", {"fix_scaling": 30.0}, train=TRAIN)
    assert "scale.factor" not in fixed.layout["delta"].shapes
    assert set(run.layout["delta"].shapes) - set(fixed.layout["delta"].shapes) == {"scale.factor"}
    net = FedNH(fix_scaling=30.0).global_model(model_of(), FedNH(fix_scaling=30.0).init_server(model_of(), FED))
    assert [name for name, _ in net.named_parameters() if name.startswith("scale")] == []
    assert float(dict(net.named_buffers())["scale.factor"]) == 30.0


def test_prototypes_have_length_1_after_a_run_and_turn_towards_the_features() -> None:
    run = manifest("fednh", train=TRAIN)
    final, start = simulate(RunSetup.of(run), shares(), RoundHistory()), FedNH().init_server(model_of(), FED)
    w = final[PROTOTYPES]["w"]
    assert torch.allclose(w.norm(dim=1), torch.ones(4), atol=1e-6)
    assert not torch.equal(w, start[PROTOTYPES]["w"])
    gram = start[PROTOTYPES]["w"] @ start[PROTOTYPES]["w"].T
    assert torch.allclose(gram[~torch.eye(4, dtype=torch.bool)], torch.tensor(-1 / 3), atol=1e-6)


def test_personal_model_has_the_local_features_the_received_prototypes_and_the_silos_scale() -> None:
    method = FedNH(scale=5.0)
    model, msg, outcome, data, context = played(method)
    personal = method.personal(model, msg, outcome.state, data, context).eval()
    x, _ = shares()[0].test.batch(torch.arange(5))
    delta = outcome.bundle["delta"].mean()
    s = float(msg["w"]["scale.factor"] + delta["scale.factor"])
    assert s != 5.0
    wanted = s * normalize(model.features(x), dim=1) @ msg[PROTOTYPES]["w"].T
    assert torch.allclose(personal(x), wanted, atol=1e-5)
    assert not same(tensor_maps.copy_state(model.body), tensor_maps.copy_state(model_of().body))


def test_orthogonal_start() -> None:
    w = FedNH(init="orthogonal").init_server(model_of(), FED)[PROTOTYPES]["w"]
    assert torch.allclose(w @ w.T, torch.eye(4), atol=1e-6)
