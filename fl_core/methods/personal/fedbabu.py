"""FedBABU: train the body under a head that never moves; fine-tune everything at the end.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1.

    theta_k     <- E epochs of SGD on CE over the body from theta^t, under the initial head psi^0 of all silos
    theta^{t+1}  = theta^t + sum_k n_k (theta_k - theta^t) / sum_k n_k
    personal:      E_ft epochs over body and head, from (theta^T, psi^0)

psi^0 follows from the run's seed and never travels. The head is left out of the optimizer, so weight decay cannot
shrink it. Fine-tuning starts from the final global body, once, at every silo, not from a silo's own old one: personal
models are measured in the closing evaluation.

Two papers measure it otherwise. FedGELA's GA (Fan et al., NeurIPS 2023, section 5.1) is that of methods "without a
global model": the mean over silos of their personal models' accuracy on the whole test set. FedNH's GM is the accuracy
of theta^T under psi^0, which is our global model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_core.methods.personal.shared_body import SharedBody, in_body
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import RoundContext, SgdOptions, State
from fl_core.validate import Count


@dataclass(frozen=True, kw_only=True)
class FedBABU(SharedBody):
    """As FedAvg, except that the head keeps its initial value and does not travel.

    finetune_epochs: E_ft of the personal model, 0 for none. Guarantees: the head is the initial one in every round, to
    the last bit.
    """

    name: ClassVar[str] = "fedbabu"
    has_personal_model: ClassVar[bool] = True
    ga_is_personal: ClassVar[bool] = True
    personal_at_end: ClassVar[bool] = True
    finetune_epochs: Count = 5

    def sgd_options(self, model: nn.Module) -> SgdOptions:  # noqa: ARG002
        return SgdOptions(only=in_body)

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Fine-tune the final received body and the initial head, which `model` has."""
        tensor_maps.load_state(model, msg["w"])
        if self.finetune_epochs:
            data.sgd(model, self.objective(model, msg, data, context), SgdOptions(epochs=self.finetune_epochs))
        return model
