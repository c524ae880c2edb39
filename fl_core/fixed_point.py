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
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_core.errors import ConfigError, ProtocolError
from fl_core.pieces import cut, side_by_side
from fl_core.types import BLOCK, Bundle, Layout, Part, PartSpec

RING64_BOUND = 2.0**24
"""Bound of every segment of a plain run: weight times value of one silo, 16.7 million."""

_FLOAT32_BITS = 64
"""Fractional bits below which a value is scaled in float32: it stays below 2^63, and the factor is a float32 too."""

Ring = Literal["ring64", "ring32"]
_Floats = NDArray[np.float32] | NDArray[np.float64]


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
        Raises ProtocolError (E-WIRE-05) as `encode`, and changes nothing then, unless the sum begins.
        """
        sums, done, clipped = into.view(-1).numpy(), 0, 0
        try:
            for units, outside in self._units(segment, value):
                block = sums[done : done + len(units)]
                if anew:
                    np.copyto(block, units, casting="unsafe")
                else:
                    np.add(block, units, out=block, dtype=np.int64, casting="unsafe")
                done, clipped = done + len(units), clipped + outside
        except ProtocolError:
            if not anew:
                self.take_back(segment, value.reshape(-1)[:done], into.view(-1)[:done])
            raise
        return clipped

    def take_back(self, segment: str, value: Tensor, into: Tensor) -> None:
        """Undo `add`, to the last bit: what is added are integers."""
        sums, done = into.view(-1).numpy(), 0
        for units, _ in self._units(segment, value):
            block = sums[done : done + len(units)]
            np.subtract(block, units, out=block, dtype=np.int64, casting="unsafe")
            done += len(units)

    def _units(self, segment: str, value: Tensor) -> Iterator[tuple[_Floats, int]]:
        """Give a tensor's units block by block, still as floats, and how many of them were clipped.

        A block is good until the next one. NumPy, since it takes less time for this than torch (`benchmarks.round_trip.
        arithmetic`), most of all to make integers.
        """
        bound, bits = self.bound(segment), self.frac_bits(segment)
        known = value.dtype in (torch.float32, torch.float64)
        x: _Floats = (value if known else value.double()).detach().reshape(-1).cpu().numpy()
        # A power of two scales exactly, and rint is exact: what neither leaves the bound nor float32 needs no float64.
        exact = bits < _FLOAT32_BITS or x.dtype == np.float64
        room, factor = np.empty(min(BLOCK, len(x)), x.dtype), x.dtype.type(2.0**bits if exact else 0)
        for at in range(0, len(x), BLOCK):
            block, outside = x[at : at + BLOCK], 0
            low, high = float(block.min()), float(block.max())  # NaN in any place makes both NaN
            if not (math.isfinite(low) and math.isfinite(high)):
                raise ProtocolError("E-WIRE-05", f"expected finite numbers in {segment!r}, found NaN or infinity")
            if exact and max(-low, high) <= bound:
                scaled = np.multiply(block, factor, out=room[: len(block)])
            else:
                wide = block.astype(np.float64)
                outside = int(np.count_nonzero(np.abs(wide) > bound))
                scaled = wide.clip(-bound, bound) * 2.0**bits
            np.rint(scaled, out=scaled)
            if outside:
                limit = float(math.floor(bound * 2.0**bits))
                scaled.clip(-limit, limit, out=scaled)
            yield scaled, outside

    def decode(self, segment: str, units: Tensor) -> Tensor:
        """Turn a sum of units back into float64; ring32 sums are read modulo 2^32 as signed integers."""
        return self._floats(units, 2.0 ** -self.frac_bits(segment))

    def _floats(self, units: Tensor, unit: float) -> Tensor:
        if self.ring == "ring32":
            units = torch.remainder(units + 2**31, 2**32) - 2**31
        return units.double().mul_(unit)

    def spend(self, segment: str, units: Tensor) -> None:
        """Write `decode` over a contiguous sum itself, as float64: `units.view(torch.float64)` is the result."""
        unit, room = 2.0 ** -self.frac_bits(segment), np.empty(min(BLOCK, units.numel()))
        for block in torch.split(units.view(-1), BLOCK):
            if self.ring == "ring64":  # a conversion of each number where it lies
                floats = np.multiply(block.numpy(), unit, out=room[: block.numel()])
                block.numpy().view(np.float64)[:] = floats
            else:
                block.view(torch.float64).copy_(self._floats(block, unit))


@cache
def _frac_bits(ring: Ring, n_max: int, bound: float) -> int:
    top, exact = 2 ** (63 if ring == "ring64" else 31) - 1, Fraction(bound)
    bits = math.floor(math.log2(top / (n_max * exact)))
    if n_max * math.ceil(exact * Fraction(2) ** bits) > top:  # log2 rounds, and so does the value at the bound
        bits -= 1
    if bits < 0:
        raise ConfigError("E-CFG-06", f"{ring} cannot hold {n_max} silos with bound {bound}")
    return bits


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
        """Read the sum back as float64, in its own memory: `total` is spent, and a sum is read once."""
        total = {
            name: Part({key: v.contiguous() for key, v in part.total.items()}, part.weight.contiguous())
            for name, part in total.items()
        }
        sums = [(name, v) for name, part in total.items() for v in part.total.values()]
        sums += [(f"{name}.weight", part.weight) for name, part in total.items()]
        side_by_side(
            lambda one: self.grid.spend(*one), [(segment, piece) for segment, v in sums for (piece,) in cut(v)]
        )
        return {
            name: Part({key: v.view(torch.float64) for key, v in part.total.items()}, part.weight.view(torch.float64))
            for name, part in total.items()
        }

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
