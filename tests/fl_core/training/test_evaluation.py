"""What is measured of models: accuracies as sums, global and personal."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from consilium.research.engines.in_process import RoundHistory, SiloShare, simulate
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.datasets import TensorExamples
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.evaluation import (
    ConcatExamples,
    WithoutScarceClasses,
    _scored,
    evaluate,
    evaluate_global,
    evaluate_own,
    evaluate_personal,
    personal_scores,
    scarce_class_names,
    weighted_accuracy,
)
from fl_core.training.local_data import PlainLocalData
from fl_core.types.enums import Split
from fl_core.types.interfaces import RoundData
from fl_core.types.metric_parts import METRICS, PERSONAL, PERSONAL_GA, PERSONAL_PUBLIC
from fl_core.types.records import TrainConfig, fairness
from fl_core.types.targets import FOUND, UNKNOWN
from fl_core.types.values import Part, RoundContext
from tests.support.federations import FED, Given, manifest, same, shares


class Told(nn.Module):
    """Predicts what the first number of an example says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(x.flatten(1)[:, 0].long(), 4).float()


def told(labels: list[int], right: list[int]) -> Given:
    """Make examples of these labels of which, per class, the first so many are predicted right."""
    left, x = dict(enumerate(right)), []
    for y in labels:
        x.append(y if left[y] > 0 else (y + 1) % 4)
        left[y] -= 1
    return Given(
        torch.tensor(x).float().reshape(-1, 1, 1, 1).expand(-1, 1, 8, 8), torch.tensor(labels, dtype=torch.int64)
    )


def door(train: list[int], test: Given, public: Given | None = None) -> PlainLocalData:
    return PlainLocalData(RoundData(told(train, [0] * 4), test, TrainConfig(), FED.for_silo(0, 0), public=public))


def test_t_ev_1_weighted_accuracies() -> None:
    """T-EV-1: test counts (2,2,2), correct (2,1,0), label distribution (.75,.25,0): GM .5, PM(V) .75, PM(L) .875."""
    correct, count = torch.tensor([2.0, 1, 0]), torch.tensor([2.0, 2, 2])
    assert weighted_accuracy(correct, count, torch.ones(3)) == pytest.approx(0.5)
    assert weighted_accuracy(correct, count, torch.tensor([1.0, 1, 0])) == pytest.approx(0.75)
    assert weighted_accuracy(correct, count, torch.tensor([0.75, 0.25, 0])) == pytest.approx(0.875)


def test_t_ev_1_and_nh_4_through_local_data() -> None:
    """T-EV-1 and NH-4 again, counted by a silo: NH-4 has PM(L) 0.725, PM(V) 0.65, GM 0.733333."""
    public = told([0] * 100 + [1] * 100 + [2] * 100, [80, 50, 90, 0])
    data = door([0] * 30 + [1] * 10, told([0, 1], [1, 0, 0, 0]), public)
    scores = personal_scores(evaluate_personal(Told(), data, 4))
    assert scores["pm_l"] == pytest.approx(0.725)
    assert scores["pm_v"] == pytest.approx(0.65)
    assert scores["pa"] == pytest.approx(0.5)
    assert scores["ga"] == pytest.approx(0.733333, abs=1e-6)
    part = evaluate(Told(), data, 4, Split.GLOBAL)
    assert float(part.total["correct"].sum() / part.weight.sum()) == pytest.approx(0.733333, abs=1e-6)
    six = door([0, 0, 0, 1], told([0], [1, 0, 0, 0]), told([0, 0, 1, 1, 2, 2], [2, 1, 0, 0]))
    scores = personal_scores(evaluate_personal(Told(), six, 4))
    assert (scores["pm_v"], scores["pm_l"]) == pytest.approx((0.75, 0.875))


def test_means_and_spreads_over_silos_come_out_of_the_sums_on_the_grid() -> None:
    """PA and the fairness of C.5 equal what the silos' accuracies give, with ddof 0, to 1e-5, equal silos too."""
    grid = FixedPoint(FixedPointFormat("ring64", 3))
    for rights in ([9, 5, 1], [7, 7, 7], [3, 3, 4]):
        bundles = []
        for k, right in enumerate(rights):
            test = told([k] * 11, [right if c == k else 0 for c in range(4)])
            bundles.append(grid.outgoing(evaluate_personal(Told(), door([k], test, test), 4), k, 0))
        total = {name: bundles[0][name] + bundles[1][name] + bundles[2][name] for name in bundles[0]}
        scores = personal_scores(grid.incoming(total, 3, 0))
        each = [r / 11 for r in rights]
        assert scores["pa"] == pytest.approx(statistics.fmean(each), abs=1e-7)
        assert scores["pa_std"] == pytest.approx(statistics.pstdev(each), abs=1e-5)
        assert fairness(scores) == scores["pm_l_std"] == pytest.approx(statistics.pstdev(each), abs=1e-5)


def test_a_silo_without_test_examples_counts_nothing() -> None:
    parts = evaluate_personal(Told(), door([0], told([], [0] * 4)), 4)
    assert float(parts[PERSONAL].weight) == float(parts[PERSONAL_PUBLIC].weight) == 0
    assert personal_scores(parts) == {}
    assert fairness({}) is None
    assert fairness({"pa_std": 0.25}) == 0.25


def test_a_silo_whose_classes_have_no_public_example_keeps_its_ga() -> None:
    """PM is a mean over the silo's own classes, GA over all; the other silo's PM is not diluted."""
    public = told([2, 3], [0, 0, 1, 0])
    mine, other = (evaluate_personal(Told(), door(labels, public, public), 4) for labels in ([0, 1], [2, 2]))
    assert [float(mine[p].weight) for p in (PERSONAL_PUBLIC, PERSONAL_GA)] == [0, 1]
    scores = personal_scores({name: mine[name] + other[name] for name in mine})
    assert scores["ga"] == 0.5
    assert (scores["pm_l"], scores["pm_l_std"]) == (1.0, 0.0)


def test_an_accuracy_from_noised_sums_stays_between_0_and_1() -> None:
    one = torch.ones(1)
    assert weighted_accuracy(2 * one, one, one) == 1
    assert weighted_accuracy(-one, one, one) == 0
    assert math.isnan(weighted_accuracy(one, -one, one))


def test_class_counts_are_asked_for_only_where_there_is_a_public_test_set() -> None:
    class Counting(PlainLocalData):
        asked = 0

        def class_counts(self) -> torch.Tensor:
            self.asked += 1
            return super().class_counts()

    test = told([0], [1, 0, 0, 0])
    for public, asked in ((None, 0), (test, 1)):
        data = Counting(RoundData(test, test, TrainConfig(), FED.for_silo(0, 0), public=public))
        evaluate_personal(Told(), data, 4)
        assert data.asked == asked


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 0, 3], [2], []])
def test_joined_examples_are_read_in_any_order(order: list[int]) -> None:
    y = torch.arange(6)
    whole = Given(torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), y)
    joined = ConcatExamples([Given(whole.x[:2], y[:2]), Given(whole.x[2:2], y[2:2]), Given(whole.x[2:], y[2:])])
    index = torch.tensor(order, dtype=torch.int64)
    assert all(torch.equal(a, b) for a, b in zip(joined.batch(index), whole.batch(index), strict=True))


@pytest.mark.parametrize("method", ["fedavg", "fedmr"])
def test_measuring_personal_models_changes_no_bit_of_the_run(method: str) -> None:
    train = TrainConfig(lr=0.05, batch_size=4, epochs=2)
    with_it, without = RoundHistory(), RoundHistory()
    a = simulate(RunSetup.of(manifest(method, train=train, personal=True)), shares(), with_it)
    b = simulate(RunSetup.of(manifest(method, train=train)), shares(), without)
    assert all(same(a[group], b[group]) for group in a)
    assert with_it.accuracies == without.accuracies
    assert all(
        set(r.personal) == {f"{s}{d}" for s in ("pa", "pm_l", "pm_v", "ga") for d in ("", "_std")}
        for r in with_it.records[:-1]
    )
    assert [r.personal for r in without.records] + [with_it.records[-1].personal] == [{}] * 5
    assert with_it.records[2].personal["pa"] > with_it.records[2].accuracy  # two classes are easier than four


def test_personal_models_are_those_after_local_training() -> None:
    """The means equal those of models trained here, silo by silo, without ports, parts or a grid."""
    from fl_core.methods.fedavg import FedAvg
    from fl_core.models import build_model
    from fl_core.types import tensor_maps

    run = manifest(rounds=1, train=TrainConfig(lr=0.05, batch_size=4, epochs=3), personal=True)
    history, given = RoundHistory(), shares()
    given[2] = SiloShare(given[2].train, Given(given[2].test.batch(torch.arange(0))[0], torch.zeros(0).long()))
    simulate(RunSetup.of(replace(run)), given, history)
    model, found = build_model("digits_cnn", {}, run.schema, 0), []
    start = tensor_maps.copy_state(model)
    for k, share in enumerate(given[:2]):
        tensor_maps.load_state(model, start)
        data = PlainLocalData(RoundData(share.train, share.test, run.train, RoundContext(3, 4, 1, 0, 3).for_silo(k, 0)))
        data.sgd(model, FedAvg.loss)
        x, y = share.test.batch(torch.arange(len(share.test)))
        found.append(float((model.eval()(x).argmax(1) == y).float().mean()))
    assert history.records[0].personal["pa"] == pytest.approx(statistics.fmean(found))
    assert history.records[0].personal["pa_std"] == pytest.approx(statistics.pstdev(found), abs=1e-5)


# ---- classes of few test images --------------------------------------------------------------------------------------


def measured(labels: Tensor, logits: Tensor, least: int, clinical: bool = True) -> dict[str, Part]:
    """Measure two models whose logits are the examples, and the first one minus itself as a hospital's own."""
    classes = logits.shape[1]
    examples = WithoutScarceClasses(TensorExamples(logits, labels), classes, least)
    data = PlainLocalData(RoundData(examples, examples, TrainConfig(batch_size=2), FED))
    model, own = nn.Identity(), nn.Hardtanh()
    parts = evaluate_global(model, data, classes, clinical) | evaluate_own(model, own, data, classes, paired=True)
    return parts | {"personal": _scored("personal", [(evaluate(model, data, classes), torch.ones(classes))])}


def plainly(labels: Tensor, logits: Tensor) -> dict[str, Part]:
    return measured(labels, logits, 0)


@pytest.mark.parametrize("clinical", [False, True])
def test_of_a_class_of_few_test_images_nothing_is_in_any_part_that_is_sent(clinical: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 10 + [1] * 9 + [2] * 1 + [4] * 12)
    logits = torch.randn(len(labels), 5, generator=draw)
    there = (labels != 1) & (labels != 2)
    found, expected = measured(labels, logits, 10, clinical), plainly(labels[there], logits[there])
    assert {"clinical"} <= set(found) or not clinical
    for name, part in found.items():
        assert torch.equal(part.weight, expected[name].weight), name
        assert all(torch.equal(part.total[k], expected[name].total[k]) for k in part.total), name
    other = logits.clone()
    other[~there] = torch.randn(10, 5, generator=draw)  # whatever the model makes of them
    again = measured(labels, other, 10, clinical)
    assert all(torch.equal(found[n].total[k], again[n].total[k]) for n in found for k in found[n].total)
    assert scarce_class_names(labels, list("abcde"), 10) == ["b", "c"]


def test_of_several_labels_one_with_few_of_either_answer_is_left_out_and_the_others_stay() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(30, 4, generator=draw), torch.zeros(30, 4, dtype=torch.int64)
    labels[:12, 0], labels[:1, 1], labels[:29, 2], labels[:15, 3] = FOUND, FOUND, FOUND, UNKNOWN
    found, whole = measured(labels, logits, 5), plainly(labels, logits)
    assert scarce_class_names(labels, list("abcd"), 5) == ["b", "c"]
    assert found[METRICS].weight.tolist() == [30, 0, 0, 15]
    assert torch.equal(found[METRICS].total["correct"][[0, 3]], whole[METRICS].total["correct"][[0, 3]])
    assert not found["clinical"].total["confusion"][1:3].any()
    assert not found["clinical"].total["positive"][1:3].any()
    assert float(found["clinical"].total["examples"].sum()) == 45
    other = logits.clone()
    other[:, 1:3] *= -1
    again = measured(labels, other, 5)
    assert all(torch.equal(found["clinical"].total[k], again["clinical"].total[k]) for k in found["clinical"].total)


def test_a_hospital_whose_classes_are_all_small_sends_weights_of_0() -> None:
    found = measured(torch.tensor([0, 1, 1]), torch.randn(3, 2), 5)
    assert all(not part.weight.any() for part in found.values())
