"""Accuracies as messages carry them: sums with their noise, and what that leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from privacy.reports import uncertainty
from privacy.reports.uncertainty import NOTHING, Estimate, EvaluationNoise, Sums
from protos.consilium.v1 import federation_pb2 as pb


def describe(info: pb.RunInfo, rounds: Sequence[Sums]) -> None:
    """Write the newest and the best accuracy of a run whose evaluation is noisy into its message."""
    newest = uncertainty.accuracy(*rounds[-1]) if rounds else NOTHING
    best = uncertainty.best(rounds)
    info.accuracy, info.best_accuracy = (-1.0 if e.point is None else e.point for e in (newest, best))
    for estimate, place in ((newest, info.accuracy_estimate), (best, info.best_estimate)):
        if estimate != NOTHING:
            place.CopyFrom(_message(estimate))


def of_run(info: pb.RunInfo) -> Estimate:
    """Read a run's newest accuracy."""
    return _read(info.accuracy_estimate) if info.HasField("accuracy_estimate") else plain(info.accuracy)


def best_of_run(info: pb.RunInfo) -> Estimate:
    """Read a run's best accuracy."""
    return _read(info.best_estimate) if info.HasField("best_estimate") else plain(info.best_accuracy)


def noise_of(info: pb.RoundInfo) -> EvaluationNoise | None:
    """Read the noise on a round's sums; None where they are counts."""
    found = info.noise
    return EvaluationNoise(found.std, found.draws, found.suppressed) if info.HasField("noise") else None


def of_round(info: pb.RoundInfo) -> Estimate:
    """Estimate a round's accuracy, of the model before its training."""
    return uncertainty.accuracy(info.correct, info.examples, noise_of(info))


def classes_of_round(info: pb.RoundInfo) -> list[Estimate]:
    """Estimate a round's accuracy of each class."""
    return uncertainty.by_class(info.correct, info.examples, noise_of(info))


def sums_json(correct: Sequence[float], examples: Sequence[float], noise: EvaluationNoise | None) -> dict[str, object]:
    """Write sums as they were released, per class, with the standard deviation of their noise; null: no number."""
    std = noise.std * math.sqrt(noise.draws) if noise else 0.0
    return {
        "correct": [_number(v) for v in correct],
        "examples": [_number(v) for v in examples],
        "noise_std": _number(std),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def plain(accuracy: float) -> Estimate:
    """Read a number that came without an interval; -1 is none yet, and another outside of [0, 1] no accuracy."""
    if accuracy == -1:
        return NOTHING
    return uncertainty.accuracy([accuracy], [1.0], None)


def _message(estimate: Estimate) -> pb.Estimate:
    return pb.Estimate(
        point=estimate.point or 0.0, low=estimate.low or 0.0, high=estimate.high or 0.0, withheld=estimate.withheld
    )


def _read(found: pb.Estimate) -> Estimate:
    if found.withheld:
        return Estimate(withheld=found.withheld)
    if not 0 <= found.low <= found.point <= found.high <= 1:
        return Estimate(withheld=uncertainty.IMPOSSIBLE)
    return Estimate(found.point, found.low, found.high)
