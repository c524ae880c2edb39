"""The exact grid on which bundles are summed.

A value v becomes the integer rint(v * 2^f); integers are added, so the sum does not depend on the order of arrival,
needs one accumulator, and a masked and a plain run on the same grid agree to the last bit. Per segment s (a part's
totals, its batch norm statistics if they have a separate bound, or its weight) with bound B_s, for at most n silos,

f_s = floor(log2((2^(w-1) - 1) / (n * B_s)))        w = 64 (`ring64`, plain runs) or 32 (`ring32`, masked runs)

so n values within their bound never overflow; f_s is negative if B_s is larger than the ring. Values outside their
bound are clipped, counted and reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from fl_core import validate
from fl_core.errors import ConfigError, ProtocolError
from fl_core.types.values import Bundle, Layout, PartSpec

if TYPE_CHECKING:  # manifests name grids without computing on them
    from torch import Tensor

RING64_BOUND = 2.0**24
"""Bound of every segment of a plain run: weight times value of one silo, 16.7 million."""

BUFFERS = ("running_mean", "running_var")
"""Endings of the names of batch norm's statistics in any model."""
Ring = Literal["ring64", "ring32"]
_BOUNDS = (2.0**-64, 2.0**64)
_LEAST_BITS = 16
"""Minimum bits of a value below its bound, without the sign: coarser grids are refused."""


@dataclass(frozen=True, slots=True)
class FixedPointFormat:
    """The public grid of a run, frozen in its manifest.

    bounds: segment -> B_s. A segment is a part's name, "<part>.weight", or "<part>.buffers" for its batch norm
    statistics; without this entry they belong to the part's own segment. Segments without an entry have the bound 2^24
    on ring64, and are an error on ring32, which has too few bits.
    """

    ring: Ring = "ring64"
    n_max: int = 1
    bounds: Mapping[str, float] = field(default_factory=dict)

    def check(self, silos: int) -> None:
        """Raise ConfigError (E-CFG-02) if sums of this number of silos do not fit on the grid."""
        if self.n_max < silos:
            raise ConfigError(
                "E-CFG-02", f"expected a grid for {silos} silos, found one for {self.n_max}: make another"
            )
        for segment, bound in self.bounds.items():
            validate.between("E-CFG-02", "grid.bounds", *_BOUNDS, **{segment: bound})
            self.frac_bits(segment)

    def segment(self, part: str, key: str | None) -> str:
        """Return the segment of one of a part's tensors; None: of its weight."""
        if key is None:
            return f"{part}.weight"
        buffers = f"{part}.buffers"
        return buffers if key.endswith(BUFFERS) and buffers in self.bounds else part

    def bound(self, segment: str) -> float:
        """Return B_s, rounded down to what the grid can represent."""
        if segment in self.bounds:
            return self.bounds[segment]
        if self.ring == "ring32":
            raise ConfigError("E-CFG-08", f"ring32 needs a bound for {segment!r}; it has bounds for {[*self.bounds]}")
        return RING64_BOUND

    def frac_bits(self, segment: str) -> int:
        """Return f_s, negative if units are larger than 1; raises ConfigError (E-CFG-08) for too many silos."""
        return _frac_bits(self.ring, self.n_max, self.bound(segment))

    def encode(self, segment: str, value: Tensor) -> tuple[Tensor, int]:
        """Encode floats as int64 units of 2^-f; also return the number of clipped values. Integers are units already.

        Raises ProtocolError (E-WIRE-05) on NaN or infinity: one such value would spoil the sum.
        """
        from fl_core.tensors import torch
        from fl_core.types.tensor_maps import as_numpy

        if not value.is_floating_point():
            return value, 0
        # NumPy, since torch's threads would wait for each other on busy cores, much longer than a step takes.
        bound, scale, exact = self.bound(segment), 2.0 ** self.frac_bits(segment), as_numpy(value).astype(np.float64)
        clipped = 0
        if not (exact.min(initial=0.0) >= -bound and exact.max(initial=0.0) <= bound):  # or NaN
            if not np.isfinite(exact).all():
                raise ProtocolError("E-WIRE-05", f"expected finite numbers in {segment!r}, found NaN or infinity")
            outside, top = np.abs(exact) > bound, float(math.floor(bound * scale)) / scale
            exact, clipped = np.where(outside, np.copysign(top, exact), exact), int(np.count_nonzero(outside))
        exact *= scale  # in place, as below: allocating memory would take most of the time
        np.rint(exact, out=exact)
        return torch.from_numpy(exact.astype(np.int64)).to(value.device), clipped

    def decode(self, segment: str, units: Tensor) -> Tensor:
        """Turn a sum of units back into float64; ring32 sums are read modulo 2^32 as signed integers."""
        if self.ring == "ring32":
            units = (units + 2**31) % 2**32 - 2**31
        return units.double().mul_(2.0 ** -self.frac_bits(segment))


@cache
def _frac_bits(ring: Ring, n_max: int, bound: float) -> int:
    top, exact = 2 ** (63 if ring == "ring64" else 31) - 1, Fraction(bound)
    bits = math.floor(math.log2(top / (n_max * exact)))
    if n_max * math.ceil(exact * Fraction(2) ** bits) > top:  # log2 rounds, and so does the value at the bound
        bits -= 1
    if exact * Fraction(2) ** bits < 2**_LEAST_BITS:
        raise ConfigError("E-CFG-08", f"{ring} cannot hold {n_max} silos with bound {bound}: use fewer, or ring64")
    return bits


def check_layout(bundle: Bundle, layout: Layout) -> None:
    """Raise ProtocolError (E-WIRE-06) unless the bundle has exactly the parts, names and shapes of the layout."""
    if set(bundle) != set(layout):
        raise ProtocolError("E-WIRE-06", f"expected the parts {sorted(layout)}, found {sorted(bundle)}")
    for name, part in bundle.items():
        if (spec := PartSpec.of(part)) != layout[name]:
            raise ProtocolError("E-WIRE-06", f"part {name!r}: expected {layout[name]}, found {spec}")
