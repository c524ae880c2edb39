"""The sum of a round's updates in the fixed-point format, independent of the number of silos and their order."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.number_blocks import Blocks, add_units, blocks, split
from fl_core.tensors import Tensor, torch
from fl_core.types.values import Bundle, Layout, Part, PartSpec

Factors = Mapping[tuple[str, str], "float | Tensor"]
"""(part, tensor) -> factor of its values: one for all, or one per row (C,)."""
NO_FACTORS: Factors = {}


class Aggregator:
    """One exact sum over the updates of a round; each is added on arrival and then dropped.

    unsummed: parts that are kept one by one, for methods that need them.

    Guarantees: the same updates in any order give the same bytes. Memory is needed for the sum, one tensor of one
    update, and the unsummed parts; without unsummed parts it does not grow with the number of silos.
    """

    def __init__(self, layout: Layout, grid: FixedPointFormat, unsummed: Collection[str] = ()) -> None:
        self.layout = layout
        self.grid = grid
        self.clipped = 0
        self._sums = {name: _zeros(spec) for name, spec in layout.items() if name not in unsummed}
        self._unsummed: dict[str, dict[int, Part]] = {name: {} for name in layout if name in unsummed}

    def add(self, update: Bundle, silo: int = 0, factors: Factors = NO_FACTORS) -> None:
        """Add a checked update, or some of its parts. Floats are encoded here; integers are encoded already.

        silo: its index in the roster, which orders unsummed parts   factors: multipliers of tensors
        Raises ProtocolError (E-WIRE-06) if a file can no longer be read; the sum is then unusable.
        """
        for name, part in update.items():
            if name in self._unsummed:
                sums = self._unsummed[name][silo] = _zeros(self.layout[name])
            else:
                sums = self._sums[name]
            for key, into in sums.total.items():
                segment, factor = self.grid.segment(name, key), factors.get((name, key))
                if isinstance(factor, Tensor):  # one per row
                    value = part.total[key].double()
                    rows = factor.reshape(-1, *([1] * (value.dim() - 1)))
                    self._add(segment, split(value * rows), into)
                else:
                    self._add(segment, blocks(part.total, key), into, factor)
            self._add(self.grid.segment(name, None), split(part.weight), sums.weight)

    def add_weight(self, name: str, weight: Tensor) -> None:
        """Add a weight without its values, for aggregators that set the values with `put`."""
        self._add(self.grid.segment(name, None), split(weight), self._sums[name].weight)

    def put(self, name: str, key: str, start: int, units: Tensor) -> None:
        """Set some of a tensor's numbers, in integer units."""
        self._sums[name].total[key].view(-1)[start : start + len(units)] = units

    def _add(self, segment: str, numbers: Blocks, into: Tensor, factor: float | None = None) -> None:
        self.clipped += add_units(self.grid, segment, numbers, into, factor)

    def total(self) -> Bundle:
        """Return the sum so far in integer units; later updates change it. Unsummed parts are stacked by roster."""
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


def _stack(values: list[Tensor], zero: Tensor) -> Tensor:
    return torch.stack(values) if values else zero.new_zeros((0, *zero.shape))
