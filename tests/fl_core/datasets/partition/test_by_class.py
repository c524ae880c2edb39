"""Partitions by label: the papers' partitions with their published sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_core.datasets.partition import by_class, federations
from fl_core.errors import ConfigError

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)


def pqcs(labels: np.ndarray, silos: int, per_silo: int, seed: int = 0, *, double: bool = False) -> list[np.ndarray]:
    held = by_class.assign_classes(int(labels.max()) + 1, silos, per_silo, seed)
    return by_class.partition_by_class(labels, held, seed, "train", double=double)


@pytest.mark.parametrize(
    ("labels", "silos", "per_silo"),
    [
        (CIFAR10, 5, 2),
        (CIFAR10, 10, 2),
        (CIFAR10, 10, 3),
        (CIFAR10, 10, 5),
        (CIFAR10, 100, 3),
        (CIFAR100, 10, 10),
        (CIFAR10, 3, 10),
    ],
)
def test_part_1_union_is_everything_without_repeats(labels, silos, per_silo) -> None:
    held = by_class.assign_classes(int(labels.max()) + 1, silos, per_silo, 0)
    parts = by_class.partition_by_class(labels, held, 0, "train")
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert [sorted(np.unique(labels[part])) for part in parts] == [sorted(mine) for mine in held]
    assert all(len(set(mine)) == per_silo for mine in held)
    times = np.bincount([c for mine in held for c in mine])
    assert times.sum() == silos * per_silo
    assert times.min() >= 1
    for c, holders in enumerate(times):  # equal shares, to one example
        shares = [int((labels[part] == c).sum()) for part, mine in zip(parts, held, strict=True) if c in mine]
        assert len(shares) == holders
        assert max(shares) - min(shares) <= 1


def test_part_1_p5c2_of_cifar10_is_five_times_10000_and_a_clean_split() -> None:
    assert by_class.assign_classes(10, 5, 2, 0) == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    assert [len(part) for part in pqcs(CIFAR10, 5, 2)] == [10_000] * 5


def test_part_1_p10c10_of_cifar100_is_ten_times_5000() -> None:
    assert [len(part) for part in pqcs(CIFAR100, 10, 10)] == [5_000] * 10


def test_part_1_p10c3_fourth_silo_holds_the_last_class_and_two_random_ones() -> None:
    held = by_class.assign_classes(10, 10, 3, 0)
    assert held[:3] == ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    assert held[3][0] == 9
    assert by_class.assign_classes(10, 10, 3, 1)[3:] != held[3:]


def test_part_1_double_option_gives_every_index_twice() -> None:
    parts = pqcs(CIFAR10, 10, 3, double=True)
    assert sum(map(len, parts)) == 2 * len(CIFAR10)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.repeat(np.arange(len(CIFAR10)), 2))


def test_part_1_double_of_a_class_with_one_holder_duplicates_inside_it() -> None:
    first = pqcs(CIFAR10, 5, 2, double=True)[0]
    assert np.array_equal(np.sort(first), np.repeat(np.flatnonzero(CIFAR10 < 2), 2))


@pytest.mark.parametrize(("silos", "per_silo"), [(3, 3), (1, 9), (5, 11), (4, 0), (0, 2)])
def test_part_1_too_few_places_is_an_error(silos: int, per_silo: int) -> None:
    with pytest.raises(ConfigError, match="would have no silo") as caught:
        by_class.assign_classes(10, silos, per_silo, 0)
    assert caught.value.code == "E-CFG-08"


@given(st.integers(1, 12), st.integers(1, 8), st.integers(2, 8), st.integers(0, 3))
def test_part_1_for_any_sizes(silos: int, per_silo: int, n_classes: int, seed: int) -> None:
    if per_silo > n_classes or silos * per_silo < n_classes:
        return
    labels = np.random.default_rng(seed).integers(0, n_classes, 60)
    held = by_class.assign_classes(n_classes, silos, per_silo, seed)
    parts = by_class.partition_by_class(labels, held, seed, "train")
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(60))
    assert all(set(labels[part]) <= set(mine) for part, mine in zip(parts, held, strict=True))


@pytest.mark.parametrize(
    ("beta", "silos", "seed", "attempts", "sizes"),
    [
        (0.5, 5, 0, 1, [190, 226, 177, 213, 194]),
        (0.1, 5, 0, 1, [172, 179, 242, 220, 187]),
        (1e5, 5, 0, 1, [193, 203, 198, 200, 206]),
        (0.1, 10, 0, 1, [21, 138, 106, 10, 98, 95, 136, 191, 104, 101]),
        (0.05, 10, 1, 8, [47, 124, 103, 132, 101, 99, 194, 67, 69, 64]),
    ],
)
def test_part_2_dirichlet_of_ten_times_100(beta, silos, seed, attempts, sizes) -> None:
    labels = np.repeat(np.arange(10), 100)
    found = by_class.partition_dirichlet(labels, 10, silos, beta, np.random.RandomState(seed))
    assert [len(part) for part in found.parts] == sizes
    assert found.attempts == attempts
    assert np.array_equal(np.sort(np.concatenate(found.parts)), np.arange(1000))
    assert found.proportions.sum(1) == pytest.approx(np.ones(10))


@pytest.mark.parametrize(
    ("beta", "sizes"),
    [
        (0.5, [5307, 3688, 4435, 5047, 5189, 3803, 5202, 4325, 8078, 4926]),
        (0.1, [7615, 5142, 7498, 865, 2731, 6130, 6415, 3034, 6091, 4479]),
    ],
)
def test_part_2_dirichlet_of_ten_times_5000(beta: float, sizes: list[int]) -> None:
    parts = by_class.partition_dirichlet(CIFAR10, 10, 10, beta, np.random.RandomState(0)).parts
    assert [len(part) for part in parts] == sizes
    if beta == 0.1:
        assert np.mean([len(np.unique(CIFAR10[part])) for part in parts]) == pytest.approx(5.8)


def test_dirichlet_keeps_two_classes_per_silo_when_asked() -> None:
    labels = np.repeat(np.arange(10), 30)

    def kinds(min_classes: int) -> tuple[int, int]:
        random = np.random.RandomState(3)
        found = by_class.partition_dirichlet(labels, 10, 10, 0.03, random, min_size=1, min_classes=min_classes)
        return min(len(np.unique(labels[part])) for part in found.parts), found.attempts

    assert kinds(1)[0] == 1
    assert kinds(2)[0] >= 2
    assert kinds(2)[1] > kinds(1)[1]


@pytest.mark.parametrize(("beta", "silos"), [(0.0, 5), (-1.0, 5), (0.5, 0), (0.5, 101)])
def test_dirichlet_refuses_what_cannot_be(beta: float, silos: int) -> None:
    with pytest.raises(ConfigError) as caught:
        by_class.partition_dirichlet(np.repeat(np.arange(10), 100), 10, silos, beta, np.random.RandomState(0))
    assert caught.value.code == "E-CFG-08"


def test_dirichlet_gives_up_after_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_class, "TRIES", 3)
    labels = np.repeat(np.arange(2), 50)
    with pytest.raises(ConfigError, match="no draw of 3") as caught:
        by_class.partition_dirichlet(labels, 2, 10, 0.001, np.random.RandomState(0))
    assert caught.value.code == "E-CFG-08"


def test_dirichlet_shares_among_open_silos_when_all_mass_falls_on_full_ones() -> None:
    parts = [np.arange(4), np.empty(0, np.int64), np.empty(0, np.int64)]
    shares = by_class._cut(parts, np.arange(10, 16), np.array([1.0, 0.0, 0.0]), total=12)
    assert [len(share) for share in shares] == [0, 3, 3]


def test_test_split_follows_the_train_proportions() -> None:
    train, test = np.repeat(np.arange(10), 500), np.repeat(np.arange(10), 100)
    found = by_class.partition_dirichlet(train, 10, 4, 0.5, np.random.RandomState(3))
    parts = by_class.partition_like(test, found.proportions, np.random.RandomState(5))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    shares = np.array([np.bincount(train[p], minlength=10) / 500 for p in found.parts])
    again = np.array([np.bincount(test[p], minlength=10) / 100 for p in parts])
    assert np.abs(shares - again).max() < 0.06  # the two gates may close at different classes


def test_equal_shares_are_disjoint_and_equal() -> None:
    parts = by_class.partition_equally(CIFAR10, 7, 0, "train")
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(50_000))
    assert {len(part) for part in parts} == {7142, 7143}
    assert all(len(np.unique(CIFAR10[part])) == 10 for part in parts)
    with pytest.raises(ConfigError):
        by_class.partition_equally(CIFAR10[:3], 4, 0, "train")


def test_hospitals6_deals_ten_classes_as_222211() -> None:
    assert by_class.disjoint_classes(10, 6) == ((0, 1), (2, 3), (4, 5), (6, 7), (8,), (9,))
    with pytest.raises(ConfigError):
        by_class.disjoint_classes(5, 6)


@pytest.mark.parametrize("text", ["hospitals6", "p5c2", "p10c3", "p7c3", "dirichlet-0.5-10", "iid-4", "p10c3@7"])
def test_a_federation_deals_both_splits_completely(text: str) -> None:
    train, test = np.repeat(np.arange(10), 140), np.repeat(np.arange(10), 36)
    federated = federations.parse_federation(text)
    shares = federated.partition(train, test, 10)
    assert len(shares) == federated.silos
    for split, labels in enumerate((train, test)):
        assert np.array_equal(np.sort(np.concatenate([share[split] for share in shares])), np.arange(len(labels)))
    if "dirichlet" not in text:
        assert all(set(train[share.train]) == set(test[share.test]) for share in shares)
    again = federations.parse_federation(text).partition(train, test, 10)
    assert all(
        np.array_equal(a.train, b.train) and np.array_equal(a.test, b.test) for a, b in zip(shares, again, strict=True)
    )


@pytest.mark.parametrize("text", ["p10c3", "dirichlet-0.5-10", "iid-4"])
def test_another_partition_seed_deals_otherwise(text: str) -> None:
    labels = np.repeat(np.arange(10), 140)
    one, other = (federations.parse_federation(t).partition(labels, labels, 10) for t in (text, f"{text}@1"))
    assert any(not np.array_equal(a.train, b.train) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("p07c3", "p7c3"),
        ("p5c2@0", "p5c2"),
        ("p5c2@3", "p5c2@3"),
        ("dirichlet-0.50-10", "dirichlet-0.5-10"),
        ("dirichlet-1e5-5", "dirichlet-100000-5"),
        ("hospitals6", "hospitals6"),
    ],
)
def test_federation_names_have_one_canonical_form(text: str, canonical: str) -> None:
    assert federations.parse_federation(text).text == canonical
    assert federations.parse_federation(canonical).text == canonical


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("hospital6", "did you mean 'hospitals6'"),
        ("p5x2", "did you mean 'p5c2'"),
        ("dirichlet", "valid:.*dirichlet-0.5-10"),
        ("", "valid:"),
        ("p5c2@x", "@7"),
        ("p5c2@", "@7"),
        ("p0c2", "at least one silo"),
        ("iid-0", "at least one silo"),
    ],
)
def test_misspelt_federations_are_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        federations.parse_federation(text)


@pytest.mark.parametrize(
    ("silos", "per_silo", "classes", "fits"),
    [(3, 2, 8, ("p3c3", "p4c2")), (2, 9, 4, ("p2c4",)), (3, 0, 8, ("p3c3",)), (1, 1, 5, ("p1c5", "p5c1"))],
)
def test_a_division_that_does_not_fit_proposes_such_as_do(
    silos: int, per_silo: int, classes: int, fits: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=f"use {' or '.join(fits)}$"):
        by_class.assign_classes(classes, silos, per_silo, 0)
    for name in fits:
        found = federations.parse_federation(name)
        assert len(by_class.assign_classes(classes, found.silos, int(name.split("c")[1]), 0)) == found.silos
