"""Sensitivity, specificity, AUC, calibration, confusion matrix: against torchmetrics, scikit-learn and by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, roc_auc_score
from torch import Tensor, nn
from torchmetrics.functional.classification import (
    binary_calibration_error,
    multiclass_auroc,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
    multiclass_recall,
    multiclass_specificity,
)

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.clinical import (
    clinical_counts,
    clinical_metrics,
    clinical_part,
    label_counts,
    no_clinical_part,
    score_bins,
)
from fl_core.training.evaluation import evaluate, evaluate_global
from fl_core.training.local_data import PlainLocalData
from fl_core.types.clinical import (
    CALIBRATION_BINS,
    SCORE_BINS,
    BinnedRange,
    ClinicalMetrics,
    ReliabilityBin,
    TwoByTwo,
    balanced_counts,
    binned_auc,
)
from fl_core.types.interfaces import RoundData
from fl_core.types.metric_parts import CLINICAL_PART, METRICS
from fl_core.types.records import TrainConfig
from fl_core.types.targets import FOUND, UNKNOWN
from fl_core.types.values import Part
from tests.support.federations import FED, Given, manifest, same, shares


def made(n: int = 400, classes: int = 5, strength: float = 1.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make logits (n, C) that know something of the labels (n,)."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=draw)
    logits = torch.randn(n, classes, generator=draw) * 2
    return logits + strength * nn.functional.one_hot(labels, classes), labels


def part(logits: Tensor, labels: Tensor) -> Part:
    counts = clinical_counts(logits, labels, logits.shape[1])
    return Part({k: v.float() for k, v in counts.items()}, counts["confusion"].sum().float())


def measured(logits: Tensor, labels: Tensor) -> ClinicalMetrics:
    found = clinical_metrics(part(logits, labels))
    assert found is not None
    return found


@pytest.mark.parametrize("classes", [2, 5])
def test_metrics_equal_those_of_torchmetrics(classes: int) -> None:
    logits, labels = made(classes=classes)
    found, p = measured(logits, labels), torch.softmax(logits, 1)
    assert torch.equal(torch.tensor(found.confusion), multiclass_confusion_matrix(p, labels, classes))
    recall = multiclass_recall(p, labels, classes, average=None)
    assert torch.tensor(found.sensitivity) == pytest.approx(recall, abs=1e-6)
    assert torch.tensor(found.specificity) == pytest.approx(
        multiclass_specificity(p, labels, classes, average=None), abs=1e-6
    )
    assert found.calibration_error == pytest.approx(
        float(multiclass_calibration_error(p, labels, classes, n_bins=15)), abs=1e-6
    )
    for area, exact in zip(found.auc, multiclass_auroc(p, labels, classes, average=None).tolist(), strict=True):
        assert area is not None
        assert area.low <= exact + 1e-6
        assert exact - 1e-6 <= area.high
        assert area.middle == pytest.approx(exact, abs=2e-3)
    assert found.macro_auc is not None
    assert found.macro_auc.middle == pytest.approx(float(multiclass_auroc(p, labels, classes)), abs=2e-3)
    assert found.macro_auc.high - found.macro_auc.low < 0.02


def test_metrics_equal_those_of_scikit_learn() -> None:
    logits, labels = made(seed=1)
    found, predicted = measured(logits, labels), logits.argmax(1)
    assert np.array_equal(found.confusion, confusion_matrix(labels, predicted))
    assert found.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predicted))
    exact = roc_auc_score(labels, torch.softmax(logits.double(), 1), multi_class="ovr", average="macro")
    assert found.macro_auc is not None
    assert found.macro_auc.low <= exact <= found.macro_auc.high


def test_an_auc_equals_that_of_the_binned_scores_to_the_last_digits() -> None:
    logits, labels = made(seed=2)
    bins = score_bins(torch.softmax(logits.double(), 1), logits.shape[1])
    for c, area in enumerate(measured(logits, labels).auc):
        assert area is not None
        assert area.middle == pytest.approx(roc_auc_score(labels == c, bins[:, c]), abs=1e-12)


LOGITS = st.floats(-(2.0**126), 2.0**126, width=32) | st.floats(-3, 3, width=32)


@given(st.lists(st.tuples(LOGITS, st.booleans()), min_size=2, max_size=40))
def test_the_true_auc_lies_in_its_range_whatever_the_scores_and_ties(scores: list[tuple[float, bool]]) -> None:
    logits = torch.tensor([[0.0, s] for s, _ in scores])
    labels = torch.tensor([int(y) for _, y in scores])
    won = [
        (a > b) + 0.5 * (a == b)
        for a, y in scores
        if y
        for b, z in scores
        if not z  # every pair of a positive and a negative
    ]
    area = measured(logits, labels).auc[1]
    if not won:
        assert area is None
        return
    assert area is not None
    assert area.low - 1e-12 <= sum(won) / len(won) <= area.high + 1e-12


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 30))
def test_counts_of_several_hospitals_add_up_to_those_of_all_their_images(seed: int, classes: int, cut: int) -> None:
    logits, labels = made(30, classes, seed=seed)
    whole, first, rest = part(logits, labels), part(logits[:cut], labels[:cut]), part(logits[cut:], labels[cut:])
    total = first + rest
    assert all(torch.equal(total.total[k], whole.total[k]) for k in whole.total if k != "confidence")
    assert torch.allclose(total.total["confidence"], whole.total["confidence"], rtol=1e-5, atol=1e-6)
    assert total.weight == whole.weight


def test_the_parts_of_one_evaluation_agree_and_the_accuracy_is_what_it_was_without_them() -> None:
    logits, labels = made(1300, 4)
    data = PlainLocalData(RoundData(*[Given(logits, labels)] * 2, TrainConfig(), FED.for_silo(0, 0)))
    both, alone = evaluate_global(nn.Identity(), data, 4, True), evaluate(nn.Identity(), data, 4)
    assert torch.equal(both[METRICS].total["correct"], alone.total["correct"])
    assert torch.equal(both[METRICS].weight, alone.weight)
    assert same(both[CLINICAL_PART].total, part(logits, labels).total)


def test_numbers_that_a_class_does_not_have_are_none_and_left_out_of_macro_means() -> None:
    logits = torch.tensor([[3.0, 0, 0], [0, 3.0, 0], [0.5, 0, 0], [0, 3.0, 0]])
    found = measured(logits, torch.tensor([0, 0, 1, 1]))
    assert found.confusion == ((1, 1, 0), (1, 1, 0), (0, 0, 0))
    assert found.sensitivity == [0.5, 0.5, None]
    assert found.specificity == [0.5, 0.5, 1.0]
    assert found.auc[2] is None
    assert (found.classes_present, found.examples, found.balanced_accuracy) == (2, 4, 0.5)
    assert found.facts()["sensitivity"] == [0.5, 0.5, None]


def test_one_class_alone_has_a_sensitivity_and_nothing_to_tell_it_from() -> None:
    found = measured(torch.tensor([[2.0], [-1e38]]), torch.tensor([0, 0]))
    assert (found.sensitivity, found.specificity, found.auc, found.macro_auc) == ([1.0], [None], (None,), None)
    assert found.calibration_error == 0


def test_scores_that_are_all_equal_leave_the_auc_open_around_one_half() -> None:
    found = measured(torch.zeros(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert found.auc == (BinnedRange(0.0, 1.0),) * 3
    assert found.macro_auc is not None
    assert found.macro_auc.middle == 0.5


def test_examples_without_probabilities_count_with_confidence_zero_and_the_answer_of_argmax() -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, nan], [inf, inf], [0.0, inf], [nan, 1.0]])
    found = measured(logits, torch.tensor([0, 0, 1, 1]))
    assert found.confusion == tuple(map(tuple, confusion_matrix([0, 0, 1, 1], logits.argmax(1)).tolist()))
    assert found.auc == (BinnedRange(0.0, 1.0), BinnedRange(0.0, 1.0))
    assert found.bins[0] == ReliabilityBin(4, 3, 0.0)


def test_logits_of_any_size_have_scores_in_the_outer_bins_and_full_confidence() -> None:
    found = measured(torch.tensor([[1e38, -1e38], [-math.inf, 0.0], [3e38, 3.1e38]]), torch.tensor([0, 1, 1]))
    assert found.auc == (BinnedRange(1.0, 1.0), BinnedRange(1.0, 1.0))
    assert found.bins[-1] == ReliabilityBin(3, 3, 3.0)
    assert found.calibration_error == 0


def test_a_silo_without_test_images_sends_zeros_of_the_same_shapes() -> None:
    empty = Given(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    data = PlainLocalData(RoundData(empty, empty, TrainConfig(), FED.for_silo(0, 0)))
    for found in (clinical_part(nn.Identity(), data, 4), no_clinical_part(4)):
        assert {k: v.shape for k, v in found.total.items()} == {
            k: v.shape for k, v in part(*made(classes=4)).total.items()
        }
        assert not any(v.any() for v in (*found.total.values(), found.weight))
        assert clinical_metrics(found) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=50), st.integers(1, 60))
def test_bins_rise_with_the_probability_and_are_all_there(p: list[float], classes: int) -> None:
    rows = torch.tensor(sorted(p), dtype=torch.float64).unsqueeze(1).expand(-1, classes)
    bins = score_bins(rows, classes)
    assert bool((bins.diff(dim=0) >= 0).all())
    assert 0 <= int(bins.min()) <= int(bins.max()) < SCORE_BINS


def test_bins_are_finest_where_a_model_knows_nothing() -> None:
    assert binned_auc([0, 1], [1, 0]) == BinnedRange(1.0, 1.0)
    near = torch.tensor([[0.25 + 0.002 * k] for k in range(-5, 6)], dtype=torch.float64).expand(-1, 4)
    assert len(score_bins(near, 4)[:, 0].unique()) == 11


def test_what_is_measured_changes_no_bit_of_a_run() -> None:
    plain, clinical = RoundHistory(), RoundHistory()
    expected = simulate(RunSetup.of(manifest("fedmr")), shares(), plain)
    found = simulate(RunSetup.of(manifest("fedmr", metrics="clinical")), shares(), clinical)
    assert all(same(found[group], expected[group]) for group in expected)
    assert [(r.correct, r.examples, r.medians) for r in clinical.records] == [
        (r.correct, r.examples, r.medians) for r in plain.records
    ]
    assert all(r.clinical is None for r in plain.records)
    for record in clinical.records:
        assert record.clinical is not None
        assert tuple(map(float, record.clinical.per_class)) == record.examples
        assert record.clinical.balanced_accuracy == pytest.approx(record.balanced_accuracy)
        assert ClinicalMetrics.of(json.loads(json.dumps(asdict(record.clinical)))) == record.clinical


# ---- several labels at once ------------------------------------------------------------------------------------------


def made_labels(n: int = 600, labels: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make logits (n, L) that know something of labels (n, L), of which a third were not looked for."""
    draw = torch.Generator().manual_seed(seed)
    there = torch.randint(2, (n, labels), generator=draw)
    logits = torch.randn(n, labels, generator=draw) + 1.5 * there - 1
    return logits, torch.where(torch.rand(n, labels, generator=draw) < 1 / 3, UNKNOWN, there)


def label_part(logits: Tensor, labels: Tensor) -> Part:
    counts = label_counts(logits, labels, logits.shape[1])
    return Part({k: v.float() for k, v in counts.items()}, counts["confusion"].sum().float())


def measured_labels(logits: Tensor, labels: Tensor) -> ClinicalMetrics:
    found = clinical_metrics(label_part(logits, labels))
    assert found is not None
    return found


def test_metrics_of_labels_are_those_of_scikit_learn_over_who_was_looked_at() -> None:
    logits, labels = made_labels()
    found = measured_labels(logits, labels)
    assert found.confusion == ()
    for c, (table, area) in enumerate(zip(found.labels, found.auc, strict=True)):
        known = labels[:, c] != UNKNOWN
        truth, said = (labels[known, c] == FOUND).int().numpy(), (logits[known, c] > 0).int().numpy()
        assert [*table] == confusion_matrix(truth, said).reshape(-1).tolist()
        exact = roc_auc_score(truth, logits[known, c].double())
        assert area is not None
        assert area.low <= exact <= area.high
        assert area.middle == pytest.approx(exact, abs=2e-3)
        assert found.sensitivity[c] == pytest.approx(float(said[truth == 1].mean()))
        assert found.specificity[c] == pytest.approx(1 - float(said[truth == 0].mean()))
    every = labels != UNKNOWN
    truth, said = (labels == FOUND)[every].numpy(), (logits > 0)[every].numpy()
    assert found.examples == int(every.sum())
    assert found.balanced_accuracy == pytest.approx(
        np.mean(
            [balanced_accuracy_score(*(v[labels[:, c] != UNKNOWN, c] for v in (labels, logits > 0))) for c in range(4)]
        )
    )
    p = torch.sigmoid(logits.double())[every]
    right, confidence = torch.tensor(truth == said), torch.maximum(p, 1 - p)
    error = binary_calibration_error(confidence, right.int(), n_bins=CALIBRATION_BINS)
    assert found.calibration_error == pytest.approx(float(error), abs=1e-5)


def test_a_label_that_was_not_looked_for_counts_nowhere_whatever_the_model_says() -> None:
    logits, labels = made_labels()
    other = torch.where(labels == UNKNOWN, 1e30 * torch.randn(logits.shape), logits)
    assert same(label_part(logits, labels).total, label_part(other, labels).total)


def test_of_labels_the_parts_of_one_evaluation_agree_and_the_accuracy_is_what_it_was_without_them() -> None:
    logits, labels = made_labels(1300)
    data = PlainLocalData(RoundData(*[Given(logits, labels)] * 2, TrainConfig(), FED.for_silo(0, 0)))
    both, alone = evaluate_global(nn.Identity(), data, 4, True), evaluate(nn.Identity(), data, 4)
    assert torch.equal(both[METRICS].total["correct"], alone.total["correct"])
    assert torch.equal(both[METRICS].weight, alone.weight)
    assert same(both[CLINICAL_PART].total, label_part(logits, labels).total)
    blank = evaluate_global(None, data, 4, True)[CLINICAL_PART]
    assert {k: v.shape for k, v in blank.total.items()} == {k: v.shape for k, v in both[CLINICAL_PART].total.items()}
    assert not any(v.any() for v in (*blank.total.values(), blank.weight))


def test_a_model_that_never_finds_anything_is_right_in_most_and_guesses() -> None:
    """What a mean of right answers by label hides: 95 of 100 are right, and balanced accuracy is one half."""
    labels = (torch.arange(100) < 5).long().unsqueeze(1).repeat(1, 3)
    found = measured_labels(torch.full((100, 3), -2.0), labels)
    assert sum(t.tn for t in found.labels) / found.examples == 0.95
    assert (found.balanced_accuracy, found.sensitivity, found.specificity) == (0.5, [0.0] * 3, [1.0] * 3)
    sums = ((95, 95, 95), (100, 100, 100))
    assert balanced_counts(*sums, found, several_labels=True) == found.balanced_counts
    assert balanced_counts(*sums, None, several_labels=True) == ((), ())
    assert balanced_counts(*sums, None, several_labels=False) == sums


def test_labels_found_nowhere_or_everywhere_have_no_area_and_no_part_in_means() -> None:
    labels = torch.tensor([[1, 0, UNKNOWN], [1, 0, UNKNOWN], [0, 0, UNKNOWN]])
    found = measured_labels(torch.tensor([[1.0, -1, 5], [-1.0, -1, 5], [-1.0, 2, 5]]), labels)
    assert found.labels == (TwoByTwo(1, 0, 1, 1), TwoByTwo(2, 1, 0, 0), TwoByTwo(0, 0, 0, 0))
    assert (found.sensitivity, found.specificity) == ([0.5, None, None], [1.0, 2 / 3, None])
    assert found.auc[1:] == (None, None)
    assert (found.classes_present, found.balanced_accuracy) == (1, 0.75)


def test_logits_of_labels_that_are_no_numbers_say_no_with_confidence_zero() -> None:
    logits = torch.tensor([[math.nan], [math.inf], [-math.inf], [1e38]])
    found = measured_labels(logits, torch.tensor([[0], [1], [0], [1]]))
    assert found.labels == (TwoByTwo(2, 0, 0, 2),)
    assert found.bins[0] == ReliabilityBin(1, 1, 0.0)
    assert found.bins[-1] == ReliabilityBin(3, 3, 3.0)
    assert ClinicalMetrics.of(json.loads(json.dumps(asdict(found)))) == found
