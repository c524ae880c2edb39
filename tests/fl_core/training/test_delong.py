"""The comparison of two models on the same images, against double loops and against the truth."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from fl_core.training.delong import paired_auc
from fl_core.types.targets import UNKNOWN
from tests.oracles.equations import slow_delong

pytestmark = pytest.mark.integration


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


def test_of_one_label_it_is_delongs_over_who_was_looked_at() -> None:
    generator = torch.Generator().manual_seed(2)
    labels = (torch.rand(60, generator=generator) < 0.4).long()
    a = torch.randn(60, generator=generator) + labels
    b = (torch.randn(60, generator=generator) + a).round(decimals=1)
    asked = torch.rand(60, generator=generator) < 0.7
    known = torch.where(asked, labels, UNKNOWN).unsqueeze(1)
    found = paired_auc(a.unsqueeze(1), b.unsqueeze(1), known)
    assert found is not None
    difference, variance = slow_delong(a[asked].tolist(), b[asked].tolist(), labels[asked].tolist())
    assert found.difference == pytest.approx(difference, abs=1e-12)
    assert found.variance == pytest.approx(variance, rel=1e-9)
    assert (found.images, found.classes) == (int(asked.sum()), 1)


def test_of_labels_that_are_alike_one_tells_all_and_those_of_other_images_tell_twice_as_much() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = (torch.rand(80, 1, generator=generator) < 0.4).long()
    a = torch.randn(80, 1, generator=generator) + labels
    b = torch.randn(80, 1, generator=generator) + labels
    one, alike = paired_auc(a, b, labels), paired_auc(*(v.repeat(1, 3) for v in (a, b, labels)))
    assert one is not None
    assert alike is not None
    assert (alike.difference, alike.variance) == pytest.approx((one.difference, one.variance))
    nobody = torch.full_like(labels, UNKNOWN)
    apart = torch.cat([torch.cat([labels, nobody], 1), torch.cat([nobody, labels], 1)])
    found = paired_auc(a.repeat(2, 2), b.repeat(2, 2), apart)
    assert found is not None
    assert (found.difference, found.variance) == pytest.approx((one.difference, one.variance / 2))
    assert (found.images, found.classes) == (160, 2)


@pytest.mark.parametrize("labels", [[[1], [1], [1], [0]], [[0], [0], [UNKNOWN], [UNKNOWN]]])
def test_labels_without_two_images_on_either_side_have_no_comparison(labels: list[list[int]]) -> None:
    scores = torch.rand(4, 1)
    assert paired_auc(scores, scores, torch.tensor(labels)) is None


def test_the_interval_over_several_labels_holds_the_true_difference() -> None:
    """Labels that go together, two models of which one is better: 95 % intervals over 400 test sets."""
    generator, held = torch.Generator().manual_seed(4), 0
    truth = float(norm.cdf(1.2 / 2**0.5) - norm.cdf(0.6 / 2**0.5))
    for _ in range(400):
        common = torch.randn(300, 1, generator=generator)
        labels = ((common + torch.randn(300, 3, generator=generator)) > 0.8).long()
        noise = torch.randn(300, 3, generator=generator)
        a = noise + 1.2 * labels
        b = 0.6 * noise + 0.8 * torch.randn(300, 3, generator=generator) + 0.6 * labels
        labels = torch.where(torch.rand(300, 3, generator=generator) < 0.2, UNKNOWN, labels)
        found = paired_auc(a, b, labels)
        assert found is not None
        held += abs(found.difference - truth) <= 1.96 * math.sqrt(found.variance)
    assert held >= 0.93 * 400
