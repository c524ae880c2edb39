"""The comparison of two models on the same images, against double loops and against the truth."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from fl_core.training.delong import paired_auc
from tests.oracles.equations import slow_delong


def two_classes(score: Tensor) -> Tensor:
    return torch.stack([-score, score], 1)


def test_of_two_classes_it_is_delongs() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(40, generator=generator) < 0.3).long()
    a = torch.randn(40, generator=generator) + labels
    b = (torch.randn(40, generator=generator) + a).round(decimals=1)  # with ties
    found = paired_auc(two_classes(a), two_classes(b), labels)
    assert found is not None
    difference, variance = slow_delong(a.tolist(), b.tolist(), labels.tolist())
    assert found.difference == pytest.approx(difference, abs=1e-12)
    assert found.variance == pytest.approx(variance, rel=1e-9)
    assert (found.images, found.classes) == (40, 2)


def test_the_order_of_models_changes_the_sign_alone_and_one_model_differs_by_nothing_from_itself() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(30) % 3
    a, b = (torch.randn(30, 3, generator=generator) for _ in range(2))
    one, other, same = paired_auc(a, b, labels), paired_auc(b, a, labels), paired_auc(a, a, labels)
    assert one is not None
    assert other is not None
    assert one.difference == pytest.approx(-other.difference)
    assert one.variance == pytest.approx(other.variance)
    assert same is not None
    assert (same.difference, same.variance) == (0.0, 0.0)


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 2, 3]])
def test_of_one_class_or_single_images_there_is_no_comparison(labels: list[int]) -> None:
    scores = torch.rand(4, 4)
    assert paired_auc(scores, scores, torch.tensor(labels)) is None


def test_scores_that_are_no_numbers_have_no_order() -> None:
    scores = torch.rand(4, 2)
    assert paired_auc(scores * math.nan, scores, torch.tensor([0, 0, 1, 1])) is None
    infinite = scores.clone()
    infinite[0, 0] = math.inf
    assert paired_auc(infinite, scores, torch.tensor([0, 0, 1, 1])) is not None


def test_the_interval_of_two_hospitals_holds_the_true_difference() -> None:
    """Scores of two models with a common part, at hospitals of 20 and 60 images; 1,000 draws."""
    generator, z, held = torch.Generator().manual_seed(2), norm.ppf(0.975), 0
    shifts, common = (1.4, 0.9), 0.6
    truth = norm.cdf(shifts[0] / math.sqrt(2)) - norm.cdf(shifts[1] / math.sqrt(2))
    for _ in range(1000):
        weight = total = square = 0.0
        for n in (20, 60):
            labels = torch.arange(n) % 2
            shared = torch.randn(n, generator=generator)
            scores = [
                common * shared + math.sqrt(1 - common**2) * torch.randn(n, generator=generator) + shift * labels
                for shift in shifts
            ]
            found = paired_auc(*map(two_classes, scores), labels)
            assert found is not None
            weight, total = weight + n, total + n * found.difference
            square += n * n * found.variance
        mean, deviation = total / weight, math.sqrt(square) / weight
        held += abs(mean - truth) <= z * deviation
    assert held / 1000 >= 0.93
