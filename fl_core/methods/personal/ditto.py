"""Ditto: a personal model that is pulled towards the global one.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, equation 1
and Algorithm 1.

    w:    FedAvg
    v_k <- E_v epochs of SGD on CE(v) + lambda/2 ||v - w^t||_2^2, from the stored v_k, first from w^0

The anchor is the received w^t, not the model that was just trained from it; buffers are outside the norm, and v_k has
its own. An explicit step needs lr (L + lambda) < 2: a large lambda diverges instead of giving v = w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_core.methods.drift.fedprox import proximal
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.shared_body import copy_tensors
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LocalResult, RoundContext, SgdOptions, State
from fl_core.validate import Count, NonNegative


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """FedAvg, with an additional personal model that is never sent.

    lambda_v: strength of the pull, >= 0; 0 trains v_k alone, as `local` does; the authors' grid is 0.1, 1, 2
    personal_epochs: E_v, 0 for the run's own epochs.
    Guarantees: the global model is FedAvg's bit for bit.
    """

    name: ClassVar[str] = "ditto"
    has_personal_model: ClassVar[bool] = True
    targets = FedAvg.targets
    lambda_v: NonNegative = 1.0
    personal_epochs: Count = 0

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {"v": copy_tensors(model)}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        bundle = super().local(model, msg, silo, data, context).bundle
        tensor_maps.load_state(model, msg["w"])
        pull, objective = proximal(model, self.lambda_v), self.objective(model, msg, data, context)
        tensor_maps.load_state(model, silo["v"])
        data.sgd(model, objective, SgdOptions(epochs=self.personal_epochs or None, penalty=pull))
        return LocalResult(bundle, {"v": copy_tensors(model)})

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        tensor_maps.load_state(model, silo["v"])
        return model
