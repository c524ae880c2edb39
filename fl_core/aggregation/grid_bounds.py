"""Bounds of a masked run's grid, computed when the run is created. On ring32 every number needs a bound.

| segment                                          | bound                                                   |
|--------------------------------------------------|---------------------------------------------------------|
| weights that count examples, and other counts    | the largest declared size, and 13.5 std of its noise    |
| answers about several labels at once             | the largest declared size x the number of labels        |
| weights that count once; accuracies of models    | 1                                                       |
| weights that the method makes                    | e, or the largest declared size                         |
| differences, control variates, heads             | 4 x the bound of the weight                             |
| `<part>.buffers`, statistics of batch norm       | 4,096 x the bound of the weight                         |
| sums per class                                   | 64, or the plan's bound of a feature, x that of the     |
|                                                  | weight, and 13.5 std of their noise                     |
| optimiser steps                                  | the most that the schedule makes, x that of the weight  |
| vectors that silo-level privacy clips            | the clip, and 13.5 std of the noise                     |

If no silo declares a size, it is a million. The probability of a standard normal number beyond 13.5 is 10^-41.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from fl_core.aggregation.contributor_floor import CENSUS
from fl_core.aggregation.fixed_point import BUFFERS, FixedPointFormat, Ring
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck, most_steps
from fl_core.errors import ConfigError
from fl_core.types.enums import Weighing
from fl_core.types.metric_parts import CLINICAL_PART, GLOBAL_PARTS, METRICS, OWN, PERSONAL_PARTS
from fl_core.types.values import PartSpec

VALUE, STATISTIC, FEATURE = 4.0, 4096.0, 64.0
"""Bounds on mean values of a silo: of a difference, of a batch norm statistic, of one number of a feature."""
UNDECLARED = 2.0**20
NOISE_STDS = 13.5
_WORD = {"ring32": 31, "ring64": 63}


def bounded_grid(
    ring: Ring, silos: int, check: UpdateCheck, largest: DeclaredSize, clipped: Mapping[str, float | None]
) -> FixedPointFormat:
    """Make the grid of a masked run with `silos` silos.

    check: of its updates, with their noise   largest: declared sizes, infinite if none is declared
    clipped: parts whose numbers a guard bounds, with the bound; None if the bound changes.
    Raises ConfigError (E-CFG-08) on a part without a bound on ring32.

    Guarantees: ring64 is the grid of a plain run, so sums are equal to the bit. A census counts in units of 1.
    """
    census = {CENSUS: 2.0 ** (_WORD[ring] - silos.bit_length())}
    if ring == "ring64":
        return FixedPointFormat(ring, silos, census)
    made = _Bounds(check, _size(largest.train), _size(largest.test), clipped)
    bounds = {segment: bound for part, spec in check.layout.items() for segment, bound in made.of(part, spec)}
    return FixedPointFormat(ring, silos, bounds | census)


def _size(declared: float) -> float:
    return declared if declared < math.inf else UNDECLARED


class _Bounds:
    def __init__(self, check: UpdateCheck, train: float, test: float, clipped: Mapping[str, float | None]) -> None:
        self._check, self._train, self._test, self._clipped = check, train, test, clipped

    def of(self, part: str, spec: PartSpec) -> Iterator[tuple[str, float]]:
        """Yield the segments of a part and their bounds."""
        if part in self._clipped:
            if (bound := self._clipped[part]) is None:
                raise _unbounded(part, "the clip follows the norms of updates")
            yield part, bound
            yield f"{part}.weight", bound if spec.weight_shape else 1.0
            return
        weight, noise = self._weight(part, spec)
        value = self._value(part, spec, weight + noise)
        if not weight + noise + value < math.inf:
            raise _unbounded(part, "noise of unknown size is added to it")
        if spec.shapes:
            yield part, value
        yield f"{part}.weight", weight + noise
        if any(key.endswith(BUFFERS) for key in spec.shapes):
            yield f"{part}.buffers", STATISTIC * weight

    def _weight(self, part: str, spec: PartSpec) -> tuple[float, float]:
        """Return the largest weight, and the most that noise adds to it."""
        if part in (*GLOBAL_PARTS, OWN):
            of_labels = part == CLINICAL_PART and self._check.multi_label  # an example counts once for each label
            each = math.prod(self._check.layout[METRICS].weight_shape) if of_labels else 1
            return each * self._test, NOISE_STDS * self._check.noise.get(part, 0.0)
        rule, size = self._check.rule(part, bool(spec.weight_shape)), self._train
        weight = {Weighing.ONCE: 1.0, Weighing.QUALITY: max(size, math.e), Weighing.EXAMPLES: size}[rule.weight]
        rows = self._check.noisy_rows
        noisy = rows is not None and spec.weight_shape and rule.weight is not Weighing.ONCE
        return weight, NOISE_STDS * rows.count if rows is not None and noisy else 0.0

    def _value(self, part: str, spec: PartSpec, weight: float) -> float:
        """Return the largest number in a part's total."""
        if part in (*GLOBAL_PARTS, OWN):
            return weight
        if part in PERSONAL_PARTS:
            return 1.0
        rule, rows, bounds = self._check.rule(part, bool(spec.weight_shape)), self._check.noisy_rows, [0.0]
        for key in spec.shapes:
            if key == rule.steps:
                bounds.append(weight * most_steps(self._check.train, self._train))
            elif key == rule.counts:
                per_class = spec.shapes[key] == self._check.layout[METRICS].weight_shape  # otherwise the declared size
                noise = NOISE_STDS * self._check.noise.get(part, 0.0) if per_class else 0.0
                bounds.append(self._train * (1.0 if rule.weight is Weighing.ONCE else weight) + noise)
            elif spec.weight_shape:
                length, noise = (rows.length, rows.value) if rows is not None else (FEATURE, 0.0)
                bounds.append(length * weight + NOISE_STDS * noise)
            else:
                bounds.append(VALUE * weight)
        return max(bounds)


def _unbounded(part: str, why: str) -> ConfigError:
    return ConfigError(
        "E-CFG-08",
        f"ring32 needs a bound of every masked number, and {part!r} has none: {why}. Set secagg.ring=ring64, which "
        "uses words twice as long",
    )
