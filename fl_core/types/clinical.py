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
    present = [v for v in values if v is not None]
    return math.fsum(present) / len(present) if present else None


Counts = tuple[Sequence[float], Sequence[float]]
"""Right answers, and of how many, in rows of which each counts alike."""


def balanced_counts(
    correct: Sequence[float], examples: Sequence[float], clinical: ClinicalMetrics | None, several_labels: bool
) -> Counts:
    """Return the counts whose shares' mean is an evaluation's balanced accuracy.

    Those by class. Of several labels at once a model that never finds any has most answers right: then those of the
    clinical metrics, and none without them.
    """
    if not several_labels:
        return correct, examples
    return ((), ()) if clinical is None else clinical.balanced_counts


class BinnedRange(NamedTuple):
    """What is known of a number that was counted in bins: it lies between `low` and `high`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class TwoByTwo(NamedTuple):
    """Answers about one class or label: tn: not there and not said, fp: said, fn: there and not said, tp: said."""

    tn: int
    fp: int
    fn: int
    tp: int

    @property
    def there(self) -> int:
        return self.fn + self.tp

    @property
    def absent(self) -> int:
        return self.tn + self.fp


class ReliabilityBin(NamedTuple):
    """The test examples whose confidence lies in one bin: how many, how many right, the sum of the confidences."""

    examples: int
    correct: int
    confidence: float


@dataclass(frozen=True, slots=True)
class ClinicalMetrics:
    """Counts of one evaluation, and what follows from them. A number that a class does not have is None.

    confusion: (C, C) test examples by class and prediction; empty with several labels at once   auc: one class against
    the rest, by class, or where a label was found against where it was not; the true area (ties count half) lies in the
    range   bins: of confidence, CALIBRATION_BINS from 0 to 1   labels: of several at once, the test examples in which
    each was looked for.
    """

    confusion: tuple[tuple[int, ...], ...]
    auc: tuple[BinnedRange | None, ...]
    bins: tuple[ReliabilityBin, ...]
    labels: tuple[TwoByTwo, ...] = ()

    @property
    def tables(self) -> tuple[TwoByTwo, ...]:
        """Answers by label, or by class against the rest."""
        if self.labels:
            return self.labels
        total, tables = sum(map(sum, self.confusion)), list[TwoByTwo]()
        for c, row in enumerate(self.confusion):
            fp, fn = sum(r[c] for r in self.confusion) - row[c], sum(row) - row[c]
            tables.append(TwoByTwo(total - sum(row) - fp, fp, fn, row[c]))
        return tuple(tables)

    @property
    def per_class(self) -> list[int]:
        """Test examples by class, or in which each label was found."""
        return [table.there for table in self.tables]

    @property
    def examples(self) -> int:
        """Test examples; of several labels at once the answers about all of them that were looked for."""
        return sum(map(sum, self.labels)) if self.labels else sum(self.per_class)

    @property
    def classes_present(self) -> int:
        """Classes with a test example, labels found in some and not in others: what the macro means are taken over."""
        return sum(bool(t.there and (t.absent or not self.labels)) for t in self.tables)

    @property
    def alternatives(self) -> int:
        """Among how many answers one is given."""
        return 2 if self.labels else len(self.confusion)

    @property
    def sensitivity(self) -> list[float | None]:
        """Return TP / (TP + FN) by class: the share of its examples that are recognised."""
        return [t.tp / t.there if t.there else None for t in self.tables]

    @property
    def specificity(self) -> list[float | None]:
        """Return TN / (TN + FP) by class: the share of all other examples that are not taken for it."""
        return [t.tn / t.absent if t.absent else None for t in self.tables]

    @property
    def balanced_counts(self) -> Counts:
        """Return right answers, and of how many: balanced accuracy is the mean of their shares.

        A share for each class; of several labels two for each that was found in some and not in others.
        """
        if not self.labels:
            return tuple(t.tp for t in self.tables), tuple(self.per_class)
        both = [t for t in self.labels if t.there and t.absent]
        return tuple(n for t in both for n in (t.tp, t.tn)), tuple(n for t in both for n in (t.there, t.absent))

    @property
    def balanced_accuracy(self) -> float | None:
        """Return the mean of the sensitivities; of several labels that of sensitivities and specificities."""
        return macro_mean(right / of if of else None for right, of in zip(*self.balanced_counts, strict=True))

    @property
    def macro_auc(self) -> BinnedRange | None:
        """Return the mean AUC over the classes that have examples, and others beside them; exact up to the range."""
        present = [r for r in self.auc if r is not None]
        if not present:
            return None
        return BinnedRange(sum(r.low for r in present) / len(present), sum(r.high for r in present) / len(present))

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
            tuple(r and BinnedRange(*r) for r in raw["auc"]),
            tuple(ReliabilityBin(*b) for b in raw["bins"]),
            tuple(TwoByTwo(*t) for t in raw.get("labels", ())),
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
    return BinnedRange(won / pairs, (won + tied) / pairs)
