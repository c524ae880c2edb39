"""Summaries of the hospital's own evaluation: exact counts, or an interval if there is noise."""

from __future__ import annotations

import math

from fl_core.types import intervals
from privacy.accounting import measures, uncertainty
from privacy.accounting.measures import ACCURACY, EvaluationResult
from privacy.accounting.uncertainty import NOTHING, Estimate
from silo.storage.tasks import LocalEvaluation


def estimate(measured: LocalEvaluation) -> Estimate:
    return uncertainty.accuracy(measured.correct, measured.examples, measured.noise)


def sentence(measured: LocalEvaluation) -> str:
    share = estimate(measured)
    if share == NOTHING:
        return "trained; no model or no test examples to evaluate"
    if share.exact:
        right, of = sum(measured.correct), sum(measured.examples)
        return f"the received model is right on {right:.0f} of {of:.0f} of this hospital's test images"
    return f"the received model's accuracy on this hospital's test images: {share.text()}"


def overall(measured: LocalEvaluation) -> str:
    share = estimate(measured)
    right, of = sum(measured.correct), sum(measured.examples)
    return f"{right:.0f}/{of:.0f} {share.text()}" if share.exact else share.text()


def classes(measured: LocalEvaluation) -> str:
    texts = []
    numbers = uncertainty.by_class(measured.correct, measured.examples, measured.noise)
    for name, right, of, share in zip(measured.classes, measured.correct, measured.examples, numbers, strict=True):
        if share.point is not None:
            texts.append(f"{name} {right:.0f}/{of:.0f}" if share.exact else f"{name} {share.text()}")
    return ", ".join(texts) or "-"


def facts(measured: LocalEvaluation) -> dict[str, float | bool | None]:
    """Return sums over all classes and their summary as JSON values. noise_std: standard deviation on each sum."""
    sums = {"correct": sum(measured.correct), "examples": sum(measured.examples)}
    return {**sums, "noise_std": _std(measured, len(measured.classes)), **estimate(measured).facts()}


def class_facts(measured: LocalEvaluation) -> dict[str, object]:
    """Return the sums of each class and their summary as JSON values. noise_std: standard deviation on each sum."""
    sums = {"classes": list(measured.classes), "correct": list(measured.correct), "examples": list(measured.examples)}
    clinical = measured.clinical and intervals.facts(measured.clinical)
    return {**sums, "noise_std": _std(measured, 1), **measures.as_json(_result(measured)), "clinical": clinical}


def others(measured: LocalEvaluation) -> str:
    """Describe measurements besides accuracy."""
    values = [(measure, value) for measure, value in measures.measured(_result(measured)) if measure is not ACCURACY]
    return "  ".join(f"{measure.label} {measure.text(value)}" for measure, value in values) or "-"


def _result(measured: LocalEvaluation) -> EvaluationResult:
    several_labels = measured.clinical is not None and measured.clinical.labels != ()
    return EvaluationResult(measured.correct, measured.examples, measured.noise, measured.clinical, several_labels)


def _std(measured: LocalEvaluation, rows: int) -> float:
    return measured.noise.std * math.sqrt(measured.noise.draws * rows) if measured.noise else 0.0
