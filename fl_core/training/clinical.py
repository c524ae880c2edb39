"""The counts behind sensitivity, specificity, AUC and calibration, as a part of an update: whole numbers that add up.

With p = softmax(logits), y the class of a test example and B = SCORE_BINS,

| tensor      | counts                                                                                          |
|-------------|-------------------------------------------------------------------------------------------------|
| confusion   | (C, C): examples of class c (row) for which the model says d (column)                           |
| positive    | (C, B): examples of class c by the bin of their score s_c = ln(p_c / (1 - p_c)) + ln(C - 1)     |
| negative    | (C, B): all other examples by the bin of s_c                                                    |
| examples    | (15,): examples by the bin of the confidence max p: [k / 15, (k + 1) / 15), the last to 1       |
| correct     | (15,): those of them that are right                                                             |
| confidence  | (15,): the sum of their confidences, the only one that is no count                              |

The weight is the number of test examples; a silo that withholds the part sends zeros of weight 0. An example whose
logits have no probabilities (NaN, +inf) lies in the lowest bins, with confidence 0; its answer is that of argmax, as in
the part "metrics".

With several labels at once, each answer about a known label counts like an example above. With p_l = sigmoid(logit l),
s_l = ln(p_l / (1 - p_l)) and the confidence max(p_l, 1 - p_l), "confusion" is (L, 2, 2): label, true value (not found,
found), predicted value (not found, found: logit > 0). The weight is the number of answers. A logit that is NaN counts
as "not found".
"""

from __future__ import annotations

import math

from fl_core.tensors import Tensor, nn, torch
from fl_core.types.clinical import (
    CALIBRATION_BINS,
    SCORE_BINS,
    SCORE_LIMIT,
    SCORE_UNIT,
    ClinicalMetrics,
    ReliabilityBin,
    TwoByTwo,
    binned_auc,
)
from fl_core.types.enums import Split
from fl_core.types.interfaces import LocalData
from fl_core.types.targets import FOUND, UNKNOWN
from fl_core.types.values import BatchSums, Part, Tensors


def clinical_part(model: nn.Module, data: LocalData, n_classes: int, split: Split = Split.TEST) -> Part:
    """Count on the silo's test split. The examples must not be private, since counts have no noise and no charge."""
    model.eval()

    count = label_counts if data.multi_label else clinical_counts

    def counts(x: Tensor, y: Tensor) -> Tensors:
        with torch.no_grad():
            return count(model(x), y, n_classes)

    sums = data.sum(BatchSums(counts), split=split)
    return Part({name: v.float() for name, v in sums.items()}, sums["confusion"].sum().float())


def no_clinical_part(n_classes: int, multi_label: bool = False) -> Part:
    """Return the part of a silo that withholds it."""
    count, of = (label_counts, (0, n_classes)) if multi_label else (clinical_counts, (0,))
    blank = count(torch.zeros(0, n_classes), torch.zeros(of, dtype=torch.int64), n_classes)
    return Part({name: v.float() for name, v in blank.items()}, torch.tensor(0.0))


def clinical_counts(logits: Tensor, labels: Tensor, n_classes: int) -> dict[str, Tensor]:
    """Count one batch: logits (n, C), labels (n,) -> float64 tensors, as in the table above."""
    predicted = logits.argmax(1).cpu()
    p, labels = torch.softmax(logits.detach().cpu().double(), 1), labels.cpu()
    finite = torch.isfinite(p).all(1)
    p = torch.where(finite.unsqueeze(1), p, 0.0)
    cells = score_bins(p, n_classes) + SCORE_BINS * torch.arange(n_classes)
    every = _histogram(cells.reshape(-1), n_classes, SCORE_BINS)
    positive = _histogram(cells.gather(1, labels.unsqueeze(1)).squeeze(1), n_classes, SCORE_BINS)
    return {
        "confusion": _histogram(labels * n_classes + predicted, n_classes, n_classes),
        "positive": positive,
        "negative": every - positive,
        **_calibration(p.amax(1), predicted == labels),
    }


def label_counts(logits: Tensor, labels: Tensor, n_classes: int) -> dict[str, Tensor]:
    """Count one batch of several labels at once: logits (n, L), labels (n, L) -> float64 tensors, as above."""
    logits, labels = logits.detach().cpu(), labels.cpu()
    labelled, positive, predicted = labels != UNKNOWN, labels == FOUND, logits > 0
    p = torch.nan_to_num(torch.sigmoid(logits.double()), 0.0)
    confidence = torch.where(torch.isnan(logits), 0.0, torch.maximum(p, 1 - p))
    label = torch.arange(n_classes).expand(len(labels), n_classes)
    bins = label * SCORE_BINS + score_bins(p, 2)
    return {
        "confusion": _histogram((label * 4 + 2 * positive + predicted)[labelled], n_classes, 4).reshape(
            n_classes, 2, 2
        ),
        "positive": _histogram(bins[labelled & positive], n_classes, SCORE_BINS),
        "negative": _histogram(bins[labelled & ~positive], n_classes, SCORE_BINS),
        **_calibration(confidence[labelled], (predicted == positive)[labelled]),
    }


def _calibration(confidence: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Count answers by the bin of their confidence; right: (n,) the correct ones."""
    place = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    return {
        "examples": torch.bincount(place, minlength=CALIBRATION_BINS).double(),
        "correct": torch.bincount(place[right], minlength=CALIBRATION_BINS).double(),
        "confidence": torch.bincount(place, weights=confidence, minlength=CALIBRATION_BINS),
    }


def answers(confusion: Tensor) -> tuple[Tensor, Tensor]:
    """Return correct answers (C,) and all answers (C,), by class or label, from the tensor "confusion"."""
    if confusion.dim() == 3:
        return confusion.diagonal(dim1=1, dim2=2).sum(1), confusion.sum((1, 2))
    return confusion.diagonal().clone(), confusion.sum(1)


def score_bins(p: Tensor, alternatives: int) -> Tensor:
    """Return the bin of each probability's score: p (n, C) float64 in [0, 1] -> (n, C) int64, increasing with p.

    alternatives: C, or 2 for a label; the probability 1 / alternatives, of a model without knowledge, has score 0.
    """
    score = torch.log(p) - torch.log1p(-p) + math.log(max(alternatives - 1, 1))
    x, end = torch.asinh(score.clamp(-SCORE_LIMIT, SCORE_LIMIT) / SCORE_UNIT), math.asinh(SCORE_LIMIT / SCORE_UNIT)
    return ((x + end) * (SCORE_BINS / (2 * end))).long().clamp(0, SCORE_BINS - 1)


def _histogram(cells: Tensor, rows: int, columns: int) -> Tensor:
    return torch.bincount(cells, minlength=rows * columns).double().reshape(rows, columns)


def clinical_metrics(part: Part) -> ClinicalMetrics | None:
    """Read the sum of parts; None if no silo sent one."""
    if float(part.weight) <= 0:
        return None
    whole = {name: v.round().long().tolist() for name, v in part.total.items() if name != "confidence"}
    sums = part.total["confidence"].tolist()
    auc = [binned_auc(p, n) for p, n in zip(whole["positive"], whole["negative"], strict=True)]
    bins = tuple(ReliabilityBin(*b) for b in zip(whole["examples"], whole["correct"], sums, strict=True))
    if part.total["confusion"].dim() == 3:
        return ClinicalMetrics((), tuple(auc), bins, tuple(TwoByTwo(*no, *yes) for no, yes in whole["confusion"]))
    return ClinicalMetrics(tuple(tuple(row) for row in whole["confusion"]), tuple(auc), bins)
