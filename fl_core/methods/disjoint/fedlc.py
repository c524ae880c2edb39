"""FedLC: logits are lowered by a margin that is larger the rarer a class is at the silo.

Zhang, Li, Li, Xu, Wu, Ding and Wu, "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022.

    q_c = g_c - tau n_c^(-1/4)         n_c: the silo's own training examples of class c
    L   = CE(q)                        "calibrated", what the public implementations train
    L   = -q_y + log sum_{c != y} exp(q_c) = log(exp(CE(q)) - 1)       "published": unbounded below

Evaluation uses g. The paper does not state tau; 0.1, 0.5 and 1 are in use.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods.fedavg import FedAvg
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Losses, LossFn, RoundContext, State
from fl_core.validate import NonNegative

log = logging.getLogger(__name__)


def margin_shift(counts: Tensor, tau: float) -> Tensor:
    """Return FedLC's shift -tau n_c^(-1/4), (C,), -inf for counts of 0 or less."""
    if not tau:
        return torch.zeros_like(counts)
    return torch.where(counts > 0, -tau * _present(counts).pow(-0.25), float("-inf"))


def prior_shift(counts: Tensor, gamma: float) -> Tensor:
    """Return balanced softmax's shift gamma log n_c, (C,), -inf for counts of 0 or less."""
    if not gamma:
        return torch.zeros_like(counts)
    return torch.where(counts > 0, gamma * _present(counts).log(), float("-inf"))


def calibrated_ce(g: Tensor, y: Tensor, counts: Tensor, tau: float) -> Tensor:
    """Return FedLC's loss of each example (B,), all classes that the silo holds in the denominator."""
    return cross_entropy(
        shifted(g, y, margin_shift(counts, tau), margin_shift(_present(counts), tau)), y, reduction="none"
    )


def published_ce(g: Tensor, y: Tensor, counts: Tensor, tau: float) -> Tensor:
    """Return FedLC's loss as published (B,): the denominator leaves out the example's own class.

    Its gradient on g_y is -1 wherever training stands, and it has no lower bound. An example whose class is the only
    one at its silo has no denominator: its loss is 0, as that of `calibrated_ce`.
    """
    q = shifted(g, y, margin_shift(counts, tau), margin_shift(_present(counts), tau))
    of_target = q.gather(1, y.unsqueeze(1))
    others = q.scatter(1, y.unsqueeze(1), float("-inf"))
    only_class = torch.isneginf(others).all(1)
    rest = torch.logsumexp(torch.where(only_class.unsqueeze(1), of_target, others), dim=1)
    return torch.where(only_class, torch.zeros_like(rest), rest - of_target.squeeze(1))


def balanced_softmax(g: Tensor, y: Tensor, counts: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the balanced softmax loss of each example (B,)."""
    return cross_entropy(
        shifted(g, y, prior_shift(counts, gamma), prior_shift(_present(counts), gamma)), y, reduction="none"
    )


def shifted(g: Tensor, y: Tensor, shift: Tensor, present: Tensor) -> Tensor:
    """Return g + shift (B, C), except that an example's own class is shifted by `present` where it counts as missing.

    Counts released with noise can say that a class is missing which the example itself shows is there.
    """
    shift, present = shift.to(g), present.to(g)
    target_shift = torch.where(torch.isneginf(shift), present, shift)[y].unsqueeze(1)
    return g + shift.expand_as(g).scatter(1, y.unsqueeze(1), target_shift)


def _present(counts: Tensor) -> Tensor:
    return torch.where(counts > 0, counts, torch.ones_like(counts))


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
            log.warning("only one class is present here: with missing=mask this silo trains nothing")
        of = calibrated_ce if self.form == "calibrated" else published_ce

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            return Losses(of(model(x), y, counts, self.tau))

        return loss
