"""Knowledge transfer from a teacher to the model in training: by logits (KD) or by features (MMD).

Li, Zhan, Shao, Li and Song, "FedPHP: Federated Personalization with Inherited Private Models", ECML PKDD 2021. o (B, C)
and h (B, d) are the student's, o_p and h_p the teacher's, detached.

    KD   tau^2 KL( softmax(o_p/tau) || softmax(o/tau) )
    MMD  || mean phi(h) - mean phi(h_p) ||^2 in the space of five Gaussian kernels, diagonals included
         K = sum_{i=0..4} exp(-D / b_i),  b_i = 2^(i-2) b,  b the mean of D over pairs of the 2B features, detached
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div

KERNELS = 5


def kd_terms(o: Tensor, o_p: Tensor, tau: float, *, scaled: bool = True) -> Tensor:
    """Return KD of each example (B,); `scaled` multiplies by tau^2, which keeps the gradient's size for any tau."""
    log_p, log_q = torch.log_softmax(o_p / tau, dim=1), torch.log_softmax(o / tau, dim=1)
    terms = kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
    return tau**2 * terms if scaled else terms


def asymmetric_terms(o: Tensor, o_p: Tensor, tau: float) -> Tensor:
    """Return the official code's form (B,): cross entropy of the teacher at tau against the student at 1."""
    return -(torch.softmax(o_p / tau, dim=1) * torch.log_softmax(o, dim=1)).sum(1)


def mmd(h: Tensor, h_p: Tensor) -> Tensor:
    """Return MMD, a scalar >= 0; 0 for equal features."""
    x, n = torch.cat([h, h_p]), len(h)
    # squared differences, not |a|^2 + |b|^2 - 2ab: that form gives a small number for equal points, here it is 0
    d = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    b = d.detach().sum() / (len(x) ** 2 - len(x)) + 1e-8
    k = torch.stack([torch.exp(-d / (b * 2.0 ** (i - KERNELS // 2))) for i in range(KERNELS)]).sum(0)
    return (k[:n, :n] + k[n:, n:] - k[:n, n:] - k[n:, :n]).mean()
