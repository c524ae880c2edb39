"""Few numbers in many tensors, laid end to end in one row: what a call costs is then paid once, not per tensor.

A model of some ten thousand numbers in a dozen tensors spends an optimizer's step in calls, not in arithmetic. Tensors
that lie in one row are still the tensors they were, by the same names, and are read, written and trained by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fl_core.types import BLOCK


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the row (n,) that tensors in the CPU's memory fill in this order, as a view; None where they do not.

    Found from where they lie now, so a model that was moved or loaded anew is never taken for what it was.
    """
    first = tensors[0]
    start = end = first.data_ptr()
    for t in tensors:
        if t.data_ptr() != end or t.dtype != first.dtype or not t.is_contiguous() or t.device.type != "cpu":
            return None
        end += t.numel() * t.element_size()
    size = (end - start) // first.element_size()
    within = (first.storage_offset() + size) * first.element_size() <= first.untyped_storage().nbytes()
    return first.detach().as_strided((size,), (1,)) if size and within else None


def lay(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Move parameters into one row and return it; None, and nothing moved, where that saves nothing or cannot be.

    That is: for a single one, more than `BLOCK` numbers, on a GPU (whose optimizers take all tensors at once anyway),
    of several types or of a memory format of their own.
    Guarantees: values, shapes, names and gradients are what they were; the parameters stay the objects that they are.
    """
    if len(parameters) < 2 or not 0 < sum(p.numel() for p in parameters) <= BLOCK:
        return None
    if (row := joined(parameters)) is not None:
        return row
    first = parameters[0]
    if any(p.dtype != first.dtype or p.device.type != "cpu" or not p.is_contiguous() for p in parameters):
        return None
    row = torch.cat([p.detach().reshape(-1) for p in parameters])
    for p, place in zip(parameters, torch.split(row, [p.numel() for p in parameters]), strict=True):
        p.data = place.view(p.shape)
    return row


class RowOptimizer:
    """An optimizer of parameters that lie in one row, which it takes for a single one.

    make: the optimizer of given parameters, one that treats every number alike (SGD, Adam).
    Guarantees: takes the steps of `make(parameters)` bit for bit; a parameter without a gradient takes none.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        row: Tensor,
        make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._parameters, self._make = parameters, make
        self._row: nn.Parameter | None = nn.Parameter(row)
        self._optimizer = make([self._row])

    def step(self) -> None:
        """Take a step along the gradients of the parameters."""
        if self._row is not None:
            gradients = [p.grad for p in self._parameters]
            there = [g.reshape(-1) for g in gradients if g is not None]
            if len(there) == len(gradients):
                self._row.grad = torch.cat(there)
            else:
                self._part(self._row)
        self._optimizer.step()

    def _part(self, row: nn.Parameter) -> None:
        """Go on tensor by tensor, each with its piece of what the optimizer remembers."""
        sizes, single = [p.numel() for p in self._parameters], self._make(self._parameters)
        for name, value in self._optimizer.state[row].items():
            whole = isinstance(value, Tensor) and value.shape == row.shape
            pieces = torch.split(value, sizes) if whole else [value] * len(sizes)
            for p, piece in zip(self._parameters, pieces, strict=True):
                single.state[p][name] = piece.view(p.shape) if whole else _own(piece)
        self._row, self._optimizer = None, single


def _own(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
