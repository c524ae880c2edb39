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

from fl_core import trees
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.protocols import SiloData
from fl_core.types import Outcome, State, Turn


@dataclass(frozen=True)
class FedProx(FedAvg):
    """As FedAvg, except that local training is pulled back to the received model.

    mu: strength of the pull, >= 0; the authors' grid is 0.001, 0.01, 0.1, 0.5, 1. Guarantees: mu = 0 is FedAvg bit
    for bit.
    """

    name: ClassVar[str] = "fedprox"
    mu: float = 0.01

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ConfigError("E-CFG-02", f"expected mu >= 0, found mu={self.mu}")

    def local(self, model: nn.Module, msg: State, silo: State, data: SiloData, turn: Turn) -> Outcome:  # noqa: ARG002
        """Train with the proximal term and send the weighed difference."""
        trees.write(model, msg["w"])
        anchor = trees.trainable(model)

        def prox(current: nn.Module) -> Tensor:
            moved = {name: p for name, p in current.named_parameters() if name in anchor}
            return 0.5 * self.mu * trees.sq_dist(moved, anchor)

        data.sgd(model, self.loss, penalty=prox if self.mu else None)
        return Outcome({"delta": self.delta(model, msg, data)}, silo)
