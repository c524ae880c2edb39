"""Distillation from logits to logits, whole and decoupled, as FedCD uses it.

Zhao, Cui, Song, Qiu and Liang, "Decoupled Knowledge Distillation", CVPR 2022. With p = softmax of the logits, c the
true class, b = (p_c, 1 - p_c), q the other probabilities divided by 1 - p_c, T the teacher and S the student:

    KD  = KL(p_T || p_S)  = KL(b_T || b_S) + (1 - p_T,c) KL(q_T || q_S)
    DKD =                   KL(b_T || b_S) + xi          KL(q_T || q_S)

All losses are per example, (B,) from logits (B, C) and labels y (B,).
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1e-12


def kd(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(p_T || p_S)."""
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
    """Return DKD with weight xi on the other classes."""
    return target(teacher, student, y) + xi * others(teacher, student, y)
