"""The measures of a model, each defined once for JSON, tables, pages, CSV, the card, comparisons and trackers.

To add one, add an entry to `MEASURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fl_core.types import intervals
from fl_core.types.clinical import ClinicalMetrics, balanced_counts
from fl_core.types.intervals import Interval
from fl_core.types.records import RoundRecord, fairness
from privacy.accounting import uncertainty
from privacy.accounting.uncertainty import LEVEL, NOTHING, Estimate, EvaluationNoise, RunNoise, Sums, SumsMeasure


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The results of an evaluation.

    correct, examples: (C,) sums as released   noise: on these sums   personal: scores of personal models
    withheld: names of scores that are hidden because of noise.
    """

    correct: Sequence[float] = ()
    examples: Sequence[float] = ()
    noise: EvaluationNoise | None = None
    clinical: ClinicalMetrics | None = None
    several_labels: bool = False
    personal: Mapping[str, float] = field(default_factory=dict)
    withheld: Collection[str] = ()

    @classmethod
    def of(cls, record: RoundRecord, noise: RunNoise) -> EvaluationResult:
        """Read a round's results. noise: of the run."""
        return cls(
            record.correct,
            record.examples,
            noise.of(record.included),
            record.clinical,
            record.several_labels,
            record.personal,
            noise.scores & set(record.personal),
        )

    @property
    def sums(self) -> Sums:
        return self.correct, self.examples, self.noise

    @property
    def balanced_sums(self) -> Sums:
        """Return the arguments of the balanced accuracy."""
        counts = balanced_counts(self.correct, self.examples, self.clinical, self.several_labels)
        return *counts, self.noise

    def by_class(self) -> list[Estimate]:
        """Estimate the accuracy of each class."""
        return uncertainty.by_class(*self.sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A measure of a model.

    name: in JSON, CSV and trackers   label: for people   title: of its figure   estimate: its value, with the
    uncertainty from noise or bins   interval: of a value without noise, for the sampling of test images
    sums, of_sums: the sums and the formula, for a measure computed from sums over test images   percent: whether it is
    a share   personal: whether it measures personal models, after a round's training   json: name of the field that
    marks it as withheld; empty if JSON has the measure in another object.
    """

    name: str
    label: str
    title: str
    estimate: Callable[[EvaluationResult], Estimate]
    interval: Callable[[EvaluationResult], Interval | None] = lambda _: None
    sums: Callable[[EvaluationResult], Sums] | None = None
    of_sums: SumsMeasure | None = None
    percent: bool = True
    personal: bool = False
    json: str

    def text(self, value: Estimate) -> str:
        """Format a value for people."""
        return value.text() if self.percent or value.point is None else f"{value.point:.3f}"

    def with_interval(self, result: EvaluationResult) -> str:
        """Format it with the interval for the sampling of test images."""
        value, interval = self.estimate(result), self.interval(result)
        if value.point is None or interval is None:
            return self.short(value)
        if self.percent:
            return f"{100 * value.point:.1f} % ({100 * interval.low:.1f} to {100 * interval.high:.1f})"
        return f"{self.text(value)} ({interval.low:.3f} to {interval.high:.3f})"

    def short(self, value: Estimate) -> str:
        """Format it for a column: a withheld value without the reason."""
        return "withheld" if value.withheld else self.text(value)


def _of_sums(
    name: str,
    label: str,
    title: str,
    sums: Callable[[EvaluationResult], Sums],
    of_sums: SumsMeasure,
    interval: Callable[[Sequence[float], Sequence[float]], Interval | None],
    json: str,
) -> Measure:
    def estimate(result: EvaluationResult) -> Estimate:
        right, of, noise = sums(result)
        return _measured(of_sums, tuple(right), tuple(of), noise)

    def sampling(result: EvaluationResult) -> Interval | None:
        right, of, noise = sums(result)
        return None if noise is not None else interval(right, of)

    return Measure(
        name=name, label=label, title=title, estimate=estimate, interval=sampling, sums=sums, of_sums=of_sums, json=json
    )


@lru_cache(maxsize=1 << 14)
def _measured(
    of_sums: SumsMeasure, correct: tuple[float, ...], examples: tuple[float, ...], noise: EvaluationNoise | None
) -> Estimate:
    """Compute a measure from sums. Cached, since closed rounds do not change and noisy ones take 0.5 ms per class."""
    return of_sums(correct, examples, noise, LEVEL)


def _area(result: EvaluationResult) -> Estimate:
    area = None if result.clinical is None else result.clinical.macro_auc
    return NOTHING if area is None else Estimate(area.middle, area.low, area.high)


def _personal(name: str, label: str, title: str) -> Measure:
    def estimate(result: EvaluationResult) -> Estimate:
        if name in result.withheld:
            return Estimate(withheld=uncertainty.UNBOUNDED)
        if name not in result.personal:
            return NOTHING
        return uncertainty.accuracy([result.personal[name]], [1.0], None)

    return Measure(name=name, label=label, title=title, estimate=estimate, personal=True, json="")


def plain(share: float) -> Estimate:
    """Estimate from a number without an interval: -1 means not yet measured, others outside [0, 1] are withheld."""
    return NOTHING if share == -1 else uncertainty.accuracy([share], [1.0], None)


BALANCED = _of_sums(
    "balanced_accuracy",
    "balanced accuracy",
    "Balanced accuracy (mean over classes)",
    sums=lambda result: result.balanced_sums,
    of_sums=uncertainty.balanced,
    interval=intervals.mean_of_shares,
    json="balanced_withheld",
)
"""Runs and hospitals are compared by this measure."""
ACCURACY = _of_sums(
    "accuracy",
    "accuracy",
    "Accuracy",
    sums=lambda result: result.sums,
    of_sums=uncertainty.accuracy,
    interval=lambda right, of: intervals.share(sum(right), sum(of)),
    json="withheld",
)
MACRO_AUC = Measure(
    name="macro_auc",
    label="macro AUC",
    title="Macro AUC (one class against the rest)",
    estimate=_area,
    interval=lambda result: None if result.clinical is None else intervals.macro_auc(result.clinical),
    percent=False,
    json="",
)
MEASURES: tuple[Measure, ...] = (
    BALANCED,
    ACCURACY,
    MACRO_AUC,
    _personal("pa", "personal", "Personal models, own test images"),
    _personal("pm_l", "personal, all", "Personal models, all test images, classes as they are at each hospital"),
    _personal("pm_v", "personal, even", "Personal models, all test images"),
)


def named(name: str) -> Measure:
    return next(measure for measure in MEASURES if measure.name == name)


def of_model() -> list[Measure]:
    """List the measures of the global model."""
    return [measure for measure in MEASURES if not measure.personal]


def measured(result: EvaluationResult) -> Iterator[tuple[Measure, Estimate]]:
    """Yield the measures of an evaluation, including those hidden by noise."""
    for measure in MEASURES:
        if (value := measure.estimate(result)) != NOTHING:
            yield measure, value


def as_json(result: EvaluationResult) -> dict[str, object]:
    """Return the measures of the global model, except those in other objects."""
    fields: dict[str, object] = {}
    for measure in of_model():
        if measure.json:
            value = measure.estimate(result)
            fields |= {measure.name: value.point, f"{measure.name}_low": value.low, f"{measure.name}_high": value.high}
            fields[measure.json] = bool(value.withheld)
    return fields


def personal_json(scores: Mapping[str, float], withheld: Collection[str] = ()) -> dict[str, object]:
    """Return the scores of personal models and their fairness; empty if none was measured.

    withheld: scores with too much noise. They are null and named in `withheld_scores`, as is a score outside [0, 1].
    """
    result = EvaluationResult(personal=scores, withheld=withheld)
    values = {measure.name: value for measure, value in measured(result) if measure.personal}
    if not values:
        return {}
    hidden = sorted(name for name, value in values.items() if value.withheld)
    spread = None if "pm_l" in hidden else fairness(scores)
    shown: dict[str, object] = {name: value.point for name, value in values.items()}
    shown["fairness"] = None if spread is None else plain(spread).point
    return {**shown, **({"withheld_scores": hidden} if hidden else {})}
