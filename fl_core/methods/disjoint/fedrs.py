"""FedRS: FedAvg with a restricted softmax.

Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021
(the loss: restricted_softmax.py). Silos weigh the same by default, as in MAP's comparison; the authors' code weighs by
samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fl_core.methods.fedavg import FedAvg
from fl_core.methods.losses import restricted_softmax
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LossFn, RoundContext, State
from fl_core.validate import UnitInterval


@dataclass(frozen=True, kw_only=True)
class FedRS(FedAvg):
    """As FedAvg, except that logits of classes missing at a silo are scaled down in its training.

    alpha: their scale, 0 to 1; at 0 their rows of the head get no gradient   rs: "hard" or "soft"
    Guarantees: alpha = 1 is FedAvg (of the same weights) bit for bit, and so is a silo that holds all classes.
    """

    name: ClassVar[str] = "fedrs"
    weights: Literal["samples", "uniform"] = "uniform"
    alpha: UnitInterval = 0.5
    rs: Literal["hard", "soft"] = "hard"

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:  # noqa: ARG002
        return restricted_softmax.restricted_loss(data.class_counts(), self.alpha, self.rs)
