"""The sum of a round's bundles on the exact grid: one, whatever the number of silos and their order."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fl_core.deferred import Filler, Numbers
from fl_core.fixed_point import Grid, Units, check_layout
from fl_core.sums import Large, Place, Row
from fl_core.types import Bundle, Layout, Part

SMALL = 1 << 14
"""Numbers up to which a tensor is added at once, together with others; all weights are."""


class Sums(Units):
    """The sums of one part."""

    def __init__(self, name: str, shapes: Mapping[str, tuple[int, ...]], row: Row, large: Large) -> None:
        super().__init__(shapes)
        self._name, self._row, self._large = name, row, large

    def filler(self, name: str) -> Filler:
        """Add up."""
        place = (self._name, name)
        return self._copy(place) if place in self._row.sums else self._large.filler(place)

    def floats(self, name: str) -> Filler:
        """Add up, in float64 where that is exact."""
        place = (self._name, name)
        return self._copy(place) if place in self._row.sums else self._large.floats(place)

    def _copy(self, place: Place) -> Filler:
        small = self._row.sums[place].reshape(-1).numpy()

        def fill(start: int, out: Numbers) -> None:
            out[:] = small[start : start + len(out)]

        return fill


class Accumulator:
    """One exact sum over the bundles of a round, folded on arrival and then forgotten.

    apart: parts that are not summed but kept one by one, for methods that must see them.

    Guarantees: the same bundles in any order give the same bytes; memory is one sum, whatever the number of silos, and
    what is kept apart; a bundle that does not fit the layout, or holds a NaN, changes nothing.
    """

    def __init__(self, layout: Layout, grid: Grid, apart: Collection[str] = ()) -> None:
        self.layout = layout
        self.grid = grid
        self.apart = frozenset(apart)
        self.clipped = 0
        self.count = 0
        small, large = dict[Place, tuple[int, ...]](), dict[Place, tuple[int, ...]]()
        for name, spec in layout.items():
            if name in self.apart:
                continue
            small[name, None] = spec.weight_shape
            for key, shape in spec.shapes.items():
                (small if math.prod(shape) <= SMALL else large)[name, key] = shape
        self._row, self._large = Row(small, grid), Large(large, grid)
        self._single: dict[int, dict[str, Part]] = {}

    def fold(self, bundle: Bundle, place: int = 0) -> None:
        """Add one silo's bundle: float parts are put on the grid here, integer parts are on it already.

        place: the silo's place in the roster, the order of what is kept apart.
        Raises ProtocolError: E-WIRE-02 on another layout, E-WIRE-05 on a number that is not finite.
        """
        check_layout(bundle, self.layout)
        alone, clipped = dict[str, Part](), 0
        for name in self.apart & set(bundle):
            alone[name], outside = self._alone(name, bundle[name])
            clipped += outside
        units, outside = self._row.units(bundle)
        seen = self._large.look(bundle)
        self._row.add(units)  # from here on nothing can fail
        self._large.add(seen)
        self._single[place] = alone
        self.clipped += clipped + outside + seen.clipped
        self.count += 1

    def _alone(self, name: str, part: Part) -> tuple[Part, int]:
        row = Row({(name, key): tuple(v.shape) for key, v in [*part.total.items(), (None, part.weight)]}, self.grid)
        units, clipped = row.units({name: part})
        row.add(units)
        return Part({key: row.sums[name, key] for key in part.total}, row.sums[name, None]), clipped

    def total(self) -> Bundle:
        """Return the sum so far, still in integer units; parts that are kept apart stacked in the roster's order.

        Totals are deferred: what is folded later shows in them.
        """
        summed = {
            name: Part(Sums(name, spec.shapes, self._row, self._large), self._row.sums[name, None])
            for name, spec in self.layout.items()
            if name not in self.apart
        }
        single = [parts for _, parts in sorted(self._single.items())]
        for name in self.apart & set(self.layout):
            spec = self.layout[name]
            summed[name] = Part(
                {
                    key: _stack([parts[name].total[key] for parts in single], shape)
                    for key, shape in spec.shapes.items()
                },
                _stack([p[name].weight for p in single], spec.weight_shape),
            )
        return summed


def _stack(values: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.stack(list(values)) if values else torch.zeros((0, *shape), dtype=torch.int64)
