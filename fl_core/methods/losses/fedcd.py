"""FedCD's losses (disjoint/fedcd.py) on cosines and features; the objective that joins them is in that file.

With psi(z, P) = exp(cos(z, P) / tau), t the fine class of an example of class c, and P^k the silo's prototypes:

    hpc = -log psi_t / (psi_t + alpha sum_{m != t} psi_(c,m) + (1 - alpha) sum_{j != c} sum_m psi_(j,m))
    bpr = mean over the classes of a batch of CE(their mean feature under phi^g Wagg, c)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot

from fl_core.methods.building_blocks.fine_grained import class_logits


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
