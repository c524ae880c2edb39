"""Clinical metrics in words and tables, for both services and the model card."""

from __future__ import annotations

from collections.abc import Sequence

from fl_core.types import intervals
from fl_core.types.clinical import BinnedRange, ClinicalMetrics
from fl_core.types.intervals import Interval

FEW = 10
"""With fewer test examples a number has almost no meaning: its interval is at least a third of the whole range."""
NOT_MEASURED = (
    "specificity, AUC, confusion matrix and calibration are not measured with the noise of a private run; sensitivity "
    "is the accuracy of the class (docs/metrics.md)"
)
NOT_SENT = (
    "no hospital sent specificity, AUC, confusion matrix or calibration: by default only correct answers are sent; "
    'send = "clinical" under [evaluation] in its policy.toml sends more (docs/metrics.md)'
)
_TWO_BY_TWO = ("absent", "absent, but predicted", "present, but not predicted", "present and predicted")
_BOTH = "were found in some test examples and not in others"
_MISLEADING = 0.1
"""Expected calibration error from which probabilities must be corrected before use."""


def sentence(metrics: ClinicalMetrics, tested: float = 0.0) -> str:
    """Describe the results over all classes. tested: number of test examples that accuracy was measured on.

    If `metrics` cover fewer examples, balanced accuracy is left out: that of all test examples is shown elsewhere.
    """
    what, have = ("classes", "have test examples") if not metrics.labels else ("labels", _BOTH)
    missing, over = round(tested) - metrics.examples, f"{metrics.classes_present} of {len(metrics.tables)} {what}"
    text = f"over {over} that {have}: "
    if missing <= 0:
        text += f"balanced accuracy {balanced_accuracy(metrics)}, "
    text += f"macro AUC {macro_auc(metrics)}; {calibration(metrics)}"
    left_out = "test examples" if not metrics.labels else "answers about labels"
    return f"{text}; without {missing} {left_out} whose hospitals send only accuracies" if missing > 0 else text


def balanced_accuracy(metrics: ClinicalMetrics) -> str:
    text = with_interval(metrics.balanced_accuracy, intervals.mean_of_shares(*metrics.balanced_counts))
    guessing = 1 / 2 if metrics.labels else 1 / max(metrics.classes_present, 1)
    return f"{text} (guessing: {percent(guessing)})" if metrics.classes_present else text


def calibration(metrics: ClinicalMetrics) -> str:
    """Describe the expected calibration error, and the meaning of a large one."""
    error, n = metrics.calibration_error, sum(b.examples for b in metrics.bins)
    text = f"expected calibration error {percent(error)}"
    if error is None or error < _MISLEADING:
        return text
    right, sure = (
        100 * sum(values) / n for values in zip(*((b.correct, b.confidence) for b in metrics.bins), strict=True)
    )
    return (
        f"{text}: {right:.0f} % of predictions are correct, but mean confidence is {sure:.0f} %: do not take the "
        "probabilities at face value"
    )


def class_head(metrics: ClinicalMetrics) -> tuple[str, ...]:
    what, n = ("class", "test examples") if not metrics.labels else ("label", "found, of those asked")
    return (what, n, "sensitivity (95 %)", "specificity (95 %)", "AUC (95 %)")


def class_rows(metrics: ClinicalMetrics, classes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row per class under `class_head`, with intervals for the sampling of test images."""
    rows = zip(
        classes,
        (f"{t.present} of {sum(t)}" if metrics.labels else str(t.present) for t in metrics.tables),
        zip(metrics.sensitivity, intervals.by_class(metrics), strict=True),
        zip(metrics.specificity, intervals.specificities(metrics), strict=True),
        zip(metrics.auc, intervals.areas(metrics), strict=True),
        strict=True,
    )
    return [(name, n, with_interval(*sens), with_interval(*spec), auc(*area)) for name, n, sens, spec, area in rows]


def confusion_head(metrics: ClinicalMetrics, classes: Sequence[str]) -> tuple[str, ...]:
    return ("label", *_TWO_BY_TWO) if metrics.labels else ("class, taken for", *classes)


def confusion_rows(metrics: ClinicalMetrics, classes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row per class under `confusion_head`."""
    return [(name, *map(str, row)) for name, row in zip(classes, metrics.labels or metrics.confusion, strict=True)]


def reliability_rows(metrics: ClinicalMetrics) -> list[tuple[str, ...]]:
    """Return (confidence, examples, mean confidence, share of correct answers) for each bin with examples."""
    width = 1 / len(metrics.bins)
    return [
        (
            f"{100 * k * width:.0f} to {100 * (k + 1) * width:.0f} %",
            str(b.examples),
            percent(b.confidence / b.examples),
            percent(b.correct / b.examples),
        )
        for k, b in enumerate(metrics.bins)
        if b.examples
    ]


def auc(metrics: BinnedRange | None, interval: Interval | None = None) -> str:
    if metrics is None:
        return "-"
    return f"{metrics.middle:.3f}" + (f" ({interval.low:.3f} to {interval.high:.3f})" if interval is not None else "")


def macro_auc(metrics: ClinicalMetrics) -> str:
    return auc(metrics.macro_auc, intervals.macro_auc(metrics))


def with_interval(share: float | None, interval: Interval | None) -> str:
    if share is None or interval is None:
        return percent(share)
    return f"{percent(share)} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
