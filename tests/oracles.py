"""Slow answers that are obviously right, for the tests to compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def slow_intra(
    z: Tensor, y: Tensor, *, code: bool = False, literal_std: bool = False, eps: float = 1e-8, mean: bool = False
) -> Tensor:
    """FedMR's L_intra class by class, with the d x d matrices; mean: of their squared entries, in place of the sum."""
    total, classes, examples = z.sum() * 0, 0, 0
    for c in y.unique().tolist():
        x = z[y == c]
        n, d = x.shape
        if n < 2:
            continue
        zh = (x - x.mean(0)) / (x.var(0, unbiased=True) + eps).sqrt()
        product = zh.T @ zh
        classes, examples = classes + 1, examples + n
        if code:
            total = total + sum(product[i, j] ** 2 for i in range(d) for j in range(d) if i != j) / (d * (d - 1))
        else:
            m = product / (n - 1) * (n / (n - 1) if literal_std else 1.0)
            total = total + (m.square().mean() if mean else m.square().sum())
    return total / max(1, examples if code else classes)


def slow_inter(
    z: Tensor, y: Tensor, g: Tensor, known: list[bool], negatives: list[bool], no_margin: bool = False
) -> Tensor:
    """FedMR's L_inter pair by pair, `own_sample`."""
    pairs = []
    for i in y.unique().tolist():
        for j in range(len(g)):
            if j == i or not (known[i] and known[j] and negatives[j]):
                continue
            own = (z[y == i] - g[i]).norm(dim=1)
            pairs.append(own.mean() if no_margin else (own - (z[y == i] - g[j]).norm(dim=1)).clamp_min(0).mean())
    return torch.stack(pairs).mean() if pairs else z.sum() * 0


def slow_inter_paired(z: Tensor, y: Tensor, g: Tensor, known: list[bool], negatives: list[bool]) -> Tensor:
    """FedMR's L_inter pair by pair as printed: sample n of class i beside sample n of class j."""
    pairs = []
    for i in y.unique().tolist():
        for j in y.unique().tolist():
            if j == i or not (known[i] and known[j] and negatives[j]):
                continue
            mine, theirs = (z[y == i] - g[i]).norm(dim=1), (z[y == j] - g[j]).norm(dim=1)
            m = min(len(mine), len(theirs))
            pairs.append((mine[:m] - theirs[:m]).clamp_min(0).mean())
    return torch.stack(pairs).mean() if pairs else z.sum() * 0


def slow_class_sums(vectors: Tensor, y: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """Sum vectors per class, one example at a time."""
    total, count = torch.zeros(n_classes, vectors.shape[1]), torch.zeros(n_classes)
    for v, c in zip(vectors, y.tolist(), strict=True):
        total[c] += v
        count[c] += 1
    return total, count


def slow_lower_median(values: list[float]) -> float:
    """Take away the smallest and the largest until one is left, or the lower of two."""
    left = sorted(values)
    while len(left) > 2:
        left = left[1:-1]
    return left[0]


def slow_trimmed_mean(values: list[float], left_out: int) -> float:
    """Sort, leave out at both ends, take the mean."""
    kept = sorted(values)[left_out : len(values) - left_out]
    return sum(kept) / len(kept)


def slow_geometric_median(points: list[list[float]], weights: list[float], steps: int, nu: float) -> list[float]:
    """Weiszfeld's steps from the weighed mean, point by point."""
    shares = [w / sum(weights) for w in weights]
    for _ in range(steps):
        middle = [sum(s * p[i] for s, p in zip(shares, points, strict=True)) for i in range(len(points[0]))]
        closer = [
            w / max(sum((a - b) ** 2 for a, b in zip(p, middle, strict=True)) ** 0.5, nu)
            for w, p in zip(weights, points, strict=True)
        ]
        shares = [c / sum(closer) for c in closer]
    return [sum(s * p[i] for s, p in zip(shares, points, strict=True)) for i in range(len(points[0]))]


def units(values: list[float], bits: int) -> int:
    """Sum the integers nearest to v * 2^bits with Python's exact integers (ties to even)."""
    return sum(round(v * 2**bits) for v in values)
