"""Bounded contributions of units, and releases of their sums: rounded to integers, with integer noise.

Proofs of privacy hold for real numbers; these functions make them hold for floats. For any floats of a unit, also NaN
and infinity, the unit contributes a finite vector within the bound. Nothing is raised, logged or counted, since that
would leak information.

contribution   v -> v min(1, C / ||v||), rounded down; the zero vector if an entry is not finite
release        (round(S / g) + N) g,  N integer noise (discrete_gaussian.py) of parameter z Delta (1 + SLACK) / g

S is a sum of contributions computed in floats, off from the exact one by at most `FLOATS` C / 2, and rounding moves two
neighbouring sums apart by at most g sqrt(d) <= `ROUNDING` C. So one unit moves the integers by at most Delta (1 +
SLACK) / g, with SLACK = FLOATS + ROUNDING: the sensitivity that noise is scaled to, and z is charged for. Everything
that follows (optimizers, differences, float32 in messages) is computed from these integers.

Mironov, "On Significance of the Least Significant Bits for Differential Privacy", CCS 2012; Higham, "Accuracy and
Stability of Numerical Algorithms", section 4.2, for sums in floating point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fl_core.tensors import Tensor, torch
from privacy.mechanisms.noise.sources import NoiseSource

FLOATS = 1e-3
"""Share of the bound by which float arithmetic may increase the distance of two neighbouring sums."""
ROUNDING = 1e-3
"""Share of the bound that rounding to the grid may add to a distance."""
SLACK = FLOATS + ROUNDING
_UNIT_ROUNDOFF = 2.0**-24
_PIECE = 1024
"""Number of squares whose float32 sum, in any order, has a relative error of at most 6.2e-5."""
_SAFE = 1.0 + 5e-5
"""Factor on norms that covers the errors of such sums, of the root and of a product in float32."""
_LARGE = 1e18
"""Norm above which squares overflow in float32; such vectors are measured and added in float64."""
EXACT = 1.0 + 1e-12
"""The same factor for norms and products in float64."""


def step(bound: float, numbers: int) -> float:
    """Return g, a power of two, for sums of `numbers` numbers whose units are bounded by `bound`."""
    return 2.0 ** math.floor(math.log2(ROUNDING * bound / math.sqrt(max(1, numbers))))


def rounded(values: Tensor, g: float) -> Tensor:
    """Round to whole multiples of g (int64), to the nearest."""
    return (values.double() / g).round_().long()


def truncated(values: Tensor, g: float) -> Tensor:
    """Round to whole multiples of g (int64) toward zero: values within a bound stay within it."""
    return (values.double() / g).trunc_().long()


def add_noise(values: Tensor, g: float, std: float, noise: NoiseSource) -> Tensor:
    """Return values and noise as multiples of g, in float64. values: int64; std: of the noise, 0 for none."""
    drawn = noise.discrete_gaussian(tuple(values.shape), std / g) if std else torch.zeros_like(values)
    return (values + drawn).double() * g


def contributions(vectors: Tensor, bound: float) -> Tensor:
    """Bound each row of vectors (u, d) by `bound`, in float64; a row with an entry that is not finite becomes zero."""
    wide = vectors.double()
    largest = wide.abs().amax(1, keepdim=True) if wide.shape[1] else wide.new_zeros(len(wide), 1)
    finite = torch.isfinite(largest)
    scale = torch.where(finite & (largest > 0), largest, torch.ones_like(largest))
    unit = torch.where(finite, wide, torch.zeros_like(wide)) / scale  # entries within [-1, 1]: squares cannot overflow
    norm = torch.linalg.vector_norm(unit, dim=1, keepdim=True) * EXACT
    # min(1, bound / (scale norm)) without a product that could overflow
    return unit * torch.minimum(scale, bound / norm.clamp(min=1e-300))


def factors(squares: Tensor, bound: float) -> Tensor:
    """Return the multiplier of each unit (u,), float64, from squared norms (u,); 0 if these are not finite."""
    norm = squares.double().sqrt() * _SAFE
    factor = (bound / norm).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.zeros_like(factor))


def square_norms(samples: Sequence[Tensor]) -> Tensor:
    """Return the squared joint norms (u,), float64, of vectors in parts (u, ...): NaN if an entry is not finite.

    Guarantees: relative error of at most 1e-4 for float32, in any order of the sums, despite overflow or underflow.
    """
    squares = torch.stack([_square(s.flatten(1)) for s in samples]).sum(0)
    again = ~(squares < _LARGE**2)  # overflow or not finite: rare, so compute again in float64
    if bool(again.any()):
        rows = [s[again].flatten(1).double().abs() for s in samples]
        large = torch.stack([r.square().sum(1) for r in rows]).sum(0)
        squares[again] = torch.where(torch.isfinite(large), large, torch.full_like(large, math.nan))
    return squares


def block_of(units: int) -> int:
    """Return the number of contributions that may be added in float32 before their sum is added in float64.

    The sum of n contributions in float32 blocks of b is off by at most 2^-24 b n of the bound: half of `FLOATS`.
    """
    most = FLOATS / (2 * _UNIT_ROUNDOFF * max(1, units))
    return int(2 ** math.floor(math.log2(max(1.0, most))))


def weighted_sum(factor: Tensor, rows: Tensor, block: int) -> Tensor:
    """Return sum_u factor_u rows_u in float64 of rows (u, ...), by blocks of `block` rows in their own precision.

    Rows whose factor is 0 may contain anything. factor: (u,) float64, at most 1.
    """
    n, flat = len(rows), rows.flatten(1)
    # A factor far below 1 would lose its digits in float32, and a row multiplied by 0 must not be NaN.
    in_float64 = (factor < 1 / _LARGE) & (factor != 1)
    total = torch.zeros(flat.shape[1], dtype=torch.float64, device=rows.device)
    if bool(in_float64.any()):
        large = in_float64 & (factor > 0)
        total += factor[large] @ flat[large].double()
        flat, factor = flat[~in_float64], factor[~in_float64]
        n = len(flat)
    if n and (flat.dtype == torch.float64 or block == 1):
        total += factor @ flat.double()
    elif n:
        narrow, whole = factor.to(flat.dtype), n // block * block
        if whole:
            sums = torch.bmm(narrow[:whole].view(-1, 1, block), flat[:whole].view(-1, block, flat.shape[1]))
            total += sums.squeeze(1).sum(0, dtype=torch.float64)
        if whole < n:
            total += (narrow[whole:] @ flat[whole:]).double()
    return total.view(rows.shape[1:])


def _square(rows: Tensor) -> Tensor:
    """Return squared norms (u,), float64, of rows (u, P). Pieces keep their own precision and are added in float64."""
    whole = rows.shape[1] // _PIECE * _PIECE
    squares: Tensor = torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square()
    if whole:
        pieces = rows[:, :whole].reshape(len(rows), -1, _PIECE)
        squares = squares + torch.linalg.vector_norm(pieces, dim=2).double().square().sum(1)
    return squares
