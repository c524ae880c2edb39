"""FedVLS: the received model teaches the classes that a silo lacks, and wrong logits are lowered.

Guo, Ding, Liang, He, Wang and Tan, "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025 (by their
released code). pi_c is the share of class c in the silo's training examples, V its vacant classes (pi_c = 0), f the
logits in training, g those of the received model in eval mode; B examples in a batch,

    L_cal = CE(f + gamma log pi)                                      over the classes that the silo has
    L_dis = KL(softmax_V(g) || softmax_V(f))                          a softmax over the vacant classes alone
    L_sup = sum_c pi_c log( (1/B) sum_i exp([y_i != c] (f_c(x_i) - log(C pi_c))) )
    L     = mean_i (L_cal + lam L_dis) + mu L_sup

Silos send and average what FedAvg's do. L_sup is a logarithm of a mean over the batch: what one example adds depends on
the others. `suppression="example"`, which is not the authors', takes it of every example alone and averages,

    sum_{c != y} pi_c (f_c - log(C pi_c))

which by Jensen's inequality is never above L_sup, and the same for a batch of one.

The code adds 1e-9 to pi where it takes the logarithm, which leaves vacant classes in L_cal with e^-21 of their weight;
here they are left out. lam = 0.1 is the authors' command for CIFAR10, mu = 0.005 stands in their code, gamma is 1.
A silo with a single class learns nothing: L_cal and L_sup are 0, and so is L_dis where training begins. gamma = 0,
which is not the authors', is plain cross entropy over all classes: such a silo learns, and the teacher's view of the
vacant classes is kept among them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, one_hot

from fl_core.methods.disjoint.fedlc import balanced_softmax
from fl_core.methods.fedavg import FedAvg
from fl_core.models.split_model import frozen_copy
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Losses, LossFn, RoundContext, State
from fl_core.validate import NonNegative

log = logging.getLogger(__name__)


def vacant_distillation(f: Tensor, g: Tensor, vacant: Tensor) -> Tensor:
    """Return L_dis of each example (B,) for logits f and g (B, C) and a mask (C,); 0 with fewer than two vacant."""
    student, teacher = (log_softmax(logits[:, vacant], dim=1) for logits in (f, g))
    return kl_div(student, teacher, reduction="none", log_target=True).sum(1)


def lowered_logits(f: Tensor, y: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return [y_i != c] (f_c - log(C pi_c)) (B, K) and pi (K,) of the K classes present by counts (C,)."""
    present = counts > 0
    pi = counts[present] / counts[present].sum()
    is_target = one_hot(y, len(counts))[:, present].bool()
    return (f[:, present] - torch.log(len(counts) * pi)).masked_fill(is_target, 0.0), pi


def suppression_of_batch(f: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Return L_sup, a number, of logits f (B, C) and labels y (B,)."""
    spread, pi = lowered_logits(f, y, counts)
    return (pi * (torch.logsumexp(spread, dim=0) - torch.log(spread.new_tensor(len(f))))).sum()


def suppression_of_examples(f: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Return L_sup of each example alone (B,)."""
    spread, pi = lowered_logits(f, y, counts)
    return (pi * spread).sum(1)


@dataclass(frozen=True, kw_only=True)
class FedVLS(FedAvg):
    """As FedAvg, except that local training keeps the received model's view of vacant classes and lowers wrong logits.

    lam, mu: weights of L_dis and L_sup, >= 0   gamma: strength of the prior in L_cal, >= 0, 1 as published
    suppression: "batch" as published, or "example"

    Guarantees: lam = mu = 0 is FedROD's averaged model bit for bit, and with gamma = 0 FedAvg's; "example" makes a loss
    of single examples. Class counts are in the loss of their silo, and are not sent.
    """

    name: ClassVar[str] = "fedvls"
    bias_follows_classes: ClassVar[bool] = False
    lam: NonNegative = 0.1
    mu: NonNegative = 0.005
    gamma: NonNegative = 1.0
    suppression: Literal["batch", "example"] = "batch"

    @property
    def _couples(self) -> bool:
        return self.suppression == "batch" and self.mu > 0

    @property
    def coupling(self) -> Coupling:
        return Coupling.BATCH if self._couples else Coupling.EXAMPLE

    @property
    def private_form(self) -> Mapping[str, str | int]:
        return {"suppression": "example"} if self._couples else {}

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:  # noqa: ARG002
        counts = data.class_counts()
        vacant = counts <= 0
        if self.gamma and int((~vacant).sum()) < 2:
            log.warning("only one class is present here: this silo trains nothing unless method.gamma=0")
        teacher = frozen_copy(model) if self.lam and int(vacant.sum()) > 1 else None

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            f = model(x)
            n = counts.to(f)
            value, coupled = balanced_softmax(f, y, n, self.gamma), None
            if teacher is not None:
                with torch.no_grad():
                    g = teacher(x)
                value = value + self.lam * vacant_distillation(f, g, vacant.to(f.device))
            if self._couples:
                coupled = self.mu * suppression_of_batch(f, y, n)
            elif self.mu:
                value = value + self.mu * suppression_of_examples(f, y, n)
            return Losses(value, coupled)

        return loss
