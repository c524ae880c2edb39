"""Units of privacy, and the noisy release of sums over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_core.types import ClassSums, Examples, Tensors
from privacy.entropy import Noise

_BATCH = 256


@dataclass(frozen=True)
class Units:
    """The examples of each unit: a record of its own, or all examples of a group (patient, lesion)."""

    members: Sequence[Tensor]
    of_example: Tensor
    """(n,): the unit of each example."""

    @classmethod
    def of(cls, examples: Examples) -> Units:
        """Read the units of a data set: its groups where it names any, else its records."""
        if examples.groups is None:
            index = torch.arange(len(examples))
            return cls(list(index.unsqueeze(1)), index)
        numbers: dict[str, int] = {}
        unit = torch.tensor([numbers.setdefault(g, len(numbers)) for g in examples.groups], dtype=torch.long)
        order = torch.argsort(unit, stable=True)
        return cls(list(torch.split(order, torch.bincount(unit).tolist())), unit)

    def __len__(self) -> int:
        return len(self.members)

    def chunks(self, drawn: Tensor, most: int | None, cap: int, noise: Noise) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the examples of drawn units as (index (n,), unit (n,) from 0), at most about `most` at a time.

        most: None for all at once; cap: examples of one unit, a random subset; 0: all. No unit is split.
        """
        waiting, held = list[Tensor](), 0
        for u in drawn.tolist():
            mine = self.members[u]
            if cap and len(mine) > cap:
                mine = mine[torch.argsort(noise.uniform(len(mine)))[:cap]]
            if waiting and most is not None and held + len(mine) > most:
                yield _joined(waiting)
                waiting, held = [], 0
            waiting.append(mine)
            held += len(mine)
        if waiting:
            yield _joined(waiting)

    def class_shares(self, labels: Tensor, n_classes: int) -> Tensor:
        """Count units per class (C,), float64: a unit of several classes counts in each by its share of examples."""
        sizes = torch.bincount(self.of_example, minlength=len(self)).double()
        return torch.zeros(n_classes, dtype=torch.float64).index_add_(0, labels, 1.0 / sizes[self.of_example])


def _joined(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    units = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(p) for p in parts]))
    return torch.cat(list(parts)), units


def class_sums(
    query: ClassSums, examples: Examples, units: Units, bound: float, weight: float, noise_multiplier: float,
    noise: Noise, few: float = 0.0, device: torch.device | None = None,
) -> Tensors:  # fmt: skip
    """Release, per class, the sum of vectors and the number of units, jointly and with noise.

    A unit of class c adds clip_R(mean of its vectors) to the sum and lambda to the scaled count; one of several classes
    adds the mean over its examples, split by class and clipped as a whole. So adding or removing a unit moves the joint
    vector by at most Delta = sqrt(R^2 + lambda^2), without a factor for the classes.
    bound: R; weight: lambda; noise std: noise_multiplier * Delta on every entry of all classes, present or not
    few: classes whose noisy count is below few + 2 std (and below 1) are rows of zeros.

    Returns {"sum": (C, d), "count": (C,)} float32. Guarantees: what is noisy is all that depends on the data.
    """
    total, count = exact_class_sums(query, examples, units, bound, device)
    std = noise_multiplier * sensitivity(bound, weight)
    noisy = total + noise.gaussian(tuple(total.shape), std)
    counted = count + noise.gaussian(tuple(count.shape), std) / weight
    least = max(1.0, few + 2 * std / weight) if few else 1.0
    kept = counted >= least
    return {
        "sum": torch.where(kept.unsqueeze(1), noisy, torch.zeros_like(noisy)).float(),
        "count": torch.where(kept, counted, torch.zeros_like(counted)).float(),
    }


def sensitivity(bound: float, weight: float) -> float:
    """Return Delta = sqrt(R^2 + lambda^2) of the joint query."""
    return math.hypot(bound, weight)


def exact_class_sums(
    query: ClassSums, examples: Examples, units: Units, bound: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Sum clipped unit vectors (C, d) and unit counts (C,) in float64, without noise: not to be released like this."""
    vectors, classes = _vectors(query, examples, device)
    n_units, c = len(units), query.n_classes
    sizes = torch.bincount(units.of_example, minlength=n_units).double()
    share = 1.0 / sizes[units.of_example]
    pair, place = torch.unique(units.of_example * c + classes, return_inverse=True)
    means = torch.zeros(len(pair), vectors.shape[1], dtype=torch.float64)
    means.index_add_(0, place, vectors * share.unsqueeze(1))
    of_pair = pair // c
    squares = torch.zeros(n_units, dtype=torch.float64).index_add_(0, of_pair, means.square().sum(1))
    factor = (bound / squares.sqrt().clamp(min=1e-300)).clamp(max=1.0)
    total = torch.zeros(c, vectors.shape[1], dtype=torch.float64)
    total.index_add_(0, pair % c, means * factor[of_pair].unsqueeze(1))
    return total, units.class_shares(classes, c)


def _vectors(query: ClassSums, examples: Examples, device: torch.device | None) -> tuple[Tensor, Tensor]:
    rows, labels = [], []
    with torch.no_grad():
        for x, y in examples.batches(_BATCH):
            rows.append(query.vectors(x.to(device), y.to(device)).double().cpu())
            labels.append(y)
    return torch.cat(rows), torch.cat(labels)
