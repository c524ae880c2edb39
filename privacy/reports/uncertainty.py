"""What noise leaves of an accuracy: an interval, or nothing.

An accuracy is a ratio of two noisy sums, which can be anything: it is shown with an interval (ratio.py), or not at all.
The interval covers the noise of privacy alone, not the luck of a test set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace

from fl_core.types.clinical import macro_mean
from privacy.reports.ratio import interval

NOISY = "noise larger than signal"
IMPOSSIBLE = "no counts can be these"
UNBOUNDED = "its noise has no bound"
LEVEL = 0.95
LAST = 5
"""Rounds whose mean stands beside the best one, which is chosen on test data."""
WIDEST = 0.5
"""Intervals that are wider say less than they seem to."""
GRID_SLACK = 1.002
"""What rounding to a grid may add to the standard deviation of a release."""
ROUNDED = 2e-3
"""What rounding each record's contribution toward zero may take off a sum, and so move a ratio of two."""
_LARGEST = 1e100
"""Numbers beyond it are no counts, and their squares and sums no numbers."""


@dataclass(frozen=True, slots=True)
class EvaluationNoise:
    """The noise on one class's sums: `draws` independent ones of standard deviation `std`, on either sum.

    std: infinite where nothing but noise is released   suppressed: rows with a noisy count below 1 are zeros central:
    one draw, whatever the number of hospitals.
    """

    std: float
    draws: int = 1
    suppressed: bool = False
    central: bool = False

    def over(self, silos: int) -> EvaluationNoise:
        return self if self.central else replace(self, draws=silos)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share in [0, 1] and its interval; None: nothing was measured. withheld: why there is no number."""

    point: float | None = None
    low: float | None = None
    high: float | None = None
    withheld: str = ""

    @property
    def exact(self) -> bool:
        return self.point is not None and self.low == self.high

    def text(self) -> str:
        if self.withheld:
            return f"withheld: {self.withheld}"
        if self.point is None or self.low is None or self.high is None:
            return "-"
        if self.exact:
            return f"{100 * self.point:.2f} %"
        return f"{100 * self.point:.1f} % (95 %: {100 * self.low:.1f} to {100 * self.high:.1f} %)"

    def short(self) -> str:
        """Write it for a column of many: that it is withheld, without why."""
        return "withheld" if self.withheld else self.text()

    def facts(self, name: str = "accuracy", prefix: str = "") -> dict[str, float | bool | None]:
        """Write it for machines: the number under `name`, and its interval and whether it is withheld beside it."""
        return {
            name: self.point,
            f"{prefix}accuracy_low": self.low,
            f"{prefix}accuracy_high": self.high,
            f"{prefix}withheld": bool(self.withheld),
        }


NOTHING = Estimate()
Sums = tuple[Sequence[float], Sequence[float], EvaluationNoise | None]
"""Correct answers and examples per class, and their noise."""


def accuracy(
    correct: Sequence[float], examples: Sequence[float], noise: EvaluationNoise | None, level: float = LEVEL
) -> Estimate:
    """Estimate sum(correct) / sum(examples) from noisy sums per class; without noise it is that ratio.

    Guarantees: for any numbers, a share in [0, 1] within an interval in [0, 1], or none; the interval holds the ratio
    of the sums without noise with probability `level`.
    """
    right, of = math.fsum(map(_finite, correct)), math.fsum(map(_finite, examples))
    if noise is None:
        return _exact(right, of)
    rows = noise.draws * len(examples)
    if rows < 1 or not (math.isfinite(right) and math.isfinite(of) and 0 < noise.std < _LARGEST):
        return Estimate(withheld=NOISY)
    found = interval(right, of, noise.std, rows, noise.suppressed, level)
    if found is None:
        return Estimate(withheld=NOISY)
    point, low, high = found[0], found[1] * (1 - ROUNDED), min(1.0, found[2] * (1 + ROUNDED))
    return Estimate(point, low, high) if high - low <= WIDEST else Estimate(withheld=NOISY)


def by_class(
    correct: Sequence[float], examples: Sequence[float], noise: EvaluationNoise | None, level: float = LEVEL
) -> list[Estimate]:
    return [accuracy([right], [of], noise, level) for right, of in zip(correct, examples, strict=False)]


def balanced(
    correct: Sequence[float], examples: Sequence[float], noise: EvaluationNoise | None, level: float = LEVEL
) -> Estimate:
    """Estimate the mean accuracy over classes that have test examples; withheld where one class is."""
    each = 1 - (1 - level) / max(len(examples), 1)
    found = [e for e in by_class(correct, examples, noise, each) if e != NOTHING]
    return next((e for e in found if e.withheld), _mean(found))


Measure = Callable[[Sequence[float], Sequence[float], EvaluationNoise | None, float], Estimate]
"""A measure of one round's sums, with an interval at a level: `accuracy`, `balanced`."""


def best(rounds: Sequence[Sums], measure: Measure = accuracy) -> Estimate:
    """Estimate the largest accuracy over rounds.

    The largest of noisy numbers is the luckiest one, so its interval comes from intervals that hold for all rounds at
    once. A round that is withheld may have been the best.
    """
    level = 1 - (1 - LEVEL) / max(len(rounds), 1)
    found = [e for e in (measure(*sums, level) for sums in rounds) if e != NOTHING]
    known = [e for e in found if not e.withheld]
    if not known:
        return found[-1] if found else NOTHING
    low, point = max(e.low or 0.0 for e in known), max(e.point or 0.0 for e in known)
    noisy = any(not e.exact for e in known) or any(e.withheld == NOISY for e in found)
    high = 1.0 if any(e.withheld == NOISY for e in found) else max(e.high or 0.0 for e in known)
    return Estimate(withheld=NOISY) if noisy and high - low > WIDEST else Estimate(point, low, high)


def mean_of_last(
    rounds: Sequence[Sums], measure: Measure = accuracy, last: int = LAST, level: float = LEVEL
) -> Estimate:
    """Estimate the mean of a measure over the last so many rounds, of all where there are fewer.

    Nothing where one of them has no test example, withheld where one is. Its interval comes from intervals that hold
    for all of these rounds at once.
    """
    newest = rounds[-last:]
    each = 1 - (1 - level) / max(len(newest), 1)
    found = [measure(*sums, each) for sums in newest]
    if NOTHING in found:
        return NOTHING
    return next((e for e in found if e.withheld), _mean(found))


@dataclass(frozen=True, slots=True)
class RunNoise:
    """What is noisy of a run's results.

    evaluation: the noise on one hospital's sums   scores: names of personal models' scores that are means of noisy
    shares, whose noise nobody knows.
    """

    evaluation: EvaluationNoise | None = None
    scores: frozenset[str] = frozenset()

    def of(self, included: Sized) -> EvaluationNoise | None:
        return self.evaluation and self.evaluation.over(len(included))


NO_NOISE = RunNoise()
UNKNOWN = RunNoise(EvaluationNoise(math.inf), frozenset({"pa", "pm_l", "pm_v"}))


def shown_scores(scores: Mapping[str, float], hidden: frozenset[str]) -> dict[str, float]:
    return {name: v for name, v in scores.items() if name.removesuffix("_std") not in hidden}


def _finite(value: float) -> float:
    return value if abs(value) < _LARGEST else math.nan


def _exact(right: float, of: float) -> Estimate:
    slack = 1e-6 * max(1.0, abs(of))
    if not (math.isfinite(right) and math.isfinite(of)) or of < 0 or not -slack <= right <= of + slack:
        return Estimate(withheld=IMPOSSIBLE)
    if not of:
        return NOTHING
    share = min(1.0, max(0.0, right / of))
    return Estimate(share, share, share)


def _mean(found: Sequence[Estimate]) -> Estimate:
    low, point, high = (macro_mean(getattr(e, end) for e in found) for end in ("low", "point", "high"))
    if low is None or point is None or high is None:
        return NOTHING
    return Estimate(withheld=NOISY) if low != high and high - low > WIDEST else Estimate(point, low, high)
