"""What a hospital does not submit of its prototypes, whatever the run asks for: classes by name, and small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor, nn

from fl_core.types.interfaces import SiloData
from fl_core.types.values import ClassSums, LossFn, PenaltyFn, Query, Split, Tensors


class Withheld:
    """`SiloData` in which classes are empty to sums over training examples; everything else is as it was.

    hidden: positions in the label space   least: classes of fewer examples are withheld as well.
    """

    def __init__(self, data: SiloData, hidden: frozenset[int], least: float) -> None:
        self.lr, self.batch_size = data.lr, data.batch_size
        self._data, self._hidden, self._least = data, sorted(hidden), least

    def planned_steps(self, epochs: float | None = None) -> int:
        """Return the steps of an `sgd` call."""
        return self._data.planned_steps(epochs)

    def effective_steps(self, steps: int, mu: float = 0.0) -> float:
        """Return how far so many steps reach."""
        return self._data.effective_steps(steps, mu)

    def sgd(
        self,
        model: nn.Module,
        loss: LossFn,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        lr_scale: float = 1.0,
        penalty: PenaltyFn | None = None,
        shift: Tensors | None = None,
        only: Callable[[str], bool] | None = None,
        plain: Callable[[str], bool] | None = None,
    ) -> int:
        """Train on all examples: a class without prototypes is learnt like any other."""
        return self._data.sgd(
            model, loss, epochs=epochs, steps=steps, lr_scale=lr_scale, penalty=penalty, shift=shift, only=only,
            plain=plain,
        )  # fmt: skip

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        """Sum a query; withheld classes are rows of zeros with weight 0, as if they had no example."""
        found = self._data.sum(query, bound=bound, split=split)
        if split is not Split.TRAIN or not isinstance(query, ClassSums):
            return found
        kept = found["count"] >= self._least
        kept[self._hidden] = False
        return {
            name: torch.where(kept.view(-1, *[1] * (v.dim() - 1)), v, torch.zeros_like(v)) for name, v in found.items()
        }

    def size(self) -> float:
        """Return the size."""
        return self._data.size()

    def class_counts(self) -> Tensor:
        """Return the examples per class."""
        return self._data.class_counts()


P = ParamSpec("P")


def with_prototype_filter(
    factory: Callable[P, SiloData], hidden: frozenset[int], least: float
) -> Callable[P, SiloData]:
    """Let a data factory hide classes; the factory itself where nothing is hidden."""
    if not hidden and least <= 0:
        return factory

    def filtered(*args: P.args, **kwargs: P.kwargs) -> SiloData:
        return Withheld(factory(*args, **kwargs), hidden, least)

    return filtered
