"""FedLC: logits are lowered by a margin that is larger the rarer a class is at the silo.

Zhang, Li, Li, Xu, Wu, Ding and Wu, "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022 (the losses: logit_adjustment.py).

    q_c = g_c - tau n_c^(-1/4)         n_c: the silo's own training examples of class c
    L   = CE(q)                        "calibrated", what the public implementations train
    L   = -q_y + log sum_{c != y} exp(q_c) = log(exp(CE(q)) - 1)       "published": unbounded below

Evaluation uses g. The paper does not state tau; 0.1, 0.5 and 1 are in use.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from fl_core.methods.fedavg import FedAvg
from fl_core.methods.losses import logit_adjustment
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Losses, LossFn, RoundContext, State
from fl_core.validate import NonNegative

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FedLC(FedAvg):
    """As FedAvg, except that local training sees calibrated logits.

    tau: size of the margins, >= 0   form: "calibrated" or "published"
    missing: "mask" leaves classes without an example out of the softmax, so that their rows of the head rest;
    "floor" counts them as 1. A silo with a single class then learns nothing, and logs a warning.

    Guarantees: tau = 0 in the calibrated form is FedAvg bit for bit.
    """

    name: ClassVar[str] = "fedlc"
    bias_follows_classes: ClassVar[bool] = False
    tau: NonNegative = 1.0
    form: Literal["calibrated", "published"] = "calibrated"
    missing: Literal["mask", "floor"] = "mask"

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:  # noqa: ARG002
        counts = data.class_counts()
        if self.missing == "floor":
            counts = counts.clamp_min(1.0)
        elif self.tau and int((counts > 0).sum()) < 2:
            log.warning("a single class is present here: with missing=mask nothing is learnt from it")
        of = logit_adjustment.calibrated_ce if self.form == "calibrated" else logit_adjustment.published_ce

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            return Losses(of(model(x), y, counts, self.tau))

        return loss
