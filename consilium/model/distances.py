"""Distance of an example to the nearest class: the score for "none of the classes".

d^2(v) = min_c (v - m_c)' (S + r I)^-1 (v - m_c), with class means m_c and one covariance S within classes (Lee, Lee,
Lee and Shin, "A simple unified framework for detecting out-of-distribution samples", NeurIPS 2018). The score is the
product of the distances of features and of logits. Fitting needs only a hospital's own examples of known classes.
docs/predict.md compares the score with the largest logit, energy and the largest probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXAMPLES = 3
"""Examples that a class needs to have a mean."""
_RANK = 256
_SHRINKAGE = 0.1
_NAMES = ("means", "known", "directions", "weights", "ridge")


@dataclass(frozen=True, eq=False, slots=True)
class ClassDistances:
    """Class means, and the covariance within classes, of vectors of d numbers; float64.

    means: (C, d)   known: (C,) which classes have a mean   directions: (k, d) orthonormal, k <= 256   ridge: r ()
    weights: (k,) share of the squared component along each direction that is subtracted: s^2 / (s^2 + r).
    """

    means: Tensor
    known: Tensor
    directions: Tensor
    weights: Tensor
    ridge: Tensor

    @classmethod
    def of(cls, vectors: Tensor, labels: Tensor, n_classes: int) -> ClassDistances:
        """Fit to vectors (n, d) and labels (n,). At least one class needs `MIN_EXAMPLES`; smaller ones get no mean."""
        v = vectors.double()
        counts = torch.bincount(labels, minlength=n_classes)
        measured = counts >= MIN_EXAMPLES
        sums = torch.zeros(n_classes, v.shape[1], dtype=torch.float64).index_add_(0, labels, v)
        means = torch.where(measured.unsqueeze(1), sums / counts.clamp(min=1).unsqueeze(1), 0.0)
        rest = (v - means[labels])[measured[labels]]
        _, s, directions = torch.linalg.svd(rest / len(rest) ** 0.5, full_matrices=False)
        s, directions = s[:_RANK].square(), directions[:_RANK]
        ridge = (_SHRINKAGE * rest.square().sum(1).mean() / v.shape[1]).clamp(min=1e-12)
        return cls(means, measured, directions, s / (s + ridge), ridge)

    def squared(self, vectors: Tensor) -> Tensor:
        """Return d^2 (n,) of vectors (n, d) to the nearest class that has a mean."""
        least = torch.full((len(vectors),), torch.inf, dtype=torch.float64)
        for mean in self.means[self.known]:
            rest = vectors.double() - mean
            along = (rest @ self.directions.T).square() @ self.weights
            least = torch.minimum(least, (rest.square().sum(1) - along) / self.ridge)
        return least

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors for a file: float64, `known` as 0 and 1."""
        return {f"{prefix}.{name}": getattr(self, name).double().contiguous() for name in _NAMES}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], prefix: str, n_classes: int) -> ClassDistances:
        """Build from a file's tensors; raises ValueError if they do not fit."""
        stored = [tensors.get(f"{prefix}.{name}", torch.zeros(0)) for name in _NAMES]
        means, measured, directions, weights, ridge = stored
        d = means.shape[-1] if means.ndim == 2 else -1
        shapes = [(n_classes, d), (n_classes,), (len(weights), d), (len(weights),), ()]
        if [tuple(v.shape) for v in stored] != shapes or any(v.dtype != torch.float64 for v in stored):
            raise ValueError(f"{prefix}: tensors with shapes or types that do not match")
        sound = all(bool(torch.isfinite(v).all()) for v in stored) and bool(((measured == 0) | (measured == 1)).all())
        if (
            not sound
            or not bool(measured.any())
            or not float(ridge) > 0
            or not bool(((weights >= 0) & (weights <= 1)).all())
        ):
            raise ValueError(f"{prefix}: numbers out of range")
        return cls(means, measured > 0, directions, weights, ridge)
