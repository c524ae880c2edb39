"""The restricted softmax: logits of classes that a silo does not hold are scaled down in training.

Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.

    s_c = a_c g_c,   a_c = 1 if n_c > 0 else alpha                     "hard", the paper
                     a_c = alpha + (1 - alpha) n_c / max_j n_j         "soft", the official code: rare classes too
    dL/dw_c = a_c (p_c - [y = c]) z                                    p: softmax of s

n_c counts the silo's whole training set. Evaluation uses g. The papers' heads have no bias; of one that has, the whole
logit is scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.types.values import Losses, LossFn


def scaling(counts: Tensor, alpha: float, form: str = "hard") -> Tensor:
    """Return a (C,) from the silo's counts (C,)."""
    if form == "soft":
        return alpha + (1.0 - alpha) * counts.clamp_min(0.0) / counts.max().clamp_min(1.0)
    return torch.where(counts > 0, 1.0, alpha).to(counts.dtype)


def restricted_ce(g: Tensor, y: Tensor, a: Tensor) -> Tensor:
    """Return the cross entropy of each example (B,) on scaled logits."""
    return cross_entropy(a.to(g) * g, y, reduction="none")


def restricted_loss(counts: Tensor, alpha: float, form: str = "hard") -> LossFn:
    a = scaling(counts, alpha, form)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        return Losses(restricted_ce(model(x), y, a))

    return loss
