"""What is known of a record's class: which one it is, or that it is one of several.

A target is an int64. From 0 on it is the class; below 0 it is a set of classes, bit c of its lower 62 bits saying that
it may be class c. So no set looks like a class to code that knows of none: as an index it is out of range.

A record of a set S, a coarse label, is learnt by the probability of S:

    loss = -log sum_{c in S} p_c        gradient in the logits: p - p restricted to S and divided by its sum

which is the cross entropy where S is one class. Sums per class and evaluations leave such records out: they ask for a
class.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

MAX_COARSE = 62
"""A coarse label can have classes of which the run has fewer before them. With one more a set could be -1."""
_SET = -(2**63)


def one_of(classes: Iterable[int]) -> int:
    """Encode a set of at least two classes, each below `MAX_COARSE`."""
    bits = sum(1 << c for c in set(classes))
    if not 0 < bits < 2**MAX_COARSE or bits.bit_count() < 2:
        raise ValueError(f"expected at least two classes from 0 to {MAX_COARSE - 1}, found {sorted(set(classes))}")
    return _SET + bits


def has_class(y: Tensor) -> Tensor:
    """Tell of which targets (n,) the class is known."""
    return y >= 0


def possible(y: Tensor, n_classes: int) -> Tensor:
    """Return which classes (n, C) each target may be."""
    place = torch.arange(n_classes, device=y.device)
    bits = (y.unsqueeze(1) >> place.clamp(max=MAX_COARSE - 1)) & 1
    return torch.where(has_class(y).unsqueeze(1), place == y.unsqueeze(1), (bits == 1) & (place < MAX_COARSE))


def classes_in(y: Tensor, n_classes: int) -> list[int]:
    """Return the classes that any of the targets may be, ascending."""
    return torch.nonzero(possible(torch.unique(y), n_classes).any(0)).flatten().tolist()


def target_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the loss (n,) of each example: cross entropy, of a set -log of its summed probability.

    Guarantees: an example of one class has the bits that `cross_entropy` gives it, whatever the others are.
    """
    if y.device.type == "cpu" and bool(has_class(y).all()):  # elsewhere the question would stop the device
        return cross_entropy(logits, y, reduction="none")
    plain = cross_entropy(logits, y.clamp(min=0), reduction="none")
    outside = ~possible(y, logits.shape[1])
    coarse = torch.logsumexp(logits, 1) - torch.logsumexp(logits.masked_fill(outside, float("-inf")), 1)
    return torch.where(has_class(y), plain, coarse)
