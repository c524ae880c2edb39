"""What a hospital reads of its own evaluation: counts, or of a noisy one an interval or nothing."""

from __future__ import annotations

import math

from fl_core.types import intervals
from privacy.accounting import measures, uncertainty
from privacy.accounting.measures import ACCURACY, EvaluationResult
from privacy.accounting.uncertainty import NOTHING, Estimate
from silo.storage.tasks import LocalEvaluation


def estimate(found: LocalEvaluation) -> Estimate:
    return uncertainty.accuracy(found.correct, found.examples, found.noise)


def sentence(found: LocalEvaluation) -> str:
    share = estimate(found)
    if share == NOTHING:
        return "trained; no model or no test examples to measure"
    if share.exact:
        right, of = sum(found.correct), sum(found.examples)
        return f"the received model is right on {right:.0f} of {of:.0f} own test examples"
    return f"the received model's accuracy on the own test examples: {share.text()}"


def overall(found: LocalEvaluation) -> str:
    share = estimate(found)
    right, of = sum(found.correct), sum(found.examples)
    return f"{right:.0f}/{of:.0f} {share.text()}" if share.exact else share.text()


def classes(found: LocalEvaluation) -> str:
    texts = []
    numbers = uncertainty.by_class(found.correct, found.examples, found.noise)
    for name, right, of, share in zip(found.classes, found.correct, found.examples, numbers, strict=True):
        if share.point is not None:
            texts.append(f"{name} {right:.0f}/{of:.0f}" if share.exact else f"{name} {share.text()}")
    return ", ".join(texts) or "-"


def facts(found: LocalEvaluation) -> dict[str, float | bool | None]:
    """Write the sums over all classes, and what they say, for machines; noise_std: of the noise on either sum."""
    sums = {"correct": sum(found.correct), "examples": sum(found.examples)}
    return {**sums, "noise_std": _std(found, len(found.classes)), **estimate(found).facts()}


def class_facts(found: LocalEvaluation) -> dict[str, object]:
    """Write the sums of each class, and what all say, for machines; noise_std: of the noise on the sums of a class."""
    sums = {"classes": list(found.classes), "correct": list(found.correct), "examples": list(found.examples)}
    clinical = found.clinical and intervals.facts(found.clinical)
    return {**sums, "noise_std": _std(found, 1), **measures.as_json(_result(found)), "clinical": clinical}


def others(found: LocalEvaluation) -> str:
    """Write what was measured beside accuracy."""
    values = [(measure, value) for measure, value in measures.measured(_result(found)) if measure is not ACCURACY]
    return "  ".join(f"{measure.label} {measure.text(value)}" for measure, value in values) or "-"


def _result(found: LocalEvaluation) -> EvaluationResult:
    several_labels = found.clinical is not None and found.clinical.labels != ()
    return EvaluationResult(found.correct, found.examples, found.noise, found.clinical, several_labels)


def _std(found: LocalEvaluation, rows: int) -> float:
    return found.noise.std * math.sqrt(found.noise.draws * rows) if found.noise else 0.0
