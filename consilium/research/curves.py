"""Measures of a run's models over its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import fmean

from coordinator.lead import accuracy
from fl_core.types.records import PERSONAL_SCORES
from privacy.accounting import uncertainty
from privacy.accounting.uncertainty import NOTHING, Estimate, EvaluationNoise, Measure, Sums
from protos.consilium.v1 import federation_pb2 as pb

OF_SUMS: dict[str, Measure] = {"accuracy": uncertainty.accuracy, "balanced_accuracy": uncertainty.balanced}
"""Measures of the global model that come from the sums per class."""
SUMS: dict[str, Callable[[pb.RoundInfo], Sums]] = {
    "accuracy": accuracy.sums,
    "balanced_accuracy": accuracy.balanced_sums,
}
"""Of which sums of a round each of them is."""
MACRO_AUC = "macro_auc"
"""The mean over classes of the area under the ROC curve, of runs that measure it; in the middle of its bin."""
MEASURES = (*OF_SUMS, MACRO_AUC, *PERSONAL_SCORES)


@dataclass(frozen=True, slots=True)
class Scores:
    """The newest value of a measure, the best one, and the mean of the last rounds; of trained models alone."""

    final: Estimate = NOTHING
    best: Estimate = NOTHING
    last: Estimate = NOTHING


@dataclass(frozen=True)
class Curve:
    """A measure over a run. rounds: how many training rounds each measured model has behind it, rising.

    first: the least of these that make a trained model: more than one of a closed form that takes several exchanges.
    """

    measure: str
    rounds: tuple[int, ...]
    values: tuple[Estimate, ...]
    first: int = 1

    @property
    def measured(self) -> bool:
        """Whether there is a value, or one that noise hides."""
        return any(value != NOTHING for value in self.values)

    @cached_property
    def scores(self) -> Scores:
        trained = [v for v, behind in zip(self.values, self.rounds, strict=True) if behind >= self.first]
        if not trained:
            return Scores()
        if hidden := next((v for v in trained if v.withheld or v.point is None), None):
            return Scores(trained[-1], hidden, hidden)
        points = [v.point for v in trained if v.point is not None]
        return Scores(trained[-1], _exact(max(points)), _exact(fmean(points[-uncertainty.LAST :])))


@dataclass(frozen=True)
class CurveOfSums(Curve):
    """A measure of the global model. sums: what it was computed from, per round."""

    sums: tuple[Sums, ...] = ()

    @cached_property
    def scores(self) -> Scores:
        measure = OF_SUMS[self.measure]
        trained = [each for each, behind in zip(self.sums, self.rounds, strict=True) if behind >= self.first]
        if not trained:
            return Scores()
        best = uncertainty.best(trained, measure)
        return Scores(self.values[-1], best, uncertainty.mean_of_last(trained, measure))


def text(measure: str, value: Estimate) -> str:
    """Write a value as its readers know it: an AUC as a number, all others in percent."""
    if measure == MACRO_AUC and value.point is not None:
        return f"{value.point:.3f}"
    return value.text()


def curves(rounds: Sequence[pb.RoundInfo]) -> dict[str, Curve]:
    """Return the curves of all measures that a run has, by name, the global model's first.

    Raises ProtocolError (E-WIRE-06) on clinical metrics that no evaluation gives.
    """
    found = [*curves_of_sums(rounds).values(), _auc(rounds), *(_of_silos(name, rounds) for name in PERSONAL_SCORES)]
    return {curve.measure: curve for curve in found if curve.measured}


def curves_of_sums(rounds: Sequence[pb.RoundInfo]) -> dict[str, Curve]:
    """Return the curves of the global model's measures, also where nothing was measured."""
    return {name: _of_sums(name, rounds, list(map(sums, rounds))) for name, sums in SUMS.items()}


def by_class(rounds: Sequence[pb.RoundInfo], most: int = 10_000) -> list[Curve]:
    """Return the accuracy of each class over the rounds, in the order of the run's classes, of at most so many."""
    found: list[Curve] = []
    for c in range(min(most, max((len(r.examples) for r in rounds), default=0))):
        sums = [(tuple(r.correct[c : c + 1]), tuple(r.examples[c : c + 1]), accuracy.noise_of(r)) for r in rounds]
        found.append(_of_sums("accuracy", rounds, sums))
    return found


def _of_sums(name: str, rounds: Sequence[pb.RoundInfo], sums: Sequence[Sums]) -> CurveOfSums:
    values = tuple(_measured(name, *each) for each in sums)
    return CurveOfSums(name, tuple(map(behind, rounds)), values, _first(rounds), tuple(sums))


def behind(info: pb.RoundInfo) -> int:
    """Return how many rounds of training the model that a round measures has behind it, as far as its run says.

    The model of an evaluation without training was trained elsewhere: it has one.
    """
    return info.round or int(info.kind == pb.EVALUATE)


def _first(rounds: Sequence[pb.RoundInfo]) -> int:
    return 1 + max((behind(r) for r in rounds if r.untrained), default=0)


@lru_cache(maxsize=1 << 14)
def _measured(
    name: str, correct: tuple[float, ...], examples: tuple[float, ...], noise: EvaluationNoise | None
) -> Estimate:
    """Measure one round. Closed rounds do not change, and a noisy one takes half a millisecond per class."""
    return OF_SUMS[name](correct, examples, noise, uncertainty.LEVEL)


def _auc(rounds: Sequence[pb.RoundInfo]) -> Curve:
    found = {behind(r): measured.macro_auc for r in rounds if (measured := accuracy.clinical_of(r)) is not None}
    values = tuple(NOTHING if area is None else _exact(area.middle) for area in found.values())
    return Curve(MACRO_AUC, tuple(found), values, _first(rounds))


def _of_silos(name: str, rounds: Sequence[pb.RoundInfo]) -> Curve:
    """Read a score of personal models, which are measured after a round's training: that round is behind them too."""
    hidden = Estimate(withheld=uncertainty.UNBOUNDED)
    measured = [r for r in rounds if name in r.personal or name in r.withheld]
    values = tuple(hidden if name in r.withheld else accuracy.plain(r.personal[name]) for r in measured)
    return Curve(name, tuple(r.round + (r.kind == pb.TRAIN) for r in measured), values)


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value)
