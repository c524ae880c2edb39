"""The sum of a round's updates in the fixed-point format: one, whatever the number of silos and their order."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from fl_core.aggregation.fixed_point import FixedPointFormat, check_finite, check_layout
from fl_core.types.values import Bundle, Layout, Part, PartSpec

BLOCK = 1 << 15
"""Numbers that are encoded at a time, so that what is computed on the way stays in the processor's cache."""


class Aggregator:
    """One exact sum over the updates of a round; each is added on arrival and not kept.

    unsummed: parts that are kept one by one, for methods that must see them.

    Guarantees: the same updates in any order give the same bytes. Memory is the sum, one tensor of one update, and what
    is kept one by one, whatever the number of silos.
    """

    def __init__(self, layout: Layout, grid: FixedPointFormat, unsummed: Collection[str] = ()) -> None:
        self.layout = layout
        self.grid = grid
        self.clipped = 0
        self.count = 0
        self._sums = {name: _zeros(spec) for name, spec in layout.items() if name not in unsummed}
        self._unsummed: dict[str, dict[int, Part]] = {name: {} for name in layout if name in unsummed}

    def validate(self, update: Bundle) -> None:
        """Check that an update can be added.

        Raises ProtocolError: E-WIRE-06 on another layout or a file that cannot be read, E-WIRE-05 on a number that is
        not finite.
        """
        check_layout(update, self.layout)
        for name, part in update.items():
            for segment, value in (*((name, part.total[key]) for key in part.total), (f"{name}.weight", part.weight)):
                for block in _blocks(value):
                    check_finite(segment, block)

    def add(self, update: Bundle, silo: int = 0) -> None:
        """Add an update that `validate` has accepted; floats are encoded here, integers are encoded already.

        silo: its index in the roster, the order of what is kept one by one.
        Raises ProtocolError (E-WIRE-06) where a file can no longer be read: the sum is then unusable.
        """
        for name, part in update.items():
            if name in self._unsummed:
                sums = self._unsummed[name][silo] = _zeros(self.layout[name])
            else:
                sums = self._sums[name]
            for key, into in sums.total.items():
                self._add(name, part.total[key], into)
            self._add(f"{name}.weight", part.weight, sums.weight)
        self.count += 1

    def _add(self, segment: str, value: Tensor, into: Tensor) -> None:
        for block, sums in zip(_blocks(value), _blocks(into), strict=True):
            units, clipped = self.grid.encode(segment, block)
            sums += units.cpu()
            self.clipped += clipped

    def total(self) -> Bundle:
        """Return the sum so far in integer units, which later updates change; unsummed parts stacked by roster."""
        total = dict(self._sums)
        for name, kept in self._unsummed.items():
            parts, empty = [kept[silo] for silo in sorted(kept)], _zeros(self.layout[name])
            total[name] = Part(
                {key: _stack([part.total[key] for part in parts], zero) for key, zero in empty.total.items()},
                _stack([part.weight for part in parts], empty.weight),
            )
        return total


def _zeros(spec: PartSpec) -> Part:
    zeros = {key: torch.zeros(shape, dtype=torch.int64) for key, shape in spec.shapes.items()}
    return Part(zeros, torch.zeros(spec.weight_shape, dtype=torch.int64))


def _blocks(value: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(value.detach().reshape(-1), BLOCK))


def _stack(values: list[Tensor], zero: Tensor) -> Tensor:
    return torch.stack(values) if values else zero.new_zeros((0, *zero.shape))
