"""FedCD in rounds: first clusters, the rules by which the head is merged, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.errors import ConfigError
from fl_core.methods.disjoint import fedcd
from fl_core.methods.disjoint.fedcd import FedCD, FineModel, clusters
from fl_core.methods.shared.prototypes import PROTOTYPES
from fl_core.rounds import capabilities
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability, Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.values import AS_SCHEDULED, SgdOptions
from tests.support.federations import FED, FEDCD_TRAIN, Given, fedcd_model, manifest, played, same, shares

pytestmark = pytest.mark.integration


class Blobs:
    """Two classes of three far clusters of 6, 4 and 2 examples, and one of two examples; features are x itself."""

    centres = torch.tensor([[0.0, 0], [10, 0], [0, 10], [20, 20], [30, 20], [20, 30]])

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        rows = [self.centres[j] + 0.1 * torch.randn(n, 2, generator=draw) for j, n in enumerate((6, 4, 2, 2, 4, 6))]
        self.x = torch.cat([*rows, torch.tensor([[5.0, 5.0], [6.0, 6.0]])])
        self.y = torch.tensor([0] * 12 + [1] * 12 + [2] * 2)
        given = Given(self.x, self.y)
        self.data = PlainLocalData(RoundData(given, given, FEDCD_TRAIN, FED.for_silo(0, 0)))

    def found(self) -> tuple[Tensor, Tensor]:
        return clusters(lambda x: x, self.data, 4, 3, torch.Generator().manual_seed(4), restarts=10, steps=10)


def test_first_clusters_are_found_by_sums_alone_and_ordered_by_size() -> None:
    blobs = Blobs()
    found, count = blobs.found()
    assert count.tolist() == [12, 12, 2, 0]
    assert torch.allclose(found[0], blobs.centres[[0, 1, 2]], atol=0.2)
    assert torch.allclose(found[1], blobs.centres[[5, 4, 3]], atol=0.2)
    exact = torch.stack([blobs.x[:6].mean(0), blobs.x[6:10].mean(0), blobs.x[10:12].mean(0)])
    assert torch.allclose(found[0], exact, atol=1e-4)


def test_a_class_with_fewer_examples_than_fine_classes_repeats_its_clusters_with_a_little_noise() -> None:
    found, _ = Blobs().found()
    two = found[2]
    assert sorted(two[:2].sum(1).tolist()) == pytest.approx([10, 12], abs=1e-4)
    distance = float((two[2] - two[0]).norm() / two[0].norm())
    assert 0 < distance < 0.01
    assert torch.equal(found[3], torch.zeros(3, 2))


def test_first_round_measures_the_silos_own_classes_and_leaves_out_missing_ones() -> None:
    msg, outcome = played(FedCD())
    part = outcome.bundle[PROTOTYPES]
    assert part.weight.view(4, 3).sum(1).tolist() == [7, 7, 0, 0]
    assert float(part.total["p"].view(4, 3, 64)[2:].abs().sum()) == 0
    assert not msg[PROTOTYPES]["known"].any()
    assert (
        outcome.bundle[fedcd.HEAD_PART].total[fedcd.HEAD].view(4, 3, 64)[2:].abs().sum() > 0
    )  # negatives of the softmax


def test_a_class_that_becomes_known_later_is_clustered_then() -> None:
    method = FedCD(acla="stale")
    _, first = played(method, 0)
    server = method.merge(method.init_server(fedcd_model(), FED), first.bundle, FED)
    assert server[PROTOTYPES]["known"].view(4, 3).any(1).tolist() == [True, True, False, False]
    _, second = played(method, 1, server, t=1)  # classes 1 and 2
    assert second.bundle[PROTOTYPES].weight.view(4, 3).sum(1).tolist() == [0, 7, 7, 0]


def test_without_hpc_prototypes_are_mean_features() -> None:
    method = FedCD(hpc=False, acla="fedavg")
    msg, outcome = played(method)
    delta = outcome.bundle["delta"].mean()
    net = FineModel(fedcd_model(), 3, "sum").eval()
    tensor_maps.load_state(net, {name: v + delta[name] for name, v in msg["w"].items()})
    share = shares()[0]
    x, y = share.train.batch(torch.arange(14))
    total = outcome.bundle[PROTOTYPES].total["p"].view(4, 3, 64).sum(1)
    for c in (0, 1):
        assert torch.allclose(total[c], net.features(x)[y == c].sum(0), atol=1e-3)


def test_only_the_published_rule_shows_single_heads_to_the_server() -> None:
    assert FedCD().unsummed_parts == {fedcd.HEAD_PART}
    with pytest.raises(ConfigError, match="acla=stale"):
        capabilities.check_supported(FedCD(), [Capability.SECURE_AGGREGATION])
    for mode in ("stale", "counts", "fedavg"):
        assert not FedCD(acla=mode).unsummed_parts
        capabilities.check_supported(FedCD(acla=mode), [Capability.SECURE_AGGREGATION])
    with pytest.raises(ConfigError, match="fednh"):
        capabilities.check_supported(FedCD(), [Capability.DIFFERENTIAL_PRIVACY])


@pytest.mark.parametrize("mode", ["server", "stale", "counts", "fedavg"])
def test_every_rule_runs_with_partial_participation_and_moves_the_head(mode: str) -> None:
    run = manifest("fedcd", {"acla": mode, "restarts": 2, "steps": 3}, train=FEDCD_TRAIN, cohort=2)
    final = simulate(RunSetup.of(run), shares(), RoundHistory())
    start = FedCD().init_server(fedcd_model(), FED)
    assert tensor_maps.all_finite(final["w"])
    assert not torch.equal(final["w"][fedcd.HEAD], start["w"][fedcd.HEAD])
    assert (fedcd.HEAD_PART in run.layout) == (mode != "fedavg")
    assert (fedcd.HEAD in run.layout["delta"].shapes) == (mode == "fedavg")
    assert not any("head." in name for name in run.layout["delta"].shapes)


def test_counts_weigh_rows_by_the_silos_examples_and_stale_falls_back_to_them_in_the_first_round() -> None:
    _, by_counts = played(FedCD(acla="counts"))
    _, stale = played(FedCD(acla="stale"))
    counts = by_counts.bundle[PROTOTYPES].weight
    assert torch.equal(by_counts.bundle[fedcd.HEAD_PART].weight, counts)
    assert torch.equal(stale.bundle[fedcd.HEAD_PART].weight, counts)
    server = FedCD(acla="stale").merge(FedCD().init_server(fedcd_model(), FED), stale.bundle, FED)
    _, later = played(FedCD(acla="stale"), 0, server, t=1)
    weight = later.bundle[fedcd.HEAD_PART].weight[server[PROTOTYPES]["known"] > 0]
    assert bool(((weight > 1) & (weight < math.e)).all())


def test_without_extra_terms_it_trains_by_cross_entropy_alone() -> None:
    """The first round has no prototypes yet: with mu = 1, lam = gamma = 0 one step is one step on CE."""

    class Seen(PlainLocalData):
        seen: list[tuple[float, float]]

        def sgd(self, model: nn.Module, loss: object, options: SgdOptions = AS_SCHEDULED) -> int:  # type: ignore[override]
            def both(net: nn.Module, x: Tensor, y: Tensor) -> object:
                losses = loss(net, x, y)  # type: ignore[operator]
                self.seen = [*getattr(self, "seen", []), (losses.objective().item(), cross_entropy(net(x), y).item())]
                return losses

            assert options.penalty is None
            return super().sgd(model, both, options)  # type: ignore[arg-type]

    method = FedCD(lam=0.0, gamma=0.0, zero_based=True, restarts=1, steps=1)
    assert method.coupling is Coupling.EXAMPLE
    share, context = shares()[0], replace(FED, round=0).for_silo(0, 0)
    data = Seen(RoundData(share.train, share.test, FEDCD_TRAIN, context))
    method.local(fedcd_model(), method.init_server(fedcd_model(), FED), {}, data, context)
    assert len(data.seen) == 8
    assert all(found == pytest.approx(ce, rel=1e-5) for found, ce in data.seen)


def test_initial_head_follows_the_run_seed_and_lies_where_a_linear_layers_would() -> None:
    heads = [FedCD().init_server(fedcd_model(seed), FED)["w"][fedcd.HEAD] for seed in (0, 0, 1)]
    assert same({"h": heads[0]}, {"h": heads[1]})
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (12, 64)
    assert 0.11 < float(heads[0].abs().max()) <= 0.125


def test_two_phase_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"two exchanges per round.*stale"):
        FedCD(acla="two_phase")


def test_the_personal_model_answers_with_the_head_that_was_trained() -> None:
    """Not with the network's own head, which FedCD leaves untrained; before a silo's first round with the received."""
    method, share, context = FedCD(restarts=2, steps=3), shares()[0], FED.for_silo(0, 0)
    model, data = fedcd_model(), PlainLocalData(RoundData(share.train, share.test, FEDCD_TRAIN, context))
    msg = method.broadcast(method.init_server(fedcd_model(), FED))
    trained = method.local(model, msg, {}, data, context)
    x = share.test.batch(torch.arange(7))[0]
    with torch.no_grad():
        z = model.eval().features(x)
        moved = trained.bundle["delta" if method.acla == "fedavg" else fedcd.HEAD_PART]
        assert bool(moved.weight.any())
        head = trained.state["personal head"]["fine.weight"]
        assert not torch.equal(head, msg["w"]["fine.weight"])
        own = method.personal(model, msg, trained.state, data, context).eval()
        assert torch.allclose(own(x), (z @ head.T).reshape(7, 4, 3).sum(2), atol=1e-6)
        assert not torch.allclose(own(x), model.head(z))
        first = method.personal(model, msg, {}, data, context).eval()
        assert torch.allclose(first(x), (z @ msg["w"]["fine.weight"].T).reshape(7, 4, 3).sum(2), atol=1e-6)
