"""k-means within each class, by sums over examples alone.

Local data only gives sums over examples. Lloyd's step is such a sum: per class and cluster, the
sum of the features and their number. Seeding is not: k-means++ picks examples. Here every restart draws its M
starting points of a class from a normal distribution with the mean and the variances of the class's features,
which are sums as well. All restarts of all classes share one query per step; the lowest inertia wins, class by class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fl_core.methods.building_blocks.fine_grained import by_fine_class
from fl_core.types.interfaces import LocalData
from fl_core.types.values import ClassSums

NOISE = 1e-3
"""Length of the noise on a repeated centroid, relative to the centroid's."""


def clusters(
    features: Callable[[Tensor], Tensor],
    data: LocalData,
    n_classes: int,
    per_class: int,
    draw: torch.Generator,
    restarts: int,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Return centroids (C, M, d) and the examples per class (C,), after 1 + `steps` queries.

    Clusters of a class are ordered by decreasing size. Where a class has fewer clusters than M, for want of examples,
    the others repeat in order, with noise; a class without examples has centroids of 0.
    """
    mean, deviation, count = _moments(features, data, n_classes)
    shape = (restarts, n_classes, per_class, mean.shape[1])
    points = mean.unsqueeze(1) + deviation.unsqueeze(1) * torch.randn(shape, generator=draw)
    size, inertia = torch.zeros(shape[:3]), torch.zeros(shape[:2])
    for _ in range(steps):
        points, size, inertia = _lloyd(features, data, points)
    best = inertia.argmin(0)
    rows = torch.arange(n_classes)
    return torch.stack([_filled(p, s, draw) for p, s in zip(points[best, rows], size[best, rows], strict=True)]), count


def _moments(features: Callable[[Tensor], Tensor], data: LocalData, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and standard deviation of the features per class, (C, d) each, and the examples per class (C,)."""

    def powers(x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
        z = features(x)
        return torch.cat([z, z.square()], dim=1)

    sums = data.sum(ClassSums(powers, n_classes))
    mean, square = (sums["sum"] / sums["count"].clamp(min=1.0).unsqueeze(1)).chunk(2, dim=1)
    return mean, (square - mean.square()).clamp(min=0.0).sqrt(), sums["count"]


def _lloyd(features: Callable[[Tensor], Tensor], data: LocalData, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Assign all examples and average: new points (R, C, M, d), sizes (R, C, M) and the inertia before (R, C)."""
    restarts, n_classes, per_class, d = points.shape

    def placed(x: Tensor, y: Tensor) -> Tensor:
        z = features(x)
        near = (points.to(z)[:, y] - z.unsqueeze(1)).square().sum(3)  # (R, B, M)
        least = near.min(2)
        return torch.cat([*(by_fine_class(z, slot, per_class) for slot in least.indices), least.values.T], dim=1)

    sums = data.sum(ClassSums(placed, n_classes))["sum"]
    slots, inertia = sums[:, :-restarts], sums[:, -restarts:].T
    slots = slots.view(n_classes, restarts, per_class, d + 1).transpose(0, 1)
    size = slots[..., -1]
    moved = slots[..., :-1] / size.clamp(min=1.0).unsqueeze(3)
    return torch.where(size.unsqueeze(3) > 0, moved, points), size, inertia


def _filled(points: Tensor, size: Tensor, draw: torch.Generator) -> Tensor:
    """Order one class's clusters (M, d) by size and let empty ones repeat the others."""
    order = torch.sort(size, descending=True, stable=True).indices
    points, n = points[order], int((size > 0).sum())
    if not n:
        return torch.zeros_like(points)
    repeated = points[torch.arange(len(points)) % n]
    noise = torch.randn(points.shape, generator=draw) * repeated.norm(dim=1, keepdim=True) / points.shape[1] ** 0.5
    return torch.where(torch.arange(len(points)).unsqueeze(1) < n, points, repeated + NOISE * noise)
