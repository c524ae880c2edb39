"""Functions for methods against client drift: effective steps, a census of the silos' sizes, means over all silos.

A mean over all N silos, pi_k = n_k / sum_j n_j, needs the sizes of silos that are not in the round. Only sums are used
for this. A silo sends n_k with its first included update, and 0 later. The mean size of

    census = (sum of n_k, number of silos) over the silos included so far,    mean size = their quotient

is used for the other silos. It is exact once all silos were included; with equal sizes, from the first round on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from fl_core.errors import RefusedError
from fl_core.types import tensor_maps
from fl_core.types.enums import Weighing
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Part, PartRule, Tensors

CENSUS = "census"
CENSUS_RULE = PartRule(Weighing.ONCE, counts="n")
SIZE = "size"
SGD_ONLY = "set train.optimizer=sgd, whose steps have a known length (with momentum or without)"


def effective_steps_of(data: LocalData, steps: int, mu: float = 0.0) -> float:
    """Return A_k of the steps taken, > 0; raises RefusedError (E-RUN-52) if no step was taken."""
    if steps < 1:
        raise RefusedError("E-RUN-52", "this silo takes no training step: raise train.epochs")
    return data.effective_steps(steps, mu)


def split(values: Tensors, names: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    named = {name: v for name, v in values.items() if name in names}
    return named, {name: v for name, v in values.items() if name not in names}


def zeros_of(model: nn.Module, travels: Callable[[str], bool]) -> dict[str, Tensor]:
    """Make zeros for the trained parameters that are sent."""
    return tensor_maps.zeros(tensor_maps.select(tensor_maps.trainable(model), travels))


def empty_census() -> dict[str, Tensor]:
    return {"n": torch.zeros(1), "silos": torch.zeros(1)}


def report_size(n: float = 0.0) -> dict[str, Tensor]:
    """Make the size in a silo's state: 0 before its first included update."""
    return {"n": torch.tensor([n])}


def size_of(size: Tensors, weight: float) -> float:
    """Return a silo's weight in means over all silos; its first included update fixes it."""
    return float(size["n"]) or weight


def size_part(size: Tensors, n: float) -> Part:
    """Make a silo's part of the census: n the first time, later zeros of weight 0."""
    return Part.of({"n": torch.tensor([n])}, 0.0 if float(size["n"]) else 1.0)


def total_size(census: Tensors, part: Part) -> dict[str, Tensor]:
    return {
        "n": (census["n"].double() + part.total["n"]).float(),
        "silos": (census["silos"].double() + part.weight).float(),
    }


def mean_size(census: Tensors) -> float:
    """Return the mean size of the silos included so far; 0 before the first."""
    silos = float(census["silos"])
    return float(census["n"]) / silos if silos else 0.0


def updated_mean(mean: Tensors, part: Part, before: Tensors, after: Tensors, n_silos: int) -> dict[str, Tensor]:
    """Move sum_k n_k v_k / sum_k n_k over all N silos by the round's sum_k n_k (v_k+ - v_k), in float64.

    before, after: the census; a better known total rescales the mean, so that mean x total stays the exact sum.
    """
    old, new = n_silos * mean_size(before), n_silos * mean_size(after)
    if not new:
        return dict(mean)
    return {name: ((v.double() * old + part.total[name]) / new).to(v.dtype) for name, v in mean.items()}
