"""Fixed classifiers: unit vectors in R^d, one per class, as far apart as they can be.

    simplex        cosine -1/(C-1) between any two          C <= d + 1, the optimum
    cross-polytope +-q_i of an orthonormal basis            d + 1 < C <= 2d, the optimum (Rankin 1955)
    polygon        angles 2 pi i / C                        d = 2, the optimum
    repulsion      min (1/b) log sum_{i<j} exp(b w_i.w_j)   else, by projected gradient, b = 1, 10, 100, 1000

All arithmetic is in float64: rounded to float32 afterwards, one seed gives the same numbers everywhere.

`FixedHead` classifies with them: only what makes the features is trained, and perhaps one scale. With h =
projection(body(x)) normalised and W (C, d) fixed, the logits are s W h.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pdist

from fl_core import rng
from fl_core.errors import ConfigError
from fl_core.models.split_model import SplitModel
from fl_core.types import tensor_maps

SHARPNESS = (1.0, 10.0, 100.0, 1000.0)
STEPS = 2000
STEP_SIZE = 0.1


def seed_of(model: nn.Module) -> int:
    """Derive a seed below 2^24 from initial weights: another seed of the run gives another, and float32 holds it."""
    return int(tensor_maps.digest(tensor_maps.copy_state(model))[:6], 16)


def haar(d: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw k <= d orthonormal columns (d, k), uniformly: Gaussian, QR, and the signs of R's diagonal taken out."""
    q, r = torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64))
    columns: Tensor = q * r.diagonal().sign()
    return columns


def helmert(n: int) -> Tensor:
    """Return an orthonormal basis (n, n - 1) of the vectors whose entries sum to 0."""
    basis = torch.zeros(n, n - 1, dtype=torch.float64)
    for k in range(1, n):
        basis[:k, k - 1], basis[k, k - 1] = 1.0, -float(k)
        basis[:, k - 1] /= math.sqrt(k * (k + 1))
    return basis


def etf(n_classes: int, d: int, seed: int) -> Tensor:
    """Return a simplex equiangular tight frame (C, d) in float64: M^T of M = sqrt(C/(C-1)) U (I - 11^T/C).

    U (d, C) has orthonormal columns; with d = C - 1, U (I - 11^T/C) becomes R B^T with R (d, d) orthonormal and B an
    orthonormal basis of the complement of the ones.
    Guarantees: M^T M = C/(C-1) (I - 11^T/C): unit vectors of cosine -1/(C-1), which sum to 0; one seed, one frame.
    Raises ConfigError (E-CFG-23) unless C >= 2 and d >= C - 1.
    """
    _check(n_classes, d, n_classes - 1)
    draw = rng.stream(seed, "etf", d, n_classes)
    if d < n_classes:
        return _simplex(n_classes, d, draw)
    u = haar(d, n_classes, draw)
    return math.sqrt(n_classes / (n_classes - 1)) * (u - u.mean(1, keepdim=True)).T.contiguous()


def uniform(n_classes: int, d: int, seed: int) -> Tensor:
    """Return unit vectors (C, d) in float64 whose smallest distance is as large as is known: see the table above.

    Raises ConfigError (E-CFG-23) unless C >= 2 and d >= 2, or C = 2.
    """
    _check(n_classes, d, min(n_classes - 1, 2))
    draw = rng.stream(seed, "uniform", d, n_classes)
    if n_classes <= d + 1:
        return _simplex(n_classes, d, draw)
    if n_classes <= 2 * d:
        axes = haar(d, d, draw).T
        return torch.cat([axes, -axes[: n_classes - d]])
    if d == 2:
        angle = 2 * math.pi * torch.arange(n_classes, dtype=torch.float64) / n_classes
        return torch.stack([angle.cos(), angle.sin()], dim=1)
    return _repelled(n_classes, d, draw)


def orthogonal(n_classes: int, d: int, seed: int) -> Tensor:
    """Return orthonormal vectors (C, d) in float64; raises ConfigError (E-CFG-23) unless d >= C >= 2."""
    _check(n_classes, d, n_classes)
    return haar(d, n_classes, rng.stream(seed, "orthogonal", d, n_classes)).T.contiguous()


def _check(n_classes: int, d: int, needed: int) -> None:
    if n_classes < 2 or d < needed:
        raise ConfigError(
            "E-CFG-23",
            f"a fixed classifier needs at least 2 classes and here {needed} features, found {n_classes} classes and "
            f"{d} features: set model.projection to a wider one",
        )


def _simplex(n_classes: int, d: int, draw: torch.Generator) -> Tensor:
    corners = math.sqrt(n_classes / (n_classes - 1)) * helmert(n_classes)
    return corners @ haar(d, n_classes - 1, draw).T


def _repelled(n_classes: int, d: int, draw: torch.Generator) -> Tensor:
    """Push points apart and keep the best configuration met on the way."""
    w = normalize(torch.randn(n_classes, d, generator=draw, dtype=torch.float64), dim=1)
    best, farthest = w, float(pdist(w).min())
    self_pairs = torch.eye(n_classes, dtype=torch.bool)
    for sharpness in SHARPNESS:
        for _ in range(STEPS):
            close = (sharpness * (w @ w.T)).masked_fill(self_pairs, float("-inf"))
            push = close.flatten().softmax(0).view_as(close)  # the gradient of (1/b) log sum exp, over ordered pairs
            w = normalize(w - STEP_SIZE * (push + push.T) @ w, dim=1)
            if (distance := float(pdist(w).min())) > farthest:
                best, farthest = w, distance
    return best


CLASSIFIER = "classifier"
SCALE = "scale.factor"
EPS = 1e-12


class UnitLength(nn.Module):
    """Bring each feature vector to length 1."""

    def forward(self, z: Tensor) -> Tensor:
        return normalize(z, dim=1, eps=EPS)


class Scale(nn.Module):
    """Multiply by one number; a module of its own, so that gradients per example can be taken of it."""

    def __init__(self, value: float, *, trained: bool) -> None:
        super().__init__()
        factor = torch.full((1,), value)
        if trained:
            self.factor = nn.Parameter(factor)
        else:
            self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class FixedHead(nn.Module):
    """Body and projection of a model, shared with it, under fixed class vectors; its head is left aside.

    classifier: (C, d), a buffer   s: the scale, trained or not   norm: of the features; None brings them to length 1.
    """

    def __init__(
        self,
        model: SplitModel,
        classifier: Tensor,
        s: float,
        *,
        trained: bool = False,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        device = next(model.parameters()).device
        self.body, self.projection = model.body, model.projection
        self.norm = (norm or UnitLength()).to(device)
        self.scale = Scale(s, trained=trained).to(device)
        self.register_buffer(CLASSIFIER, classifier.float().to(device))
        self.feature_dim, self.n_classes = model.feature_dim, model.n_classes

    def features(self, x: Tensor) -> Tensor:
        """Return the normalised features (B, d)."""
        h: Tensor = self.norm(self.projection(self.body(x)))
        return h

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.scale(self.features(x) @ cast(Tensor, self.classifier).T)
        return logits


class ScaledClassifier(nn.Module):
    """A classifier whose logits are multiplied by one number per class; classes of `left_out` are never chosen."""

    def __init__(self, model: nn.Module, factor: Tensor, left_out: Tensor | None = None) -> None:
        super().__init__()
        self.model, self.factor, self.left_out = model, factor, left_out

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        logits = logits * self.factor.to(logits)
        return logits if self.left_out is None else logits.masked_fill(self.left_out.to(logits.device), float("-inf"))


def adaptation(counts: Tensor) -> Tensor:
    """Return phi_k = C n_k^c / n_k (C,) from class counts (C,); counts below 0, which noise can make, count as 0."""
    present = counts.clamp(min=0.0)
    return len(counts) * present / present.sum().clamp(min=1.0)
