"""A model that classifies with fixed class vectors: only what makes the features is trained, and perhaps one scale.

With h = projection(body(x)) normalised and W (C, d) fixed, the logits are s W h.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_core.models.split_model import SplitModel

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


class Adapted(nn.Module):
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
