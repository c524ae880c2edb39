"""FedProx: FedAvg with a pull back to the received model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, equation 2.

    min_w  CE(w) + mu/2 ||w - w^t||_2^2        squared, over all trainable parameters, buffers excluded

The gradient mu (w - w^t) enters before the momentum buffer, as if it stood in the loss. An explicit step needs
lr (L + mu) < 2: a large mu diverges instead of freezing the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fl_core.methods.prototype_aided import PrototypeAided
from fl_core.types import tensor_maps
from fl_core.types.values import PenaltyFn, SgdOptions
from fl_core.validate import NonNegative


@dataclass(frozen=True, kw_only=True)
class FedProx(PrototypeAided):
    """As FedAvg, except that local training is pulled back to the received model.

    mu: strength of the pull, >= 0; the authors' grid is 0.001, 0.01, 0.1, 0.5, 1. Guarantees: mu = 0 is FedAvg bit
    for bit.
    """

    name: ClassVar[str] = "fedprox"
    mu: NonNegative = 0.01

    def sgd_options(self, model: nn.Module) -> SgdOptions:
        return SgdOptions(penalty=proximal(model, self.mu))


def proximal(model: nn.Module, mu: float) -> PenaltyFn | None:
    """Make mu/2 ||w - w^t||^2 around the trainable parameters that `model` has now; None for mu = 0."""
    anchor = tensor_maps.trainable(model)

    def prox(current: nn.Module) -> Tensor:
        moved = {name: p for name, p in current.named_parameters() if name in anchor}
        return 0.5 * mu * tensor_maps.squared_distance(moved, anchor)

    return prox if mu else None
