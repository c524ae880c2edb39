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
logits have no probabilities (NaN, +inf) lies in the lowest bins, with confidence 0; its answer is argmax's, as in the
part "metrics".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fl_core.types.clinical import (
    CALIBRATION_BINS,
    SCORE_BINS,
    SCORE_LIMIT,
    SCORE_UNIT,
    ClinicalMetrics,
    ReliabilityBin,
    binned_auc,
)
from fl_core.types.enums import Split
from fl_core.types.interfaces import LocalData
from fl_core.types.values import BatchSums, Part, Tensors


def clinical_part(model: nn.Module, data: LocalData, n_classes: int, split: Split = Split.TEST) -> Part:
    """Count on the silo's test split. Examples must not be private: nothing is noisy and nothing charged."""
    model.eval()

    def counts(x: Tensor, y: Tensor) -> Tensors:
        with torch.no_grad():
            return clinical_counts(model(x), y, n_classes)

    sums = data.sum(BatchSums(counts), split=split)
    return Part({name: v.float() for name, v in sums.items()}, sums["confusion"].sum().float())


def no_clinical_part(n_classes: int) -> Part:
    """Return the part of a silo that sends none."""
    blank = clinical_counts(torch.zeros(0, n_classes), torch.zeros(0, dtype=torch.int64), n_classes)
    return Part({name: v.float() for name, v in blank.items()}, torch.tensor(0.0))


def clinical_counts(logits: Tensor, labels: Tensor, n_classes: int) -> dict[str, Tensor]:
    """Count one batch: logits (n, C), labels (n,) -> float64 tensors, as in the table above."""
    predicted = logits.argmax(1).cpu()
    p, labels = torch.softmax(logits.detach().cpu().double(), 1), labels.cpu()
    known = torch.isfinite(p).all(1)
    p = torch.where(known.unsqueeze(1), p, 0.0)
    cells = score_bins(p) + SCORE_BINS * torch.arange(n_classes)
    every = _histogram(cells.reshape(-1), n_classes, SCORE_BINS)
    positive = _histogram(cells.gather(1, labels.unsqueeze(1)).squeeze(1), n_classes, SCORE_BINS)
    confidence = p.amax(1)
    place = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    return {
        "confusion": _histogram(labels * n_classes + predicted, n_classes, n_classes),
        "positive": positive,
        "negative": every - positive,
        "examples": torch.bincount(place, minlength=CALIBRATION_BINS).double(),
        "correct": torch.bincount(place[predicted == labels], minlength=CALIBRATION_BINS).double(),
        "confidence": torch.bincount(place, weights=confidence, minlength=CALIBRATION_BINS),
    }


def score_bins(p: Tensor) -> Tensor:
    """Return the bin of each probability's score: p (n, C) float64 in [0, 1] -> (n, C) int64, rising with p."""
    score = torch.log(p) - torch.log1p(-p) + math.log(max(p.shape[1] - 1, 1))
    x, end = torch.asinh(score.clamp(-SCORE_LIMIT, SCORE_LIMIT) / SCORE_UNIT), math.asinh(SCORE_LIMIT / SCORE_UNIT)
    return ((x + end) * (SCORE_BINS / (2 * end))).long().clamp(0, SCORE_BINS - 1)


def _histogram(cells: Tensor, rows: int, columns: int) -> Tensor:
    return torch.bincount(cells, minlength=rows * columns).double().reshape(rows, columns)


def clinical_metrics(part: Part) -> ClinicalMetrics | None:
    """Read the sum of parts; None where no silo sent one."""
    if float(part.weight) <= 0:
        return None
    whole = {name: v.round().long().tolist() for name, v in part.total.items() if name != "confidence"}
    sums = part.total["confidence"].tolist()
    auc = [binned_auc(p, n) for p, n in zip(whole["positive"], whole["negative"], strict=True)]
    bins = zip(whole["examples"], whole["correct"], sums, strict=True)
    return ClinicalMetrics(
        tuple(tuple(row) for row in whole["confusion"]),
        tuple(auc),
        tuple(ReliabilityBin(*b) for b in bins),
    )
