"""The exact grid on which bundles are summed.

A value v becomes the integer rint(v * 2^f); integers are added, so the sum does not depend on the order of arrival,
needs one accumulator, and a masked and a plain run on the same grid agree to the last bit. Per segment s (a part's
totals, or its weight) with bound B_s, for at most n silos,

    f_s = floor(log2((2^(w-1) - 1) / (n * B_s)))        w = 64 (`ring64`, plain runs) or 32 (`ring32`, masked runs)

so n values inside their bound never overflow. Values outside it are clipped, counted and reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_core.blockwise.lazy_tensors import Deferred, Filler, Numbers
from fl_core.blockwise.parallel import BLOCK
from fl_core.errors import ConfigError, ProtocolError
from fl_core.types.values import Bundle, Layout, Part, PartSpec

RING64_BOUND = 2.0**24
"""Bound of every segment of a plain run: weight times value of one silo, 16.7 million."""

_FLOAT32_BITS = 64
"""Fractional bits below which a value is scaled in float32."""

Ring = Literal["ring64", "ring32"]
_Floats = NDArray[np.float32] | NDArray[np.float64]


class Reach(NamedTuple):
    """How far numbers reach: the largest magnitude, and how many are beyond their bound."""

    most: float
    outside: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The public grid of a run, frozen in its manifest.

    bounds: segment -> B_s, where a segment is a part's name or "<part>.weight"; a segment that is not named takes
    2^24 on ring64 and is an error on ring32, which has no room to spare.
    """

    ring: Ring = "ring64"
    n_max: int = 1
    bounds: Mapping[str, float] = field(default_factory=dict)

    def bound(self, segment: str) -> float:
        """Return B_s, rounded down to what the grid can hold."""
        if segment in self.bounds:
            return self.bounds[segment]
        if self.ring == "ring32":
            raise ConfigError("E-CFG-06", f"ring32 needs a bound for {segment!r}; it has bounds for {[*self.bounds]}")
        return RING64_BOUND

    def frac_bits(self, segment: str) -> int:
        """Return f_s; raises ConfigError (E-CFG-06) when a bound leaves no resolution at all."""
        return _frac_bits(self.ring, self.n_max, self.bound(segment))

    def encode(self, segment: str, value: Tensor) -> tuple[Tensor, int]:
        """Put a float tensor on the grid: int64 units of 2^-f and the number of values that were clipped.

        Raises ProtocolError (E-WIRE-05) when a value is NaN or infinite: one such value would poison the sum.
        """
        units = torch.empty(value.shape, dtype=torch.int64)
        clipped = self.add(segment, value, units, anew=True)
        return units.to(value.device), clipped

    def add(self, segment: str, value: Tensor, into: Tensor, anew: bool = False) -> int:
        """Add a float tensor to a contiguous int64 sum of its shape and return the number of values that were clipped.

        Equals `into += encode(value)`, in blocks that stay in the processor's cache, so without a copy of either.
        anew: begin the sum, whatever `into` holds, a CPU tensor.
        Raises ProtocolError (E-WIRE-05) as `encode`, in the middle: `look` before what must not be left half-done.
        """
        sums, done, clipped = into.view(-1).numpy(), 0, 0
        for units, outside in self._units(segment, value):
            block = sums[done : done + len(units)]
            if anew:
                np.copyto(block, units, casting="unsafe")
            else:
                np.add(block, units, out=block, dtype=np.int64, casting="unsafe")
            done, clipped = done + len(units), clipped + outside
        return clipped

    def look(self, segment: str, block: Numbers) -> Reach:
        """Say how far floats reach. Raises ProtocolError (E-WIRE-05) as `add`."""
        return _reach(segment, block, self.bound(segment))

    def within(self, segment: str, low: float, high: float) -> Reach | None:
        """Say as `look` how far floats reach whose extremes are known; None where one is to be refused or clipped."""
        most = max(-low, high)
        return Reach(most, 0) if most <= self.bound(segment) and low <= high else None

    def scaling(self, segment: str) -> np.float32 | None:
        """Return 2^f where a float32 inside the bound is scaled in float32: it stays below 2^63, and so does 2^f.

        rint(v * 2^f) has no other error than rint's then: a power of two scales exactly.
        """
        bits = self.frac_bits(segment)
        return np.float32(2.0**bits) if bits < _FLOAT32_BITS else None

    def _units(self, segment: str, value: Tensor) -> Iterator[tuple[_Floats, int]]:
        """Give a tensor's units block by block, still as floats, and how many of them were clipped.

        A block is good until the next one. NumPy, since it takes less time for this than torch (`benchmarks.round_trip.
        arithmetic`), most of all to make integers.
        """
        bound, bits, x = self.bound(segment), self.frac_bits(segment), flat(value)
        factor = np.float64(2.0**bits) if x.dtype == np.float64 else self.scaling(segment)
        room = np.empty(min(BLOCK, len(x)), x.dtype)
        for at in range(0, len(x), BLOCK):
            block = x[at : at + BLOCK]
            outside = _reach(segment, block, bound).outside
            if factor is not None and not outside:
                scaled = np.multiply(block, factor, out=room[: len(block)])
            else:
                scaled = block.astype(np.float64).clip(-bound, bound) * 2.0**bits
            np.rint(scaled, out=scaled)
            if outside:
                limit = float(math.floor(bound * 2.0**bits))
                scaled.clip(-limit, limit, out=scaled)
            yield scaled, outside

    def decode(self, segment: str, units: Tensor) -> Tensor:
        """Turn a sum of units back into float64; ring32 sums are read modulo 2^32 as signed integers."""
        if self.ring == "ring32":
            units = torch.remainder(units + 2**31, 2**32) - 2**31
        return units.double().mul_(2.0 ** -self.frac_bits(segment))


def flat(value: Tensor) -> Numbers:
    """Read a tensor as a flat array, without a copy where it can; floats that NumPy does not know as float64."""
    return (value if flat_as_it_is(value.dtype) else value.double()).detach().reshape(-1).cpu().numpy()


def flat_as_it_is(dtype: torch.dtype) -> bool:
    """Tell whether `flat` keeps a type of numbers."""
    return not dtype.is_floating_point or dtype in (torch.float32, torch.float64)


def _reach(segment: str, block: _Floats, bound: float) -> Reach:
    """Look at a block. Raises ProtocolError (E-WIRE-05) on a number that is not finite."""
    low, high = float(np.minimum.reduce(block)), float(np.maximum.reduce(block))  # NaN in any place makes both NaN
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ProtocolError("E-WIRE-05", f"expected finite numbers in {segment!r}, found NaN or infinity")
    most = max(-low, high)
    return Reach(most, 0 if most <= bound else int(np.count_nonzero(np.abs(block.astype(np.float64)) > bound)))


@cache
def _frac_bits(ring: Ring, n_max: int, bound: float) -> int:
    top, exact = 2 ** (63 if ring == "ring64" else 31) - 1, Fraction(bound)
    bits = math.floor(math.log2(top / (n_max * exact)))
    if n_max * math.ceil(exact * Fraction(2) ** bits) > top:  # log2 rounds, and so does the value at the bound
        bits -= 1
    if bits < 0:
        raise ConfigError("E-CFG-06", f"{ring} cannot hold {n_max} silos with bound {bound}")
    return bits


class Units(Deferred):
    """Sums in integer units."""

    def dtype_of(self, name: str) -> torch.dtype:  # noqa: ARG002
        """Name the type of all numbers."""
        return torch.int64

    def floats(self, name: str) -> Filler:
        """Give what writes units in float64."""
        return in_float64(self.filler(name))


def in_float64(integers: Filler) -> Filler:
    """Give what writes numbers in float64 that are made as int64."""

    def fill(start: int, out: Numbers) -> None:
        units = np.empty(len(out), np.int64)
        integers(start, units)
        np.copyto(out, units)

    return fill


class Decoded(Deferred):
    """Sums in integer units, read as float64."""

    def __init__(self, units: Units, grid: Grid, segment: str) -> None:
        super().__init__(units.shapes)
        self._units, self._grid, self._segment = units, grid, segment

    def dtype_of(self, name: str) -> torch.dtype:  # noqa: ARG002
        """Name the type of all numbers."""
        return torch.float64

    def filler(self, name: str) -> Filler:
        """Decode."""
        if self._grid.ring == "ring64":
            floats, unit = self._units.floats(name), 2.0 ** -self._grid.frac_bits(self._segment)

            def fill(start: int, out: Numbers) -> None:
                floats(start, out)
                np.multiply(out, unit, out=out)

            return fill
        integers = self._units.filler(name)

        def decode(start: int, out: Numbers) -> None:
            units = torch.empty(len(out), dtype=torch.int64)
            integers(start, units.numpy())
            np.copyto(out, self._grid.decode(self._segment, units).numpy())

        return decode

    def quotients(self, name: str, divisor: float) -> Filler:
        """Decode and divide in one step: a power of two scales exactly, so the quotient has the same bits."""
        units = divisor * 2.0 ** self._grid.frac_bits(self._segment)
        if self._grid.ring != "ring64" or not math.isfinite(units):
            return super().quotients(name, divisor)
        floats = self._units.floats(name)

        def fill(start: int, out: Numbers) -> None:
            floats(start, out)
            np.divide(out, units, out=out)

        return fill


class FixedPoint:
    """The guard that encodes: at the silo when a mask follows, on arrival in a plain run."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.clipped = 0

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:  # noqa: ARG002
        """Put every part on the grid."""
        return {name: self._encode(name, part) for name, part in bundle.items()}

    def _encode(self, name: str, part: Part) -> Part:
        total = {key: self._units(name, value) for key, value in part.total.items()}
        return Part(total, self._units(f"{name}.weight", part.weight))

    def _units(self, segment: str, value: Tensor) -> Tensor:
        """Encode floats; integers are on the grid already, where noise was added on it."""
        if not value.is_floating_point():
            return value
        units, clipped = self.grid.encode(segment, value)
        self.clipped += clipped
        return units

    def incoming(self, total: Bundle, cohort: int, round: int) -> Bundle:  # noqa: ARG002
        """Read the sum back as float64; what is deferred stays so."""
        return {name: self._decode(name, part) for name, part in total.items()}

    def _decode(self, name: str, part: Part) -> Part:
        weight = self.grid.decode(f"{name}.weight", part.weight)
        if isinstance(part.total, Units):
            return Part(Decoded(part.total, self.grid, name), weight)
        return Part({key: self.grid.decode(name, v) for key, v in part.total.items()}, weight)

    def sensitivity(self) -> Mapping[str, float]:
        """Report none: coding is no privacy mechanism."""
        return {}


def check_layout(bundle: Bundle, layout: Layout) -> None:
    """Raise ProtocolError (E-WIRE-02) unless the bundle has exactly the parts, names and shapes of the layout."""
    if set(bundle) != set(layout):
        raise ProtocolError("E-WIRE-02", f"expected the parts {sorted(layout)}, found {sorted(bundle)}")
    for name, part in bundle.items():
        if (found := PartSpec.of(part)) != layout[name]:
            raise ProtocolError("E-WIRE-02", f"part {name!r}: expected {layout[name]}, found {found}")
