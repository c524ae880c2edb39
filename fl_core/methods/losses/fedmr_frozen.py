"""FedMR's L_intra with frozen statistics: features decorrelated by terms of single examples (experimental).

With p = P clip_R(z), P (k, d) of orthonormal rows, public, and per class c the mean m, deviation s and correlation
matrix M of p over all examples, the objective mean_c ||M_c||_F^2 of manifold.py has the exact gradient, where s, m and
M were measured, of the mean over all N examples of

    2 N / (|V| n_c) ( ph' M_c ph - sum_a r_a ph_a^2 ),   ph = (p - m_c) / s_c,   r_a = sum_b M_ab^2

whose second term is the path through s. They follow from one joint sum per class of (p / R, p p' / R^2, 1), of norm
sqrt(3). Means and variances alone would not do, decorrelation is about cross moments; d instead of k dimensions would
drown in noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from fl_core import rng
from fl_core.methods.building_blocks import class_vectors as geometry
from fl_core.methods.building_blocks.prototypes import features_of
from fl_core.training.frozen_statistics import Freezable
from fl_core.types.values import ClassSums, Losses, LossFn, Tensors, Turn

DIMENSIONS = 16
"""k, or the features' dimension where that is smaller."""
_FLOOR = 1e-8
"""Of a variance, in units of R^2: a constant feature is not blown up."""


class Intra(Protocol):
    """The options of FedMR that decide whether L_intra is the only coupled term, in the paper's form."""

    @property
    def mu1(self) -> float:
        """Weigh L_intra."""
        ...

    @property
    def intra(self) -> str:
        """Name the form of L_intra."""
        ...

    @property
    def inter(self) -> str:
        """Name the form of L_inter."""
        ...

    @property
    def inter_weighting(self) -> str:
        """Name the weights of L_inter's terms."""
        ...

    @property
    def uses_prototypes(self) -> bool:
        """Tell whether L_inter is there."""
        ...


@dataclass(frozen=True)
class Statistics:
    """What is frozen, per class: mean, deviation (C, k), correlations (C, k, k), and N / (|V| n_c), 0 outside V."""

    mean: Tensor
    deviation: Tensor
    correlation: Tensor
    share: Tensor

    @classmethod
    def of(cls, sums: Tensors, k: int, radius: float, std: float) -> Statistics:
        """Read moments off the sums; std: of their noise, under which no variance is believed."""
        total, count = sums["sum"].double(), sums["count"].double()
        n = count.clamp(min=1.0).unsqueeze(1)
        mean = total[:, :k] / n
        second = (total[:, k:] / n).reshape(-1, k, k)
        covariance = (second + second.mT) / 2 - mean.unsqueeze(2) * mean.unsqueeze(1)
        least = (2 * std / n).clamp(min=_FLOOR)
        deviation = torch.maximum(covariance.diagonal(dim1=1, dim2=2), least).sqrt()
        correlation = (covariance / (deviation.unsqueeze(2) * deviation.unsqueeze(1))).clamp(-1.0, 1.0)
        correlation.diagonal(dim1=1, dim2=2).fill_(1.0)
        seen = count >= 2
        share = torch.where(seen, count.sum() / (seen.sum().clamp(min=1) * n.squeeze(1)), torch.zeros_like(count))
        return cls(mean * radius, deviation * radius, correlation, share)

    def terms(self, p: Tensor, y: Tensor) -> Tensor:
        """Return the terms (B,) of projected features p (B, k)."""
        mean, deviation, m, share = (
            v.to(p.device, p.dtype)[y] for v in (self.mean, self.deviation, self.correlation, self.share)
        )
        ph = (p - mean) / deviation
        pulled = (m @ ph.unsqueeze(2)).squeeze(2) - m.square().sum(2) * ph
        return 2 * share * (ph * pulled).sum(1)


@dataclass(frozen=True)
class FrozenIntra:
    """The frozen form of mu1 L_intra. seed: of the projection, the run's own."""

    mu1: float
    n_classes: int
    seed: int
    norm: ClassVar[float] = sqrt(2)
    weight: ClassVar[float] = 1.0

    def query(self, model: nn.Module, radius: float) -> ClassSums:
        """Ask per class for the sums of p / R and of p p' / R^2."""

        def vectors(x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
            with torch.no_grad():
                p = self.projected(model, x, radius) / radius
            return torch.cat((p, (p.unsqueeze(2) * p.unsqueeze(1)).flatten(1)), 1)

        return ClassSums(vectors, self.n_classes)

    def loss(self, whole: LossFn, sums: Tensors, radius: float, std: float) -> LossFn:
        """Put the frozen terms in the place of the coupled ones."""
        k = round(sqrt(sums["sum"].shape[1] + 0.25) - 0.5)  # k + k^2 columns
        held = Statistics.of(sums, k, radius, std)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            terms = held.terms(self.projected(model, x, radius), y)
            return Losses(whole(model, x, y).per_example + self.mu1 * terms)

        return loss

    def projected(self, model: nn.Module, x: Tensor, radius: float) -> Tensor:
        """Return p = P clip_R(z) (B, k)."""
        z: Tensor = features_of(model).features(x)
        z = z * (radius / z.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
        d = z.shape[1]
        k = min(DIMENSIONS, d)
        axes = geometry.haar(d, k, rng.stream(self.seed, "projection", d, k))
        projected: Tensor = z @ axes.to(z.device, z.dtype)
        return projected


def freezable(method: Intra, loss: LossFn, turn: Turn) -> LossFn:
    """Give a loss its frozen form where L_intra, as the paper has it, is all that couples its batch."""
    alone = not method.uses_prototypes or (method.inter == "own_sample" and method.inter_weighting == "example")
    if not (method.mu1 and method.intra == "paper" and alone):
        return loss
    return Freezable(loss, FrozenIntra(method.mu1, turn.fed.n_classes, turn.seed))
