"""The sum of a round's bundles on the exact grid: one, whatever the number of silos and their order."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fl_core.buffers import MEMORY
from fl_core.errors import ProtocolError
from fl_core.fixed_point import Grid, check_layout, peak
from fl_core.types import BLOCK, Bundle, Layout, Part


class _Room(NamedTuple):
    """Room for the sum of some parts. row: everything in one row, where it is little; `parts` are views of it then."""

    parts: dict[str, Part]
    row: Tensor | None

    @classmethod
    def of(cls, layout: Layout) -> _Room:
        """Make room, whatever it holds."""
        shapes = [shape for spec in layout.values() for shape in (*spec.shapes.values(), spec.weight_shape)]
        sizes, row = [math.prod(shape) for shape in shapes], None
        if sum(sizes) > BLOCK:
            room = iter([MEMORY.empty(shape, torch.int64) for shape in shapes])
        else:
            row = torch.empty(sum(sizes), dtype=torch.int64)
            room = iter([v.view(shape) for v, shape in zip(torch.split(row, sizes), shapes, strict=True)])
        parts = {
            name: Part({key: next(room) for key in spec.shapes}, weight=next(room)) for name, spec in layout.items()
        }
        return cls(parts, row)


_NOWHERE = _Room({}, None)


class _Step(NamedTuple):
    """One tensor to be added to another."""

    segment: str
    value: Tensor
    into: Tensor
    largest: float


def _steps(bundle: Bundle, room: _Room, grid: Grid) -> list[_Step]:
    """List the additions of a bundle, every tensor looked at; raises ProtocolError (E-WIRE-05) on a NaN."""
    pairs = [
        pair
        for name, into in room.parts.items()
        for pair in (
            *((name, bundle[name].total[key], place) for key, place in into.total.items()),
            (f"{name}.weight", bundle[name].weight, into.weight),
        )
    ]
    if room.row is not None and (whole := _at_once(pairs, room.row, grid)) is not None:
        return [whole]
    return [_Step(*pair, peak(pair[0], pair[1]) if pair[1].is_floating_point() else 0.0) for pair in pairs]


def _at_once(pairs: Sequence[tuple[str, Tensor, Tensor]], row: Tensor, grid: Grid) -> _Step | None:
    """Make the additions of few floats on one grid a single one: what small tensors cost is in the calls.

    None where segments differ in their grids, numbers are on it already, or one is not finite and wants its own name.
    """
    if len({grid.bound(segment) for segment, _, _ in pairs}) != 1:
        return None
    if not all(value.is_floating_point() for _, value, _ in pairs):
        return None
    segment, values = pairs[0][0], torch.cat([value.reshape(-1) for _, value, _ in pairs])
    try:
        return _Step(segment, values, row, peak(segment, values))
    except ProtocolError:
        return None


class Accumulator:
    """One exact sum over the bundles of a round, folded on arrival and then forgotten.

    apart: parts that are not summed but kept one by one, for methods that must see them.

    Guarantees: the same bundles in any order give the same bytes; memory is one sum, whatever the number of silos,
    and what is kept apart; a bundle that does not fit the layout, or holds a NaN, changes nothing.
    """

    def __init__(self, layout: Layout, grid: Grid, apart: Collection[str] = ()) -> None:
        self.layout = layout
        self.grid = grid
        self.apart = frozenset(apart)
        self.clipped = 0
        self.count = 0
        self._single: dict[int, dict[str, Part]] = {}

    @cached_property
    def _sum(self) -> _Room:
        """Make room on first use: a round's silos are at work by then, and do not wait for it.

        It holds nothing until the first bundle is written into it; only `total` must know of a sum without any.
        """
        return _Room.of({name: spec for name, spec in self.layout.items() if name not in self.apart})

    def fold(self, bundle: Bundle, place: int = 0) -> None:
        """Add one silo's bundle: float parts are put on the grid here, integer parts are on it already.

        place: the silo's place in the roster, the order of what is kept apart.
        """
        check_layout(bundle, self.layout)
        alone = _Room.of({name: self.layout[name] for name in self.apart & set(bundle)}) if self.apart else _NOWHERE
        summed, single = _steps(bundle, self._sum, self.grid), _steps(bundle, alone, self.grid)  # before any addition
        for step in summed:
            self._add(step, anew=self.count == 0)
        for step in single:
            self._add(step, anew=True)
        self._single[place] = alone.parts
        self.count += 1

    def _add(self, step: _Step, anew: bool) -> None:
        if step.value.is_floating_point():
            self.clipped += self.grid.add(step.segment, step.value, step.into, anew, step.largest)
        elif anew:
            step.into.copy_(step.value)
        else:
            step.into.add_(step.value)

    def total(self) -> Bundle:
        """Return the sum so far, still in integer units; parts that are kept apart stacked in the roster's order."""
        summed = {name: Part(dict(part.total), part.weight) for name, part in self._sum.parts.items()}
        if not self.count:
            for part in summed.values():
                for value in (*part.total.values(), part.weight):
                    value.zero_()
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
