"""FedRS: FedAvg with a restricted softmax.

Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.
Silos weigh the same by default, as in MAP's comparison; the authors' code weighs by
samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods.fedavg import FedAvg
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Losses, LossFn, RoundContext, State
from fl_core.validate import UnitInterval


def scaling(counts: Tensor, alpha: float, form: str = "hard") -> Tensor:
    """Return a (C,) from the silo's counts (C,)."""
    if form == "soft":
        return alpha + (1.0 - alpha) * counts.clamp_min(0.0) / counts.max().clamp_min(1.0)
    return torch.where(counts > 0, 1.0, alpha).to(counts.dtype)


def restricted_ce(g: Tensor, y: Tensor, a: Tensor) -> Tensor:
    """Return the cross entropy of each example (B,) on scaled logits."""
    return cross_entropy(a.to(g) * g, y, reduction="none")


def restricted_loss(counts: Tensor, alpha: float, form: str = "hard") -> LossFn:
    a = scaling(counts, alpha, form)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        return Losses(restricted_ce(model(x), y, a))

    return loss


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
        return restricted_loss(data.class_counts(), self.alpha, self.rs)
