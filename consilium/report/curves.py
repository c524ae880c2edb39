"""Measures of a run's models over its rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from coordinator.lead import accuracy
from privacy.accounting import measures, uncertainty
from privacy.accounting.measures import ACCURACY, EvaluationResult, Measure
from privacy.accounting.uncertainty import NOTHING, Estimate, Sums
from protos.consilium.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Scores:
    """The newest value of a measure, the best one, and the mean of the last rounds, for trained models only."""

    final: Estimate = NOTHING
    best: Estimate = NOTHING
    last: Estimate = NOTHING


@dataclass(frozen=True)
class Curve:
    """A measure over a run. rounds: number of training rounds before each measured model, increasing.

    first: the least number of rounds for a trained model; more than one for a closed form with several exchanges
    sums: for a measure of sums, the sums of each round.
    """

    measure: Measure
    rounds: tuple[int, ...]
    values: tuple[Estimate, ...]
    first: int = 1
    sums: tuple[Sums, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether there is any value, including values hidden by noise."""
        return any(value != NOTHING for value in self.values)

    @cached_property
    def scores(self) -> Scores:
        trained = [k for k, behind in enumerate(self.rounds) if behind >= self.first]
        if not trained:
            return Scores()
        final, of_sums = self.values[trained[-1]], self.measure.of_sums
        if of_sums is not None:
            sums = [self.sums[k] for k in trained]
            return Scores(final, uncertainty.best(sums, of_sums), uncertainty.mean_of_last(sums, of_sums))
        values = [self.values[k] for k in trained]
        if hidden := next((v for v in values if v.withheld or v.point is None), None):
            return Scores(final, hidden, hidden)
        points = [v.point for v in values if v.point is not None]
        return Scores(final, _exact(max(points)), _exact(fmean(points[-uncertainty.LAST :])))


def curves(rounds: Sequence[pb.RoundInfo]) -> dict[str, Curve]:
    """Return the curves of all measures that a run has, by name, the global model's first.

    Raises ProtocolError (E-WIRE-06) on impossible clinical metrics.
    """
    results, first = list(map(accuracy.result_of, rounds)), _first(rounds)
    drawn = {}
    for measure in measures.MEASURES:
        values = tuple(map(measure.estimate, results))
        sums = tuple(map(measure.sums, results)) if measure.sums else ()
        kept = [k for k, value in enumerate(values) if sums or value != NOTHING]
        # Personal models are measured after a round's training, so that round counts, too.
        done = (rounds[k].round + (rounds[k].kind == pb.TRAIN) if measure.personal else behind(rounds[k]) for k in kept)
        began = 1 if measure.personal else first
        drawn[measure.name] = Curve(measure, tuple(done), tuple(values[k] for k in kept), began, sums)
    return {name: curve for name, curve in drawn.items() if curve.measured}


def by_class(rounds: Sequence[pb.RoundInfo], most: int = 10_000) -> list[Curve]:
    """Return the accuracy of each class over the rounds, for at most `most` classes, in the run's order."""
    drawn: list[Curve] = []
    for c in range(min(most, max((len(r.examples) for r in rounds), default=0))):
        sums = [(tuple(r.correct[c : c + 1]), tuple(r.examples[c : c + 1]), accuracy.noise_of(r)) for r in rounds]
        values = tuple(ACCURACY.estimate(EvaluationResult(*each)) for each in sums)
        drawn.append(Curve(ACCURACY, tuple(map(behind, rounds)), values, _first(rounds), tuple(sums)))
    return drawn


def behind(info: pb.RoundInfo) -> int:
    """Return the number of training rounds before the model that a round measures.

    The model of an evaluation without training was trained in another run: it counts as one round.
    """
    return info.round or int(info.kind == pb.EVALUATE)


def _first(rounds: Sequence[pb.RoundInfo]) -> int:
    return 1 + max((behind(r) for r in rounds if r.untrained), default=0)


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value)


# ---- a table ---------------------------------------------------------------------------------------------------------


class MetricValue(NamedTuple):
    """One number of a table. round: rounds before it was measured, 0 for the initial model.

    class_: a class, "" for all of them   value: None if there is none or noise hides it   low, high: interval of
    privacy noise; equal to the value without noise.
    """

    round: int
    measure: str
    class_: str
    value: float | None
    low: float | None
    high: float | None


COLUMNS = ("round", "measure", "class", "value", "low", "high")


def history(rounds: Sequence[pb.RoundInfo], classes: Sequence[str]) -> list[MetricValue]:
    """List all numbers of a federation's run by round, with the same measures and names as for a simulation."""
    rows: list[MetricValue] = []
    for info in rounds:
        result = accuracy.result_of(info)
        rows += evaluation_rows(behind(info), result, classes)
        done = info.round + (info.kind == pb.TRAIN)  # personal models are measured after the round's training
        scores = uncertainty.shown_scores(result.personal, frozenset(result.withheld))
        rows += [MetricValue(done, name, "", value, value, value) for name, value in scores.items()]
    return rows


def evaluation_rows(done: int, evaluation: EvaluationResult, classes: Sequence[str]) -> Iterator[MetricValue]:
    """List the measures of one model. done: as `MetricValue.round`."""
    for measure in measures.of_model():
        if measure.json or evaluation.clinical is not None:
            yield estimate_row(done, measure.name, "", measure.estimate(evaluation))
    for name, estimate in zip(classes, evaluation.by_class(), strict=False):
        yield estimate_row(done, "class_accuracy", name, estimate)
    if (clinical := evaluation.clinical) is not None:
        error = clinical.calibration_error
        yield MetricValue(done, "calibration_error", "", error, error, error)
        for name, value, area in zip(classes, clinical.specificity, clinical.auc, strict=True):
            yield MetricValue(done, "specificity", name, value, value, value)
            yield MetricValue(done, "auc", name, area and area.middle, area and area.low, area and area.high)


def estimate_row(done: int, measure: str, class_: str, estimate: Estimate) -> MetricValue:
    return MetricValue(done, measure, class_, estimate.point, estimate.low, estimate.high)
