"""Aggregators that do not add: coordinate-wise median and trimmed mean, and geometric median.

All updates of a round are read tensor by tensor, from their files or from memory, so that one tensor of each is in
memory at once. Weights are added as usual. The values become the aggregate of the silos' means, times the sum of
weights, since `merge` divides by it. Silos count equally in the median and the trimmed mean, and by weight in the
geometric median.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.options import GeometricMedian, Median, TrimmedMean
from fl_core.aggregation.round_sum import AggregationDecision, RoundSum
from fl_core.aggregation.update_check import UpdateCheck, UpdateNorms
from fl_core.errors import ConfigError
from fl_core.tensors import torch
from fl_core.types.computed_tensors import BLOCK
from fl_core.types.interfaces import Method
from fl_core.types.metric_parts import METRIC_PARTS
from fl_core.types.values import Bundle, Layout

Values = NDArray[np.float64]
_MAX_UNITS = 2.0**62


def check_supported(method: Method, layout: Layout, aggregator: str) -> None:
    """Raise ConfigError (E-CFG-08) if a method's server needs sums, or has parts with a weight per class."""
    values = {name: spec for name, spec in layout.items() if name not in METRIC_PARTS}
    rules = method.part_rules
    why = ""
    if method.unsummed_parts:
        why = f"its server needs each hospital's {', '.join(sorted(method.unsummed_parts))} separately"
    elif method.server_tracks_state or any(rules[name].counts for name in values if name in rules):
        why = "its server keeps sums over silos"
    elif rows := sorted(name for name, spec in values.items() if spec.weight_shape):
        why = f"{', '.join(rows)} are weighted by class"
    if why:
        raise ConfigError(
            "E-CFG-08", f"method {method.name} cannot be used with aggregator={aggregator}: {why}; use norm_clipped"
        )


class CoordinatewiseSum(RoundSum):
    """A round's coordinate-wise or distance-based aggregate; updates wait until all have arrived.

    Guarantees: the result depends only on the set of updates; the weight of a part is the sum of its silos' weights.
    """

    def __init__(self, sums: Aggregator, check: UpdateCheck, options: Median | TrimmedMean | GeometricMedian) -> None:
        super().__init__(sums, check)
        self._options = options
        self._updates: dict[int, Bundle] = {}

    def add(self, update: Bundle, name: str, silo: int, measured: UpdateNorms) -> None:  # noqa: ARG002
        summed = {part: update[part] for part in update if part in METRIC_PARTS}
        self.sums.add(summed, silo)
        self._updates[silo] = {part: update[part] for part in update if part not in METRIC_PARTS}

    def finish(self) -> AggregationDecision:
        updates = [self._updates[silo] for silo in sorted(self._updates)]
        for name in sorted(updates[0]) if updates else ():
            self._part(name, updates)
        return AggregationDecision()

    def _part(self, name: str, updates: Sequence[Bundle]) -> None:
        contributing = [u for u in updates if float(u[name].weight) > 0]
        if not contributing:
            return
        weights = np.array([float(u[name].weight) for u in contributing])
        shares = self._shares(name, contributing, weights)
        grid = self.sums.grid
        for key, start, values in self._blocks(name, contributing, weights):
            combined = self._combine(values) if shares is None else shares @ values
            scale = float(weights.sum()) * 2.0 ** grid.frac_bits(grid.segment(name, key))
            units = np.rint(np.clip(combined * scale, -_MAX_UNITS, _MAX_UNITS)).astype(np.int64)
            self.sums.put(name, key, start, torch.from_numpy(units))
        for update in contributing:
            self.sums.add_weight(name, update[name].weight)

    @staticmethod
    def _blocks(name: str, updates: Sequence[Bundle], weights: Values) -> Iterator[tuple[str, int, Values]]:
        """Yield (tensor, position, mean values (n, block))."""
        for key in updates[0][name].total:
            tensors = [u[name].total[key].reshape(-1) for u in updates]
            for start in range(0, tensors[0].numel(), BLOCK):
                rows = [t[start : start + BLOCK].numpy().astype(np.float64) for t in tensors]
                yield key, start, np.stack(rows) / weights[:, None]

    def _combine(self, values: Values) -> Values:
        if isinstance(self._options, TrimmedMean):
            n = len(values)
            left_out = min(max(1, math.floor(self._options.trim * n)), (n - 1) // 2)
            kept: Values = np.sort(values, axis=0)[left_out : n - left_out].mean(axis=0)
            return kept
        medians: Values = np.median(values, axis=0)
        return medians

    def _shares(self, name: str, updates: Sequence[Bundle], weights: Values) -> Values | None:
        """Return each update's weight in the geometric median, by Weiszfeld's steps from the mean."""
        if not isinstance(self._options, GeometricMedian):
            return None
        shares: Values = weights / weights.sum()
        for _ in range(self._options.steps):
            squares = np.zeros(len(updates))
            for _, _, values in self._blocks(name, updates, weights):
                squares += np.square(values - shares @ values).sum(axis=1)
            closer = weights / np.maximum(np.sqrt(squares), self._options.smoothing)
            shares = closer / closer.sum()
        return shares
