"""How a model does at the hospitals that let it be shown: each with its interval, the lowest one, and the gap.

Hospitals see different diseases, and a number over different diseases ranks diseases. So they are held against each
other over the classes that all of them have test images of, by balanced accuracy, and a rank is given only where the
test images can tell: where the interval of the gap between the highest and the lowest lies above 0, at a level at which
all pairs of hospitals hold at once (Bonferroni). Else it is said why nobody can be ranked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fl_core.types import intervals
from fl_core.types.clinical import macro_mean
from fl_core.types.intervals import LEVEL, Interval
from fl_core.types.records import HospitalResult
from service_core import clinical_report
from service_core.console import counted

LEAST_IMAGES = 10
"""Test images with fewer of which a hospital is not ranked: with 9 the shortest exact interval is 34 points long."""
HEAD = ("hospital", "test images", "classes", "balanced accuracy", "chance", "accuracy", "macro AUC")


@dataclass(frozen=True, slots=True)
class Standing:
    """The hospitals that can be held against each other.

    compared: their balanced accuracies over `classes`, the positions of those that all of them have
    lowest, gap: the hospital with the lowest, and by how much the highest is ahead; None of fewer than two
    interval: of the gap   cannot_rank: why the order may be chance; empty where it is told apart.
    Guarantees: of hospitals at which a model does equally well, at most one evaluation in 20 ranks any.
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
        """Write it for machines."""
        return {
            "compared_classes": list(self.classes),
            "balanced_accuracy": dict(self.compared),
            "lowest": self.lowest or None,
            "gap": self.gap,
            "gap_interval": self.interval and list(self.interval),
            "cannot_rank": self.cannot_rank or None,
        }


def standing(results: Mapping[str, HospitalResult]) -> Standing:
    """Hold hospitals against each other; see the module for when they are ranked."""
    enough = {name: found for name, found in results.items() if sum(found.examples) >= LEAST_IMAGES}
    if len(enough) < 2:
        few = f" ({len(results) - len(enough)} with fewer)" if len(enough) < len(results) else ""
        found = f"{counted(len(enough), 'hospital')} with at least {LEAST_IMAGES} test images shows its results{few}"
        return Standing({}, (), cannot_rank=f"{found}, and it takes two")
    width = min(len(found.examples) for found in enough.values())
    common = tuple(c for c in range(width) if all(found.examples[c] > 0 for found in enough.values()))
    if not common:
        return Standing(
            {}, (), cannot_rank="no class has test images at all of them, so they tell of different diseases"
        )
    scores = {name: _balanced(found, common) for name, found in enough.items()}
    lowest, highest = (choose(scores, key=lambda name: scores[name]) for choose in (min, max))
    pairs = math.comb(len(scores), 2)
    level = 1 - (1 - LEVEL) / pairs
    ends = [_interval(enough[name], common, level) for name in (highest, lowest)]
    interval = intervals.difference(scores[highest], ends[0], scores[lowest], ends[1])
    chance = "" if interval.low > 0 else "the luck of these test images explains it"
    return Standing(scores, common, lowest, scores[highest] - scores[lowest], interval, chance)


def _balanced(found: HospitalResult, classes: Sequence[int]) -> float:
    return math.fsum(found.correct[c] / found.examples[c] for c in classes) / len(classes)


def _interval(found: HospitalResult, classes: Sequence[int], level: float) -> Interval:
    interval = intervals.mean_of_shares(
        [found.correct[c] for c in classes], [found.examples[c] for c in classes], level
    )
    assert interval is not None
    return interval


def rows(results: Mapping[str, HospitalResult]) -> Iterator[tuple[str, ...]]:
    """Yield a row per hospital under `HEAD`, by name."""
    for name, found in sorted(results.items()):
        shares = [c / n if n else None for c, n in zip(found.correct, found.examples, strict=True)]
        tested, right, present = sum(found.examples), sum(found.correct), sum(n > 0 for n in found.examples)
        balanced = intervals.mean_of_shares(found.correct, found.examples)
        yield (
            name,
            f"{tested:.0f}" + (" (few)" if tested < LEAST_IMAGES else ""),
            str(present),
            clinical_report.with_interval(macro_mean(shares), balanced),
            clinical_report.percent(1 / present if present else None),
            clinical_report.with_interval(right / tested if tested else None, intervals.share(right, tested)),
            "-" if found.clinical is None else clinical_report.macro_auc(found.clinical),
        )


def facts(results: Mapping[str, HospitalResult]) -> dict[str, object]:
    """Write what each hospital lets be shown, and how they stand, for machines."""
    return {
        "hospitals": {
            name: {
                "correct": list(found.correct),
                "examples": list(found.examples),
                "balanced_accuracy": macro_mean(c / n if n else None for c, n in zip(found.correct, found.examples)),  # noqa: B905
                "balanced_accuracy_interval": _list(intervals.mean_of_shares(found.correct, found.examples)),
                "clinical": found.clinical and intervals.facts(found.clinical),
            }
            for name, found in sorted(results.items())
        },
        "standing": standing(results).facts(),
    }


def _list(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)
