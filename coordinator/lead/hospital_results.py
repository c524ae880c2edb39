"""A model's results at the hospitals that allow it: each with its interval, the lowest one, and the gap.

Hospitals see different diseases, and comparing different diseases compares the diseases, not the hospitals. So
hospitals are compared by balanced accuracy over the classes that all of them have test images of. A rank is given only
if the test images suffice: if the interval of the gap between the highest and the lowest lies above 0, at a level that
holds for all pairs of hospitals at once (Bonferroni). Otherwise the reason is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean

from fl_core.training import clinical_report
from fl_core.training.clinical_report import FEW
from fl_core.types import intervals
from fl_core.types.clinical import macro_mean
from fl_core.types.intervals import LEVEL, Interval
from fl_core.types.records import HospitalResult, OwnModels
from privacy.accounting import measures
from privacy.accounting.measures import BALANCED, EvaluationResult
from service_core.console import pluralize

_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, slots=True)
class ComparableHospitals:
    """The hospitals that can be compared.

    compared: their balanced accuracies over `classes`, the positions of the classes that all of them have
    lowest, gap: the hospital with the lowest, and the distance to the highest; None with fewer than two
    interval: of the gap   cannot_rank: why the order may be chance; empty if it is not.
    Guarantees: if a model does equally well everywhere, at most one evaluation in 20 ranks hospitals.
    """

    compared: Mapping[str, float]
    classes: tuple[int, ...]
    lowest: str = ""
    gap: float | None = None
    interval: Interval | None = None
    cannot_rank: str = ""

    def sentence(self) -> str:
        if self.gap is None or self.interval is None:
            return f"cannot rank: {self.cannot_rank}"
        over = f"over {len(self.classes)} {'class' if len(self.classes) == 1 else 'classes'} that all have"
        gap = f"gap {100 * self.gap:.1f} points (95 %: {100 * self.interval.low:.1f} to {100 * self.interval.high:.1f})"
        low = f"{self.lowest} is lowest with {100 * self.compared[self.lowest]:.1f} % balanced accuracy {over}, {gap}"
        return f"cannot rank: {low}; {self.cannot_rank}" if self.cannot_rank else low

    def facts(self) -> dict[str, object]:
        """Return the comparison for machines."""
        return {
            "compared_classes": list(self.classes),
            "balanced_accuracy": dict(self.compared),
            "lowest": self.lowest or None,
            "gap": self.gap,
            "gap_interval": self.interval and list(self.interval),
            "cannot_rank": self.cannot_rank or None,
        }


def standing(results: Mapping[str, HospitalResult], *, several_labels: bool = False) -> ComparableHospitals:
    """Compare hospitals; see the module for when they are ranked."""
    enough = {name: result for name, result in results.items() if sum(result.examples) >= FEW}
    if several_labels:  # raw accuracy says little here: most labels are absent, and absent ones are easy
        enough = {name: result for name, result in enough.items() if result.clinical is not None}
    if len(enough) < 2:
        few = f" ({len(results) - len(enough)} with fewer)" if len(enough) < len(results) else ""
        shows = f"{pluralize(len(enough), 'hospital')} with at least {FEW} test images shows its results{few}"
        return ComparableHospitals({}, (), cannot_rank=f"{shows}, and it takes two")
    width = min(len(result.examples) for result in enough.values())
    common = tuple(c for c in range(width) if all(of > 0 for f in enough.values() for _, of in _counts(f, c)))
    if not common:
        return ComparableHospitals(
            {}, (), cannot_rank="no class has test images at all of them, so they cover different diseases"
        )
    scores = {name: _balanced(result, common) for name, result in enough.items()}
    lowest, highest = (choose(scores, key=lambda name: scores[name]) for choose in (min, max))
    pairs = math.comb(len(scores), 2)
    level = 1 - (1 - LEVEL) / pairs
    ends = [_interval(enough[name], common, level) for name in (highest, lowest)]
    interval = intervals.difference(scores[highest], ends[0], scores[lowest], ends[1])
    chance = "" if interval.low > 0 else "the sampling of test images can explain the difference"
    return ComparableHospitals(scores, common, lowest, scores[highest] - scores[lowest], interval, chance)


def _counts(result: HospitalResult, c: int) -> list[tuple[float, float]]:
    """Return correct answers and examples of a class; of a label two pairs, for images with it and without it."""
    if result.clinical is not None and (labels := result.clinical.labels):
        return [(labels[c].tp, labels[c].present), (labels[c].tn, labels[c].absent)]
    return [(result.correct[c], result.examples[c])]


def _balanced(result: HospitalResult, classes: Sequence[int]) -> float:
    return fmean(right / of for c in classes for right, of in _counts(result, c))


def _interval(result: HospitalResult, classes: Sequence[int], level: float) -> Interval:
    rights, ofs = zip(*(counts for c in classes for counts in _counts(result, c)), strict=True)
    interval = intervals.mean_of_shares(rights, ofs, level)
    assert interval is not None
    return interval


def head() -> tuple[str, ...]:
    labels = [measure.label for measure in measures.of_model()]
    return ("hospital", "test images", "classes", labels[0], "guessing", *labels[1:], "model beside")


def rows(results: Mapping[str, HospitalResult], *, several_labels: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield a row per hospital, in the columns of `head`, by name."""
    for name, shown in sorted(results.items()):
        tested, present = sum(shown.examples), sum(n > 0 for n in shown.examples)
        guessed_among = 2 if several_labels else present
        result = _result(shown, several_labels)
        first, *others = [measure.with_interval(result) for measure in measures.of_model()]
        yield (
            name,
            f"{tested:.0f}" + (" (few)" if tested < FEW else ""),
            str(present),
            first,
            clinical_report.percent(1 / guessed_among if present else None),
            *others,
            "-" if shown.own is None else _shares(shown.own.own, shown.own.examples),
        )


def _result(result: HospitalResult, several_labels: bool) -> EvaluationResult:
    return EvaluationResult(result.correct, result.examples, None, result.clinical, several_labels)


def _shares(right: Sequence[float], of: Sequence[float]) -> str:
    mean = macro_mean(c / n if n else None for c, n in zip(right, of, strict=True))
    return clinical_report.with_interval(mean, intervals.mean_of_shares(right, of))


def own_sentence(models: OwnModels, tested: float, other: str = "", *, several_labels: bool = False) -> str:
    """Compare the hospitals' local models, each at home, with the evaluated model on the same images.

    tested: the test images of the evaluation; some hospitals may have no local model   other: the run whose model was
    evaluated as well, instead of local ones   several_labels: whether the answers are about labels
    """
    on = f"{sum(models.examples):.0f} of {tested:.0f} {'answers about labels' if several_labels else 'test images'}"
    measure = "right answers, label by label," if several_labels else "balanced accuracy"
    where, theirs = (", where hospitals have models that they trained alone", "those") if not other else ("", other)
    text = (
        f"on {on}{where}: {measure} of {theirs} {_shares(models.own, models.examples)}, of the evaluated model "
        f"{_shares(models.measured, models.examples)}"
    )
    if (ahead := models.auc_ahead) is None:
        return text
    point, error = ahead
    low, high = point - _Z * error, point + _Z * error
    note = "" if low > 0 or high < 0 else ", not told apart"
    return f"{text}; macro AUC within hospitals {point:+.3f} (95 %: {low:+.3f} to {high:+.3f}, DeLong{note})"


def own_facts(models: OwnModels) -> dict[str, object]:
    """Return the comparison of `own_sentence` for machines."""
    ahead = models.auc_ahead
    return {
        **asdict(models),
        "auc_ahead": ahead and ahead[0],
        "auc_ahead_interval": ahead and [ahead[0] - _Z * ahead[1], ahead[0] + _Z * ahead[1]],
    }


def facts(results: Mapping[str, HospitalResult], *, several_labels: bool = False) -> dict[str, object]:
    """Return the results that hospitals show, and their comparison, for machines."""
    return {
        "hospitals": {
            name: {
                "correct": list(result.correct),
                "examples": list(result.examples),
                "balanced_accuracy": BALANCED.estimate(_result(result, several_labels)).point,
                "balanced_accuracy_interval": BALANCED.interval(_result(result, several_labels)),
                "clinical": result.clinical and intervals.facts(result.clinical),
            }
            for name, result in sorted(results.items())
        },
        "standing": standing(results, several_labels=several_labels).facts(),
    }
