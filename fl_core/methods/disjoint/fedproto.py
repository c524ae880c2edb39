"""FedProto: silos exchange class prototypes and no weights.

Tan, Long, Liu, Zhou, Lu, Jiang and Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022, Algorithm 1. g_c is the received prototype of class c, d the dimension of features:

    L_i = CE_i + lambda (1/d) ||z_i - g_{y_i}||_2^2            the second term is 0 where class y_i has no prototype
    g_c = sum_k sum_{i in D_k, y_i = c} z_i / sum_k n_{k,c}    "samples"; "uniform" averages the silos' means instead

The distance is the released code's, a mean over batch and dimensions: lambda for the sum of squares is lambda / d. The
paper divides each prototype once more by its number of owners, which would shrink it; that is taken for a slip.
Prototypes are measured after training, in eval mode, over all training examples; a class that nobody reported keeps
its prototype. Each silo keeps its whole network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import validate
from fl_core.methods.building_blocks import prototypes
from fl_core.methods.personal.local_only import LocalOnly
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, Losses, LossFn, Part, RoundContext, State


class Nearest(nn.Module):
    """Classify by the nearest known prototype: logits (B, C) are minus the squared distances, -inf if unknown."""

    def __init__(self, model: nn.Module, g: Tensor, known: Tensor) -> None:
        super().__init__()
        self.model, self.g, self.known = model, g, known

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        z = prototypes.features_of(self.model).features(x)
        far = (z.unsqueeze(1) - self.g.to(z)).square().sum(2)
        return (-far).masked_fill(~self.known.to(z.device), float("-inf"))


@dataclass(frozen=True, kw_only=True)
class FedProto(LocalOnly):
    """Local training that is pulled to the federation's class prototypes.

    weights: how prototypes are averaged, "samples" or "uniform" over the silos that own the class
    lambda_p: weight of the pull, >= 0; the authors use 1 (MNIST) and 0.1 (CIFAR-10)
    predict: the personal model decides by the nearest received prototype ("proto"; by the head while none is known)
    or by its own head ("head")   own_classes: "proto" chooses among the silo's own classes alone, as released.

    Guarantees: lambda_p = 0 trains as `local` does, bit for bit.
    """

    name: ClassVar[str] = "fedproto"
    lambda_p: float = 1.0
    predict: str = "proto"
    own_classes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.at_least("E-CFG-02", self.name, 0, lambda_p=self.lambda_p)
        validate.one_of("E-CFG-02", self.name, predict=(self.predict, ("proto", "head")))

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up."""
        return (prototypes.PROTOTYPES,)

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Start with no prototype known."""
        unknown = prototypes.initial_prototypes(context.n_classes, prototypes.features_of(model).feature_dim)
        return {**super().init_server(model, context), prototypes.PROTOTYPES: unknown}

    def broadcast(self, server: State) -> State:
        """Send the prototypes."""
        return {**super().broadcast(server), prototypes.PROTOTYPES: server[prototypes.PROTOTYPES]}

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:
        """Make the loss of one silo's round; cross entropy alone while no prototype is known."""
        g, known = msg[prototypes.PROTOTYPES]["g"], msg[prototypes.PROTOTYPES]["known"] > 0
        if not self.lambda_p or not bool(known.any()):
            return super().objective(model, msg, data, context)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            split = prototypes.features_of(model)
            z = split.features(x)
            ce = cross_entropy(split.head(z), y, reduction="none")
            return Losses(ce + self.lambda_p * pull(z, y, g.to(z), known.to(z.device)))

        return loss

    def extras(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:
        """Measure prototypes with the trained network."""
        part = prototypes.part_to_send(model, msg, data, context)
        if self.weights == "uniform":
            part = Part.of(part.mean(), (part.weight > 0).float())
        return {prototypes.PROTOTYPES: part}

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        """Move the prototypes by what the silos measured."""
        after = super().merge(server, total, context)
        return {
            **after,
            prototypes.PROTOTYPES: prototypes.update(server[prototypes.PROTOTYPES], total[prototypes.PROTOTYPES]),
        }

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Return the silo's network, wrapped where the nearest prototype decides."""
        g, known = msg[prototypes.PROTOTYPES]["g"], msg[prototypes.PROTOTYPES]["known"] > 0
        if self.own_classes:
            known = known & (data.class_counts() > 0)
        return Nearest(model, g, known) if self.predict == "proto" and bool(known.any()) else model


def pull(z: Tensor, y: Tensor, g: Tensor, known: Tensor) -> Tensor:
    """Return (1/d) ||z_i - g_{y_i}||^2 per example (B,), 0 where the class has no prototype."""
    return torch.where(known[y], (z - g[y]).square().mean(1), z.new_zeros(()))
