"""FedAvg: average what the silos trained.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1.

    w_k     <- E epochs of SGD on CE from w            ClientUpdate
    w^{t+1}  = w + sum_k n_k (w_k - w) / sum_k n_k     over the silos whose update arrived

BatchNorm's running statistics are averaged like weights (methods of the FedMR family count them in their traffic).

Other methods inherit from here and say what they change: `objective` (the loss of local training), `shared` (the
tensors that travel), `extras` (parts beside the delta), or whole halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import validate
from fl_core.methods.traits import Traits
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Losses, LossFn, Part, RoundContext, State, Tensors


@dataclass(frozen=True, kw_only=True)
class FedAvg(Traits):
    """Average of locally trained models.

    weights: "samples" weighs a silo by its training examples, "uniform" counts each silo once.
    """

    name: ClassVar[str] = "fedavg"
    weights: str = "samples"

    def __post_init__(self) -> None:
        validate.one_of("E-CFG-02", self.name, weights=(self.weights, ("samples", "uniform")))

    def shared(self, name: str) -> bool:  # noqa: ARG002
        """Tell whether a parameter or buffer of the model travels."""
        return True

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """Return the cross entropy of each example."""
        return Losses(cross_entropy(model(x), y, reduction="none"))

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:  # noqa: ARG002
        """Make the loss of one silo's round; `model` holds the received weights."""
        return self.loss

    def extras(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:  # noqa: ARG002
        """Make what goes up beside the delta, from the trained model."""
        return {}

    def init_server(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        """Start from the initialised model."""
        return {"w": tensor_maps.select(tensor_maps.copy_state(model), self.shared)}

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        """Keep nothing between rounds."""
        return {}

    def broadcast(self, server: State) -> State:
        """Send the model."""
        return {"w": server["w"]}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        """Train from the received model and send the weighed difference."""
        tensor_maps.load_state(model, msg["w"])
        data.sgd(model, self.objective(model, msg, data, context))
        return LocalResult({"delta": self.delta(model, msg, data), **self.extras(model, msg, data, context)}, silo)

    def weight(self, data: LocalData) -> float:
        """Return what this silo counts in an average of models."""
        return data.size() if self.weights == "samples" else 1.0

    def delta(self, model: nn.Module, msg: State, data: LocalData) -> Part:
        """Weigh what training changed in the tensors that travel."""
        return Part.of(self.moved(model, msg), self.weight(data))

    @staticmethod
    def moved(model: nn.Module, msg: State) -> dict[str, Tensor]:
        """Return trained minus received, for the tensors that travel."""
        trained = tensor_maps.named_tensors(model)
        return {name: trained[name].detach().cpu() - received for name, received in msg["w"].items()}

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:  # noqa: ARG002
        """Add the mean difference; without any update the model stays as it is."""
        return {**server, "w": tensor_maps.add(server["w"], total["delta"].mean())}

    def exported(self, server: State) -> Tensors:
        """Export the tensors that travel."""
        return server["w"]

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        """Load the received model; what does not travel keeps its initial value."""
        tensor_maps.load_state(model, msg["w"])
        return model

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Return the model after local training, the personal model of a method that has none of its own."""
        return model
