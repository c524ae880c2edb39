"""Tensors that are read from a file, or computed from others block by block, on each access.

So a mean and the model computed from it need no memory of the model's size, and intermediate results stay in the
processor's cache. The tests compare with the simple version, whole tensors in memory.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # as in `values`
    import torch
    from torch import Tensor

BLOCK = 1 << 15
"""Numbers per block."""


class StoredTensors(Mapping[str, "Tensor"], ABC):
    """Tensors that are read or computed on each access; `shapes` are known without reading them."""

    shapes: Mapping[str, tuple[int, ...]]

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def blocks(self, name: str, size: int) -> Iterator[Tensor]:
        """Read a tensor's numbers in order, at most `size` at a time; each block is valid until the next one."""
        from fl_core.tensors import torch

        return iter(torch.split(self[name].reshape(-1), size))


class ComputedTensors(StoredTensors):
    """Tensors computed by `compute`, which yields blocks as `StoredTensors.blocks`, in the dtype of `dtypes`."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        compute: Callable[[str, int], Iterator[Tensor]],
    ) -> None:
        self.shapes = shapes
        self._dtypes, self._compute = dtypes, compute

    def __getitem__(self, name: str) -> Tensor:
        from fl_core.tensors import torch

        value, at = torch.empty(self.shapes[name], dtype=self._dtypes[name]), 0
        flat = value.view(-1)
        for block in self._compute(name, BLOCK):
            flat[at : at + len(block)] = block
            at += len(block)
        return value

    def blocks(self, name: str, size: int) -> Iterator[Tensor]:
        return self._compute(name, size)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]


def mean_of(total: StoredTensors, weight: Tensor) -> ComputedTensors:
    """Divide sums by a weight () in float64; the result is float32."""
    from fl_core.tensors import torch

    def compute(name: str, size: int) -> Iterator[Tensor]:
        most = min(size, math.prod(total.shapes[name]))
        exact, mean = torch.empty(most, dtype=torch.float64), torch.empty(most)
        for block in total.blocks(name, size):
            torch.div(block, weight, out=exact[: len(block)])
            yield mean[: len(block)].copy_(exact[: len(block)])

    return ComputedTensors(total.shapes, dict.fromkeys(total.shapes, torch.float32), compute)


def sum_of(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a + b; it is computed on access if `b` is."""
    if not isinstance(b, StoredTensors):
        return {name: value + b[name] for name, value in a.items()}

    from fl_core.tensors import torch

    def compute(name: str, size: int) -> Iterator[Tensor]:
        for x, y in zip(_blocks(a, name, size), b.blocks(name, size), strict=True):
            yield x + y

    dtypes = {name: a.dtype(name) if isinstance(a, StoredTensors) else a[name].dtype for name in a}
    return ComputedTensors(
        {name: b.shapes[name] for name in a},
        {name: torch.promote_types(dtype, b.dtype(name)) for name, dtype in dtypes.items()},
        compute,
    )


def _blocks(tensors: Mapping[str, Tensor], name: str, size: int) -> Iterator[Tensor]:
    if isinstance(tensors, StoredTensors):
        return tensors.blocks(name, size)
    flat = tensors[name].detach().reshape(-1)
    return (flat[start : start + size] for start in range(0, len(flat), size))
