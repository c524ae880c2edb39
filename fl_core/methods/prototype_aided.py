"""A baseline with prototypes: its cross entropy becomes a mixture with a contrast to class prototypes.

Mu, Shen, Cheng, Geng, Fu, Zhang and Zhang, "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data",
FGCS 2023; as an option of other baselines: FedMR (TMLR 2023), Table 8. With zn, gn of length 1 and V the classes that
have a prototype,

    GPC_i = -log( exp(zn_i . gn_y / tau) / sum_{c in V} exp(zn_i . gn_c / tau) )     0 where class y has none
    "mixture":  a GPC_i + (1 - a) CE_i,   a = max(0, 1 - t/T); CE alone while no prototype is known
                (and in round 0, which has some where a run goes on from another one: a = 1 would train no head)
    "additive": CE_i + lambda_p GPC_i

Prototypes are measured after training and merged as in prototypes.py. A method's own regulariser keeps its strength.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_core.methods.shared.prototypes import PROTOTYPES, PrototypeExchange, features_of
from fl_core.types.enums import ANY_TARGET
from fl_core.types.interfaces import LocalData
from fl_core.types.targets import has_class, target_loss
from fl_core.types.values import Losses, LossFn, RoundContext, State
from fl_core.validate import NonNegative, Positive


def contrast(z: Tensor, y: Tensor, g: Tensor, known: Tensor, tau: float) -> Tensor:
    """Return GPC_i (B,) for features z (B, d), labels y (B,), prototypes g (C, d) and the mask of known ones (C,).

    0 for a coarse label.
    """
    similarity = normalize(z, dim=1) @ normalize(g, dim=1).T / tau
    log_p = torch.log_softmax(similarity.masked_fill(~known, float("-inf")), dim=1)
    place = y.clamp(min=0)
    of_target = log_p.gather(1, place.unsqueeze(1)).squeeze(1)
    return torch.where(known[place] & has_class(y), -of_target, torch.zeros_like(of_target))


@dataclass(frozen=True, kw_only=True)
class PrototypeAided(PrototypeExchange):
    """As FedAvg, except that training may be aided by prototypes.

    prototypes: "off" (default), "mixture" or "additive"   lambda_p: weight of the additive form
    tau_p: temperature of the contrast. Guarantees: "off" sends and computes nothing more.
    """

    without_prototypes: ClassVar[Mapping[str, str | bool] | None] = {"prototypes": "off"}
    targets = ANY_TARGET
    prototypes: Literal["off", "mixture", "additive"] = "off"
    lambda_p: NonNegative = 0.1
    tau_p: Positive = 1.0

    @property
    def uses_prototypes(self) -> bool:
        return self.prototypes != "off"

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:
        """Make the loss of this round; cross entropy alone in round 0 of a mixture and while no prototype is known."""
        plain = super().objective(model, msg, data, context)
        if not self.uses_prototypes or not bool((msg[PROTOTYPES]["known"] > 0).any()):
            return plain
        share = max(0.0, 1.0 - context.round / context.rounds)
        of_ce, of_gpc = (1.0 - share, share) if self.prototypes == "mixture" else (1.0, self.lambda_p)
        if not of_gpc or not of_ce:
            return plain
        g, known = msg[PROTOTYPES]["g"], msg[PROTOTYPES]["known"] > 0

        def mixture(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            split = features_of(model)
            z = split.features(x)
            ce = target_loss(split.head(z), y)
            return Losses(of_ce * ce + of_gpc * contrast(z, y, g.to(z), known.to(z.device), self.tau_p))

        return mixture
