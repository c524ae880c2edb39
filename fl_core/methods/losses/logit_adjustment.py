"""Cross entropy on logits shifted by how many examples of each class a silo holds.

n_c counts a silo's own training examples of class c; g (B, C) are the logits that evaluation uses, without a shift.

    FedLC    q_c = g_c - tau n_c^(-1/4)      Zhang, Li, Li, Xu, Wu, Ding and Wu, "Federated Learning with Label
                                             Distribution Skew via Logits Calibration", ICML 2022
    FedROD   q_c = g_c + gamma log n_c       Chen and Chao, "On Bridging Generic and Personalized Federated Learning
                                             for Image Classification", ICLR 2022 (balanced softmax)

Both shifts tend to -inf as n_c tends to 0: a missing class is left out of the softmax, and its row of the head gets a
gradient of zero. With tau or gamma = 0 nothing is shifted, so nothing is left out: plain cross entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


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
    own = q.gather(1, y.unsqueeze(1))
    others = q.scatter(1, y.unsqueeze(1), float("-inf"))
    only_class = torch.isneginf(others).all(1)
    rest = torch.logsumexp(torch.where(only_class.unsqueeze(1), own, others), dim=1)
    return torch.where(only_class, torch.zeros_like(rest), rest - own.squeeze(1))


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
    own = torch.where(torch.isneginf(shift), present, shift)[y].unsqueeze(1)
    return g + shift.expand_as(g).scatter(1, y.unsqueeze(1), own)


def _present(counts: Tensor) -> Tensor:
    return torch.where(counts > 0, counts, torch.ones_like(counts))
