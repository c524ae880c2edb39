"""The guard that encodes updates on the fixed-point grid, and decodes the sum."""

from __future__ import annotations

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.number_blocks import DecodedSums
from fl_core.tensors import Tensor
from fl_core.types.interfaces import Guard
from fl_core.types.values import Bundle, Part


class FixedPoint(Guard):
    """Encodes updates: at the silo if a mask follows, otherwise on arrival at the coordinator."""

    def __init__(self, grid: FixedPointFormat) -> None:
        self.grid = grid
        self.clipped = 0

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:  # noqa: ARG002
        segment, converted = self.grid.segment, {}
        for name, part in bundle.items():
            total = {key: self._units(segment(name, key), value) for key, value in part.total.items()}
            converted[name] = Part(total, self._units(segment(name, None), part.weight))
        return converted

    def _units(self, segment: str, value: Tensor) -> Tensor:
        units, clipped = self.grid.encode(segment, value)
        self.clipped += clipped
        return units

    def incoming(self, total: Bundle, cohort: int, round: int) -> Bundle:  # noqa: ARG002
        weights = {name: self.grid.decode(self.grid.segment(name, None), part.weight) for name, part in total.items()}
        return {name: Part(DecodedSums(self.grid, name, part.total), weights[name]) for name, part in total.items()}
