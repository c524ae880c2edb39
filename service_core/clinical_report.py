"""Clinical metrics in words and tables, as both services and the model card print them."""

from __future__ import annotations

from collections.abc import Sequence

from fl_core.types.clinical import ClinicalMetrics, Range

CLASS_HEAD = ("class", "test examples", "sensitivity", "specificity", "AUC")
NOT_MEASURED = (
    "specificity, AUC, confusion matrix and calibration are not measured with the noise of a private run; sensitivity "
    "is the accuracy of the class (docs/metrics.md)"
)
NOT_SENT = (
    "specificity, AUC, confusion matrix and calibration were sent by no hospital: a hospital's policy sends correct "
    'answers alone, unless its policy.toml says send = "clinical" under [evaluation] (docs/metrics.md)'
)
_PRECISE = 1e-3
"""An AUC whose range is wider is shown with it."""


def sentence(found: ClinicalMetrics, tested: float = 0.0) -> str:
    """Say what holds over all classes; tested: the examples that accuracy was measured on, if these may be fewer."""
    text = (
        f"over {found.classes_present} of {len(found.confusion)} classes that have test examples: balanced accuracy "
        f"{_percent(found.balanced_accuracy)}, macro AUC {auc(found.macro_auc)}; expected calibration error "
        f"{_percent(found.calibration_error)}"
    )
    missing = round(tested) - found.examples
    return f"{text}; without {missing} test examples whose hospitals send accuracies alone" if missing > 0 else text


def short(found: ClinicalMetrics) -> str:
    return f"balanced {_percent(found.balanced_accuracy)}  AUC {auc(found.macro_auc)}"


def class_rows(found: ClinicalMetrics, classes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row per class under `CLASS_HEAD`."""
    columns = zip(classes, found.per_class, found.sensitivity, found.specificity, found.auc, strict=True)
    return [(name, str(n), _percent(sens), _percent(spec), auc(area)) for name, n, sens, spec, area in columns]


def confusion_rows(found: ClinicalMetrics, classes: Sequence[str]) -> list[tuple[str, ...]]:
    return [(name, *map(str, row)) for name, row in zip(classes, found.confusion, strict=True)]


def reliability_rows(found: ClinicalMetrics) -> list[tuple[str, ...]]:
    """Return (confidence, examples, mean confidence, share right) of the bins that have examples."""
    width = 1 / len(found.bins)
    return [
        (
            f"{100 * k * width:.0f} to {100 * (k + 1) * width:.0f} %",
            str(b.examples),
            _percent(b.confidence / b.examples),
            _percent(b.correct / b.examples),
        )
        for k, b in enumerate(found.bins)
        if b.examples
    ]


def auc(found: Range | None) -> str:
    if found is None:
        return "-"
    wide = f" ({found.low:.3f} to {found.high:.3f})" if found.high - found.low > _PRECISE else ""
    return f"{found.middle:.3f}{wide}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
