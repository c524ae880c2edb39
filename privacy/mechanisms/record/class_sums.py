"""Units of privacy, and the noisy release of sums over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_core.tensors import Tensor, torch
from fl_core.types.targets import has_class
from fl_core.types.values import ClassSums, Examples, Tensors
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.sources import NoiseSource
from privacy.mechanisms.record.draws import record_keys

ROWS = 64
"""Rows per batch of a query; the last batch is padded to it, see `pad_batch`."""
Subset = Callable[[Tensor], Tensor]
"""Selects some examples of one unit."""


@dataclass(frozen=True)
class PrivacyUnits:
    """The examples of each unit: a single record, or all examples of a group (patient, lesion)."""

    members: Sequence[Tensor]
    of_example: Tensor
    """(n,): the unit of each example."""

    @classmethod
    def of(cls, examples: Examples) -> PrivacyUnits:
        if examples.groups is None:
            index = torch.arange(len(examples))
            return cls(list(index.unsqueeze(1)), index)
        numbers: dict[str, int] = {}
        unit = torch.tensor([numbers.setdefault(g, len(numbers)) for g in examples.groups], dtype=torch.long)
        order = torch.argsort(unit, stable=True)
        return cls(list(torch.split(order, torch.bincount(unit).tolist())), unit)

    def __len__(self) -> int:
        return len(self.members)

    def chunks(self, drawn: Tensor, most: int | None, subset: Subset | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield chunks of whole units: (index (n,), unit (n,)).

        most: largest number of examples in a chunk of several units; None: all units in one chunk, 0: one per chunk.
        """
        waiting, size = list[Tensor](), 0
        for u in drawn.tolist():
            members = self.members[u] if subset is None else subset(self.members[u])
            if waiting and most is not None and size + len(members) > most:
                yield _joined(waiting)
                waiting, size = [], 0
            waiting.append(members)
            size += len(members)
        if waiting:
            yield _joined(waiting)


def _joined(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    units = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(p) for p in parts]))
    return torch.cat(list(parts)), units


@dataclass(frozen=True, slots=True)
class KeyedUnits:
    """Units with keys from their contents. drawn: a selection of units; None: all."""

    units: PrivacyUnits
    examples: Examples
    drawn: Tensor | None = None

    def __len__(self) -> int:
        return len(self.units) if self.drawn is None else len(self.drawn)

    def keys(self) -> NDArray[np.uint64]:
        """Return a key per unit, independent of the order of its records."""
        keys = np.zeros(len(self.units), dtype=np.uint64)
        np.add.at(keys, self.units.of_example.numpy(), record_keys(self.examples))
        return keys if self.drawn is None else keys[self.drawn.numpy()]

    def at(self, drawn: Tensor) -> KeyedUnits:
        return KeyedUnits(self.units, self.examples, drawn)


def pad_batch(x: Tensor, rows: int) -> Tensor:
    """Fill a batch (n, ...) with zeros up to a multiple of `rows` rows.

    Kernels sum in an order that depends on the shape, so without this one additional unit could change the last bits of
    all others.
    """
    return torch.cat((x, x.new_zeros(-len(x) % rows, *x.shape[1:]))) if len(x) % rows else x


def class_sums(
    query: ClassSums,
    examples: Examples,
    units: PrivacyUnits,
    bound: float,
    weight: float,
    noise_multiplier: float,
    noise: NoiseSource,
    few: float = 0.0,
    device: torch.device | None = None,
) -> Tensors:
    """Release, per class, the sum of vectors and the number of units, jointly and with noise.

    A unit of class c adds clip_R(mean of its vectors) to the sum and lambda to the scaled count; a unit with several
    classes adds the mean over its examples, split by class and clipped as a whole. So adding or removing a unit moves
    the joint vector by at most Delta = sqrt(R^2 + lambda^2), independent of the number of classes. Contributions are
    rounded toward zero to whole multiples of g (grid.py): the sum is exact, and rounding adds no sensitivity.
    Noise of std noise_multiplier * Delta is added to every entry of all classes, present or not.
    bound: R   weight: lambda   few: rows of classes whose noisy count is below max(1, few + 2 std) are zeros; 0: of
    classes whose noisy count is below 1.

    Returns {"sum": (C, d), "count": (C,)} float32. Guarantees: the result depends on the data only through the noisy
    values; a unit with a vector that is not finite adds nothing.
    """
    delta = sensitivity(bound, weight)
    shares = unit_shares(query, examples, units, bound, device)
    g, std = grid.step(delta, query.n_classes * (shares.vectors.shape[1] + 1)), noise_multiplier * delta
    total = shares.summed(grid.truncated(shares.vectors, g), query.n_classes)
    count = shares.summed(grid.truncated(weight * shares.counts, g), query.n_classes)
    noisy, counted = grid.add_noise(total, g, std, noise), grid.add_noise(count, g, std, noise) / weight
    least = max(1.0, few + 2 * std / weight) if few else 1.0
    kept = counted >= least
    return {
        "sum": torch.where(kept.unsqueeze(1), noisy, torch.zeros_like(noisy)).float(),
        "count": torch.where(kept, counted, torch.zeros_like(counted)).float(),
    }


def class_counts(
    examples: Examples, units: PrivacyUnits, n_classes: int, noise_multiplier: float, noise: NoiseSource
) -> Tensor:
    """Release the noisy number of units per class (C,) float32, at least 0; a unit moves the vector by at most 1.

    A unit with several classes counts in each class by its share of examples.
    """
    unit, label, share = _pairs(units, examples.labels, n_classes)
    shares = UnitShares(unit, label, share.new_zeros(len(unit), 0), share)
    g = grid.step(1.0, n_classes)
    count = shares.summed(grid.truncated(shares.counts, g), n_classes)
    return grid.add_noise(count, g, noise_multiplier, noise).clamp(min=0.0).float()


def sensitivity(bound: float, weight: float) -> float:
    """Return Delta = sqrt(R^2 + lambda^2) of the joint query."""
    return math.hypot(bound, weight)


@dataclass(frozen=True, slots=True)
class UnitShares:
    """Each unit's contribution to each of its classes, in float64. Never release them without noise.

    unit, label: (m,), for each pair of a unit and one of its classes   vectors: (m, d)   counts: (m,), at most 1 in
    total per unit.
    """

    unit: Tensor
    label: Tensor
    vectors: Tensor
    counts: Tensor

    def summed(self, values: Tensor, n_classes: int) -> Tensor:
        """Sum values of the pairs (m, ...) by class (C, ...)."""
        return values.new_zeros(n_classes, *values.shape[1:]).index_add_(0, self.label, values)


def unit_shares(
    query: ClassSums, examples: Examples, units: PrivacyUnits, bound: float, device: torch.device | None = None
) -> UnitShares:
    """Return each unit's mean vector, split by class, with a joint norm of at most `bound`."""
    vectors, n_units = _vectors(query, examples, device), len(units)
    unit, label, counts = _pairs(units, examples.labels, query.n_classes)
    sizes = torch.bincount(units.of_example, minlength=n_units).double()
    labelled = has_class(examples.labels)
    place = torch.unique((units.of_example * query.n_classes + examples.labels)[labelled], return_inverse=True)[1]
    means = torch.zeros(len(unit), vectors.shape[1], dtype=torch.float64)
    means.index_add_(0, place, (vectors / sizes[units.of_example].unsqueeze(1))[labelled])
    bad_rows = (~torch.isfinite(means).all(1)).long()
    not_finite = torch.zeros(n_units, dtype=torch.long).index_add_(0, unit, bad_rows)[unit] > 0
    means, counts = means.masked_fill(not_finite.unsqueeze(1), 0.0), counts.masked_fill(not_finite, 0.0)
    largest = means.abs().amax(1) if means.shape[1] else means.new_zeros(len(means))
    scale = torch.zeros(n_units, dtype=torch.float64).scatter_reduce(0, unit, largest, "amax")
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    means /= scale[unit].unsqueeze(1)
    norms = torch.zeros(n_units, dtype=torch.float64).index_add_(0, unit, means.square().sum(1)).sqrt()
    length = torch.minimum(scale, bound / (norms * grid.EXACT).clamp(min=1e-300))
    return UnitShares(unit, label, means * length[unit].unsqueeze(1), counts)


def _pairs(units: PrivacyUnits, labels: Tensor, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the pairs of a unit and one of its classes: unit (m,), label (m,), the unit's share of examples there (m,).

    Examples with coarse labels have no pair, but count as examples of their unit. So its shares add up to at most 1.
    """
    sizes = torch.bincount(units.of_example, minlength=len(units)).double()
    labelled = has_class(labels)
    pair, number = torch.unique((units.of_example * n_classes + labels)[labelled], return_counts=True)
    unit = pair // n_classes
    return unit, pair % n_classes, number / sizes[unit]


def _vectors(query: ClassSums, examples: Examples, device: torch.device | None) -> Tensor:
    rows = []
    with torch.no_grad():
        for x, y in examples.batches(ROWS):
            vectors = query.vectors(pad_batch(x, ROWS).to(device), pad_batch(y.clamp(min=0), ROWS).to(device))
            rows.append(vectors[: len(x)].double().cpu())
        if not rows:  # a split without examples: only its width is needed
            x, y = examples.batch(torch.zeros(0, dtype=torch.long))
            blank = query.vectors(x.new_zeros(ROWS, *x.shape[1:]).to(device), y.new_zeros(ROWS).to(device))
            rows.append(blank[:0].double().cpu())
    return torch.cat(rows)
