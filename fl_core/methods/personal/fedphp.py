"""FedPHP: every silo keeps an inherited private model that teaches its local training.

Li, Zhan, Shao, Li and Song, "FedPHP: Federated Personalization with Inherited Private Models", ECML PKDD 2021
(the private model and its losses: inherited_model.py). Model, traffic and average are FedAvg's.

The authors' code teaches from an untrained model in a silo's first round, and cuts mu_n at 0.9 (`mu_max`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_core.methods.personal.inherited_model import InheritedModel
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LocalResult, RoundContext, State


@dataclass(frozen=True, kw_only=True)
class FedPHP(InheritedModel):
    """As FedAvg, except that training is taught by the silo's inherited private model, its personal model.

    Guarantees: lam = 0 is FedAvg (of the same weights) bit for bit for the global model, and so is every silo's first
    round.
    """

    name: ClassVar[str] = "fedphp"

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        data.sgd(model, self.transfer_loss(model, silo))
        return LocalResult(self.bundle(model, msg, data, context), self.inherit(model, silo, data, context))
