"""Measurements in messages to a lead: accuracies with the intervals of their noise, and clinical metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from fl_core.errors import ProtocolError
from fl_core.training import clinical_report
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.clinical import (
    CALIBRATION_BINS,
    CLINICAL,
    BinnedRange,
    ClinicalMetrics,
    ReliabilityBin,
    TwoByTwo,
)
from fl_core.types.records import HospitalResult, OwnModels
from privacy.accounting import uncertainty
from privacy.accounting.measures import EvaluationResult, plain
from privacy.accounting.uncertainty import NOTHING, Estimate, EvaluationNoise, Sums
from protos.consilium.v1 import federation_pb2 as pb


def set_estimates(info: pb.RunInfo, rounds: Sequence[Sums]) -> None:
    """Set the newest and the best accuracy of a run whose evaluation is noisy."""
    estimates = uncertainty.accuracy(*rounds[-1]) if rounds else NOTHING, best_of(rounds)
    info.accuracy, info.best_accuracy = (-1.0 if e.point is None else e.point for e in estimates)
    for estimate, target in zip(estimates, (info.accuracy_estimate, info.best_estimate), strict=True):
        _write(estimate, target)


def best_of(rounds: Sequence[Sums]) -> Estimate:
    """Estimate the best accuracy of a run's models, without the model before round 1. rounds: all of them."""
    return uncertainty.best(rounds[1:] or rounds)


def set_balanced(info: pb.RunInfo, newest: Sums, several_labels: bool = False) -> None:
    """Set the balanced accuracy of a run's newest evaluation, and the number of answers that guessing chooses from.

    newest: as `EvaluationResult.balanced_sums`.
    """
    right, of, noise = newest
    present = sum(n > 0 for n in of) if noise is None else len(of)
    info.guessed_among = min(present, 2) if several_labels else present
    _write(uncertainty.balanced(right, of, noise), info.balanced_accuracy)


def _write(estimate: Estimate, target: pb.Estimate) -> None:
    if estimate != NOTHING:
        target.point, target.low, target.high = (v or 0.0 for v in (estimate.point, estimate.low, estimate.high))
        target.withheld = estimate.withheld


def newest(info: pb.RunInfo) -> Estimate:
    return _read(info.accuracy_estimate) if info.HasField("accuracy_estimate") else plain(info.accuracy)


def best(info: pb.RunInfo) -> Estimate:
    return _read(info.best_estimate) if info.HasField("best_estimate") else plain(info.best_accuracy)


def newest_balanced(info: pb.RunInfo) -> Estimate:
    return _read(info.balanced_accuracy) if info.HasField("balanced_accuracy") else NOTHING


def coverage(info: pb.RunInfo) -> ClassCoverage:
    """Return the classes that a run trains and tests, as far as known."""
    return ClassCoverage.of({name: getattr(info.coverage, name) for name in info.coverage.DESCRIPTOR.fields_by_name})


def balanced_text(info: pb.RunInfo) -> str:
    """Describe the newest balanced accuracy of a run, with its classes."""
    value = newest_balanced(info)
    return f"{value.text()}{'' if value.point is None else coverage(info).over()}"


def chance(info: pb.RunInfo) -> float | None:
    """Return the balanced accuracy of guessing; None if nothing was tested."""
    return 1 / info.guessed_among if info.guessed_among else None


def noise_of(info: pb.RoundInfo) -> EvaluationNoise | None:
    """Return the noise on a round's sums; None if they are counts."""
    noise = info.noise
    return EvaluationNoise(noise.std, noise.draws, noise.suppressed) if info.HasField("noise") else None


def result_of(info: pb.RoundInfo) -> EvaluationResult:
    """Read a round's measurement of the model before its training; raises as `clinical_of`."""
    return EvaluationResult(
        tuple(info.correct),
        tuple(info.examples),
        noise_of(info),
        clinical_of(info),
        info.several_labels,
        dict(info.personal),
        tuple(info.withheld),
    )


def clinical_message(clinical: ClinicalMetrics) -> pb.ClinicalMetrics:
    nothing = BinnedRange(math.nan, math.nan)
    return pb.ClinicalMetrics(
        confusion=[n for row in clinical.confusion for n in row],
        auc_low=[(r or nothing).low for r in clinical.auc],
        auc_high=[(r or nothing).high for r in clinical.auc],
        bin_examples=[b.examples for b in clinical.bins],
        bin_correct=[b.correct for b in clinical.bins],
        bin_confidence=[b.confidence for b in clinical.bins],
        labels=[n for table in clinical.labels for n in table],
    )


def clinical_of(info: pb.RoundInfo) -> ClinicalMetrics | None:
    """Read a round's clinical metrics, None without any; raises ProtocolError (E-WIRE-06) on impossible values."""
    return _clinical(info, info.several_labels)


def _clinical(info: pb.RoundInfo | pb.HospitalResult, several_labels: bool) -> ClinicalMetrics | None:
    if not info.HasField("clinical"):
        return None
    clinical, c = info.clinical, len(info.correct)
    areas = zip(clinical.auc_low, clinical.auc_high, strict=False)
    auc = [None if math.isnan(low) else BinnedRange(low, high) for low, high in areas]
    bins = tuple(map(ReliabilityBin, clinical.bin_examples, clinical.bin_correct, clinical.bin_confidence))
    sound = (
        (len(clinical.confusion), len(clinical.labels)) == ((0, 4 * c) if several_labels else (c * c, 0))
        and len(clinical.auc_low) == len(clinical.auc_high) == c
        and len(clinical.bin_examples) == len(clinical.bin_correct) == len(clinical.bin_confidence) == CALIBRATION_BINS
        and all(r is None or 0 <= r.low <= r.high <= 1 for r in auc)
        and all(b.correct <= b.examples and 0 <= b.confidence <= b.examples * (1 + 1e-6) for b in bins)
    )
    if not sound:
        raise ProtocolError(
            "E-WIRE-06",
            f"expected clinical metrics of {c} classes, found numbers that no evaluation can give: both sides must "
            "run the same version",
        )
    confusion = tuple(tuple(clinical.confusion[k : k + c]) for k in range(0, len(clinical.confusion), c))
    labels = tuple(TwoByTwo(*clinical.labels[k : k + 4]) for k in range(0, len(clinical.labels), 4))
    return ClinicalMetrics(confusion, tuple(auc), bins, labels)


def own_message(models: OwnModels) -> pb.OwnModels:
    return pb.OwnModels(**asdict(models))


def own_of(info: pb.RoundInfo | pb.HospitalResult) -> OwnModels | None:
    """Read the results of hospitals' local models; raises ProtocolError (E-WIRE-06) on impossible values."""
    if not info.HasField("own"):
        return None
    counts = info.own
    local, measured, examples = (tuple(v) for v in (counts.own, counts.measured, counts.examples))
    sound = len(local) == len(measured) == len(examples) == len(info.correct) and all(
        0 <= right <= of < math.inf for rights in (local, measured) for right, of in zip(rights, examples, strict=True)
    )
    areas = abs(counts.difference) <= counts.images < math.inf and 0 <= counts.square <= counts.images**2
    if not (sound and areas):
        raise ProtocolError(
            "E-WIRE-06",
            f"expected two models' counts of {len(info.correct)} classes, found numbers that no evaluation can give: "
            "both sides must run the same version",
        )
    return OwnModels(local, measured, examples, counts.images, counts.difference, counts.square)


def result_messages(results: Mapping[str, HospitalResult]) -> list[pb.HospitalResult]:
    return [
        pb.HospitalResult(
            silo=name,
            correct=result.correct,
            examples=result.examples,
            clinical=None if result.clinical is None else clinical_message(result.clinical),
            own=None if result.own is None else own_message(result.own),
        )
        for name, result in sorted(results.items())
    ]


def results_of(info: pb.RoundInfo) -> dict[str, HospitalResult]:
    """Read the results that hospitals show under their names; raises ProtocolError (E-WIRE-06) on impossible values."""
    results = {}
    for result in info.by_hospital:
        counts = list(zip(result.correct, result.examples, strict=False))
        width = len(result.correct) == len(result.examples) == len(info.correct)
        if not width or not all(0 <= right <= of < math.inf for right, of in counts):
            raise ProtocolError(
                "E-WIRE-06",
                f"expected counts of {len(info.correct)} classes of {result.silo[:60]!r}, found numbers that no "
                "evaluation can give: both sides must run the same version",
            )
        results[result.silo] = HospitalResult(
            tuple(result.correct), tuple(result.examples), _clinical(result, info.several_labels), own_of(result)
        )
    return results


def no_clinical(info: pb.RoundInfo, metrics: str) -> str:
    """Explain why a round has only accuracies; empty if its run asks for no more."""
    if info.HasField("noise"):
        return clinical_report.NOT_MEASURED
    return clinical_report.NOT_SENT if metrics == CLINICAL else ""


def sums_json(correct: Sequence[float], examples: Sequence[float], noise: EvaluationNoise | None) -> dict[str, object]:
    """Return the released sums per class, with the standard deviation of their noise; null: no number."""
    std = noise.std * math.sqrt(noise.draws) if noise else 0.0
    counts = {"correct": [_number(v) for v in correct], "examples": [_number(v) for v in examples]}
    return {**counts, "noise_std": _number(std)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read(message: pb.Estimate) -> Estimate:
    if message.withheld:
        return Estimate(withheld=message.withheld)
    if not 0 <= message.low <= message.point <= message.high <= 1:
        return Estimate(withheld=uncertainty.IMPOSSIBLE)
    return Estimate(message.point, message.low, message.high)
