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
from fl_core.fixed_point import Grid, check_layout
from fl_core.pieces import cut, side_by_side
from fl_core.types import BLOCK, Bundle, Layout, Part

SMALL = BLOCK // 4
"""Numbers up to which a tensor is added together with others."""


class _Room(NamedTuple):
    """Room for the sum of some parts. small: the names of tensors that lie in `row`, one after the other."""

    parts: dict[str, Part]
    small: frozenset[tuple[str, str | None]]
    row: Tensor

    @classmethod
    def of(cls, layout: Layout) -> _Room:
        """Make room, whatever it holds."""
        shapes: dict[tuple[str, str | None], tuple[int, ...]] = {}
        for name, spec in layout.items():
            shapes |= {(name, key): shape for key, shape in spec.shapes.items()} | {(name, None): spec.weight_shape}
        sizes = {which: math.prod(shape) for which, shape in shapes.items() if math.prod(shape) <= SMALL}
        row = torch.empty(sum(sizes.values()), dtype=torch.int64)
        room = dict(zip(sizes, torch.split(row, list(sizes.values())), strict=True)) if sizes else {}
        made = {
            which: room[which].view(shape) if which in room else MEMORY.empty(shape, torch.int64)
            for which, shape in shapes.items()
        }
        parts = {
            name: Part({key: made[name, key] for key in spec.shapes}, weight=made[name, None])
            for name, spec in layout.items()
        }
        return cls(parts, frozenset(sizes), row)


_NOWHERE = _Room.of({})


class _Step(NamedTuple):
    """One tensor to be added to another: floats, which are put on the grid, or integers that are on it."""

    segment: str
    value: Tensor
    into: Tensor

    def add(self, grid: Grid, anew: bool) -> int:
        """Add, and return how many values were clipped. anew: whatever the sum holds."""
        if self.value.is_floating_point():
            return grid.add(self.segment, self.value, self.into, anew)
        if anew:
            self.into.copy_(self.value)
        else:
            self.into.add_(self.value)
        return 0

    def take_back(self, grid: Grid) -> None:
        """Undo `add`, to the last bit."""
        if self.value.is_floating_point():
            grid.take_back(self.segment, self.value, self.into)
        else:
            self.into.sub_(self.value)


def _steps(bundle: Bundle, room: _Room, grid: Grid) -> list[_Step]:
    """List the additions of a bundle: of large tensors in pieces, of small ones as one where that can be."""
    small, large = list[_Step](), list[_Step]()
    for name, into in room.parts.items():
        for key, place in (*into.total.items(), (None, into.weight)):
            value = bundle[name].weight if key is None else bundle[name].total[key]
            step = _Step(f"{name}.weight" if key is None else name, value, place)
            (small if (name, key) in room.small else large).append(step)
    pieces = [_Step(step.segment, value, into) for step in large for value, into in cut(step.value, step.into)]
    whole = _at_once(small, room.row, grid)
    return [*pieces, *(small if whole is None else [whole])]


def _at_once(steps: Sequence[_Step], row: Tensor, grid: Grid) -> _Step | None:
    """Make the additions of few floats on one grid a single one: what small tensors cost is in the calls.

    None where segments differ in their grids, numbers are on it already, or one is not finite and wants its own name.
    """
    if len({(grid.bound(step.segment), step.value.dtype) for step in steps}) != 1:
        return None
    if not steps[0].value.is_floating_point():
        return None
    values = torch.cat([step.value.reshape(-1) for step in steps])
    return _Step(steps[0].segment, values, row) if torch.isfinite(values).all() else None


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
        clipped = sum(step.add(self.grid, anew=True) for step in _steps(bundle, alone, self.grid))
        clipped += self._sum_up(_steps(bundle, self._sum, self.grid))
        self._single[place] = alone.parts
        self.clipped += clipped
        self.count += 1

    def _sum_up(self, steps: Sequence[_Step]) -> int:
        """Add all or nothing, and return how many values were clipped."""
        anew, added = self.count == 0, list[tuple[_Step, int]]()
        try:
            side_by_side(lambda step: added.append((step, step.add(self.grid, anew))), steps)
        except ProtocolError:
            if not anew:  # else the sum holds nothing yet
                for step, _ in added:
                    step.take_back(self.grid)
            raise
        return sum(clipped for _, clipped in added)

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
