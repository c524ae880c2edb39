"""Models beside the one in training: frozen copies, and a view that computes the features of a batch once."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from fl_core.methods.building_blocks import prototypes
from fl_core.models.split_model import SplitModel
from fl_core.types import tensor_maps
from fl_core.types.values import Tensors


def frozen_copy(model: nn.Module, values: Tensors | None = None) -> SplitModel:
    """Copy a model, with `values` loaded where given, in eval mode and without gradients."""
    twin = copy.deepcopy(model)
    if values is not None:
        tensor_maps.load_state(twin, values)
    twin.requires_grad_(False)
    return prototypes.features_of(twin.eval())


class CachedFeatures(nn.Module):
    """A model whose features of one batch are known: `forward` and `features` take that batch and do not look at it.

    A loss that is made of another one then passes the batch through the body once: BatchNorm counts it once.
    """

    def __init__(self, model: nn.Module, z: Tensor) -> None:
        super().__init__()
        self.head = prototypes.features_of(model).head
        self._z = z

    def features(self, x: Tensor) -> Tensor:  # noqa: ARG002
        return self._z

    def forward(self, x: Tensor) -> Tensor:  # noqa: ARG002
        logits: Tensor = self.head(self._z)
        return logits
