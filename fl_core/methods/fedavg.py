"""FedAvg: average what the silos trained.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1.

    w_k     <- E epochs of SGD on CE from w            ClientUpdate
    w^{t+1}  = w + sum_k n_k (w_k - w) / sum_k n_k     over the silos whose update arrived

BatchNorm's running statistics are averaged like weights (methods of the FedMR family count them in their traffic).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import trees
from fl_core.protocols import SiloData
from fl_core.types import Bundle, Coupling, Exposure, Federation, Losses, Outcome, Part, State, Turn


@dataclass(frozen=True)
class FedAvg:
    """Average of locally trained models, weighed by examples."""

    name: ClassVar[str] = "fedavg"
    exposure: ClassVar[Exposure] = Exposure.SUM
    has_personal_model: ClassVar[bool] = False

    @property
    def coupling(self) -> Coupling:
        """Say that each example has a loss of its own."""
        return Coupling.EXAMPLE

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up, part by part."""
        return ("delta",)

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """Return the cross entropy of each example."""
        return Losses(cross_entropy(model(x), y, reduction="none"))

    def init_server(self, model: nn.Module, fed: Federation) -> State:  # noqa: ARG002
        """Start from the initialised model."""
        return {"w": trees.read(model)}

    def init_silo(self, model: nn.Module, fed: Federation) -> State:  # noqa: ARG002
        """Keep nothing between rounds."""
        return {}

    def broadcast(self, server: State) -> State:
        """Send the model."""
        return {"w": server["w"]}

    def local(self, model: nn.Module, msg: State, silo: State, data: SiloData, turn: Turn) -> Outcome:  # noqa: ARG002
        """Train from the received model and send the weighed difference."""
        trees.write(model, msg["w"])
        data.sgd(model, self.loss)
        return Outcome({"delta": self.delta(model, msg, data)}, silo)

    @staticmethod
    def delta(model: nn.Module, msg: State, data: SiloData) -> Part:
        """Weigh what training changed by the silo's size."""
        trained = {name: v.cpu() for name, v in trees.read(model).items()}
        return Part.of(trees.sub(trained, msg["w"]), data.size())

    def merge(self, server: State, total: Bundle, fed: Federation) -> State:  # noqa: ARG002
        """Add the mean difference; without any update the model stays as it is."""
        return {**server, "w": trees.add(server["w"], total["delta"].mean())}

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        """Load the received model."""
        trees.write(model, msg["w"])
        return model

    def personal(self, model: nn.Module, msg: State, silo: State, data: SiloData, turn: Turn) -> nn.Module:
        """Return the model after local training, the personal model of a method that has none of its own."""
        self.local(model, msg, silo, data, turn)
        return model
