"""Linear heads in closed form, from sums of second moments and of each class, and these moments from class means.

A (D, D) and B (C, D) are sums over vectors of d features with a constant 1 behind them, D = d + 1, with the weights w_c
of classes inside; equations and sources: `methods/disjoint/analytic.py`. All of it is float64.

Lambda is in units of a feature's mean square, one unit for all, or (`standardised`) in units of each feature's own
variance: then the head is that of features with mean 0 and variance 1, written for the features as they are.
"""

from __future__ import annotations

import math

from fl_core.errors import ConfigError
from fl_core.tensors import Tensor, torch

CONSTANT = 1
"""Entries behind the features."""
_NEVER = -1e30
"""The bias of a class without examples."""
LAMBDAS: tuple[float, ...] = tuple(10.0 ** (k / 4) for k in range(-28, 9))
"""Lambda is chosen from these, 10^-7 to 100."""
_LEAST = 2.0**-28
"""Of the sum of weights, which a silo may send as 0: quotients stay finite."""
_CONSTANT_BELOW = 1e-12
"""Variance of a feature, as a share of its mean square, that may be rounding: such a feature is the same everywhere."""


def packed(a: Tensor) -> Tensor:
    """Return the lower triangle of symmetric matrices (..., D, D) as vectors (..., D (D + 1) / 2)."""
    rows, columns = torch.tril_indices(*a.shape[-2:])
    return a[..., rows, columns]


def unpacked(triangle: Tensor) -> Tensor:
    """Return the symmetric matrices (..., D, D) of vectors from `packed`."""
    size = (math.isqrt(8 * len(triangle) + 1) - 1) // 2
    rows, columns = torch.tril_indices(size, size)
    a = triangle.new_zeros(size, size)
    a[rows, columns] = triangle
    return torch.tril(a) + torch.tril(a, -1).T


def positive(A: Tensor) -> Tensor:
    """Return the nearest symmetric matrix whose eigenvalues are not below 0, which those of noisy moments can be."""
    values, vectors = torch.linalg.eigh(A)
    projected: Tensor = (vectors * values.clamp(min=0.0)) @ vectors.T
    return projected


def balanced(counts: Tensor) -> Tensor:
    """Return the roots (C,) of the weights that give every class of counts (C,) the same share."""
    return torch.sqrt(counts.sum() / (len(counts) * counts.clamp(min=1.0)))


def solve_ridge(A: Tensor, B: Tensor, ridge: float, noise: float = 0.0, *, standardised: bool = False) -> Tensor:
    """Return W (C, d + 1): least squares on one-hot targets with lambda N |W|^2, the constant's row left out.

    A: (d + 1, d + 1)   B: (C, d + 1)   ridge: lambda   noise: added to lambda N, for the constant as well.
    """
    return solve_penalised(A, B, ridge * units(A, standardised=standardised) + noise, noise)


def units(A: Tensor, *, standardised: bool) -> Tensor:
    """Return what lambda N is counted in for each feature (d,): N times its variance, or the mean square of all.

    A feature that is constant has no variance: it gets that of an average one, and so the weight 0.
    """
    if not standardised:
        return A.diagonal()[:-CONSTANT].mean().expand(len(A) - CONSTANT)
    squares, sums = A.diagonal()[:-CONSTANT], A[-1, :-CONSTANT]
    spread = squares - sums.square() / A[-1, -1].clamp(min=_LEAST)
    varies = spread > _CONSTANT_BELOW * squares
    average = spread[varies].mean() if bool(varies.any()) else torch.ones_like(spread[0])
    return torch.where(varies, spread, average)


def solve_penalised(A: Tensor, B: Tensor, penalty: Tensor, of_constant: float = 0.0) -> Tensor:
    """Return W (C, d + 1) of (A + P)^-1 B, where P is diagonal: penalty (d,), and `of_constant` for the constant."""
    diagonal = torch.full((len(A),), of_constant, dtype=A.dtype)
    diagonal[:-CONSTANT] = penalty
    return _solve(A + torch.diag(diagonal), B.T).T


def effective_records(weighted: Tensor, root: Tensor) -> Tensor:
    """Return how many records of equal weight leave as much to an error as weighted ones: n where all weights are 1.

    A record's leverage is about f w_i / sum w, so its mean over weights is f sum w^2 / (sum w)^2 (Kish, "Survey
    Sampling", 1965). A few heavily weighted records of a rare class count as fewer than they are.

    weighted: w_c n_c (C,)   root: of the weights w_c (C,)
    """
    return weighted.sum().square() / (weighted * root.square()).sum().clamp(min=_LEAST)


def choose_ridge(A: Tensor, B: Tensor, weighted: Tensor, records: float) -> float:
    """Return lambda of standardised ridge by generalised cross-validation, from the sums alone.

    Golub, Heath and Wahba, "Generalized Cross-Validation as a Method for Choosing a Good Ridge Parameter",
    Technometrics 1979. With the eigenvalues e_j and eigenvectors V of the features' correlations R (d, d), the
    correlations q = V^T r of features and targets, and S the sum of squares of the centred targets, each term weighted,

        GCV(lambda) = (RSS / n) / (1 - f / n)^2         f = 1 + sum_j e_j / (e_j + lambda)       trace of the hat matrix
        RSS = S - sum_j |q_j|^2 / e_j + sum_j |q_j|^2 / e_j (lambda / (e_j + lambda))^2          over all targets

    The 1 is the constant, which has no penalty. Weights are inside of RSS and f, and n counts records, of unequal
    weights the `effective_records`. Of equal scores the largest lambda is taken.

    weighted: sums of squares of each target, w_c n_c of one-hot ones (C,)   records: n
    """
    size, total = len(A) - CONSTANT, A[-1, -1].clamp(min=_LEAST)
    root, sums = units(A, standardised=True).sqrt(), A[-1, :-CONSTANT]
    R = (A[:size, :size] - torch.outer(sums, sums / total)).div_(root).div_(root.unsqueeze(1))
    values, vectors = torch.linalg.eigh(R)
    r = (B[:, :size] - torch.outer(B[:, -1], sums / total)) / root
    q = (r @ vectors).square().sum(0)
    kept = values > max(float(values[-1]), 0.0) * size * torch.finfo(A.dtype).eps
    e, explained = values[kept], q[kept] / values[kept]
    left = (weighted.sum() - B[:, -1].square().sum() / total - explained.sum()).clamp(min=0.0)

    def score(ridge: float) -> float:
        free = records - CONSTANT - float((e / (e + ridge)).sum())
        rss = float(left + (explained * (ridge / (e + ridge)).square()).sum())
        return rss * records / free**2 if free > 0 else math.inf

    return min(reversed(LAMBDAS), key=score)


def solve_lda(
    A: Tensor, B: Tensor, weights: Tensor, ridge: float, noise: float = 0.0, *, standardised: bool = False
) -> Tensor:
    """Return W (C, d + 1) of discriminants with the pooled covariance; a class without examples is never chosen.

    noise: of noisy sums, added to N times the covariance, whose eigenvalues below 0 are 0 first.
    """
    means, size, total = _means(B, weights), len(A) - CONSTANT, weights.sum()
    S = (A[:size, :size] - means.T @ (weights.unsqueeze(1) * means)) / total
    if noise:
        S = positive(S) + noise / total * torch.eye(size, dtype=A.dtype)
    S = S + torch.diag(ridge * (units(A, standardised=standardised) / total))
    W = _solve(S, means.T).T
    bias = torch.where(weights > 0, torch.log(weights / total) - (means * W).sum(1) / 2, _NEVER)
    return torch.cat((W, bias.unsqueeze(1)), dim=1)


def nearest_mean(B: Tensor, weights: Tensor, variance: Tensor | None = None) -> Tensor:
    """Return W (C, d + 1) whose logits are largest for the nearest class mean; classes without examples come last.

    variance: (C,) of the noise on each entry of a mean, whose square it adds to
    """
    means = _means(B, weights)
    squares = means.square().sum(1)
    bias = -(squares if variance is None else squares - means.shape[1] * variance) / 2
    return torch.cat((means, torch.where(weights > 0, bias, _NEVER).unsqueeze(1)), dim=1)


def shrunk(values: Tensor, variance: Tensor) -> Tensor:
    """Return noisy values (C,) moved towards their mean by as much as their spread is noise; variance: of it (C,)."""
    spread = (values.var(correction=0) - variance.mean()).clamp(min=0.0)
    return values.mean() + (values - values.mean()) * spread / (spread + variance).clamp(min=1e-300)


def _means(B: Tensor, weights: Tensor) -> Tensor:
    return B[:, :-CONSTANT] / weights.clamp(min=1e-300).unsqueeze(1)


def _solve(S: Tensor, right: Tensor) -> Tensor:
    """Solve a symmetric system in float64; if it is not positive definite, use only its positive eigenvalues."""
    factor, failed = torch.linalg.cholesky_ex(S)
    if not int(failed):
        return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(S)
    kept = values > values.abs().max() * len(S) * torch.finfo(S.dtype).eps
    inverse = torch.where(kept, 1.0 / torch.where(kept, values, torch.ones_like(values)), torch.zeros_like(values))
    solved: Tensor = vectors @ (inverse.unsqueeze(1) * (vectors.T @ right))
    return solved


def estimated_moments(b: Tensor, n: Tensor, weights: Tensor) -> Tensor:
    """Return A (D, D), estimated from the sums of silos' examples of each class alone.

    b: (K, C, D) w_c times the sum over the examples of class c at silo k   n: (K, C) their counts   weights: w (C,)
    Raises ConfigError (E-CFG-08) if no class is at two silos, since then no covariance can be estimated.
    """
    silos, counts = (n > 0).sum(0), n.sum(0)
    shares = torch.where(silos > 1, weights * counts, 0.0)
    if not bool(shares.any()):
        raise ConfigError(
            "E-CFG-08",
            "the covariance is estimated from the means of a class at two silos, but no class is at two silos: set "
            "method.covariance=moments, or method.head=ncm",
        )
    means = b.sum(0) / (weights * counts).clamp(min=1e-300).unsqueeze(1)
    apart = torch.where((n > 0).unsqueeze(2), b / (weights * n.clamp(min=1.0)).unsqueeze(2) - means, 0.0)
    scale = shares * (silos - 1).clamp(min=1).reciprocal() / shares.sum()
    rows = (apart * (n * scale).sqrt().unsqueeze(2)).flatten(0, 1)
    total = (weights * counts).unsqueeze(1)
    return means.T @ (total * means) + total.sum() * rows.T @ rows
