"""Losses whose coupled term has a frozen form: the statistics that couple a batch are measured once, then held.

With them held, the term of an example depends on that example alone, so that it can be clipped per example. The
statistics are a joint sum over classes like any other: bounded, noisy and charged where a run is private.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from fl_core.types.values import ClassSums, Losses, LossFn, Tensors


class FrozenForm(Protocol):
    """The frozen form of a coupled term."""

    @property
    def norm(self) -> float:
        """Bound one example's vector in the query."""
        ...

    @property
    def weight(self) -> float:
        """Weigh its count of 1 beside that vector."""
        ...

    def query(self, model: nn.Module, radius: float) -> ClassSums:
        """Ask for the statistics, of features within `radius`."""
        ...

    def loss(self, whole: LossFn, sums: Tensors, radius: float, std: float) -> LossFn:
        """Make the loss of single examples; std: of the noise on every entry of the sums."""
        ...


@dataclass(frozen=True, slots=True)
class Freezable:
    """A loss as it is, and the frozen form of its coupled term."""

    whole: LossFn
    form: FrozenForm

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """Compute the loss as it is."""
        return self.whole(model, x, y)
