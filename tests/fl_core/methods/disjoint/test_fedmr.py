"""FedMR in rounds: what travels, whose prototypes count, and what each option changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core import rng
from fl_core.methods.disjoint.fedmr import FedMR, IntraVariant, intra_loss
from fl_core.methods.shared import prototypes
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, Losses, Part, State
from tests.oracles.equations import slow_class_sums, slow_inter, slow_intra
from tests.support.federations import FED, SCHEMA, manifest, same, shares

pytestmark = pytest.mark.integration


def run(method: str, options: Mapping[str, str | int | float | bool], share: float = 1.0) -> tuple[State, RoundHistory]:
    history = RoundHistory()
    made = manifest(method, options, train=TrainConfig(lr=0.05, batch_size=4, epochs=2), share=share)
    return simulate(RunSetup.of(made), shares(), history), history


def test_prototypes_off_is_intra_alone_bit_for_bit_and_nothing_else_travels() -> None:
    off, _ = run("fedmr", {"mu1": 1e-4, "prototypes": False})
    alone, _ = run("fedmr", {"mu1": 1e-4, "mu2": 0.0})
    assert same(off["w"], alone["w"])
    assert not same(off["w"], run("fedmr", {"mu1": 1e-4})[0]["w"])
    assert sorted(manifest("fedmr", {"prototypes": False}).layout) == ["delta", "metrics"]
    assert sorted(manifest("fedmr").layout) == ["delta", "metrics", "prototypes"]
    assert set(off) == {"w"}


def test_share_decides_whose_prototypes_are_in_the_mean() -> None:
    finals = {}
    for share in (0.0, 0.5, 0.8, 1.0):
        made = manifest("fedmr", share=share)
        assert sum(m.prototypes for m in made.members) == int(share * 3 + 0.5)
        state, _ = run("fedmr", {}, share)
        held = {c for k, m in enumerate(made.members) if m.prototypes for c in (k, k + 1)}
        assert {c for c in range(4) if state["prototypes"]["known"][c]} == held
        assert bool((state["prototypes"]["g"][[c for c in range(4) if c not in held]] == 0).all())
        finals[share] = state["w"]
    assert same(finals[0.0], run("fedmr", {"prototypes": False})[0]["w"])  # nothing known: L_inter stays inactive
    assert not same(finals[0.5], finals[1.0])


class Watched(PlainLocalData):
    """Counts `sum` queries."""

    sums = 0

    def sum(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.sums += 1
        return super().sum(*args, **kwargs)


def one_turn(method: FedMR, *, submits: bool = True, known: bool = True) -> tuple[Watched, State, Part | None, State]:
    share, model = shares()[0], build_model("digits_cnn", {}, SCHEMA, 0)
    context = FED.for_silo(0, 0, submits)
    data = Watched(RoundData(share.train, share.test, TrainConfig(batch_size=4, epochs=1), context))
    server = dict(method.init_server(model, FED))
    if known and "prototypes" in server:
        server["prototypes"] = {
            "g": torch.randn(4, 64, generator=rng.stream(0, "g")),
            "known": torch.tensor([1.0, 1, 1, 0]),
        }
        server["prototypes"]["g"][3] = 0
    bundle = method.local(model, method.broadcast(server), {}, data, context).bundle
    return data, server, bundle.get("prototypes"), {"w": tensor_maps.copy_state(model)}


def test_a_silo_that_does_not_submit_makes_no_query_and_sends_zeros() -> None:
    data, _, part, trained = one_turn(FedMR(), submits=False)
    assert part is not None
    assert data.sums == 0
    assert not part.weight.any()
    assert not part.total["offset"].any()
    submitted = one_turn(FedMR())
    assert submitted[0].sums == 1
    assert same(trained["w"], submitted[3]["w"])  # it receives and uses prototypes all the same


def test_prototypes_are_class_means_of_the_trained_model_in_eval_mode() -> None:
    _, server, part, trained = one_turn(FedMR())
    assert part is not None
    model = build_model("digits_cnn", {}, SCHEMA, 5)
    tensor_maps.load_state(model, trained["w"])
    share = shares()[0]
    with torch.no_grad():
        z = model.eval().features(share.train.batch(torch.arange(len(share.train)))[0])
    total, count = slow_class_sums(z, share.train.labels, 4)
    assert torch.equal(part.weight, count)
    g = prototypes.update(server["prototypes"], part)["g"]
    assert torch.allclose(g[:2], total[:2] / count[:2].unsqueeze(1), atol=1e-4)
    assert torch.equal(g[2:], server["prototypes"]["g"][2:])


def test_lite_paired_observed_warm_up_and_literal_each_change_training() -> None:
    base = one_turn(FedMR(mu1=1e-4, mu2=0.5))[3]["w"]
    for other in (
        FedMR(mu1=1e-4, mu2=0.5, lite=2),
        FedMR(mu1=1e-4, mu2=0.5, lite=3, lite_scope="both"),
        FedMR(mu1=1e-4, mu2=0.5, inter="paired_sample"),
        FedMR(mu1=1e-4, mu2=0.5, negatives="observed"),
        FedMR(mu1=1e-4, mu2=0.5, warmup=4),
        FedMR(mu1=1e-4, mu2=0.5, paper_literal_std=True),
        FedMR(mu1=1e-4, mu2=0.5, intra="code"),
        FedMR(mu1=1e-4, mu2=0.5, no_margin=True),
        FedMR(mu1=1e-4, mu2=0.5, inter_weighting="example"),
    ):
        assert not same(one_turn(other)[3]["w"], base), other
    assert same(one_turn(FedMR(mu1=1e-4, mu2=0.5, lite=50))[3]["w"], base)  # more than a batch holds
    early = one_turn(FedMR(mu1=1e-4, mu2=0.5), known=False)[3]["w"]
    assert same(early, one_turn(FedMR(mu1=1e-4, mu2=0.0))[3]["w"])  # nothing known yet


def test_objective_is_equation_5() -> None:
    method, model, share = FedMR(mu1=1e-3, mu2=0.7), build_model("digits_cnn", {}, SCHEMA, 0).double(), shares()[1]
    x, y = share.train.batch(torch.arange(9))
    g = torch.randn(4, 64, generator=rng.stream(0, "g"), dtype=torch.float64)
    msg = {"w": tensor_maps.copy_state(model), "prototypes": {"g": g, "known": torch.ones(4)}}
    context = FED.for_silo(0, 0)
    losses: list[Losses] = []

    class Catch(PlainLocalData):
        def sgd(self, model, loss, options=AS_SCHEDULED):  # type: ignore[no-untyped-def]
            losses.append(loss(model, x.double(), y))
            return 0

        def sum(self, query, **_):  # type: ignore[no-untyped-def]
            return {"sum": torch.zeros(4, 64), "count": torch.zeros(4)}

    method.local(model, msg, {}, Catch(RoundData(share.train, share.test, TrainConfig(), context)), context)
    z = model.features(x.double())
    ce = torch.nn.functional.cross_entropy(model.head(z), y)
    between = slow_inter(z, y, g, [True] * 4, [True] * 4)
    assert torch.allclose(losses[0].per_example.mean(), ce + 0.7 * between)
    assert losses[0].coupled is not None
    assert torch.allclose(losses[0].coupled, 1e-3 * slow_intra(z, y, mean=True, eps=method.eps))


def test_coupling_says_what_mixes_a_batch() -> None:
    assert FedMR().coupling is Coupling.BATCH
    assert FedMR(mu2=0).coupling is Coupling.BATCH
    assert FedMR(mu1=0).coupling is Coupling.BATCH  # weights of equation 4 come from the labels of the batch
    assert FedMR(mu1=0, inter="paired_sample", inter_weighting="example").coupling is Coupling.BATCH
    assert FedMR(mu1=0, inter_weighting="example").coupling is Coupling.EXAMPLE
    assert FedMR(mu1=0, mu2=0).coupling is FedMR(mu1=0, prototypes=False).coupling is Coupling.EXAMPLE


def test_the_last_bit_of_a_feature_does_not_decide_an_update_as_it_does_with_the_eps_of_the_authors_code() -> None:
    """Of a feature that hardly varies: it is not divided by its own rounding errors."""
    draw = rng.stream(0, "z")
    z, y = torch.rand(16, 8, generator=draw), torch.zeros(16, dtype=torch.int64)
    z[:, 0] = 0.7 + 1e-5 * z[:, 1].roll(3)
    near = torch.nextafter(z, 9.0 * torch.randint(2, z.shape, generator=draw))

    def gradient(x: Tensor, eps: float) -> Tensor:
        x = x.clone().requires_grad_()
        intra_loss(x, y, 1, IntraVariant(eps=eps, mean=True)).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    def moved(eps: float) -> float:
        before = gradient(z, eps)
        return float((gradient(near, eps) - before).norm() / before.norm())

    assert moved(FedMR().eps) < 1e-3
    assert moved(1e-8) > 1e-2
