"""Targets of records: a class, a set of possible classes, or for each label whether it was found.

A target is an int64. A number of 0 or more is the class. A negative number is a set of classes: bit c of its lower 62
bits means that it may be class c. So code without support for sets cannot mistake a set for a class: as an index it is
out of range.

A record with a set S, a coarse label, is trained on the probability of S:

loss = -log sum_{c in S} p_c        gradient in the logits: p - p restricted to S and divided by its sum

which is the cross entropy if S is one class. Sums per class and evaluations leave such records out, since they need a
class.

A record of a run with several labels at once has a row of L values: FOUND, NOT_FOUND, or UNKNOWN if it was not examined
for the label. With p_l = sigmoid of logit l,

loss = -1/L sum over known l of (t_l log p_l + (1 - t_l) log(1 - p_l))

The sum is divided by L, not by the number of known labels. So every known answer has the same weight.
"""

from __future__ import annotations

from collections.abc import Iterable

from fl_core.tensors import Tensor, nn, torch

MAX_COARSE = 62
"""A coarse label may only contain the first 62 classes of a run. With one more, a set could be -1."""
_SET = -(2**63)
FOUND, NOT_FOUND, UNKNOWN = 1, 0, -1
"""Values of a label: found; examined and not found; not examined."""


def one_of(classes: Iterable[int]) -> int:
    """Encode a set of at least two classes, each below `MAX_COARSE`."""
    bits = sum(1 << c for c in set(classes))
    if not 0 < bits < 2**MAX_COARSE or bits.bit_count() < 2:
        raise ValueError(f"expected at least two classes from 0 to {MAX_COARSE - 1}, found {sorted(set(classes))}")
    return _SET + bits


def has_class(y: Tensor) -> Tensor:
    """Return which targets (n,) have a known class."""
    return y >= 0


def possible(y: Tensor, n_classes: int) -> Tensor:
    """Return which classes (n, C) each target may be."""
    place = torch.arange(n_classes, device=y.device)
    bits = (y.unsqueeze(1) >> place.clamp(max=MAX_COARSE - 1)) & 1
    return torch.where(has_class(y).unsqueeze(1), place == y.unsqueeze(1), (bits == 1) & (place < MAX_COARSE))


def is_multi_label(y: Tensor) -> bool:
    """Return whether targets are rows of labels (n, L), instead of one class per record (n,)."""
    return y.dim() == 2


def class_counts(y: Tensor, n_classes: int) -> Tensor:
    """Count the records (C,) with a known class, or with each label found."""
    if is_multi_label(y):
        return (y == FOUND).sum(0)
    return torch.bincount(y[has_class(y)], minlength=n_classes)


def trained_classes(y: Tensor, n_classes: int) -> Tensor:
    """Return the classes (C,) in the training examples; with several labels, those that are known in some example."""
    return (y != UNKNOWN).any(0) if is_multi_label(y) else class_counts(y, n_classes) > 0


def classes_in(y: Tensor, n_classes: int) -> list[int]:
    """Return, ascending, the classes that some target may be, or the labels that are known in some target."""
    if is_multi_label(y):
        return torch.nonzero((y != UNKNOWN).any(0)).flatten().tolist()
    return torch.nonzero(possible(torch.unique(y), n_classes).any(0)).flatten().tolist()


def target_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the loss (n,) of each example: cross entropy, -log of a set's summed probability, labels as above.

    Guarantees: an example of one class has the same bits as in `cross_entropy`, independent of the other examples; an
    unknown label has a gradient of exactly 0.
    """
    if is_multi_label(y):
        each = nn.functional.binary_cross_entropy_with_logits(logits, y.clamp(min=0).to(logits), reduction="none")
        return torch.where(y != UNKNOWN, each, torch.zeros_like(each)).sum(1) / y.shape[1]
    if y.device.type == "cpu" and bool(has_class(y).all()):  # on a GPU the check would synchronise the device
        return nn.functional.cross_entropy(logits, y, reduction="none")
    plain = nn.functional.cross_entropy(logits, y.clamp(min=0), reduction="none")
    outside = ~possible(y, logits.shape[1])
    coarse = torch.logsumexp(logits, 1) - torch.logsumexp(logits.masked_fill(outside, float("-inf")), 1)
    return torch.where(has_class(y), plain, coarse)
