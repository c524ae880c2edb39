"""FedPer: a shared body under private heads.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers", arXiv:1912.00818, 2019,
Algorithms 1 and 2.

    (theta_k, psi_k) <- E epochs of SGD on CE from (theta^t, psi_k), one optimizer for both
    theta^{t+1}       = theta^t + sum_k n_k (theta_k - theta^t) / sum_k n_k

The private part is the last linear layer, as FedNH compares it; the paper also keeps last blocks. Every head starts
from the common initial one, and grows old while its silo is not asked.

Its personal models are what silos use. FedGELA's GA of such a method (Fan et al., NeurIPS 2023, section 5.1) is the
mean over silos of their personal models' accuracy on the whole test set; FedNH's GM that of the body under the initial,
untrained head, which is our global model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_core.methods.personal.shared_body import SharedBody, copy_tensors, in_head
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LocalResult, RoundContext, State


@dataclass(frozen=True, kw_only=True)
class FedPer(SharedBody):
    """As FedAvg, except that the head stays at the silo.

    The global model is the averaged body under the initial head. Guarantees: no tensor of the head travels.
    """

    name: ClassVar[str] = "fedper"
    has_personal_model: ClassVar[bool] = True
    ga_is_personal: ClassVar[bool] = True
    targets = SharedBody.targets

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {"head": copy_tensors(model, in_head)}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, {**msg["w"], **silo["head"]})
        self.fit(model, msg, data, context)
        return LocalResult(self.bundle(model, msg, data, context), {"head": copy_tensors(model, in_head)})

    def fit(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> None:
        data.sgd(model, self.objective(model, msg, data, context))
