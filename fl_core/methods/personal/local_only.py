"""Local training alone: each hospital's result without the others.

The lower bound that every paper on personalisation compares with. With K steps per round and no exchange,

    w_k <- E epochs of SGD on CE from w_k         in the rounds whose cohort the silo is in, from the common w^0

A silo trains in the rounds in which FedAvg would have asked it, with a fresh optimizer in each and the round's
learning rate, so that both spend the same work (the protocol of FedNH, AAAI 2023); every round with `cohort: 0`.
GA is the mean over silos of their models' accuracy on the whole test set (FedGELA, NeurIPS 2023, section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.shared_body import copy_tensors
from fl_core.tensors import nn
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, RoundContext, State, Tensors


@dataclass(frozen=True, kw_only=True)
class LocalOnly(FedAvg):
    """Every silo trains its own model; nothing of it travels.

    The silo keeps its whole network, buffers included. `weights` has no effect: nothing is averaged.
    Guarantees: the first round's training is FedAvg's, bit for bit.
    """

    name: ClassVar[str] = "local"
    has_personal_model: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = False
    ga_is_personal: ClassVar[bool] = True
    targets = FedAvg.targets

    @property
    def sends(self) -> tuple[str, ...]:
        return ()

    def shared(self, name: str) -> bool:  # noqa: ARG002
        return False

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {"net": copy_tensors(model)}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, silo["net"])
        data.sgd(model, self.objective(model, msg, data, context))
        return LocalResult(self.extras(model, msg, data, context), {"net": copy_tensors(model)})

    @staticmethod
    def own_model(model: nn.Module, silo: State) -> nn.Module:
        """Load the model that a silo trained alone into `model`, from what it kept."""
        tensor_maps.load_state(model, silo["net"])
        return model

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:  # noqa: ARG002
        raise _no_model(self.name)

    def exported(self, server: State) -> Tensors:  # noqa: ARG002
        raise _no_model(self.name)

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:  # noqa: ARG002
        return server


def _no_model(name: str) -> ConfigError:
    return ConfigError("E-CFG-08", f"expected a method with a global model, found {name}, whose silos keep their own")
