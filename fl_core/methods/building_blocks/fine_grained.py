"""Classes split into M fine classes each: a head over fine classes, and prototypes of them.

Fine class j = c M + m. A fixed aggregation turns fine logits (B, CM) into class logits (B, C):

    "sum"   sum_m v_(c,m)        "mean"  sum_m v_(c,m) / M        "prob"  log sum_m exp v_(c,m)

The last one makes a class's probability the sum of its fine classes' probabilities.
Prototypes are kept as p (CM, d), known (CM,), 1 where one exists, and count (CM,), the examples it stood for last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_core.models.split_model import SplitModel
from fl_core.types.interfaces import LocalData
from fl_core.types.values import ClassSums, Part, Tensors

AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda v: v.sum(2),
    "mean": lambda v: v.mean(2),
    "prob": lambda v: v.logsumexp(2),
}
COSINE_EPS = 1e-8


def class_logits(fine: Tensor, per_class: int, aggregation: str) -> Tensor:
    """Aggregate fine logits (B, CM) to class logits (B, C)."""
    return AGGREGATIONS[aggregation](fine.reshape(len(fine), fine.shape[1] // per_class, per_class))


def by_class(rows: Tensor, per_class: int) -> Tensor:
    """View rows of fine classes (CM, ...) as (C, M, ...)."""
    return rows.reshape(-1, per_class, *rows.shape[1:])


class Prototypes(nn.Module):
    """Trainable prototypes (CM, d)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, z: Tensor) -> Tensor:
        """Return the cosines (B, CM) with features z (B, d); lengths below 1e-8 count as 1e-8."""
        return normalize(z, dim=1, eps=COSINE_EPS) @ normalize(self.weight, dim=1, eps=COSINE_EPS).T


class FineModel(nn.Module):
    """Body and projection of a model, shared with it, under a head over fine classes; the model's head is left aside.

    The head's weights are not set here: write the received ones. prototypes: only where they are trained.
    """

    def __init__(self, model: SplitModel, per_class: int, aggregation: str, prototypes: Tensor | None = None) -> None:
        super().__init__()
        device = next(model.parameters()).device
        self.body, self.projection = model.body, model.projection
        fine = model.n_classes * per_class
        self.fine: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]  # no draw of torch's own generator
            nn.Linear, model.feature_dim, fine, bias=False, device=device
        )
        if prototypes is not None:
            self.prototypes = Prototypes(prototypes.to(device))
        self.feature_dim, self.n_classes = model.feature_dim, model.n_classes
        self._form = (per_class, aggregation)

    def features(self, x: Tensor) -> Tensor:
        z: Tensor = self.projection(self.body(x))
        return z

    def classify(self, z: Tensor) -> Tensor:
        """Return the class logits (B, C) of features (B, d)."""
        return class_logits(self.fine(z), *self._form)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class Anchors(NamedTuple):
    """What fine classes are told apart by in one round: points (CM, d) and which of them exist (CM,)."""

    points: Tensor
    there: Tensor

    def nearest(self, z: Tensor, y: Tensor, per_class: int) -> Tensor:
        """Return the fine class (B,) in 0..M-1 of largest cosine within the class of each example."""
        points = by_class(normalize(self.points, dim=1, eps=COSINE_EPS).to(z), per_class)[y]
        cosine = torch.einsum("bd,bmd->bm", normalize(z.detach(), dim=1, eps=COSINE_EPS), points)
        there = by_class(self.there.to(z.device), per_class)[y]
        return cosine.masked_fill(~there, float("-inf")).argmax(1)


def unknown(fine: int, d: int) -> dict[str, Tensor]:
    return {"p": torch.zeros(fine, d), "known": torch.zeros(fine), "count": torch.zeros(fine)}


def census(model: FineModel, anchors: Anchors, data: LocalData, per_class: int) -> tuple[Tensor, Tensor]:
    """Sum features (CM, d) and count examples (CM,) per fine class, in eval mode: one joint query."""
    model.eval()

    def placed(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = model.features(x)
        return by_fine_class(z, anchors.nearest(z, y, per_class), per_class)

    sums = data.sum(ClassSums(placed, model.n_classes))["sum"].reshape(model.n_classes * per_class, -1)
    return sums[:, :-1], sums[:, -1]


def by_fine_class(z: Tensor, slot: Tensor, slots: int) -> Tensor:
    """Place (z, 1) of each example in its slot: (B, d) to (B, slots (d + 1)), so that sums tell slots apart."""
    rows = z.new_zeros(len(z), slots, z.shape[1] + 1)
    rows[torch.arange(len(z), device=z.device), slot] = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
    return rows.flatten(1)


def merged(state: Tensors, part: Part, per_class: int) -> dict[str, Tensor]:
    """Move each prototype by its mean offset; rows of weight 0 stay. Counts of classes nobody reported stay, too."""
    weight = part.weight.float()
    reported = by_class(weight, per_class).sum(1).gt(0).repeat_interleave(per_class)
    return {
        "p": state["p"] + part.mean()["p"],
        "known": torch.maximum(state["known"], (weight > 0).float()),
        "count": torch.where(reported, weight, state["count"]),
    }
