"""The sum of a round's bundles on the exact grid: one, whatever the number of silos and their order."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_core.aggregation.fixed_point import Grid, Units, check_layout
from fl_core.aggregation.partial_sums import Large, Looked, Place, Row
from fl_core.blockwise.lazy_tensors import Filler, Numbers
from fl_core.types.values import Bundle, Layout, Part

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


@dataclass(frozen=True, slots=True)
class Seen:
    """A bundle that can be added.

    alone: its parts that are kept apart   units: its small tensors in one row   clipped: values that the grid cuts off
    """

    place: int
    alone: Mapping[str, Part]
    units: Tensor
    large: Looked
    clipped: int


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
        self._single: dict[int, Mapping[str, Part]] = {}

    def fold(self, bundle: Bundle, place: int = 0) -> None:
        """Look at one silo's bundle and add it; raises as both do."""
        self.add(self.look(bundle, place))

    def look(self, bundle: Bundle, place: int = 0) -> Seen:
        """Read one silo's bundle for `add`: float parts are put on the grid here, integer parts are on it already.

        place: the silo's place in the roster, the order of what is kept apart.
        Raises ProtocolError: E-WIRE-02 on another layout, E-WIRE-05 on a number that is not finite, E-WIRE-06 on a file
        that cannot be read; nothing has changed then.
        """
        check_layout(bundle, self.layout)
        alone, clipped = dict[str, Part](), 0
        for name in self.apart & set(bundle):
            alone[name], outside = self._alone(name, bundle[name])
            clipped += outside
        units, outside = self._row.units(bundle)
        large = self._large.look(bundle)
        return Seen(place, alone, units, large, clipped + outside + large.clipped)

    def add(self, seen: Seen) -> None:
        """Add a bundle, now or together with later ones, which are read again then.

        Raises ProtocolError (E-WIRE-06) where one of them, and maybe not this one, can no longer be read: there is no
        sum of them any more.
        """
        self._row.add(seen.units)
        self._single[seen.place] = seen.alone
        self.clipped += seen.clipped
        self.count += 1
        self._large.add(seen.large)

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
