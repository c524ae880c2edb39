"""Metrics that medicine uses, from counts that can be added over hospitals. docs/metrics.md has the definitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

BASIC, CLINICAL = "basic", "clinical"
METRICS_KINDS = (BASIC, CLINICAL)
"""What evaluations of a run send: correct answers per class, or all that is in `ClinicalMetrics` beside them."""
SUGGESTED_CLASSES, MAX_CLASSES = 50, 100
"""Classes up to which a run measures them unasked, and at all: they are C^2 + 256 C numbers in each update."""
SCORE_BINS, SCORE_UNIT, SCORE_LIMIT = 128, 0.03, 16.0
"""Bins of a score s, 0 where a model knows nothing: equal width in asinh(s / 0.03), so 0.003 wide at 0 and 11 % of |s|
far from it, up to |s| = 16; the outer two take what is beyond. ADR 0040 compares them with others."""
CALIBRATION_BINS = 15
"""Bins of equal width of the confidence (Guo et al., ICML 2017)."""


def macro_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean over the classes that have a value, each counted alike; None where none has."""
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


class Range(NamedTuple):
    """What is known of a number that was counted in bins: it lies between `low` and `high`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class ReliabilityBin(NamedTuple):
    """The test examples whose confidence lies in one bin: how many, how many right, the sum of the confidences."""

    examples: int
    correct: int
    confidence: float


@dataclass(frozen=True, slots=True)
class ClinicalMetrics:
    """Counts of one evaluation, and what follows from them. A number that a class does not have is None.

    confusion: (C, C) test examples by class and prediction   auc: one class against the rest, by class; the true area
    (ties count half) lies in the range   bins: of confidence, CALIBRATION_BINS from 0 to 1.
    """

    confusion: tuple[tuple[int, ...], ...]
    auc: tuple[Range | None, ...]
    bins: tuple[ReliabilityBin, ...]

    @property
    def per_class(self) -> list[int]:
        """Test examples by class."""
        return [sum(row) for row in self.confusion]

    @property
    def examples(self) -> int:
        return sum(self.per_class)

    @property
    def classes_present(self) -> int:
        """Classes with a test example: those that the macro means are taken over."""
        return sum(n > 0 for n in self.per_class)

    @property
    def sensitivity(self) -> list[float | None]:
        """Return TP / (TP + FN) by class: the share of its examples that are recognised."""
        return [row[c] / sum(row) if sum(row) else None for c, row in enumerate(self.confusion)]

    @property
    def specificity(self) -> list[float | None]:
        """Return TN / (TN + FP) by class: the share of all other examples that are not taken for it."""
        total, found = self.examples, list[float | None]()
        for c, row in enumerate(self.confusion):
            others, false_positives = total - sum(row), sum(r[c] for r in self.confusion) - row[c]
            found.append((others - false_positives) / others if others else None)
        return found

    @property
    def balanced_accuracy(self) -> float | None:
        return macro_mean(self.sensitivity)

    @property
    def macro_auc(self) -> Range | None:
        """Return the mean AUC over the classes that have examples, and others beside them; exact up to the range."""
        known = [r for r in self.auc if r is not None]
        if not known:
            return None
        return Range(sum(r.low for r in known) / len(known), sum(r.high for r in known) / len(known))

    @property
    def calibration_error(self) -> float | None:
        """Return ECE: the mean of |share right - confidence| over the bins, weighed by their examples."""
        n = sum(b.examples for b in self.bins)
        return sum(abs(b.correct - b.confidence) for b in self.bins) / n if n else None

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> ClinicalMetrics:
        """Read what `dataclasses.asdict` made of one, by way of JSON."""
        return cls(
            tuple(tuple(row) for row in raw["confusion"]),
            tuple(r and Range(*r) for r in raw["auc"]),
            tuple(ReliabilityBin(*b) for b in raw["bins"]),
        )

    def facts(self) -> dict[str, object]:
        """Write it for machines, lists in the order of the run's classes; None for what there is not."""
        auc = self.macro_auc
        return {
            "examples": self.examples,
            "classes_present": self.classes_present,
            "balanced_accuracy": self.balanced_accuracy,
            "sensitivity": self.sensitivity,
            "specificity": self.specificity,
            "macro_auc": auc and auc.middle,
            "macro_auc_range": auc and list(auc),
            "auc": [r and r.middle for r in self.auc],
            "auc_range": [r and list(r) for r in self.auc],
            "calibration_error": self.calibration_error,
            "confusion": [list(row) for row in self.confusion],
            "reliability": [
                {
                    "from": k / len(self.bins),
                    "to": (k + 1) / len(self.bins),
                    "examples": b.examples,
                    "correct": b.correct,
                    "confidence_sum": b.confidence,
                }
                for k, b in enumerate(self.bins)
            ],
        }


def binned_auc(positive: Sequence[int], negative: Sequence[int]) -> Range | None:
    """Return what binned scores, bins in ascending order, leave of P(score of a positive > of a negative), ties half.

    Pairs in one bin may be in either order. None without a positive or without a negative.
    """
    pairs = sum(positive) * sum(negative)
    if not pairs:
        return None
    below = won = tied = 0
    for p, n in zip(positive, negative, strict=True):
        won += p * below
        tied += p * n
        below += n
    return Range(won / pairs, (won + tied) / pairs)
