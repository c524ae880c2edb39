"""FedCD: CD-1 to CD-9, fine classes, first clusters, and the rules by which the head is merged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from fl_core.methods.disjoint import fedcd
from fl_core.methods.disjoint.fedcd import Anchors, FedCD, FineModel, Objective, bpr, class_logits, decay, hpc
from fl_core.methods.shared.prototypes import PROTOTYPES
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.values import Part
from tests.support.federations import FED, FEDCD_TRAIN, fedcd_model, played, same, shares


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_cd_1_weights_of_a_row() -> None:
    def v(*shares: float) -> list[float]:
        return fedcd.head_weights(double(*shares).unsqueeze(1)).flatten().tolist()

    assert v(1, 0) == pytest.approx([0.731059, 0.268941], abs=1e-6)
    assert v(0.9, 0.6, 0.1) == pytest.approx([0.456590, 0.338250, 0.205159], abs=1e-6)
    assert v(1, *[0] * 9) == pytest.approx([0.231969, *[0.085337] * 9], abs=1e-6)
    assert v(*[0.3] * 7) == pytest.approx([1 / 7] * 7)


def test_cd_1_published_rule_exponentiates_shares() -> None:
    """Heads whose share at row 0 is nearly 1 and nearly 0 weigh .731059 and .268941."""
    p, phi = torch.tensor([[100.0, 0.0], [0.0, 0.0]]), torch.zeros(2, 2)
    moved = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[-1.0, 0.0], [0.0, 0.0]]])
    after = fedcd.merged_head("server", phi, Part({fedcd.HEAD: moved}, torch.ones(2)), p, torch.ones(2))
    assert float(after[0, 0]) == pytest.approx(0.731059 - 0.268941, abs=1e-6)


def test_cd_1_equal_heads_weigh_the_same() -> None:
    phi, moved = torch.rand(6, 4), torch.rand(1, 6, 4)
    part = Part({fedcd.HEAD: moved.repeat(5, 1, 1)}, torch.ones(5))
    after = fedcd.merged_head("server", phi, part, torch.rand(6, 4), torch.ones(6))
    assert torch.allclose(after, phi + moved[0], atol=1e-6)


def test_cd_2_linear_form_is_the_published_rule() -> None:
    s, phi = double(0.9, 0.6, 0.1), double(1, 0, 0, 1, 2, 2).view(3, 2)
    published = (fedcd.head_weights(s.unsqueeze(1)) * phi).sum(0)
    assert published.tolist() == pytest.approx([0.866909, 0.748569], abs=1e-6)
    a, b, c = (Part.of({fedcd.HEAD: row.unsqueeze(0)}, e.exp().view(1)) for row, e in zip(phi, s, strict=True))
    linear = fedcd.merged_head("stale", torch.zeros(1, 2), a + b + c, torch.zeros(1, 2), torch.ones(1))
    assert linear[0].tolist() == pytest.approx([0.866909, 0.748569], abs=1e-6)


def test_cd_2_stale_equals_server_where_prototypes_stand_still() -> None:
    draw = torch.Generator().manual_seed(0)
    phi, p = torch.randn(6, 4, generator=draw), torch.randn(6, 4, generator=draw)
    heads = [phi + 0.3 * torch.randn(6, 4, generator=draw) for _ in range(3)]
    received = Anchors(p, torch.ones(6, dtype=torch.bool))
    stale = [fedcd.outgoing_head("stale", h - phi, h, received, torch.zeros(6)) for h in heads]
    each = [fedcd.outgoing_head("server", h - phi, h, received, torch.zeros(6)) for h in heads]
    stack = Part(
        {fedcd.HEAD: torch.stack([q.total[fedcd.HEAD] for q in each])},
        torch.ones(3),
    )
    summed = fedcd.merged_head("stale", phi, stale[0] + stale[1] + stale[2], p, torch.ones(6))
    single = fedcd.merged_head("server", phi, stack, p, torch.ones(6))
    by_hand = torch.zeros(6, 4)
    for j in range(6):  # the definition, row by row
        s = torch.stack([(p[j] @ h.T).softmax(0)[j] for h in heads])
        by_hand[j] = sum((v * h[j] for v, h in zip(s.softmax(0), heads, strict=True)), torch.zeros(4))
    assert torch.allclose(single, by_hand, atol=1e-6)
    assert torch.allclose(summed, by_hand, atol=1e-6)


@pytest.mark.parametrize(
    ("alpha", "tau", "loss"), [(0.1, 1.0, 0.4144555), (0.3, 1.0, 0.4280153), (0.1, 0.5, 0.1613309)]
)
def test_cd_3_contrast(alpha: float, tau: float, loss: float) -> None:
    cosine, there = double(1.0, 0.5, 0.0, -1.0).view(1, 4), torch.ones(4, dtype=torch.bool)
    found = hpc(cosine, torch.tensor([0]), 2, there, alpha, tau)
    assert float(found) == pytest.approx(loss, abs=1e-6)
    if (alpha, tau) == (0.1, 1.0):
        assert math.exp(-float(found)) == pytest.approx(0.6607, abs=1e-6)


def test_cd_3_equal_cosines_and_lower_bound() -> None:
    there = torch.ones(30, dtype=torch.bool)
    equal = hpc(torch.zeros(1, 30, dtype=torch.float64), torch.tensor([4]), 3, there, 0.1, 1.0)
    assert float(equal) == pytest.approx(3.2386785, abs=1e-6)
    assert math.exp(float(equal)) == pytest.approx(25.5)
    best = -torch.ones(1, 30, dtype=torch.float64)
    best[0, 4] = 1.0
    assert float(hpc(best, torch.tensor([4]), 3, there, 0.1, 1.0)) == pytest.approx(1.4622629, abs=1e-6)


def test_classes_without_prototypes_are_left_out_of_the_contrast() -> None:
    cosine = double(1.0, 0.5, 0.9, 0.9).view(1, 4)
    there = torch.tensor([True, True, False, False])
    wanted = math.log(math.e + 0.1 * math.exp(0.5)) - 1
    assert float(hpc(cosine, torch.tensor([0]), 2, there, 0.1, 1.0)) == pytest.approx(wanted)


def test_cd_4_decoupled_distillation() -> None:
    teacher, student, y = (
        double(0.5, 0.3, 0.2).log().view(1, 3),
        double(0.7, 0.1, 0.2).log().view(1, 3),
        torch.tensor([0]),
    )
    assert float(fedcd.target(teacher, student, y)) == pytest.approx(0.0871767, abs=1e-6)
    assert float(fedcd.non_target_kd(teacher, student, y)) == pytest.approx(0.1483417, abs=1e-6)
    assert float(fedcd.dkd(teacher, student, y, 8.0)) == pytest.approx(1.2739107, abs=1e-6)
    assert float(fedcd.dkd(teacher, student, y, 0.5)) == pytest.approx(0.1613476, abs=1e-6)
    assert float(fedcd.kd(teacher, student)) == pytest.approx(0.1613476, abs=1e-6)


def test_cd_4_with_two_classes_the_others_say_nothing_and_gradients_are_finite() -> None:
    teacher, student = double(3.0, -40.0).view(1, 2), double(-1.0, 60.0).view(1, 2).requires_grad_()
    assert fedcd.non_target_kd(teacher, student, torch.tensor([0])).tolist() == [0]
    fedcd.dkd(teacher, student, torch.tensor([0]), 8.0).sum().backward()
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize(
    ("form", "logits", "probabilities"),
    [
        ("sum", (1.0, 1.5, 1.0), (0.274069, 0.451863, 0.274069)),
        ("mean", None, (0.314331, 0.371338, 0.314331)),
        ("prob", None, (0.256131, 0.268501, 0.475368)),
    ],
)
def test_cd_5_aggregation_of_fine_logits(
    form: str, logits: tuple[float, ...] | None, probabilities: tuple[float, ...]
) -> None:
    fine = double(1, 0, 0, 0.5, 0.5, 0.5, -1, 2, 0).view(1, 9)
    found = class_logits(fine, 3, form)
    if logits:
        assert found[0].tolist() == pytest.approx(list(logits))
    assert found.softmax(1)[0].tolist() == pytest.approx(list(probabilities), abs=1e-6)


def test_cd_6_prototypes_are_averaged_by_counts() -> None:
    start = fedcd.unknown(4, 1)
    parts = [
        Part.of({"p": torch.full((4, 1), v)}, torch.tensor([n, 0.0, 0.0, 0.0])) for v, n in ((1.0, 10.0), (5.0, 30.0))
    ]
    after = fedcd.merged(start, parts[0] + parts[1], 2)
    assert after["p"].flatten().tolist() == [4, 0, 0, 0]
    assert after["known"].tolist() == [1, 0, 0, 0]
    assert after["count"].tolist() == [40, 0, 0, 0]


def test_counts_of_reported_classes_are_replaced_and_those_of_others_kept() -> None:
    state = {"p": torch.ones(4, 1), "known": torch.ones(4), "count": torch.tensor([5.0, 6.0, 7.0, 8.0])}
    part = Part({"p": torch.zeros(4, 1)}, torch.tensor([11.0, 0.0, 0.0, 0.0]))
    assert fedcd.merged(state, part, 2)["count"].tolist() == [11, 0, 7, 8]


def test_cd_7_decay() -> None:
    assert [decay(t - 1, 100, zero_based=False) for t in (1, 50, 100)] == pytest.approx([0.99, 0.5, 0.0])
    assert decay(0, 100, zero_based=True) == 1.0


def objective(count: Tensor, n: float, **options: object) -> Objective:
    draw = torch.Generator().manual_seed(1)
    p = torch.randn(len(count), 64, generator=draw)
    anchors = Anchors(p, torch.ones(len(count), dtype=torch.bool))
    return Objective(FedCD(**options), 0.4, torch.randn(len(count), 64, generator=draw), anchors, p, count, n)  # type: ignore[arg-type]


def test_cd_8_local_share() -> None:
    rule = objective(torch.full((30,), 50_000 / 30), 5000.0)
    assert rule.share(64) == pytest.approx(1 / 11)
    per_example, per_prototype = rule.share(64) / 64, (1 - rule.share(64)) / 30
    assert per_prototype / per_example == pytest.approx(21.3333, abs=1e-4)
    assert objective(torch.full((30,), 50_000 / 30), 0.0).share(64) == pytest.approx(64 / 50_064)


@pytest.mark.parametrize("n", [14.0, 0.0])
def test_cd_8_loss_is_the_mean_over_the_rebalanced_batch(n: float) -> None:
    """Against the definition: prototypes appended to the batch with their importances, one weighted mean over all."""
    count = torch.tensor([3.0, 0, 4, 5, 1, 2, 0, 6, 7, 8, 2, 1])
    rule = objective(count, n, importance="scaled" if n else "unscaled", gamma=0.0)
    net = FineModel(fedcd_model(), 3, "sum", torch.randn(12, 64, generator=torch.Generator().manual_seed(2))).eval()
    torch.nn.init.normal_(net.fine.weight, generator=torch.Generator().manual_seed(3))
    x, y = shares()[0].train.batch(torch.arange(5))
    z = net.features(x)
    every = torch.cat([z, rule.prototypes])
    label = torch.cat([y, torch.arange(12) // 3])
    own = torch.cat([3 * y + rule.anchors.nearest(z, y, 3), torch.arange(12)])
    importance = torch.cat([torch.ones(5), count * (5 / n if n else 1.0)])
    logits = net.classify(every)
    teacher = class_logits(every @ rule.phi.T, 3, "sum")
    cosine = normalize(every, dim=1) @ normalize(net.prototypes.weight, dim=1).T
    contrast = hpc(cosine, own, 3, rule.anchors.known, 0.1, 1.0)
    rows = 0.4 * cross_entropy(logits, label, reduction="none") + 0.6 * contrast
    rows = rows + 0.1 * fedcd.dkd(teacher, logits, label, 0.5)
    wanted = (importance * rows).sum() / importance.sum()
    found = rule.loss(net, x, y).objective() + (rule.penalty(net) if n else 0.0)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)


def test_cd_8_a_shuffled_batch_is_the_mean_over_its_examples_and_the_prototypes_drawn_into_it() -> None:
    count = torch.tensor([3.0, 0, 4, 5, 1, 2, 0, 6, 7, 8, 2, 1])
    joins = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0])
    net = FineModel(fedcd_model(), 3, "sum", torch.randn(12, 64, generator=torch.Generator().manual_seed(2))).eval()
    torch.nn.init.normal_(net.fine.weight, generator=torch.Generator().manual_seed(3))
    x, y = shares()[0].train.batch(torch.arange(5))
    shuffled = objective(count, 0.0, importance="shuffle", gamma=0.0)
    found = replace(shuffled, drawn=lambda batch: count * joins * float(batch == 5)).loss(net, x, y).objective()
    same_as = replace(shuffled, count=count * joins).loss(net, x, y).objective()  # these alone, unscaled
    assert float(found.detach()) == pytest.approx(float(same_as.detach()))
    none = replace(shuffled, drawn=torch.zeros_like(count).mul).loss(net, x, y)
    own = objective(torch.zeros(12), 5.0, gamma=0.0).loss(net, x, y)
    assert float(none.objective().detach()) == pytest.approx(float(own.objective().detach()))
    assert float(none.objective().detach()) != pytest.approx(float(found.detach()))


def test_cd_8_each_prototype_joins_one_batch_of_an_epoch_on_average() -> None:
    share, context = shares()[0], FED.for_silo(0, 7)
    data, count = PlainLocalData(RoundData(share.train, share.test, FEDCD_TRAIN, context)), torch.arange(1.0, 13.0)
    draw, again = (FedCD(importance="shuffle")._shuffled(count, data, context) for _ in range(2))
    seen = torch.stack([draw(b) / count for _ in range(1000) for b in (4, 4, 4, 2)])  # 14 examples
    assert seen.unique().tolist() == [0, 1]
    assert (seen.sum(0) / 1000).tolist() == pytest.approx([1.0] * 12, abs=0.1)
    assert torch.equal(again(4) / count, seen[0])


@pytest.mark.parametrize("importance", ["scaled", "unscaled", "shuffle", "none"])
def test_every_importance_trains_and_without_any_no_prototype_is_appended(importance: str) -> None:
    method = FedCD(acla="stale", importance=importance)
    server = method.init_server(fedcd_model(), FED)
    _, first = played(method, 0, server)
    server = method.merge(server, first.bundle, FED)
    _, second = played(method, 0, server, t=1)
    assert all(tensor_maps.all_finite(part.total) for part in second.bundle.values())
    _, scaled = played(FedCD(acla="stale", importance="scaled"), 0, server, t=1)
    moved, of_scaled = (o.bundle["delta"].total for o in (second, scaled))
    assert same(moved, of_scaled) == (importance == "scaled")
    if importance == "none":
        state = {**server[PROTOTYPES], "count": torch.zeros(12)}
        _, without = played(FedCD(acla="stale", importance="scaled"), 0, {**server, PROTOTYPES: state}, t=1)
        assert same(moved, without.bundle["delta"].total)


def test_cd_9_class_means_under_the_frozen_head() -> None:
    z, y = torch.tensor([[1.0, 0, 0], [3.0, 0, 0]], dtype=torch.float64), torch.tensor([0, 0])
    found = bpr(z, y, torch.eye(3, dtype=torch.float64), 1, "sum", 3)
    assert float(found) == pytest.approx(0.239545, abs=1e-6)  # the mean of z has logits (2, 0, 0)


def test_cd_9_each_class_of_a_batch_counts_once() -> None:
    z = torch.tensor([[2.0, 0, 0], [2.0, 0, 0], [2.0, 0, 0], [0, 0, 5.0]], dtype=torch.float64)
    found = bpr(z, torch.tensor([0, 0, 0, 2]), torch.eye(3, dtype=torch.float64), 1, "sum", 3)
    assert float(found) == pytest.approx((0.239545 + math.log(1 + 2 * math.exp(-5))) / 2, abs=1e-6)


def test_nearest_fine_class_lies_within_the_own_class_and_exists() -> None:
    points = torch.tensor([[1.0, 0], [0, 1.0], [1.0, 0], [0, 1.0]])
    z, y = torch.tensor([[0.1, 1.0], [0.1, 1.0], [1.0, 0.1]]), torch.tensor([0, 1, 1])
    everything = Anchors(points, torch.ones(4, dtype=torch.bool))
    assert everything.nearest(z, y, 2).tolist() == [1, 1, 0]
    assert Anchors(points, torch.tensor([True, False, True, True])).nearest(z, y, 2).tolist() == [0, 1, 0]
