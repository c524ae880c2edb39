"""Sums of many tensors on the exact grid: small ones in one row, large ones block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_core.aggregation.fixed_point import Grid, Reach, flat, flat_as_it_is, in_float64
from fl_core.blockwise.buffer_pool import MEMORY
from fl_core.blockwise.lazy_tensors import Deferred, Filler, Numbers, Shapes, block_by_block, numpy_type
from fl_core.blockwise.parallel import PIECE
from fl_core.types.values import Bundle

WAITING = 1 << 30
"""Bytes of a round's bundles that wait on a disk, whose pages the system may keep."""
_EXACT = 2.0**53
"""Below it every integer is a float64."""

Place = tuple[str, str | None]
"""Part and tensor; None: the part's weight."""
Lender = Callable[[int, Numbers], Numbers]
"""Gives numbers of one tensor, from the one at a place on: where they lie, or in an array that has room for as many."""


def _numbers(bundle: Bundle, places: Collection[Place]) -> dict[Place, Numbers]:
    """Read tensors as flat arrays; of a file that takes a third of the time of tensors."""
    parts = {name: bundle[name] for name in {name for name, _ in places}}
    waiting = {name: part.total for name, part in parts.items() if isinstance(part.total, Deferred)}
    found = dict[Place, Numbers]()
    for place in places:
        name, key = place
        if key is None:
            found[place] = flat(parts[name].weight)
        elif (total := waiting.get(name)) is not None and flat_as_it_is(total.dtype_of(key)):
            found[place] = total.numbers(key)
        else:
            found[place] = flat(parts[name].total[key])
    return found


def _segment(place: Place) -> str:
    name, key = place
    return f"{name}.weight" if key is None else name


class Row:
    """The sum of small tensors, which lie one after the other: what they cost is in the calls."""

    def __init__(self, shapes: Mapping[Place, tuple[int, ...]], grid: Grid) -> None:
        sizes = [math.prod(shape) for shape in shapes.values()]
        self._grid = grid
        self._row = torch.zeros(sum(sizes), dtype=torch.int64)
        parts = torch.split(self._row, sizes) if sizes else ()
        self.sums = {place: part.view(shape) for (place, shape), part in zip(shapes.items(), parts, strict=True)}

    def units(self, bundle: Bundle) -> tuple[Tensor, int]:
        """Put a bundle's small tensors on the grid, and count the values that were clipped; raises as `Grid.encode`."""
        values = _numbers(bundle, self.sums)
        kinds = {(_segment(place), value.dtype) for place, value in values.items()}
        alike = {(self._grid.bound(segment), dtype) for segment, dtype in kinds}
        if len(alike) == 1 and all(dtype.kind == "f" for _, dtype in alike):
            row = np.concatenate(list(values.values()))
            if np.isfinite(row).all():  # else the one that is not wants its own name
                return self._grid.encode(_segment(next(iter(values))), torch.from_numpy(row))
        found = [
            self._grid.encode(_segment(place), torch.from_numpy(value))
            if value.dtype.kind == "f"
            else (torch.from_numpy(value).long(), 0)
            for place, value in values.items()
        ]
        return torch.cat([units for units, _ in found]) if found else self._row, sum(clipped for _, clipped in found)

    def add(self, units: Tensor) -> None:
        """Add what `units` made."""
        self._row += units


class Looked:
    """The large tensors of a bundle that is looked at.

    reach: of each a bound of its units, infinite where they need integers   waits: whether it lies on a disk
    Raises TypeError on numbers in a file of a type that NumPy does not know; receiving one was refused (E-WIRE-16).
    """

    def __init__(self, bundle: Bundle, shapes: Shapes[Place]) -> None:
        self.reach = dict.fromkeys(shapes, 0.0)
        self.clipped = 0
        totals = {place: bundle[place[0]].total for place in shapes}
        self._deferred = {place: total for place, total in totals.items() if isinstance(total, Deferred)}
        self._here = _numbers(bundle, [place for place in shapes if place not in self._deferred])
        self.waits = not self._here
        self.nbytes = sum(math.prod(shape) * self.dtype(place).itemsize for place, shape in shapes.items())

    def dtype(self, place: Place) -> np.dtype[Any]:
        """Name the type of a tensor's numbers."""
        if place in self._here:
            return self._here[place].dtype
        return numpy_type(self._deferred[place].dtype_of(str(place[1])))

    def extremes(self, place: Place) -> tuple[float, float] | None:
        """Give the smallest and the largest number where they are known."""
        return None if place in self._here else self._deferred[place].extremes(str(place[1]))

    def lender(self, place: Place) -> Lender:
        """Give what reads a tensor block by block."""
        if (here := self._here.get(place)) is not None:
            return lambda start, room: here[start : start + len(room)]
        fill = self._deferred[place].filler(str(place[1]))

        def read(start: int, room: Numbers) -> Numbers:
            fill(start, room)
            return room

        return read


class Large:
    """The sum of large tensors: what has been added up, and the last few bundles, which are not yet.

    A bundle on a disk waits and is read again with others, up to WAITING bytes of them: adding several takes little
    more than adding one. While all units are below 2^53 in magnitude, sums of them are exact in float64 too, which
    takes half the time of making integers of each bundle's.
    """

    def __init__(self, shapes: Shapes[Place], grid: Grid) -> None:
        self._shapes = shapes
        self._grid = grid
        self._sums: dict[Place, Tensor] = {}
        self._waiting: list[Looked] = []
        self._reach = dict.fromkeys(shapes, 0.0)

    def look(self, bundle: Bundle) -> Looked:
        """Read a bundle for `add`, as far as its extremes are not known; raises as `Grid.look`."""
        seen = Looked(bundle, self._shapes)
        found = [(place, known) for place in self._shapes if (known := self._known(seen, place)) is not None]
        unknown = {place: self._shapes[place] for place in self._shapes.keys() - {place for place, _ in found}}
        lenders = {place: (seen.lender(place), seen.dtype(place)) for place in unknown}

        def look(place: Place, at: int, end: int) -> None:
            lend, dtype = lenders[place]
            block = lend(at, np.empty(end - at, dtype))
            whole = block.dtype.kind != "f"
            found.append((place, Reach(math.inf, 0) if whole else self._grid.look(_segment(place), block)))

        block_by_block(unknown, look, PIECE)
        for place, (most, outside) in found:
            factor, floats = self._grid.scaling(_segment(place)), seen.dtype(place) == np.float32
            exact = factor is not None and floats and not outside  # what is clipped is clipped as integers
            seen.reach[place] = max(seen.reach[place], float(factor) * most + 1 if exact and factor else math.inf)
            seen.clipped += outside
        return seen

    def _known(self, seen: Looked, place: Place) -> Reach | None:
        extremes = seen.extremes(place)
        return None if extremes is None else self._grid.within(_segment(place), *extremes)

    def add(self, bundle: Looked) -> None:
        """Add a bundle that was looked at, or let it wait with others."""
        self._waiting.append(bundle)
        self._reach = {place: reach + bundle.reach[place] for place, reach in self._reach.items()}
        if bundle.waits and sum(waiting.nbytes for waiting in self._waiting) <= WAITING:
            return
        anew = not self._sums
        if anew:  # here and not before: a round's silos are at work by now, and do not wait for it
            self._sums = {place: MEMORY.empty((math.prod(s),), torch.int64) for place, s in self._shapes.items()}
        sums = {place: (self._adder(place, anew), into.numpy()) for place, into in self._sums.items()}

        def work(place: Place, at: int, end: int) -> None:
            add, into = sums[place]
            add(at, into[at:end])

        block_by_block(self._shapes, work)
        self._waiting.clear()

    def filler(self, place: Place) -> Filler:
        """Give what writes the sum of everything so far as int64."""
        add = self._adder(place, anew=not self._sums)
        if not self._sums:
            return add
        sums = self._sums[place].numpy()

        def fill(start: int, out: Numbers) -> None:
            np.copyto(out, sums[start : start + len(out)])
            add(start, out)

        return fill

    def floats(self, place: Place) -> Filler:
        """Give what writes the sum of everything so far as float64: the one next to the exact sum."""
        if self._waiting and not self._sums and self._reach[place] < _EXACT:
            return self._exact(place)
        return in_float64(self.filler(place))

    def _adder(self, place: Place, anew: bool) -> Filler:
        """Give what adds all that waits to int64. anew: whatever is there."""
        if self._waiting and self._reach[place] < _EXACT:
            exact = self._exact(place)

            def add(start: int, into: Numbers) -> None:
                floats = np.empty(len(into))
                exact(start, floats)
                if anew:
                    np.copyto(into, floats, casting="unsafe")
                else:
                    np.add(into, floats, out=into, dtype=np.int64, casting="unsafe")

            return add
        segment, waiting = _segment(place), [(bundle.lender(place), bundle.dtype(place)) for bundle in self._waiting]

        def add_each(start: int, into: Numbers) -> None:
            if anew:
                into.fill(0)
            sums = torch.from_numpy(into)
            for lend, dtype in waiting:
                block = lend(start, np.empty(len(into), dtype))
                if block.dtype.kind == "f":
                    self._grid.add(segment, torch.from_numpy(block), sums)
                else:
                    np.add(into, block, out=into)

        return add_each

    def _exact(self, place: Place) -> Filler:
        """Give what writes the sum of all that waits as float64: of float32 tensors whose reach is below 2^53."""
        factor, waiting = self._grid.scaling(_segment(place)), [bundle.lender(place) for bundle in self._waiting]
        assert factor is not None

        def fill(start: int, out: Numbers) -> None:
            scaled = np.empty(len(out), np.float32)
            for i, lend in enumerate(waiting):
                np.multiply(lend(start, scaled), factor, out=scaled)
                np.rint(scaled, out=scaled)
                if i:
                    np.add(out, scaled, out=out)  # a float64 of each would no longer fit the cache beside these
                else:
                    np.add(scaled, 0.0, out=out)  # not -0.0, which integers do not have

        return fill
