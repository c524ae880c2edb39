"""Every method of the papers against its equations in plain Python (tests/oracles/equations.py), at drawn numbers.

FedMR's are in losses/test_fedmr.py, FedPHP's MMD in personal/test_fedphp.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fl_core.methods.disjoint import fedcd, fedrs
from fl_core.methods.disjoint.fedcd import class_logits
from fl_core.methods.disjoint.fedgela import FedGELA, frame_of
from fl_core.methods.disjoint.fednh import FedNH
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.fedphp import FedPHP
from fl_core.methods.personal.inherited_model import kd_terms
from fl_core.methods.personal.map_ import Map
from fl_core.methods.shared import class_vectors
from fl_core.methods.shared.class_vectors import adaptation
from fl_core.methods.shared.prototypes import PROTOTYPES
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import LocalResult, Part, State, Tensors
from tests.oracles.equations import (
    slow_adapted_ce,
    slow_bpr,
    slow_ce,
    slow_class_level_mean,
    slow_class_scores,
    slow_dkd,
    slow_frame,
    slow_hpc,
    slow_inherited,
    slow_kd,
    slow_prototype_step,
    slow_restricted,
    slow_scaling,
)
from tests.support.federations import FED, SCHEMA, shares

SEEDS = (0, 1, 2)
FULL_BATCH = TrainConfig(lr=0.2, batch_size=14, epochs=4, momentum=0.0, weight_decay=0.0)
"""Steps of all 14 examples of a silo: they do not depend on the order in which these are drawn."""


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(seed: int = 0) -> nn.Module:
    return build_model("digits_linear", {}, SCHEMA, seed)


def trained(method: FedAvg, silo: State, k: int = 0) -> tuple[LocalResult, nn.Module, Tensors]:
    """Train one silo for one round; return what it gave, the trained model, and the weights that it had received."""
    model, context = linear(), FED.for_silo(k, 0)
    msg = method.broadcast(method.init_server(linear(), FED))
    data = PlainLocalData(RoundData(shares()[k].train, shares()[k].test, FULL_BATCH, context))
    return method.local(model, msg, silo, data, context), model, msg["w"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["hard", "soft"])
def test_fedrs_loss_and_gradient_are_the_papers(form: str, seed: int) -> None:
    w, h, counts = drawn(seed, 5, 3).requires_grad_(), drawn(seed + 9, 4, 3), torch.tensor([6.0, 0, 2, 0, 1])
    a, y = fedrs.scaling(counts, 0.3, form), torch.tensor([0, 2, 4, 0])
    losses = fedrs.restricted_ce(h @ w.T, y, a)
    for i in range(4):
        loss, gradient = slow_restricted(
            w.tolist(), h[i].tolist(), int(y[i]), slow_scaling(counts.tolist(), 0.3, form == "soft")
        )
        assert float(losses[i].detach()) == pytest.approx(loss, rel=1e-6)
        (found,) = torch.autograd.grad(losses[i], w, retain_graph=True)
        assert torch.allclose(found, torch.tensor(gradient, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("n_classes", "d"), [(3, 3), (4, 7), (10, 16)])
def test_fedgela_frame_is_the_papers_of_any_basis(n_classes: int, d: int) -> None:
    """Frames of other bases are turned ones: the matrix of inner products is what they share."""
    basis = torch.linalg.qr(drawn(n_classes, d, n_classes)).Q.T
    wanted, found = torch.tensor(slow_frame(basis.tolist()), dtype=torch.float64), class_vectors.etf(n_classes, d, 3)
    assert torch.allclose(found @ found.T, wanted @ wanted.T, atol=1e-12)
    assert torch.linalg.matrix_rank(found) == n_classes - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_fedgela_loss_is_the_papers(seed: int) -> None:
    method, share, context = FedGELA(logit_scale=3.0), shares()[1], FED.for_silo(1, 0)
    model = linear(seed)
    msg = method.broadcast(method.init_server(model, FED))
    data = PlainLocalData(RoundData(share.train, share.test, FULL_BATCH, context))
    net = method.global_model(model, msg)
    x, y = share.train.batch(torch.arange(14))
    found = method.objective(net, msg, data, context)(net, x, y).per_example
    z, frame = model.features(x).double(), frame_of(msg["etf"]).tolist()
    counts = [sum(int(label) == c for label in y) for c in range(4)]
    wanted = [slow_adapted_ce(z[i].tolist(), int(y[i]), frame, counts, 3.0) for i in range(14)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-4)
    assert adaptation(torch.tensor(counts)).tolist() == pytest.approx([4 * n / 14 for n in counts])


def test_fednh_prototypes_after_a_round_are_the_papers() -> None:
    """Of three silos, two of which hold each inner class, from the models that they trained."""
    method, server = FedNH(rho=0.6), FedNH().init_server(linear(), FED)
    total, reported = None, list[tuple[list[int], Tensor]]()
    for k in range(3):
        outcome, model, _ = trained(method, method.init_silo(linear(), FED), k)
        x, y = shares()[k].train.batch(torch.arange(14))
        reported.append((y.tolist(), model.eval().features(x).double()))  # type: ignore[operator]
        part = outcome.bundle[PROTOTYPES]
        total = part if total is None else total + part
    assert total is not None
    found = method.merge(server, {"delta": trained(method, {})[0].bundle["delta"], PROTOTYPES: total}, FED)
    for c in range(4):
        silos = [
            (labels.count(c), [z[i].tolist() for i, label in enumerate(labels) if label == c]) for labels, z in reported
        ]
        wanted = slow_prototype_step(server[PROTOTYPES]["w"][c].tolist(), silos, 0.6)
        assert found[PROTOTYPES]["w"][c].tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_fedphp_distillation_and_private_model_are_the_papers(seed: int) -> None:
    o, o_p = drawn(seed, 6, 4), drawn(seed + 9, 6, 4)
    wanted = [slow_kd(a.tolist(), b.tolist(), 4.0) for a, b in zip(o, o_p, strict=True)]
    assert kd_terms(o, o_p, 4.0).tolist() == pytest.approx(wanted, rel=1e-9)
    context, values, private = replace(FED, rounds=5, cohort=FED.n_silos), drawn(seed, 4).tolist(), 0.0
    for n, (value, after) in enumerate(zip(values, slow_inherited(values, 5.0), strict=True), start=1):
        mu = FedPHP().momentum(n, context)
        private = mu * private + (1 - mu) * value
        assert private == pytest.approx(after)


def slow_descent(weights: Tensors, k: int, steps: int, teacher: Tensors | None, alpha: float | None) -> Tensors:
    """Steps of gradient descent on all examples of a silo: a restricted softmax, or CE with a teacher's lesson."""
    model, (x, y), lam, tau = linear(), shares()[k].train.batch(torch.arange(14)), 0.1, 4.0
    held = torch.tensor([bool((y == c).any()) for c in range(4)])
    w = {name: v.clone().requires_grad_() for name, v in weights.items()}
    for _ in range(steps):
        o = functional_call(model, w, (x,))
        if alpha is not None:
            loss = cross_entropy(torch.where(held, 1.0, alpha) * o, y)
        elif teacher is None:
            loss = cross_entropy(o, y)
        else:
            p, q = (functional_call(model, teacher, (x,)) / tau).softmax(1), (o / tau).softmax(1)
            loss = (1 - lam) * cross_entropy(o, y) + lam * tau**2 * (p * (p / q).log()).sum(1).mean()
        slopes = torch.autograd.grad(loss, list(w.values()))
        w = {n: (v - 0.2 * s).detach().requires_grad_() for (n, v), s in zip(w.items(), slopes, strict=True)}
    return {name: v.detach() for name, v in w.items()}


def near(a: Tensors, b: Tensors) -> bool:
    return set(a) == set(b) and all(torch.allclose(v, b[name], atol=1e-5) for name, v in a.items())


def test_map_sends_half_of_the_steps_under_the_restricted_softmax_and_keeps_what_the_teacher_taught() -> None:
    """Algorithm 1 over two rounds of one silo: four steps, two of them before what is sent."""
    method, silo, private = Map(alpha=0.3), dict[str, Tensors](), None
    for n in (1, 2):
        outcome, _, start = trained(method, silo)
        sent = slow_descent(start, 0, 2, None, 0.3)
        after = slow_descent(sent, 0, 2, private, None)
        mu = 0.9 * (n - 1) / max(FED.cohort * FED.rounds // FED.n_silos, 1)
        private = (
            after if private is None else {k: min(1, mu) * private[k] + (1 - min(1, mu)) * after[k] for k in after}
        )
        assert near(tensor_maps.add(start, outcome.bundle["delta"].mean()), sent)
        assert near(outcome.state["inherited"], private)
        assert not near(sent, after)
        silo = dict(outcome.state)


def test_fedphp_sends_and_keeps_what_the_papers_algorithm_does() -> None:
    method, silo, private = FedPHP(), dict[str, Tensors](), None
    for n in (1, 2):
        outcome, _, start = trained(method, silo)
        sent = slow_descent(start, 0, 4, private, None)
        mu = 0.9 * (n - 1) / 3
        private = sent if private is None else {k: mu * private[k] + (1 - mu) * sent[k] for k in sent}
        assert near(tensor_maps.add(start, outcome.bundle["delta"].mean()), sent)
        assert near(outcome.state["inherited"], private)
        silo = dict(outcome.state)


@pytest.mark.parametrize("seed", SEEDS)
def test_fedcd_losses_are_the_papers(seed: int) -> None:
    z, p, phi = drawn(seed, 5, 4), drawn(seed + 9, 6, 4), drawn(seed + 99, 6, 4)
    own, y = torch.tensor([0, 3, 4, 1, 3]), torch.tensor([0, 1, 2, 0, 1])
    cosine = nn.functional.normalize(z) @ nn.functional.normalize(p).T
    contrast = fedcd.hpc(cosine, own, 2, torch.ones(6, dtype=torch.bool), 0.2, 0.7)
    by_class = p.reshape(3, 2, 4).tolist()
    wanted = [slow_hpc(z[i].tolist(), by_class, int(y[i]), int(own[i]) % 2, 0.2, 0.7) for i in range(5)]
    assert contrast.tolist() == pytest.approx(wanted, rel=1e-6)  # its weights are in single precision
    logits, teacher = class_logits(z @ phi.T, 2, "sum"), class_logits(z @ p.T, 2, "sum")
    scores = [slow_class_scores(row.tolist(), phi.tolist(), 2) for row in z]
    assert logits.flatten().tolist() == pytest.approx([v for row in scores for v in row])
    assert cross_entropy(logits, y, reduction="none").tolist() == pytest.approx(
        [slow_ce(row, int(c)) for row, c in zip(scores, y, strict=True)]
    )
    taught = [slow_dkd(t.tolist(), s, int(c), 0.5) for t, s, c in zip(teacher, scores, y, strict=True)]
    assert fedcd.dkd(teacher, logits, y, 0.5).tolist() == pytest.approx(taught, rel=1e-6)
    balanced = slow_bpr(z.tolist(), y.tolist(), phi.tolist(), 2)
    assert float(fedcd.bpr(z, y, phi, 2, "sum", 3)) == pytest.approx(balanced, rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_fedcd_head_is_merged_by_the_papers_rule(seed: int) -> None:
    phi, heads, p = drawn(seed, 6, 4).float(), drawn(seed + 9, 3, 6, 4).float(), drawn(seed + 99, 6, 4).float()
    part = Part({fedcd.HEAD: heads - phi}, torch.ones(3))
    found = fedcd.merged_head("server", phi, part, p, torch.ones(6))
    wanted = torch.tensor(slow_class_level_mean(heads.tolist(), p.tolist()))
    assert torch.allclose(found, wanted, atol=1e-5)
