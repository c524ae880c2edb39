"""FedAvg: average the models that the silos trained.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1.

    w_k     <- E epochs of SGD on CE from w            ClientUpdate
    w^{t+1}  = w + sum_k n_k (w_k - w) / sum_k n_k     over the silos whose update arrived

BatchNorm's running statistics are averaged like weights (methods of the FedMR family count them in their traffic).

Other methods inherit from here and say what they change: `objective` (the loss of local training), `shared` (the
tensors that travel), `sgd_options`, `extras` (parts beside the delta), or whole halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fl_core import validate
from fl_core.tensors import Tensor, nn
from fl_core.types import computed_tensors, tensor_maps
from fl_core.types.enums import ANY_TARGET, Targets, Weighing
from fl_core.types.interfaces import LocalData, Method
from fl_core.types.targets import target_loss
from fl_core.types.values import (
    AS_SCHEDULED,
    Bundle,
    LocalResult,
    Losses,
    LossFn,
    Part,
    PartRule,
    RoundContext,
    SgdOptions,
    State,
    Tensors,
)


@dataclass(frozen=True, kw_only=True)
class Traits(Method):
    """Properties of a method that follow from its hyper-parameters alone, before a run."""

    has_personal_model: ClassVar[bool] = False
    schedule: ClassVar[Mapping[str, float]] = {}
    """The method's changes of the default schedule (`train`); the command line overrides them."""
    suitable_model: ClassVar[str] = ""
    """The default model, instead of the data set's."""
    without_prototypes: ClassVar[Mapping[str, str | bool] | None] = None
    """The options that turn prototypes off, for a run in which no silo submits any; None where there is no such way."""
    targets: ClassVar[Targets] = frozenset()
    """Targets besides one class per record that its loss accepts; a subclass with its own loss declares them again."""

    multi_label_form: ClassVar[Mapping[str, bool]] = {}
    """Option -> value, for options that a run with several labels at once changes."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "targets" not in vars(cls) and vars(cls).keys() & {"loss", "objective", "local"}:
            cls.targets = frozenset()

    @property
    def sends(self) -> tuple[str, ...]:
        return ("delta",)


@dataclass(frozen=True, kw_only=True)
class FedAvg(Traits):
    """Average of locally trained models.

    weights: "samples" weighs a silo by its training examples, "uniform" counts each silo once.
    """

    name: ClassVar[str] = "fedavg"
    bias_follows_classes: ClassVar[bool] = True
    targets = ANY_TARGET
    weights: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        kind = type(self)
        owner = self.name if "name" in vars(kind) else kind.__name__  # a class of a user's inherits the name of another
        validate.declared("E-CFG-02", owner, self)

    def shared(self, name: str) -> bool:  # noqa: ARG002
        """Tell whether a parameter or buffer of the model is sent."""
        return True

    @property
    def weighing(self) -> Weighing:
        """Return the meaning of the weight."""
        return Weighing.EXAMPLES if self.weights == "samples" else Weighing.ONCE

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Weigh the model as `weights` says."""
        return {"delta": PartRule(self.weighing)}

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """Return the cross entropy of each example, of a coarse label that of its classes together."""
        return Losses(target_loss(model(x), y))

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:  # noqa: ARG002
        """Make the loss of one silo's round; `model` holds the received weights."""
        return self.loss

    def extras(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:  # noqa: ARG002
        """Make the parts of the update besides the delta, from the trained model."""
        return {}

    def sgd_options(self, model: nn.Module) -> SgdOptions:  # noqa: ARG002
        """Return the options of local training that differ from the schedule; `model` has the received weights."""
        return AS_SCHEDULED

    def init_server(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {"w": tensor_maps.select(tensor_maps.copy_state(model), self.shared)}

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {}

    def broadcast(self, server: State) -> State:
        return {"w": server["w"]}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        data.sgd(model, self.objective(model, msg, data, context), self.sgd_options(model))
        return LocalResult(self.bundle(model, msg, data, context), silo)

    def bundle(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:
        """Make the update from the trained model."""
        return {"delta": self.delta(model, msg, data), **self.extras(model, msg, data, context)}

    def weight(self, data: LocalData) -> float:
        return data.size() if self.weights == "samples" else 1.0

    def delta(self, model: nn.Module, msg: State, data: LocalData) -> Part:
        return Part.of(self.model_delta(model, msg), self.weight(data))

    @staticmethod
    def model_delta(model: nn.Module, msg: State) -> dict[str, Tensor]:
        """Return trained minus received values of the tensors that are sent."""
        trained = tensor_maps.named_tensors(model)
        return {name: trained[name].detach().cpu() - received for name, received in msg["w"].items()}

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:  # noqa: ARG002
        """Add the mean difference; without any update the model stays as it is."""
        return {**server, "w": computed_tensors.sum_of(server["w"], total["delta"].mean())}

    def exported(self, server: State) -> Tensors:
        return server["w"]

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        tensor_maps.load_state(model, msg["w"])
        return model

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Return the model after local training, the personal model of a method that has none of its own."""
        return model
