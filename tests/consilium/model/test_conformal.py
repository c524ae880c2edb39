"""Temperature against other ways of finding it; sets against what they promise, exactly and over many draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from consilium.model import conformal
from fl_core.training.clinical import clinical_counts, clinical_metrics
from fl_core.types.clinical import ReliabilityBin
from fl_core.types.values import Part


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labelled(n: int, seed: int, temperature: float = 1.0, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Draw logits, and labels that have the probabilities of these logits at a temperature."""
    z = 3 * torch.randn(n, classes, generator=drawn(seed), dtype=torch.float64)
    p = torch.softmax(z / temperature, 1)
    return z, torch.multinomial(p, 1, generator=drawn(seed + 1)).squeeze(1)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 4.0])
def test_the_temperature_that_labels_were_drawn_at_is_found(temperature: float) -> None:
    z, y = labelled(20_000, 0, temperature)
    assert conformal.fit_temperature(z, y) == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("n", [3, 40, 1000])
def test_no_temperature_of_a_grid_is_better(n: int) -> None:
    z, y = labelled(n, n, 2.0)
    found = conformal.fit_temperature(z, y)
    target = torch.full_like(z, 1 / (n + 2) / z.shape[1])
    target[torch.arange(n), y] += 1 - 1 / (n + 2)

    def loss(t: float) -> float:
        return float(-(target * torch.log_softmax(z / t, 1)).sum(1).mean())

    best = min(loss(math.exp(k / 50)) for k in range(-300, 300))
    assert loss(found) <= best + 1e-9


def test_a_model_that_is_right_about_everything_does_not_become_certain() -> None:
    z = torch.eye(4, dtype=torch.float64).repeat(5, 1)
    y = torch.arange(4).repeat(5)
    p = conformal.probabilities(z, conformal.fit_temperature(z, y))
    right = p.gather(1, y.unsqueeze(1))
    n, c = len(z), 4
    assert right.squeeze(1).tolist() == pytest.approx([1 - 1 / (n + 2) * (c - 1) / c] * n, abs=2e-3)


def test_a_temperature_changes_no_answer() -> None:
    z, _ = labelled(100, 3)
    assert torch.equal(conformal.probabilities(z, 0.01).argmax(1), z.argmax(1))


@pytest.mark.parametrize(("n", "share"), [(9, 0.9), (10, 0.9), (37, 0.9), (19, 0.95), (50, 0.5), (99, 0.99), (29, 0.7)])
def test_of_n_plus_1_exchangeable_scores_the_promised_share_is_within_the_quantile_of_the_others(
    n: int, share: float
) -> None:
    """The guarantee itself: each of the n + 1 is as likely the new one, and all of them are tried."""
    scores = torch.randperm(n + 1, generator=drawn(n)).double()
    others = [torch.cat([scores[:k], scores[k + 1 :]]) for k in range(n + 1)]
    inside = [float(scores[k]) <= conformal.quantile(others[k], share) for k in range(n + 1)]
    assert share <= sum(inside) / (n + 1) + 1e-12
    assert sum(inside) / (n + 1) < share + 1 / (n + 1)


@pytest.mark.parametrize(("share", "least"), [(0.5, 1), (0.9, 9), (0.95, 19), (0.99, 99)])
def test_fewer_scores_than_a_share_needs_have_no_quantile(share: float, least: int) -> None:
    assert conformal.smallest(share) == least
    assert math.isinf(conformal.quantile(torch.arange(least - 1.0), share))
    assert conformal.quantile(torch.arange(float(least)), share) == least - 1


def test_a_class_has_its_own_quantile_from_49_examples_and_others_share_one() -> None:
    y = torch.tensor([0] * 49 + [1] * 48 + [2] * 10 + [4] * 3)
    z = torch.randn(len(y), 5, generator=drawn(1), dtype=torch.float64)
    p = torch.softmax(z, 1)
    found = conformal.class_quantiles(p, y, 0.9)
    scores = 1 - p.gather(1, y.unsqueeze(1)).squeeze(1)
    assert found.sources == ("own", *["together"] * 4)
    assert found.values[0] == float(scores[y == 0].sort().values[44])
    assert set(found.values[1:]) == {float(scores[y != 0].sort().values[55])}


def test_where_too_few_are_left_their_quantile_is_that_of_all_and_says_so() -> None:
    y = torch.tensor([0] * 60 + [1] * 60 + [2] * 8)
    p = torch.softmax(torch.randn(len(y), 4, generator=drawn(2), dtype=torch.float64), 1)
    found = conformal.class_quantiles(p, y, 0.9)
    scores = 1 - p.gather(1, y.unsqueeze(1)).squeeze(1)
    assert found.sources == ("own", "own", "all", "all")
    assert found.values[2] == found.values[3] == conformal.quantile(scores, 0.9)


@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_the_set_of_a_label_holds_what_is_so_as_often_as_it_promises_whether_it_is_there_or_not(
    coverage: float,
) -> None:
    """300 draws; label 0 is frequent, label 1 rare and looked for in half of the records, both told apart badly."""
    frequent, looked = torch.tensor([0.5, 0.2]), torch.tensor([1.0, 0.5])
    covered, seen = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for draw in range(300):
        g = drawn(5000 + draw)
        there = (torch.rand(1400, 2, generator=g) < frequent).long()
        record, label = torch.nonzero(torch.rand(1400, 2, generator=g) < looked, as_tuple=True)
        y, held = there[record, label], record < 1000
        z = torch.randn(len(y), generator=g, dtype=torch.float64) + 1.5 * y - 1
        p = torch.softmax(torch.stack((torch.zeros_like(z), z), 1), 1)
        quantiles = conformal.label_quantiles(p[held], y[held], label[held], 2, coverage)
        assert quantiles.sources == ("own",) * 4
        category = 2 * label[~held] + y[~held]
        found = conformal.in_set(p[~held].repeat(1, 2), quantiles.values).gather(1, category.unsqueeze(1)).squeeze(1)
        covered.index_add_(0, category, found.double())
        seen += torch.bincount(category, minlength=4)
    for share in (covered / seen).tolist():
        assert coverage - 0.01 < share < coverage + 0.02


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_sets_hold_the_class_as_often_as_they_promise_within_each_category(coverage: float) -> None:
    """300 draws of held-out and new examples; class 0 is frequent and easy, classes 3 and 4 are rare."""
    weights = torch.tensor([0.55, 0.25, 0.12, 0.05, 0.03], dtype=torch.float64)
    covered, seen = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for draw in range(300):
        g = drawn(1000 + draw)
        y = torch.multinomial(weights, 500, replacement=True, generator=g)
        z = torch.randn(500, 5, generator=g, dtype=torch.float64) + 2 * torch.nn.functional.one_hot(y, 5)
        z[:, 0] += 0.5
        p = torch.softmax(z, 1)
        held, new = slice(0, 300), slice(300, 500)
        quantiles = conformal.class_quantiles(p[held], y[held], coverage)
        assert quantiles.sources[0] == "own"
        inside = conformal.in_set(p[new], quantiles.values).gather(1, y[new].unsqueeze(1)).squeeze(1)
        covered.index_add_(0, y[new], inside.double())
        seen += torch.bincount(y[new], minlength=5)
    few = slice(3, 5)
    of_few, of_all = covered[few].sum() / seen[few].sum(), covered.sum() / seen.sum()
    shares = [float(covered[0] / seen[0]), float(of_few), float(of_all)]
    assert shares[0] == pytest.approx(coverage, abs=0.015)
    assert coverage - 0.015 < shares[1] < coverage + 0.04
    assert coverage - 0.01 < shares[2] < coverage + 0.02


def bins_of(z: Tensor, y: Tensor) -> tuple[tuple[ReliabilityBin, ...], float]:
    """Count as a hospital does; return the bins and the expected calibration error."""
    counts = clinical_counts(z, y, z.shape[1])
    found = clinical_metrics(Part(counts, counts["confusion"].sum()))
    assert found is not None
    return found.bins, float(found.calibration_error or 0)


@pytest.mark.parametrize(("temperature", "factor"), [(0.05, 2.0), (0.3, 1.1), (1.0, 1.1), (3.0, 2.0)])
def test_where_all_other_classes_are_alike_counts_alone_give_the_temperature(temperature: float, factor: float) -> None:
    margin = temperature * 6 * torch.rand(20_000, generator=drawn(0), dtype=torch.float64)
    z = torch.zeros(len(margin), 8, dtype=torch.float64)
    z[:, 0] = margin
    y = torch.multinomial(torch.softmax(z / temperature, 1), 1, generator=drawn(1)).squeeze(1)
    found = conformal.estimate_temperature(bins_of(z, y)[0], 8)
    assert found is not None
    assert temperature / factor < found < temperature * factor


@pytest.mark.parametrize(("scale", "at_most"), [(0.07, 0.2), (1.0, 0.05), (3.0, 0.15)])
def test_an_estimate_from_counts_brings_probabilities_nearer_to_what_is_right(scale: float, at_most: float) -> None:
    z, y = labelled(5000, 7, classes=8)
    bins, before = bins_of(scale * z, y)
    found = conformal.estimate_temperature(bins, 8)
    assert found is not None
    after = bins_of(scale * z / found, y)[1]
    assert after < at_most
    assert after < before + 0.03


@pytest.mark.parametrize(
    "bins", [(), (ReliabilityBin(0, 0, 0.0),) * 15, (ReliabilityBin(5, 5, 5.0),), (ReliabilityBin(5, 0, 0.0),)]
)
def test_counts_of_nothing_have_no_temperature_and_at_the_ends_a_finite_one(
    bins: tuple[ReliabilityBin, ...],
) -> None:
    found = conformal.estimate_temperature(bins, 2)
    assert found is None if not sum(b.examples for b in bins) else 0 < float(found or 0) < math.inf
