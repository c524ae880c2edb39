"""Features whose classifier gradients match given ones, and a classifier trained on them.

Shang, Lu, Huang and Wang, "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with
Federated Features", IJCAI 2022, equations 4 to 8. For logits W z + b, p = softmax and the one-hot e_y,

    g(z, y) = (p - e_y) [z, 1]^T                                    a classifier's gradient, with one column for b
    D(A, B) = sum_j 1 - <A_j, B_j> / (|A_j| |B_j| + 1e-6)           over the rows of W's part, and b's as one row
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot

from fl_core.methods.building_blocks.feature_generator import one_thread
from fl_core.types.values import Tensors

EPS = 1e-6


def outer_gradient(z: Tensor, y: Tensor, head: Tensors) -> Tensor:
    """Return g of each example (n, C, d + 1), or (n, C, d) for a head without bias."""
    logits = linear(z, head["weight"], head.get("bias"))
    slope = torch.softmax(logits, 1) - one_hot(y, logits.shape[1]).to(logits)
    inputs = torch.cat([z, z.new_ones(len(z), 1)], 1) if "bias" in head else z
    return slope.unsqueeze(2) * inputs.unsqueeze(1)


def class_gradient(z: Tensor, head: Tensors) -> Tensor:
    """Return the mean g per class (C, C, d + 1) of features z (C, m, d), differentiable in z."""
    c, m, _ = z.shape
    y = torch.arange(c, device=z.device).repeat_interleave(m)
    flat = z.reshape(c * m, -1)
    logits = linear(flat, head["weight"], head.get("bias"))
    slope = (torch.softmax(logits, 1) - one_hot(y, c).to(logits)).view(c, m, c)
    inputs = torch.cat([z, z.new_ones(c, m, 1)], 2) if "bias" in head else z
    return torch.einsum("kmc,kmd->kcd", slope, inputs) / m


def distance(a: Tensor, b: Tensor, *, bias: bool) -> Tensor:
    """Return D for gradients (..., C, d + 1); bias: the last column is b's gradient, one row of its own.

    A row of zeros counts 1.
    """

    def rows(x: Tensor, y: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
        cosine_distance: Tensor = 1 - (x * y).sum(-1) / (norms + EPS)
        return cosine_distance

    if not bias:
        return rows(a, b).sum(-1)
    return rows(a[..., :-1], b[..., :-1]).sum(-1) + rows(a[..., -1], b[..., -1])


def matched(z: Tensor, head: Tensors, target: Tensor, known: Tensor, steps: int, lr: float) -> Tensor:
    """Move features z (C, m, d) by plain gradient steps towards the target gradients (C, C, d + 1) of known classes."""
    moved = z.clone().requires_grad_()
    with one_thread(), torch.enable_grad():
        for _ in range(steps):
            gap = distance(class_gradient(moved, head), target, bias="bias" in head)
            (slope,) = torch.autograd.grad(torch.where(known, gap, torch.zeros_like(gap)).sum(), moved)
            moved = (moved - lr * slope).detach().requires_grad_()
    return moved.detach()


def retrained(z: Tensor, bias: bool, epochs: int, lr: float, batch: int, random: torch.Generator) -> dict[str, Tensor]:
    """Train a fresh linear head on features z (C, m, d) by plain SGD, from a linear layer's even random start."""
    c, m, d = z.shape
    y, flat = torch.arange(c).repeat_interleave(m), z.reshape(c * m, d)
    shapes: dict[str, tuple[int, ...]] = {"weight": (c, d), **({"bias": (c,)} if bias else {})}
    head = {n: ((2 * torch.rand(s, generator=random) - 1) / d**0.5).requires_grad_() for n, s in shapes.items()}
    with one_thread(), torch.enable_grad():
        for _ in range(epochs):
            for index in torch.split(torch.randperm(c * m, generator=random), batch):
                loss = cross_entropy(linear(flat[index], head["weight"], head.get("bias")), y[index])
                slopes = torch.autograd.grad(loss, list(head.values()))
                with torch.no_grad():
                    for v, slope in zip(head.values(), slopes, strict=True):
                        v -= lr * slope
    return {name: v.detach() for name, v in head.items()}
