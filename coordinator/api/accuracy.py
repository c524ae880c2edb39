"""Accuracies in messages to a lead, with the intervals of their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from privacy.reports import uncertainty
from privacy.reports.uncertainty import NOTHING, Estimate, EvaluationNoise, Sums
from protos.consilium.v1 import federation_pb2 as pb


def set_estimates(info: pb.RunInfo, rounds: Sequence[Sums]) -> None:
    """Set the newest and the best accuracy of a run whose evaluation is noisy."""
    estimates = uncertainty.accuracy(*rounds[-1]) if rounds else NOTHING, uncertainty.best(rounds)
    info.accuracy, info.best_accuracy = (-1.0 if e.point is None else e.point for e in estimates)
    for estimate, target in zip(estimates, (info.accuracy_estimate, info.best_estimate), strict=True):
        if estimate != NOTHING:
            target.point, target.low, target.high = (v or 0.0 for v in (estimate.point, estimate.low, estimate.high))
            target.withheld = estimate.withheld


def newest(info: pb.RunInfo) -> Estimate:
    return _read(info.accuracy_estimate) if info.HasField("accuracy_estimate") else plain(info.accuracy)


def best(info: pb.RunInfo) -> Estimate:
    return _read(info.best_estimate) if info.HasField("best_estimate") else plain(info.best_accuracy)


def noise_of(info: pb.RoundInfo) -> EvaluationNoise | None:
    """Return the noise on a round's sums; None where they are counts."""
    noise = info.noise
    return EvaluationNoise(noise.std, noise.draws, noise.suppressed) if info.HasField("noise") else None


def of_round(info: pb.RoundInfo) -> Estimate:
    """Estimate the accuracy of the model before the round's training."""
    return uncertainty.accuracy(info.correct, info.examples, noise_of(info))


def by_class(info: pb.RoundInfo) -> list[Estimate]:
    return uncertainty.by_class(info.correct, info.examples, noise_of(info))


def sums_json(correct: Sequence[float], examples: Sequence[float], noise: EvaluationNoise | None) -> dict[str, object]:
    """Return the sums as they were released, per class, with the standard deviation of their noise; null: no number."""
    std = noise.std * math.sqrt(noise.draws) if noise else 0.0
    counts = {"correct": [_number(v) for v in correct], "examples": [_number(v) for v in examples]}
    return {**counts, "noise_std": _number(std)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def plain(accuracy: float) -> Estimate:
    """Estimate from a number without an interval: -1 is none yet, any other outside [0, 1] is withheld."""
    return NOTHING if accuracy == -1 else uncertainty.accuracy([accuracy], [1.0], None)


def _read(message: pb.Estimate) -> Estimate:
    if message.withheld:
        return Estimate(withheld=message.withheld)
    if not 0 <= message.low <= message.point <= message.high <= 1:
        return Estimate(withheld=uncertainty.IMPOSSIBLE)
    return Estimate(message.point, message.low, message.high)
