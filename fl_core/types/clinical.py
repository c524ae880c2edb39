"""Clinical metrics from counts that can be added over hospitals. docs/metrics.md has the definitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

BASIC, CLINICAL = "basic", "clinical"
METRICS_KINDS = (BASIC, CLINICAL)
"""What evaluations of a run send: correct answers per class, or also everything in `ClinicalMetrics`."""
SUGGESTED_CLASSES, MAX_CLASSES = 50, 100
"""Most classes for which a run measures clinical metrics by default, and at all: an update has C^2 + 256 C numbers."""
SCORE_BINS, SCORE_UNIT, SCORE_LIMIT = 128, 0.03, 16.0
"""Bins of a score s, which is 0 for a model without knowledge: equal width in asinh(s / 0.03), so 0.003 wide at 0 and
11 % of |s| far from it, up to |s| = 16; the outer two contain the rest. ADR 0040 compares them with others."""
CALIBRATION_BINS = 15
"""Bins of equal width of the confidence (Guo et al., ICML 2017)."""


def macro_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean over the classes that have a value, with equal weights; None if none has."""
    present = [v for v in values if v is not None]
    return math.fsum(present) / len(present) if present else None


Counts = tuple[Sequence[float], Sequence[float]]
"""Correct answers, and all answers, in rows of equal weight."""


def balanced_counts(
    correct: Sequence[float], examples: Sequence[float], clinical: ClinicalMetrics | None, several_labels: bool
) -> Counts:
    """Return the counts whose mean share is an evaluation's balanced accuracy.

    They are by class. With several labels at once, a model that never finds any label is mostly right. So the counts of
    the clinical metrics are used then; without clinical metrics, there are none.
    """
    if not several_labels:
        return correct, examples
    return ((), ()) if clinical is None else clinical.balanced_counts


class BinnedRange(NamedTuple):
    """The range of a number computed from bins: it lies between `low` and `high`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class TwoByTwo(NamedTuple):
    """A 2 x 2 table of one class or label.

    tn: absent, not predicted   fp: absent, predicted   fn: present, not predicted   tp: present, predicted
    """

    tn: int
    fp: int
    fn: int
    tp: int

    @property
    def present(self) -> int:
        return self.fn + self.tp

    @property
    def absent(self) -> int:
        return self.tn + self.fp


class ReliabilityBin(NamedTuple):
    """The test examples with a confidence in one bin: their number, the correct ones, the sum of confidences."""

    examples: int
    correct: int
    confidence: float


@dataclass(frozen=True, slots=True)
class ClinicalMetrics:
    """Counts of one evaluation, and derived metrics. A number that is undefined for a class is None.

    confusion: (C, C) test examples by class and prediction; empty with several labels at once   auc: by class, one
    class against the rest, or by label, present against absent; the true area (ties count half) lies in the range
    bins: of confidence, CALIBRATION_BINS from 0 to 1   labels: with several labels at once, the table of each label,
    over the test examples in which it is known.
    """

    confusion: tuple[tuple[int, ...], ...]
    auc: tuple[BinnedRange | None, ...]
    bins: tuple[ReliabilityBin, ...]
    labels: tuple[TwoByTwo, ...] = ()

    @property
    def tables(self) -> tuple[TwoByTwo, ...]:
        """2 x 2 tables by label, or by class against the rest."""
        if self.labels:
            return self.labels
        total, tables = sum(map(sum, self.confusion)), list[TwoByTwo]()
        for c, row in enumerate(self.confusion):
            fp, fn = sum(r[c] for r in self.confusion) - row[c], sum(row) - row[c]
            tables.append(TwoByTwo(total - sum(row) - fp, fp, fn, row[c]))
        return tuple(tables)

    @property
    def per_class(self) -> list[int]:
        """Test examples by class, or with each label."""
        return [table.present for table in self.tables]

    @property
    def examples(self) -> int:
        """Number of test examples; with several labels at once, of answers about known labels."""
        return sum(map(sum, self.labels)) if self.labels else sum(self.per_class)

    @property
    def classes_present(self) -> int:
        """Number of classes with a test example, or of labels both present and absent: the basis of the macro means."""
        return sum(bool(t.present and (t.absent or not self.labels)) for t in self.tables)

    @property
    def alternatives(self) -> int:
        """The number of possible answers."""
        return 2 if self.labels else len(self.confusion)

    @property
    def sensitivity(self) -> list[float | None]:
        """Return TP / (TP + FN) by class: the share of its examples that are recognised."""
        return [t.tp / t.present if t.present else None for t in self.tables]

    @property
    def specificity(self) -> list[float | None]:
        """Return TN / (TN + FP) by class: the share of all other examples that are not assigned to it."""
        return [t.tn / t.absent if t.absent else None for t in self.tables]

    @property
    def balanced_counts(self) -> Counts:
        """Return correct answers and all answers; balanced accuracy is the mean of their ratios.

        There is one entry for each class. With several labels there are two for each label that is present in some
        examples and absent in others.
        """
        if not self.labels:
            return tuple(t.tp for t in self.tables), tuple(self.per_class)
        both = [t for t in self.labels if t.present and t.absent]
        return tuple(n for t in both for n in (t.tp, t.tn)), tuple(n for t in both for n in (t.present, t.absent))

    @property
    def balanced_accuracy(self) -> float | None:
        """Return the mean of the sensitivities; with several labels that of sensitivities and specificities."""
        return macro_mean(right / of if of else None for right, of in zip(*self.balanced_counts, strict=True))

    @property
    def macro_auc(self) -> BinnedRange | None:
        """Return the range of the mean AUC, over classes with examples and with other examples."""
        present = [r for r in self.auc if r is not None]
        if not present:
            return None
        return BinnedRange(sum(r.low for r in present) / len(present), sum(r.high for r in present) / len(present))

    @property
    def calibration_error(self) -> float | None:
        """Return ECE: the mean of |share correct - confidence| over the bins, weighted by their examples."""
        n = sum(b.examples for b in self.bins)
        return sum(abs(b.correct - b.confidence) for b in self.bins) / n if n else None

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> ClinicalMetrics:
        """Read the output of `dataclasses.asdict`, through JSON."""
        return cls(
            tuple(tuple(row) for row in raw["confusion"]),
            tuple(r and BinnedRange(*r) for r in raw["auc"]),
            tuple(ReliabilityBin(*b) for b in raw["bins"]),
            tuple(TwoByTwo(*t) for t in raw.get("labels", ())),
        )

    def facts(self) -> dict[str, object]:
        """Return it as JSON values, lists in the order of the run's classes; None for missing numbers."""
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
            "confusion": [list(row) for row in self.confusion] or None,
            "labels": [table._asdict() for table in self.labels] or None,
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


def binned_auc(positive: Sequence[int], negative: Sequence[int]) -> BinnedRange | None:
    """Return the range of P(score of a positive > score of a negative), ties half, from counts in ascending bins.

    Pairs in one bin may be in either order. None if there are no positives or no negatives.
    """
    pairs = sum(positive) * sum(negative)
    if not pairs:
        return None
    below = won = tied = 0
    for p, n in zip(positive, negative, strict=True):
        won += p * below
        tied += p * n
        below += n
    return BinnedRange(won / pairs, (won + tied) / pairs)
