"""The noisy release of second moments and class sums, from which a closed-form head is solved.

Dwork, Talwar, Thakurta and Zhang, "Analyze Gauss: Optimal Bounds for Privacy-Preserving Principal Component Analysis",
STOC 2014, with the sums per class of a ridge regression beside the moments (Wang, "Revisiting Differentially Private
Linear Regression", UAI 2018). A record of class y with the vector u adds

v = (svec(u u^T), u (x) e_y),   |v|^2 = |u|^4 + |u|^2 <= 2   for |u| <= 1

where svec is the lower triangle with off-diagonal entries multiplied by sqrt(2), so that its norm is that of the
matrix. A group adds the mean of its records' v, which is no longer. The release adds Gaussian noise of standard
deviation s = z sqrt(2) to every number of the sum of v, or s = z if only sums per class are requested: in the matrix
itself s on the diagonal and s / sqrt(2) elsewhere.

In integers: u is bounded in float64 and its entries are truncated toward zero to whole multiples of h, so that products
are whole multiples of h^2 and their sums are exact; the mean of a group is truncated toward zero once more. No step
makes an entry larger, so the sensitivity does not grow. The result depends on the data only through noisy values.

If silos share the noise, only the sum over them is private, so nothing may be computed from a single release: its
numbers are whole steps of the grid that masks are added on, within its bounds. The sums of the records are clipped to
these bounds before their noise, which does not increase the distance of any two of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.grid_bounds import NOISE_STDS
from fl_core.errors import ConfigError
from fl_core.tensors import Tensor, torch
from fl_core.types.targets import has_class
from fl_core.types.values import Examples, MomentSums, Tensors
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.discrete_gaussian import MAX_SIGMA, MIN_SIGMA
from privacy.mechanisms.noise.sources import NoiseSource
from privacy.mechanisms.record.class_sums import ROWS, PrivacyUnits, pad_batch

FINEST = 2.0**-16
"""h if the noise permits it. An int64 then holds the sum of the products of two thousand million units."""
COARSEST = 2.0**-8
"""The largest h that a grid may require: entries of hundreds of features are about a sixteenth."""
_EXACT = 2.0**53
MOST_SENSITIVE = math.sqrt(2.0)
"""Sensitivity of a release with second moments."""


@dataclass(frozen=True, slots=True)
class ReleaseGrid:
    """The grid of a release's numbers: whole multiples of `step`, a power of two, up to `most`."""

    step: float
    most: float

    @classmethod
    def of(cls, format: FixedPointFormat, segments: Iterable[str]) -> ReleaseGrid:
        """Choose a grid that fits all segments; raises ConfigError as `FixedPointFormat.bound`."""
        bounds, bits = zip(*((format.bound(s), format.frac_bits(s)) for s in segments), strict=True)
        return cls(2.0 ** -min(bits), min(bounds))

    def room(self, std: float) -> float:
        """Return the bound on sums with which sum and noise stay within the grid.

        Raises ConfigError (E-PRIV-20) if the grid is too coarse for sums of moments, or too small for the noise.
        """
        h = grid_of(std, self.step)
        if h > COARSEST or std / math.sqrt(2.0) < MIN_SIGMA * h**2 or std < MIN_SIGMA * h:
            raise ConfigError(
                "E-PRIV-20",
                f"sums of moments need grid steps of at most {COARSEST**2:g}, found {self.step:g}: set "
                "secagg.ring=ring64",
            )
        room = min(self.most, _EXACT * h**2) - NOISE_STDS * std
        if room <= 0:
            raise ConfigError(
                "E-PRIV-20",
                f"noise can reach {NOISE_STDS * std:.3g}, but the grid ends at {self.most:g}: set secagg.ring=ring64",
            )
        return room


def moment_sums(
    query: MomentSums,
    examples: Examples,
    units: PrivacyUnits,
    noise_multiplier: float,
    noise: NoiseSource,
    few: float = 0.0,
    device: torch.device | None = None,
    on: ReleaseGrid | None = None,
) -> Tensors:
    """Release a query with noise of `noise_multiplier` times its sensitivity.

    few: sums of classes whose noisy count is below few + 2 std are rows of zeros   on: for shared noise, the grid of
    the sum over silos. Returns the tensors in `MomentSums`; raises as `ReleaseGrid.room`.
    Guarantees: adding or removing a unit, with any numbers, moves (svec(A), B), before the noise, by at most
    `sensitivity`; a record that is not finite adds nothing.
    """
    std = noise_multiplier * sensitivity(query)
    h = grid_of(std, on.step if on else 0.0)
    a, b = exact_sums(query, examples, units, h, device)
    if on:
        room = on.room(std)
        a, b = (v.clamp(-math.floor(room / step), math.floor(room / step)) for v, step in ((a, h**2), (b, h)))
    if query.second:
        a = _symmetric_noise(a, std / h**2, noise)
    rows = 1 if query.joint else query.n_classes
    b = torch.cat((grid.add_noise(b[:rows], h, std, noise), b[rows:].double()))
    if few:
        least = query.constant * few + 2 * std
        b = torch.where((b[:, -1] >= least).unsqueeze(1), b, torch.zeros_like(b))
    return {"a": a.double() * h**2, "b": b, "variance": torch.tensor(std**2, dtype=torch.float64)}


def sensitivity(query: MomentSums) -> float:
    return MOST_SENSITIVE if query.second else 1.0


def grid_of(std: float, step: float = 0.0) -> float:
    """Return h, a power of two, for this standard deviation: std / h^2 is in the range of the noise sampler.

    step: a power of two of which h and h^2 are whole multiples; 0 for none.
    """
    finest = max(FINEST, step, 2.0 ** math.ceil(math.log2(step) / 2)) if step else FINEST
    return max(finest, 2.0 ** -math.floor((math.log2(MAX_SIGMA) - math.log2(std)) / 2)) if std else finest


def exact_sums(
    query: MomentSums, examples: Examples, units: PrivacyUnits, h: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sums (D, D) in units of h^2 and (C, D) in units of h, int64. Never release them without noise."""
    a = torch.zeros(query.width, query.width, dtype=torch.long)
    b = torch.zeros(query.n_classes, query.width, dtype=torch.long)
    for index, unit in units.chunks(torch.arange(len(units)), ROWS):
        x, y = examples.batch(index)
        u = grid.truncated(grid.contributions(_vectors(query, x, y.clamp(min=0), device), 1.0), h)
        u, y = torch.where(has_class(y).unsqueeze(1), u, torch.zeros_like(u)), y.clamp(min=0)  # a coarse label adds 0
        y = torch.zeros_like(y) if query.joint else y
        if int(unit[-1]) + 1 == len(unit):  # every unit is a single record
            a += _products(u, query.second)
            b.index_add_(0, y, u)
            continue
        for k in range(int(unit[-1]) + 1):
            records, labels = u[unit == k], y[unit == k]
            a += torch.div(_products(records, query.second), len(records), rounding_mode="trunc")
            b += torch.div(torch.zeros_like(b).index_add_(0, labels, records), len(records), rounding_mode="trunc")
    return a, b


def _products(u: Tensor, second: bool) -> Tensor:
    """Return sum u u^T in int64: up to 2^21 products of entries below 2^16 are added exactly in float64."""
    wide = u.double()
    return (wide.T @ wide).long() if second else torch.zeros(u.shape[1], u.shape[1], dtype=torch.long)


def _vectors(query: MomentSums, x: Tensor, y: Tensor, device: torch.device | None) -> Tensor:
    """Return the vectors (n, D) in float64, computed in batches of one shape."""
    with torch.no_grad():
        pairs = zip(torch.split(pad_batch(x, ROWS), ROWS), torch.split(pad_batch(y, ROWS), ROWS), strict=True)
        vectors = [query.vectors(features.to(device), labels.to(device)).double().cpu() for features, labels in pairs]
    return torch.cat(vectors)[: len(x)]


def _symmetric_noise(a: Tensor, sigma: float, noise: NoiseSource) -> Tensor:
    """Add noise of `sigma` on the diagonal and, symmetrically, of sigma / sqrt(2) elsewhere."""
    if not sigma:
        return a
    size = len(a)
    rows, columns = torch.tril_indices(size, size, -1)
    off_diagonal = noise.discrete_gaussian((len(rows),), sigma / math.sqrt(2.0))
    drawn = torch.diag(noise.discrete_gaussian((size,), sigma))
    drawn[rows, columns] = off_diagonal
    drawn[columns, rows] = off_diagonal
    return a + drawn
