"""The losses of FedCD (fedcd.py), over examples and over prototypes that stand in for the other silos' examples.

With psi(z, P) = exp(cos(z, P) / tau), t the fine class of an example of class c, and P^k the silo's prototypes:

    hpc = -log psi_t / (psi_t + alpha sum_{m != t} psi_(c,m) + (1 - alpha) sum_{j != c} sum_m psi_(j,m))
    dcl = CE(z phi_k Wagg, c)
    gid = DKD(softmax(z phi^g Wagg) || softmax(z phi_k Wagg))
    bpr = mean over the classes of a batch of CE(their mean feature under phi^g Wagg, c)

    L   = 1/N sum I (mu_t dcl + (1 - mu_t) hpc + lam gid) + gamma bpr,      mu_t = 1 - t/T

over D^{k+}: the silo's n_k examples with importance I = 1, and every global prototype with I = the examples it stands
for; N = n_k + sum I. In a mini-batch b all importances of prototypes are multiplied by |b|/n_k, which keeps the ratio:
of K equal silos each then sees its own examples with a weight of 1/(K + 1). Shuffled among the examples instead, as
algorithm 1 may be read, each prototype joins a batch with chance |b|/n_k and its whole importance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot

from fl_core.methods.building_blocks.fine_grained import Anchors, FineModel, class_logits
from fl_core.methods.disjoint.fedcd.options import FedCDOptions
from fl_core.methods.losses import decoupled_distillation
from fl_core.types.values import Coupling, Losses


def hpc(cosine: Tensor, own: Tensor, per_class: int, there: Tensor, alpha: float, tau: float) -> Tensor:
    """Return the contrast of each row (B,): cosines (B, CM) with P^k, own fine classes (B,), existing ones (CM,)."""
    columns = torch.arange(cosine.shape[1], device=cosine.device)
    same = (columns // per_class) == (own // per_class).unsqueeze(1)
    weight = torch.where(same, alpha, 1.0 - alpha).masked_fill(columns == own.unsqueeze(1), 1.0)
    scaled = cosine / tau
    log_weight = weight.to(scaled).masked_fill(~there.to(scaled.device), 0.0).log()
    return (scaled + log_weight).logsumexp(1) - scaled.gather(1, own.unsqueeze(1)).squeeze(1)


def bpr(z: Tensor, y: Tensor, phi: Tensor, per_class: int, aggregation: str, n_classes: int) -> Tensor:
    """Return the mean loss () of the batch's class means under the frozen global head phi (CM, d)."""
    member = one_hot(y, n_classes).to(z)
    count = member.sum(0)
    present = count.nonzero().squeeze(1)
    means = (member.T @ z)[present] / count[present].unsqueeze(1)
    return cross_entropy(class_logits(linear(means, phi), per_class, aggregation), present)


def decay(t: int, rounds: int, *, zero_based: bool) -> float:
    """Return mu_t of round t (0-based): 1 - (t + 1)/T, or 1 - t/T."""
    return 1.0 - (t if zero_based else t + 1) / rounds


@dataclass(frozen=True)
class Objective:
    """FedCD's loss of one silo's round.

    options: M and the weights above   mu: of this round
    phi: the received head (CM, d)   anchors: what examples are assigned by, P^k at the start of the round
    prototypes: the received ones (CM, d) and count: what they stand for (CM,), 0 for unknown ones
    n: the silo's examples; 0 takes importances as they are in every batch, whatever its size
    drawn: with n = 0, the importances (CM,) that join a batch of so many examples; all of them without it
    """

    options: FedCDOptions
    mu: float
    phi: Tensor
    anchors: Anchors
    prototypes: Tensor
    count: Tensor
    n: float
    drawn: Callable[[int], Tensor] | None = None

    def rows(self, model: FineModel, z: Tensor, y: Tensor, own: Tensor) -> Tensor:
        """Return mu dcl + (1 - mu) hpc + lam gid of each row (B,); own: fine classes in 0..CM-1."""
        logits = model.classify(z)
        total = self.mu * cross_entropy(logits, y, reduction="none")
        if self.mu < 1.0:
            cosine = model.prototypes(z)
            total = total + (1 - self.mu) * hpc(
                cosine, own, self.options.fine, self.anchors.there, self.options.alpha, self.options.tau
            )
        if self.options.lam:
            with torch.no_grad():
                teacher = class_logits(linear(z, self.phi.to(z)), self.options.fine, self.options.aggregation)
            gap = (
                decoupled_distillation.kd(teacher, logits)
                if self.options.distill == "kd"
                else decoupled_distillation.dkd(teacher, logits, y, self.options.xi)
            )
            total = total + self.options.lam * gap
        return total

    def share(self, batch: int, joining: Tensor | None = None) -> float:
        """Return what the silo's own examples count in the mean over D^{k+}, or over a batch and what joins it."""
        own = self.n or float(batch)
        return own / (own + float((self.count if joining is None else joining).sum()))

    def appended(self, model: nn.Module, count: Tensor) -> Tensor:
        """Return the mean loss () of the prototypes, weighed by importances (CM,): no example enters it."""
        known = count.nonzero().squeeze(1)
        z, weight = self.prototypes[known].to(next(model.parameters())), count[known]
        own = known.to(z.device)
        rows = self.rows(cast(FineModel, model), z, own // self.options.fine, own)
        return (rows * (weight / weight.sum()).to(z)).sum()

    def penalty(self, model: nn.Module) -> Tensor:
        """Return the prototypes' share of the loss."""
        return (1.0 - self.share(0)) * self.appended(model, self.count)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """Return the examples' share of the loss, and what mixes the batch."""
        fine = cast(FineModel, model)
        z = fine.features(x)
        own = self.options.fine * y + self.anchors.nearest(z, y, self.options.fine)
        joining = self.drawn(len(y)) if self.drawn else self.count
        share, coupled = self.share(len(y), joining), z.new_zeros(())
        if self.options.gamma:
            coupled = coupled + self.options.gamma * bpr(
                z, y, self.phi.to(z), self.options.fine, self.options.aggregation, fine.n_classes
            )
        if not self.n and bool(joining.any()):
            coupled = coupled + (1.0 - share) * self.appended(model, joining)
        mixed = self.options.coupling is Coupling.BATCH
        return Losses(share * self.rows(fine, z, y, own), coupled if mixed else None)
