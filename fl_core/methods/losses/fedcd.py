"""FedCD's losses (disjoint/fedcd.py) on cosines, features and logits; the objective that joins them is in that file.

With psi(z, P) = exp(cos(z, P) / tau), t the fine class of an example of class c, and P^k the silo's prototypes:

    hpc = -log psi_t / (psi_t + alpha sum_{m != t} psi_(c,m) + (1 - alpha) sum_{j != c} sum_m psi_(j,m))
    bpr = mean over the classes of a batch of CE(their mean feature under phi^g Wagg, c)

Distillation from logits to logits, whole and decoupled: Zhao, Cui, Song, Qiu and Liang, "Decoupled Knowledge
Distillation", CVPR 2022. With p = softmax of the logits (B, C), c the true class, b = (p_c, 1 - p_c), q the other
probabilities divided by 1 - p_c, T the teacher and S the student, per example (B,):

    KD  = KL(p_T || p_S)  = KL(b_T || b_S) + (1 - p_T,c) KL(q_T || q_S)
    DKD =                   KL(b_T || b_S) + xi          KL(q_T || q_S)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot

from fl_core.methods.building_blocks.fine_grained import class_logits

SMALLEST = 1e-12


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


def kd(teacher: Tensor, student: Tensor) -> Tensor:
    log_t, log_s = teacher.log_softmax(1), student.log_softmax(1)
    return (log_t.exp() * (log_t - log_s)).sum(1)


def target(teacher: Tensor, student: Tensor, y: Tensor) -> Tensor:
    """Return KL(b_T || b_S): true class against all others."""
    own = y.unsqueeze(1)
    log_t, log_s = (logits.log_softmax(1).gather(1, own).squeeze(1) for logits in (teacher, student))
    rest_t, rest_s = ((1.0 - log_p.exp()).clamp(min=SMALLEST) for log_p in (log_t, log_s))
    return log_t.exp() * (log_t - log_s) + rest_t * (rest_t.log() - rest_s.log())


def others(teacher: Tensor, student: Tensor, y: Tensor) -> Tensor:
    """Return KL(q_T || q_S) among the other classes; 0 where there is only one."""
    own = torch.zeros_like(teacher, dtype=torch.bool).scatter_(1, y.unsqueeze(1), value=True)
    log_t, log_s = (logits.masked_fill(own, float("-inf")).log_softmax(1) for logits in (teacher, student))
    log_ratio = (log_t - log_s).masked_fill(own, 0.0)  # -inf minus -inf at the true class, which has no share
    return (log_t.exp() * log_ratio).sum(1)


def dkd(teacher: Tensor, student: Tensor, y: Tensor, xi: float) -> Tensor:
    return target(teacher, student, y) + xi * others(teacher, student, y)
