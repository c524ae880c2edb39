"""FedProto: silos exchange class prototypes and no weights.

Tan, Long, Liu, Zhou, Lu, Jiang and Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022, Algorithm 1. g_c is the received prototype of class c, d the dimension of features:

    L_i = CE_i + lambda (1/d) ||z_i - g_{y_i}||_2^2            the second term is 0 where class y_i has no prototype
    g_c = sum_k sum_{i in D_k, y_i = c} z_i / sum_k n_{k,c}    "samples"; "uniform" averages the silos' means instead

The distance is the released code's, a mean over batch and dimensions: lambda for the sum of squares is lambda / d. The
paper divides each prototype once more by its number of owners, which would shrink it; that is taken for a slip.
Prototypes are measured after training, in eval mode, over all training examples; a class that no silo reported keeps
its prototype. Each silo keeps its whole network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods.personal.local_only import LocalOnly
from fl_core.methods.shared.prototypes import PROTOTYPES, PrototypeExchange, features_of
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Losses, LossFn, Part, PartRule, RoundContext, State
from fl_core.validate import NonNegative


class NearestPrototype(nn.Module):
    """Classify by the nearest known prototype: logits (B, C) are minus the squared distances, -inf if unknown."""

    def __init__(self, model: nn.Module, g: Tensor, known: Tensor) -> None:
        super().__init__()
        self.model, self.g, self.known = model, g, known

    def forward(self, x: Tensor) -> Tensor:
        z = features_of(self.model).features(x)
        far = (z.unsqueeze(1) - self.g.to(z)).square().sum(2)
        return (-far).masked_fill(~self.known.to(z.device), float("-inf"))


@dataclass(frozen=True, kw_only=True)
class FedProto(PrototypeExchange, LocalOnly):
    """Local training that is pulled to the federation's class prototypes.

    weights: how prototypes are averaged, "samples" or "uniform" over the silos that own the class
    lambda_p: weight of the pull, >= 0; the authors use 1 (MNIST) and 0.1 (CIFAR-10)
    predict: the personal model decides by the nearest received prototype ("proto"; by the head while none is known)
    or by its own head ("head")   own_classes: "proto" chooses among the silo's own classes alone, as released.

    Guarantees: lambda_p = 0 trains as `local` does, bit for bit.
    """

    name: ClassVar[str] = "fedproto"
    lambda_p: NonNegative = 1.0
    predict: Literal["proto", "head"] = "proto"
    own_classes: bool = False

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Count owners of a class once where their means are averaged."""
        return {**super().part_rules, PROTOTYPES: PartRule(self.weighing)}

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:
        """Make the loss of one silo's round; cross entropy alone while no prototype is known."""
        g, known = msg[PROTOTYPES]["g"], msg[PROTOTYPES]["known"] > 0
        if not self.lambda_p or not bool(known.any()):
            return super().objective(model, msg, data, context)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            split = features_of(model)
            z = split.features(x)
            ce = cross_entropy(split.head(z), y, reduction="none")
            return Losses(ce + self.lambda_p * pull(z, y, g.to(z), known.to(z.device)))

        return loss

    def extras(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:
        extra = super().extras(model, msg, data, context)
        if self.weights == "samples":
            return extra
        part = extra[PROTOTYPES]
        return {PROTOTYPES: Part.of(part.mean(), (part.weight > 0).float())}

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        g, known = msg[PROTOTYPES]["g"], msg[PROTOTYPES]["known"] > 0
        if self.own_classes:
            known = known & (data.class_counts() > 0)
        return NearestPrototype(model, g, known) if self.predict == "proto" and bool(known.any()) else model


def pull(z: Tensor, y: Tensor, g: Tensor, known: Tensor) -> Tensor:
    """Return (1/d) ||z_i - g_{y_i}||^2 per example (B,), 0 where the class has no prototype."""
    return torch.where(known[y], (z - g[y]).square().mean(1), z.new_zeros(()))
