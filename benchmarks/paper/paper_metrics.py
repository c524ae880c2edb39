"""Numbers by which papers compare methods, from features, classifiers and the records of a run.

Accuracies (global, personal, fairness) are measured during a run: evaluation.py, records.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

BATCH, TOP = 128, 50
"""Features per batch, and eigenvalues that count, in FedMR's Table 7."""


def correlation_eigenvalues(z: Tensor, eps: float = 1e-8) -> Tensor:
    """Return the eigenvalues (d,) of the correlation matrix of features z (n, d), largest first, in float64.

    Features are standardised with the unbiased variance; a dimension that does not vary contributes nothing.
    """
    z = z.detach().double()
    if len(z) < 2:
        return z.new_zeros(z.shape[1])
    centred = z - z.mean(0)
    variance = centred.square().sum(0) / (len(z) - 1)
    scaled = torch.where(variance > eps, centred / variance.clamp(min=eps).sqrt(), torch.zeros_like(centred))
    values = torch.linalg.svdvals(scaled).square() / (len(z) - 1)
    return torch.cat([values, values.new_zeros(max(0, z.shape[1] - len(values)))])[: z.shape[1]]


def eigenvalue_variance(eigenvalues: Tensor, batch: int = BATCH, top: int = TOP) -> float:
    """Return FedMR's Table 7: 1/batch sum_{i <= top} (lambda_i - mean of the top ones)^2, over the largest eigenvalues.

    It is 0 for decorrelated features and (1 - 1/top) d^2 / batch where one direction carries all: 2007.04 at d = 512.
    Fan et al., "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping", TMLR 2023.
    """
    kept = eigenvalues.double().sort(descending=True).values[:top]
    return float((kept - kept.mean()).square().sum() / batch)


def class_eigenvalue_variance(z: Tensor, y: Tensor, batch: int = BATCH, top: int = TOP) -> float:
    """Return Table 7's number per class of at least two examples, averaged; NaN where there is no such class."""
    groups = [z[y == c] for c in y.unique().tolist()]  # type: ignore[no-untyped-call]
    values = [eigenvalue_variance(correlation_eigenvalues(g), batch, top) for g in groups if len(g) > 1]
    return sum(values) / len(values) if values else math.nan


def mean_angle(vectors: Tensor, members: Sequence[int] | Tensor) -> float:
    """Return the mean angle in degrees over unordered pairs of rows of vectors (C, d); NaN for fewer than two members.

    members: indices, or a mask (C,). Fan, Yao et al. (FedGELA), NeurIPS 2023, Figure 2: the rows are a classifier's
    over the existing or the missing classes of a silo, or class means of features.
    """
    chosen = torch.as_tensor(members)
    rows = vectors.detach().double()[chosen]
    if len(rows) < 2:
        return math.nan
    unit = normalize(rows, dim=1, eps=1e-300)
    i, j = torch.triu_indices(len(unit), len(unit), 1)
    # |u - v| = 2 sin(angle / 2) is exact where the cosine is near 1, its complement where it is near -1
    difference, total = (unit[i] - unit[j]).norm(dim=1), (unit[i] + unit[j]).norm(dim=1)
    return float(torch.rad2deg(2 * torch.atan2(difference, total)).mean())


def classifier_angles(head: Tensor, present: Tensor) -> dict[str, float]:
    """Return the mean angles {"existing", "missing"} of a classifier (C, d) for a silo's present classes (C,) bool."""
    return {"existing": mean_angle(head, present), "missing": mean_angle(head, ~present)}


def class_means(z: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """Return the mean feature per class (C, d); NaN rows where a class has no example."""
    sums = z.new_zeros(n_classes, z.shape[1]).index_add_(0, y, z)
    return sums / torch.bincount(y, minlength=n_classes).to(z).unsqueeze(1)


def feature_angle(z: Tensor, y: Tensor, n_classes: int) -> float:
    """Return the mean angle between class-mean features, without centring, over the classes that z (n, d) holds."""
    held = torch.bincount(y, minlength=n_classes) > 0
    return mean_angle(class_means(z, y, n_classes), held)


def proxy_statistics(head: Tensor, present: Tensor) -> Mapping[str, float | list[float]]:
    """Return how a classifier's rows (C, d) lie for a silo's present classes O (C,) bool and missing ones M.

    norms: |w_c|; o_o, o_m, m_m: mean distance |w_i - w_j| over i in the first and j in the second set, the zeros of
    i = j counted. Li and Zhan et al. (MAP), TKDE 2024. NaN where a set is empty.
    """
    w = head.detach().double()
    distances = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")

    def mean(a: Tensor, b: Tensor) -> float:
        block = distances[a][:, b]
        return float(block.mean()) if block.numel() else math.nan

    return {
        "norms": w.norm(dim=1).tolist(),
        "o_o": mean(present, present),
        "o_m": mean(present, ~present),
        "m_m": mean(~present, ~present),
    }


def rounds_to_target(accuracies: Sequence[float], target: float) -> float:
    """Return the first t >= 1 with accuracies[t] >= target, NaN where there is none; index 0 is before round 1."""
    return next((float(t) for t, a in enumerate(accuracies) if t and a >= target), math.nan)


def speed_up(rounds: float, reached: float) -> float:
    """Return T / t: FedAvg is charged all T rounds, whenever it found its best (FedMR, Table 4)."""
    return rounds / reached


def rounds_text(reached: float, rounds: int) -> str:
    """Write a number of rounds, or ">T" where the target was not reached."""
    return f">{rounds}" if math.isnan(reached) else f"{reached:.0f}"
