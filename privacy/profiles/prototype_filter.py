"""Prototypes that a hospital does not submit: of named classes, and of small ones."""

from __future__ import annotations

import torch

from fl_core.training.local_data import LocalDataWrapper
from fl_core.types.enums import Split
from fl_core.types.interfaces import DataFactory, LocalData
from fl_core.types.values import ClassSums, Query, Tensors


class PrototypeFilter(LocalDataWrapper):
    """Hides classes, and those with fewer examples than `least`, from sums over training examples."""

    def __init__(self, data: LocalData, hidden: frozenset[int], least: float) -> None:
        super().__init__(data)
        self._hidden, self._least = sorted(hidden), least

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        """Sum a query; hidden classes are rows of zeros with weight 0, as if they had no example."""
        found = super().sum(query, bound=bound, split=split)
        if split is not Split.TRAIN or not isinstance(query, ClassSums):
            return found
        kept = found["count"] >= self._least
        kept[self._hidden] = False
        return {
            name: torch.where(kept.view(-1, *[1] * (v.dim() - 1)), v, torch.zeros_like(v)) for name, v in found.items()
        }


def with_prototype_filter(factory: DataFactory, hidden: frozenset[int], least: float) -> DataFactory:
    if not hidden and least <= 0:
        return factory
    return lambda data: PrototypeFilter(factory(data), hidden, least)
