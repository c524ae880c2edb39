"""The uncertainty of a noisy accuracy: an interval, or no number.

An accuracy is a ratio of two noisy sums, which can take any value: it is shown with an interval, or not at all. The
interval covers the noise of privacy, not the sampling of a test set.

The interval of the ratio. With A and D the noisy sums over R rows of correct answers and of examples, s the standard
deviation of each row's noise and p the true ratio, A - p D has mean 0 and variance R s^2 (1 + p^2); the interval
contains every p in [0, 1] for which A - p D is within q standard deviations of 0 (Fieller, "Some problems in interval
estimation", JRSS B 16, 1954). It exists if D is significantly above 0.

If rows with a noisy count below 1 arrive as zeros, a row of n examples, m of them answered correctly, has with u = (1 -
n) / s and P = Phi(-u), the probability that it is kept,

E[row of A] = m P,   E[row of D] = n P + s phi(u)

so A - p D is off by between -((1 - p) n (1 - P) + p s phi(u)) and p (n (1 - P) - s phi(u)) per row: the interval allows
for the worst of both, and of the variance, over all n and m <= n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from statistics import NormalDist
from typing import TYPE_CHECKING

from fl_core.types.clinical import macro_mean
from fl_core.types.records import PERSONAL_SCORES

if TYPE_CHECKING:
    from fl_core.aggregation.update_check import NoisyRows

NOISY = "noise larger than signal"
IMPOSSIBLE = "no counts give these values"
UNBOUNDED = "its noise has no bound"
LEVEL = 0.95
LAST = 5
"""Number of last rounds whose mean is shown next to the best round, which is chosen on test data."""
WIDEST = 0.5
"""Wider intervals are withheld, since their numbers would mislead."""
GRID_SLACK = 1.002
"""Factor by which rounding to a grid may increase the standard deviation of a release."""
ROUNDED = 2e-3
"""Bound on the change of a ratio of two sums by rounding each record's contribution toward zero."""
_MAX_NUMBER = 1e100
"""Largest number that counts as a count; squares and sums of larger ones overflow."""


@dataclass(frozen=True, slots=True)
class EvaluationNoise:
    """The noise on one class's sums: `draws` independent ones of standard deviation `std`, on both sums.

    std: infinite if only noise is released   suppressed: rows with a noisy count below 1 are zeros   central: one
    draw, whatever the number of hospitals.
    """

    std: float
    draws: int = 1
    suppressed: bool = False
    central: bool = False

    def over(self, silos: int) -> EvaluationNoise:
        return self if self.central else replace(self, draws=silos)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share in [0, 1] and its interval. point: None if not measured or withheld   withheld: the reason, or empty."""

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
        """Format it for a column: a withheld value without the reason."""
        return "withheld" if self.withheld else self.text()

    def facts(self, name: str = "accuracy", prefix: str = "") -> dict[str, float | bool | None]:
        """Return it as JSON values: the number under `name`, its interval, and whether it is withheld."""
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
    """Estimate sum(correct) / sum(examples) from noisy sums per class; without noise, return that ratio.

    Guarantees: for any numbers, the result is a share in [0, 1] within an interval in [0, 1], or no number; the
    interval contains the ratio of the sums without noise with probability `level`.
    """
    right, of = math.fsum(map(_finite, correct)), math.fsum(map(_finite, examples))
    if noise is None:
        return _exact(right, of)
    rows = noise.draws * len(examples)
    if rows < 1 or not (math.isfinite(right) and math.isfinite(of) and 0 < noise.std < _MAX_NUMBER):
        return Estimate(withheld=NOISY)
    ratio = interval(right, of, noise.std, rows, noise.suppressed, level)
    if ratio is None:
        return Estimate(withheld=NOISY)
    point, low, high = ratio[0], ratio[1] * (1 - ROUNDED), min(1.0, ratio[2] * (1 + ROUNDED))
    return Estimate(point, low, high) if high - low <= WIDEST else Estimate(withheld=NOISY)


def by_class(
    correct: Sequence[float], examples: Sequence[float], noise: EvaluationNoise | None, level: float = LEVEL
) -> list[Estimate]:
    return [accuracy([right], [of], noise, level) for right, of in zip(correct, examples, strict=False)]


def balanced(
    correct: Sequence[float], examples: Sequence[float], noise: EvaluationNoise | None, level: float = LEVEL
) -> Estimate:
    """Estimate the mean accuracy over classes with test examples; withheld if the accuracy of one class is withheld."""
    each = 1 - (1 - level) / max(len(examples), 1)
    estimates = [e for e in by_class(correct, examples, noise, each) if e != NOTHING]
    return next((e for e in estimates if e.withheld), _mean(estimates))


SumsMeasure = Callable[[Sequence[float], Sequence[float], EvaluationNoise | None, float], Estimate]
"""A measure of one round's sums, with an interval at a level: `accuracy`, `balanced`."""


def best(rounds: Sequence[Sums], measure: SumsMeasure = accuracy) -> Estimate:
    """Estimate the largest accuracy over rounds.

    The largest of noisy numbers tends to be too large. So its interval comes from intervals that hold for all rounds at
    once. A withheld round may have been the best.
    """
    level = 1 - (1 - LEVEL) / max(len(rounds), 1)
    estimates = [e for e in (measure(*sums, level) for sums in rounds) if e != NOTHING]
    shown = [e for e in estimates if not e.withheld]
    if not shown:
        return estimates[-1] if estimates else NOTHING
    low, point = max(e.low or 0.0 for e in shown), max(e.point or 0.0 for e in shown)
    noisy = any(not e.exact for e in shown) or any(e.withheld == NOISY for e in estimates)
    high = 1.0 if any(e.withheld == NOISY for e in estimates) else max(e.high or 0.0 for e in shown)
    return Estimate(withheld=NOISY) if noisy and high - low > WIDEST else Estimate(point, low, high)


def mean_of_last(
    rounds: Sequence[Sums], measure: SumsMeasure = accuracy, last: int = LAST, level: float = LEVEL
) -> Estimate:
    """Estimate the mean of a measure over the last `last` rounds, or all if there are fewer.

    Not measured if one round has no test example, withheld if one round is withheld. The interval comes from intervals
    that hold for all of these rounds at once.
    """
    newest = rounds[-last:]
    each = 1 - (1 - level) / max(len(newest), 1)
    estimates = [measure(*sums, each) for sums in newest]
    if NOTHING in estimates:
        return NOTHING
    return next((e for e in estimates if e.withheld), _mean(estimates))


@dataclass(frozen=True, slots=True)
class RunNoise:
    """Which results of a run are noisy.

    Attributes:
        evaluation: the noise on one hospital's sums as sent; None if they are exact counts
        scores: names of personal models' scores that are means of noisy shares, with unknown noise
        counts: the noise on counts by part, infinite if its size is unknown here; none without privacy
        rows: bounds on released sums per class; None if there are none
    """

    evaluation: EvaluationNoise | None = None
    scores: frozenset[str] = frozenset()
    counts: Mapping[str, float] = field(default_factory=dict)
    rows: NoisyRows | None = None

    def of(self, included: Sized) -> EvaluationNoise | None:
        return self.evaluation and self.evaluation.over(len(included))


NO_NOISE = RunNoise()
UNKNOWN = RunNoise(EvaluationNoise(math.inf), frozenset(PERSONAL_SCORES))


def shown_scores(scores: Mapping[str, float], hidden: frozenset[str]) -> dict[str, float]:
    return {name: v for name, v in scores.items() if name.removesuffix("_std") not in hidden}


def _finite(value: float) -> float:
    return value if abs(value) < _MAX_NUMBER else math.nan


def _exact(right: float, of: float) -> Estimate:
    slack = 1e-6 * max(1.0, abs(of))
    if not (math.isfinite(right) and math.isfinite(of)) or of < 0 or not -slack <= right <= of + slack:
        return Estimate(withheld=IMPOSSIBLE)
    if not of:
        return NOTHING
    share = min(1.0, max(0.0, right / of))
    return Estimate(share, share, share)


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    low, point, high = (macro_mean(getattr(e, end) for e in estimates) for end in ("low", "point", "high"))
    if low is None or point is None or high is None:
        return NOTHING
    return Estimate(withheld=NOISY) if low != high and high - low > WIDEST else Estimate(point, low, high)


# ---- the ratio of two noisy sums -------------------------------------------------------------------------------------

_SHARES = 100
_NORMAL = NormalDist()


def interval(
    right: float, of: float, std: float, rows: int, suppressed: bool, level: float
) -> tuple[float, float, float] | None:
    """Return a point in [0, 1] and its interval for the ratio of `rows` rows; None if there is too much noise.

    std: of the noise on one row, on both sums   suppressed: rows with a noisy count below 1 are zeros
    Guarantees: with probability `level`, the ratio without noise is in the interval, or the result is None.
    """
    row, wide = _rows_of(std, suppressed), _NORMAL.inv_cdf((1 + level) / 2) * math.sqrt(rows)
    if not of - rows * row.gained - wide * math.sqrt(row.spread) > 0:
        return None

    def top(cut: float, p: float) -> float:
        return cut - p * of + rows * _at(row.below, p) + wide * math.sqrt(_at(row.variance, p))

    def bottom(cut: float, p: float) -> float:
        return cut - p * of - rows * _at(row.above, p) - wide * math.sqrt(_at(row.variance, p))

    if bottom(right, 1.0) > 0 or top(right, 0.0) < 0:  # no share is consistent with these sums
        return None
    # p D is in [0, D], so that moving A there moves it nearer to every p D: what the interval held, it holds.
    cut = min(max(right, 0.0), of)
    # Both fall in p, since D is larger than all that is added to its slope.
    point = cut / of  # within both, except for the last bits of a root
    return point, min(point, _root(partial(bottom, cut))), max(point, _root(partial(top, cut)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The worst case of one row, at shares p = 0, 1 / _SHARES, ..., 1; convex in p, so that chords are above it.

    below, above: how far the mean of (row of A) - p (row of D) can be off   variance: of it   gained, spread: how far
    the mean of D's row can be above n, and its variance.
    """

    below: tuple[float, ...]
    above: tuple[float, ...]
    variance: tuple[float, ...]
    gained: float
    spread: float


def _at(values: Sequence[float], share: float) -> float:
    k = min(int(share * _SHARES), _SHARES - 1)
    return values[k] + (share * _SHARES - k) * (values[k + 1] - values[k])


@lru_cache(maxsize=64)
def _rows_of(std: float, suppressed: bool) -> _Rows:
    shares = [k / _SHARES for k in range(_SHARES + 1)]
    square = std * std
    if not suppressed:
        none = tuple(0.0 for _ in shares)
        return _Rows(none, none, tuple(square * (1 + p * p) for p in shares), 0.0, square)
    # From rows without an example to rows that are never dropped, in fine steps near a count of 1.
    sizes = sorted({*(8 * std * k / 200 for k in range(201)), *(k / 20 for k in range(61))})
    rows = [(n, *_moments(n, std)) for n in sizes]
    lost = [(n * (1 - kept), std * density) for n, kept, density, _, _ in rows]
    variance = [
        max(_variance(m, p, std, kept, mean, second) for n, kept, _, mean, second in rows for m in (0.0, n))
        for p in shares
    ]
    return _Rows(
        tuple(max((1 - p) * gone + p * more for gone, more in lost) for p in shares),
        tuple(max(0.0, *(p * (gone - more) for gone, more in lost)) for p in shares),
        tuple(variance),
        max(0.0, *(more - gone for gone, more in lost)),
        max(second - mean * mean for _, _, _, mean, second in rows),
    )


def _moments(n: float, std: float) -> tuple[float, float, float, float]:
    """Return P(Y >= 1), phi((1 - n) / std), E[Y; Y >= 1] and E[Y^2; Y >= 1] of Y normal with mean n."""
    u = (1 - n) / std
    kept, density = _NORMAL.cdf(-u), _NORMAL.pdf(u)
    mean = n * kept + std * density
    return kept, density, mean, (n * n + std * std) * kept + std * density * (n + 1)


def _variance(m: float, p: float, std: float, kept: float, mean: float, second: float) -> float:
    """Return the variance of (m + f - p Y) [Y >= 1], f of variance std^2 on its own."""
    first = m * kept - p * mean
    return std * std * kept + m * m * kept - 2 * m * p * mean + p * p * second - first * first


def _root(falling: Callable[[float], float]) -> float:
    if falling(0.0) <= 0:
        return 0.0
    if falling(1.0) >= 0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
