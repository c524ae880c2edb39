"""What coarse labels cost, and what they are to code that knows of none."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_core.types.targets import (
    MAX_COARSE,
    UNKNOWN,
    class_counts,
    classes_in,
    has_class,
    one_of,
    possible,
    target_loss,
)

CLASSES = 5


def test_a_set_of_classes_is_read_back_and_is_no_index() -> None:
    y = torch.tensor([3, one_of([0, 4]), one_of(range(MAX_COARSE))])
    assert has_class(y).tolist() == [True, False, False]
    assert possible(y, 70).nonzero().tolist() == [[0, 3], [1, 0], [1, 4], *([2, c] for c in range(MAX_COARSE))]
    assert classes_in(y[:2], CLASSES) == [0, 3, 4]
    for coarse in y[1:]:
        with pytest.raises((IndexError, RuntimeError)):
            cross_entropy(torch.zeros(1, 70), coarse.unsqueeze(0))
        with pytest.raises((IndexError, RuntimeError)):
            torch.zeros(70)[coarse]


@pytest.mark.parametrize("classes", [[], [3], [2, 2], [0, MAX_COARSE], [-1, 2]])
def test_a_set_is_of_two_classes_that_have_a_bit(classes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"two classes|negative shift"):
        one_of(classes)


def test_the_loss_of_a_set_is_minus_log_of_its_probability() -> None:
    logits = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([2, one_of([0, 4]), one_of([1, 2, 3]), one_of(range(CLASSES))])
    p = torch.softmax(logits, 1)
    wanted = [p[0, 2], p[1, 0] + p[1, 4], p[2, 1:4].sum(), torch.tensor(1.0, dtype=torch.float64)]
    assert torch.allclose(target_loss(logits, y), -torch.stack(wanted).log(), atol=1e-12)


def test_its_gradient_is_that_of_finite_differences() -> None:
    logits = torch.randn(3, CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.tensor([one_of([0, 4]), one_of([1, 2, 3]), 2])
    found = logits.clone().requires_grad_()
    target_loss(found, y).sum().backward()
    step = 1e-6
    for i in range(len(y)):
        for c in range(CLASSES):
            around = torch.stack([logits, logits])
            around[0, i, c] -= step
            around[1, i, c] += step
            low, high = (target_loss(v, y).sum() for v in around)
            assert float(found.grad[i, c]) == pytest.approx(float(high - low) / (2 * step), abs=1e-8)
    p = torch.softmax(logits, 1)
    inside = possible(y, CLASSES)
    formula = p - torch.where(inside, p, 0.0) / torch.where(inside, p, 0.0).sum(1, keepdim=True)
    assert torch.allclose(found.grad, formula, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 80.0, 1e4])
def test_a_coarse_neighbour_changes_no_bit_of_an_example_with_a_class(scale: float) -> None:
    logits = scale * torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(3))
    y = torch.tensor([0, 1, 2, 3, 4, one_of([1, 3])])
    alone, beside = logits[:5].clone().requires_grad_(), logits.clone().requires_grad_()
    plain, found = target_loss(alone, y[:5]), target_loss(beside, y)
    assert torch.equal(plain, cross_entropy(logits[:5], y[:5], reduction="none"))
    assert torch.equal(plain, found[:5])
    plain.sum().backward()
    found.sum().backward()
    assert torch.equal(alone.grad, beside.grad[:5])
    assert bool(torch.isfinite(beside.grad).all())


# ---- several labels at once


ROWS = torch.tensor([[1, 0, UNKNOWN], [UNKNOWN, UNKNOWN, 1], [UNKNOWN] * 3, [0, 0, 1]])


def test_labels_are_counted_where_they_were_found_and_known_where_somebody_looked() -> None:
    assert class_counts(ROWS, 3).tolist() == [1, 0, 2]
    assert class_counts(torch.tensor([2, 0, 2, one_of([0, 1])]), 4).tolist() == [1, 0, 2, 0]
    assert classes_in(ROWS[:1], 3) == [0, 1]


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_label_that_nobody_looked_for_has_no_gradient_at_all(scale: float) -> None:
    logits = (scale * torch.randn(4, 3, generator=torch.Generator().manual_seed(4))).requires_grad_()
    losses = target_loss(logits, ROWS)
    losses.sum().backward()
    losses = losses.detach()
    unknown = ROWS == UNKNOWN
    assert torch.equal(logits.grad[unknown], torch.zeros(int(unknown.sum())))
    wanted = torch.where(unknown, 0.0, (torch.sigmoid(logits.detach()) - ROWS) / 3)
    assert torch.allclose(logits.grad, wanted, atol=1e-6)
    p = torch.sigmoid(logits.detach().double()[0])
    if scale == 1.0:
        assert float(losses[0]) == pytest.approx(-float(p[0].log() + (1 - p[1]).log()) / 3, rel=1e-5)
    assert float(losses[2]) == 0.0


def test_the_gradient_of_labels_is_that_of_finite_differences() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found, step = logits.clone().requires_grad_(), 1e-6
    target_loss(found, ROWS).sum().backward()
    for i in range(4):
        for k in range(3):
            around = torch.stack([logits, logits])
            around[0, i, k] -= step
            around[1, i, k] += step
            low, high = (target_loss(v, ROWS).sum() for v in around)
            assert float(found.grad[i, k]) == pytest.approx(float(high - low) / (2 * step), abs=1e-8)
