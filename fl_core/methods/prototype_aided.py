"""A baseline with prototypes: its cross entropy becomes a mixture with a contrast to class prototypes.

Mu, Shen, Cheng, Geng, Fu, Zhang and Zhang, "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data",
FGCS 2023; as an option of other baselines: FedMR (TMLR 2023), Table 8. With zn, gn of length 1 and V the classes that
have a prototype,

    GPC_i = -log( exp(zn_i . gn_y / tau) / sum_{c in V} exp(zn_i . gn_c / tau) )     0 where class y has none
    "mixture":  a GPC_i + (1 - a) CE_i,   a = max(0, 1 - t/T); CE alone while no prototype is known
    "additive": CE_i + lambda_p GPC_i

Prototypes are measured after training and merged as in prototypes.py. A method's own regulariser keeps its strength.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fl_core import validate
from fl_core.methods.building_blocks import prototypes
from fl_core.methods.fedavg import FedAvg
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, Losses, LossFn, Part, RoundContext, State

FORMS = ("off", "mixture", "additive")


def contrast(z: Tensor, y: Tensor, g: Tensor, known: Tensor, tau: float) -> Tensor:
    """Return GPC_i (B,) for features z (B, d), labels y (B,), prototypes g (C, d) and the mask of known ones (C,)."""
    similarity = normalize(z, dim=1) @ normalize(g, dim=1).T / tau
    log_p = torch.log_softmax(similarity.masked_fill(~known, float("-inf")), dim=1)
    own = log_p.gather(1, y.unsqueeze(1)).squeeze(1)
    return torch.where(known[y], -own, torch.zeros_like(own))


@dataclass(frozen=True, kw_only=True)
class PrototypeAided(FedAvg):
    """As FedAvg, except that training may be aided by prototypes.

    prototypes: "off" (default), "mixture" or "additive"   lambda_p: weight of the additive form
    tau_p: temperature of the contrast. Guarantees: "off" sends and computes nothing more.
    """

    without_prototypes: ClassVar[Mapping[str, str | bool] | None] = {"prototypes": "off"}
    prototypes: str = "off"
    lambda_p: float = 0.1
    tau_p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.one_of("E-CFG-02", self.name, prototypes=(self.prototypes, FORMS))
        validate.at_least("E-CFG-02", self.name, 0, lambda_p=self.lambda_p)
        validate.positive("E-CFG-02", self.name, tau_p=self.tau_p)

    @property
    def aided(self) -> bool:
        """Tell whether prototypes travel."""
        return self.prototypes != "off"

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up, part by part."""
        return (*super().sends, prototypes.PROTOTYPES) if self.aided else super().sends

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Start with no prototype known."""
        start = super().init_server(model, context)
        if not self.aided:
            return start
        return {
            **start,
            prototypes.PROTOTYPES: prototypes.initial_prototypes(
                context.n_classes, prototypes.features_of(model).feature_dim
            ),
        }

    def broadcast(self, server: State) -> State:
        """Send the prototypes beside what the method sends."""
        msg = super().broadcast(server)
        return {**msg, prototypes.PROTOTYPES: server[prototypes.PROTOTYPES]} if self.aided else msg

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:
        """Make the mixture for this round; cross entropy alone while no prototype is known."""
        plain = super().objective(model, msg, data, context)
        if not self.aided or not bool((msg[prototypes.PROTOTYPES]["known"] > 0).any()):
            return plain
        share = max(0.0, 1.0 - context.round / context.rounds)
        of_ce, of_gpc = (1.0 - share, share) if self.prototypes == "mixture" else (1.0, self.lambda_p)
        if not of_gpc:
            return plain
        g, known = msg[prototypes.PROTOTYPES]["g"], msg[prototypes.PROTOTYPES]["known"] > 0

        def mixture(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            split = prototypes.features_of(model)
            z = split.features(x)
            ce = cross_entropy(split.head(z), y, reduction="none")
            return Losses(of_ce * ce + of_gpc * contrast(z, y, g.to(z), known.to(z.device), self.tau_p))

        return mixture

    def extras(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:
        """Measure prototypes with the trained model."""
        extra = super().extras(model, msg, data, context)
        return (
            {**extra, prototypes.PROTOTYPES: prototypes.part_to_send(model, msg, data, context)}
            if self.aided
            else extra
        )

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        """Merge prototypes by class counts beside what the method merges."""
        after = super().merge(server, total, context)
        if not self.aided:
            return after
        return {
            **after,
            prototypes.PROTOTYPES: prototypes.update(server[prototypes.PROTOTYPES], total[prototypes.PROTOTYPES]),
        }
