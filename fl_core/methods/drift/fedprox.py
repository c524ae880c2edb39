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

from fl_core import validate
from fl_core.methods.prototype_aided import PrototypeAided
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LocalResult, PenaltyFn, RoundContext, SgdOptions, State


@dataclass(frozen=True, kw_only=True)
class FedProx(PrototypeAided):
    """As FedAvg, except that local training is pulled back to the received model.

    mu: strength of the pull, >= 0; the authors' grid is 0.001, 0.01, 0.1, 0.5, 1. Guarantees: mu = 0 is FedAvg bit
    for bit.
    """

    name: ClassVar[str] = "fedprox"
    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.at_least("E-CFG-02", self.name, 0, mu=self.mu)

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        """Train with the proximal term and send the weighed difference."""
        tensor_maps.load_state(model, msg["w"])
        data.sgd(model, self.objective(model, msg, data, context), SgdOptions(penalty=proximal(model, self.mu)))
        return LocalResult({"delta": self.delta(model, msg, data), **self.extras(model, msg, data, context)}, silo)


def proximal(model: nn.Module, mu: float) -> PenaltyFn | None:
    """Make mu/2 ||w - w^t||^2 around the trainable parameters that `model` has now; None for mu = 0."""
    anchor = tensor_maps.trainable(model)

    def prox(current: nn.Module) -> Tensor:
        moved = {name: p for name, p in current.named_parameters() if name in anchor}
        return 0.5 * mu * tensor_maps.squared_distance(moved, anchor)

    return prox if mu else None
