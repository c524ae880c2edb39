"""MAP: a restricted softmax for the uploaded model, an inherited private model that stays at the silo.

Li, Song, Li, Li, Shao, Yang and Zhan, "MAP: Model Aggregation and Personalization in Federated Learning with Incomplete
Classes", TKDE 2024, Algorithm 1 (fedrs.py, inherited_model.py). Of the N = E * batches steps of a round,

    stage 1, ceil(N/2) steps:  theta <- theta_t,  the restricted softmax's loss;  theta_a := theta is sent
    stage 2, floor(N/2) steps: from theta_a, (1 - lam) CE + lam L_transfer;  then theta_p inherits theta

each with an optimizer of its own. The official code runs N restricted steps and then max(N/10, 5) steps at a fifth of
the rate (`stages="code"`). It also takes as observed only a class that makes up all of a silo's examples, which turns
its restricted softmax into a temperature; that is a slip, and no option here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fl_core.methods.disjoint.fedrs import restricted_loss
from fl_core.methods.personal.inherited_model import InheritedModel
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LocalResult, LossFn, RoundContext, SgdOptions, State
from fl_core.validate import UnitInterval


@dataclass(frozen=True, kw_only=True)
class Map(InheritedModel):
    """Sends the model after half of the steps, as FedRS, and keeps that after all steps, as FedPHP.

    alpha: scale of missing classes' logits, 0 to 1   rs: "hard" or "soft"   stages: "paper" or "code"
    Guarantees: nothing of stage 2 leaves the silo. alpha = 1 over 2E epochs sends what FedAvg sends over E epochs.
    """

    name: ClassVar[str] = "map"
    alpha: UnitInterval = 0.5
    rs: Literal["hard", "soft"] = "hard"
    stages: Literal["paper", "code"] = "paper"

    def plan(self, steps: int) -> tuple[int, int, float]:
        """Split the planned steps: those of stage 1, those of stage 2, and the factor on the rate of stage 2."""
        return (steps, max(steps // 10, 5), 0.2) if self.stages == "code" else (-(-steps // 2), steps // 2, 1.0)

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:  # noqa: ARG002
        return restricted_loss(data.class_counts(), self.alpha, self.rs)

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        first, second, rate = self.plan(data.planned_steps())
        data.sgd(model, self.objective(model, msg, data, context), SgdOptions(steps=first))
        bundle = self.bundle(model, msg, data, context)
        if second:
            data.sgd(model, self.transfer_loss(model, silo), SgdOptions(steps=second, lr_scale=rate))
        return LocalResult(bundle, self.inherit(model, silo, data, context))
