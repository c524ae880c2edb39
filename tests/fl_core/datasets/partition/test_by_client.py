"""The splits of FedRepo and MAP, FedNH's and FedGELA's Dirichlet variants, and FedGELA's 20 clients of Fed-ISIC2019."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_core.datasets.checks import Item, SourceIndex
from fl_core.datasets.partition import by_class, by_client, federations
from fl_core.datasets.sources import isic2019
from fl_core.errors import ConfigError
from fl_core.types.enums import Split

LABELS = np.repeat(np.arange(10), 500)


def kinds(labels: np.ndarray, parts: list[np.ndarray]) -> list[int]:
    return [len(np.unique(labels[part])) for part in parts]


def disjoint(parts: list[np.ndarray]) -> np.ndarray:
    """Return all indices, sorted, after checking that none is given twice."""
    together = np.sort(np.concatenate(parts))
    assert len(np.unique(together)) == len(together)
    return together


@pytest.mark.parametrize("variant", ["two", "swap", "once"])
def test_part_2_variants_of_dirichlet_deal_everything(variant: str) -> None:
    shares = federations.parse_federation(f"dirichlet-0.3-20-{variant}").partition(LABELS, LABELS[::5], 10)
    assert np.array_equal(disjoint([s.train for s in shares]), np.arange(5000))
    assert np.array_equal(disjoint([s.test for s in shares]), np.arange(1000))
    if variant == "two":
        assert min(kinds(LABELS, [s.train for s in shares])) >= 2


def test_part_2_once_takes_the_first_draw_as_it_is() -> None:
    labels = np.repeat(np.arange(10), 100)
    plain = by_class.partition_dirichlet(labels, 10, 10, 0.05, np.random.RandomState(1))
    once = by_class.partition_dirichlet(labels, 10, 10, 0.05, np.random.RandomState(1), tries=1, accept=True)
    assert (plain.attempts, once.attempts) == (8, 1)
    assert min(map(len, once.parts)) < 10 <= min(map(len, plain.parts))


def test_part_2_swap_changes_places_with_the_last_shares() -> None:
    assert by_class._swapped(np.array([0, 3, 1, 2, 2])) == [4, 1, 3, 2, 0]
    assert by_class._swapped(np.array([2, 2, 2])) == [0, 1, 2]
    assert by_class._swapped(np.array([2, 2, 1])) == [0, 1, 2]  # the last one has nobody to change with

    def one_class(swap: bool) -> float:
        few = [
            kinds(
                LABELS,
                by_class.partition_dirichlet(
                    LABELS, 10, 40, 0.1, np.random.RandomState(s), tries=1, accept=True, swap=swap
                ).parts,
            ).count(1)
            for s in range(8)
        ]
        return float(np.mean(few))

    assert one_class(True) < one_class(False)


def test_label_deals_equal_slots_and_counts_a_repeated_class_twice() -> None:
    parts = by_client.partition_slots(LABELS, 10, 20, 3, seed=0)
    assert set(map(len, parts)) == {3 * (500 // 6)}  # 60 slots, 6 of each class, 2 of 500 left over
    assert len(disjoint(parts)) == 60 * 83
    for part in parts:
        assert set(np.bincount(LABELS[part], minlength=10)) <= {0, 83, 166}
    assert min(kinds(LABELS, parts)) >= 2
    with pytest.raises(ConfigError, match="9: some class"):
        by_client.partition_slots(LABELS, 10, 3, 3, seed=0)


def test_per_silo_distributions_follow_alpha() -> None:
    flat = by_client.partition_per_silo(LABELS, 10, 10, 1e5, seed=0)
    assert all(abs(np.bincount(LABELS[p], minlength=10) - 50).max() <= 1 for p in flat)
    steep = by_client.partition_per_silo(LABELS, 10, 10, 0.1, seed=0)
    largest = [np.bincount(LABELS[p]).max() / len(p) for p in steep]
    assert np.mean(largest) > 0.4
    assert len(disjoint(steep)) >= 5000 - 10 * 10  # rounding leaves over at most half an example per cut


def test_map_gives_each_silo_two_classes_or_more_and_every_class_an_owner() -> None:
    parts = by_client.partition_map(LABELS, 10, 30, seed=0)
    assert 2 <= min(kinds(LABELS, parts)) < max(kinds(LABELS, parts)) <= 10
    assert min(map(len, parts)) >= 5
    assert len(np.unique(LABELS[disjoint(parts)])) == 10
    with pytest.raises(ConfigError, match="fewer silos"):
        by_client.partition_map(LABELS[::100], 10, 12, seed=0)


@pytest.mark.parametrize("text", ["persilo-0.5-10", "label-3-10", "map-10", "map-10@4"])
def test_the_first_fifth_is_held_out_of_training(text: str) -> None:
    federated = federations.parse_federation(text)
    shares = federated.partition(LABELS, LABELS[::5], 10)
    assert len(shares) == 10
    for share in shares:
        n = len(share.train) + len(share.held_out)
        assert len(share.held_out) == max(1, int(0.2 * n))
        assert len(share.test) == 0
    disjoint([s.train for s in shares] + [s.held_out for s in shares])
    again = federations.parse_federation(text).partition(LABELS, LABELS[::5], 10)
    assert all(np.array_equal(a.held_out, b.held_out) for a, b in zip(shares, again, strict=True))


def test_a_tiny_silo_still_holds_one_out() -> None:
    own, held = by_client.hold_out(np.array([7, 9, 11]), 0, 0)
    assert (len(own), len(held)) == (2, 1)
    assert sorted([*own, *held]) == [7, 9, 11]


def test_double_dealing_doubles_training_alone() -> None:
    shares = federations.parse_federation("p10c3-double").partition(LABELS, LABELS[::5], 10)
    assert np.array_equal(np.sort(np.concatenate([s.train for s in shares])), np.repeat(np.arange(5000), 2))
    assert len(disjoint([s.test for s in shares])) == 1000


def test_users_need_data_that_has_them() -> None:
    with pytest.raises(ConfigError, match="femnist") as caught:
        federations.parse_federation("users-2").partition(LABELS, LABELS, 10)
    assert caught.value.code == "E-CFG-08"


def test_the_20_clients_of_fedgela_on_isic_have_the_sizes_of_the_split() -> None:
    """Label-only: FLamby's counts per centre, cut by largest remainder (B.8)."""
    assert isic2019.TRAIN_SIZES == (9930, 3163, 2691, 1807, 655, 351)
    assert tuple(map(sum, isic2019.TEST_COUNTS)) == (2483, 791, 672, 452, 164, 88)
    assert sum(isic2019.TRAIN_SIZES) == 18597
    assert tuple(map(sum, zip(*isic2019.TRAIN_COUNTS, strict=True))) == (3332, 9084, 2649, 712, 1950, 184, 201, 485)
    assert tuple(map(sum, zip(*isic2019.TEST_COUNTS, strict=True))) == (853, 2242, 674, 155, 476, 55, 52, 143)
    assert isic2019.parts(20) == (10, 3, 3, 2, 1, 1)
    assert isic2019.parts(6) == (1,) * 6
    scans = [
        SourceIndex(
            f"isic2019/center{k}",
            isic2019.CLASSES,
            tuple(
                Item(Path(f"{split.value}{n}"), f"{k}{split.value}{n}", label, split)
                for split, counts in ((Split.TRAIN, isic2019.TRAIN_COUNTS), (Split.TEST, isic2019.TEST_COUNTS))
                for label, many in zip(isic2019.CLASSES, counts[k], strict=True)
                for n in range(many)
            ),
        )
        for k in range(6)
    ]
    cuts = []
    for client in range(20):
        center, place, count = isic2019.center_of(20, client)
        cuts.append(isic2019.split_center(scans[center], place, count, 0, f"isic2019/clients20/{client}"))
    sizes = [[sum(i.split is split for i in c.items) for c in cuts] for split in (Split.TRAIN, Split.TEST)]
    assert sizes[0] == [993] * 10 + [1055, 1054, 1054] + [897] * 3 + [904, 903] + [655, 351]
    assert sizes[1] == [249] * 3 + [248] * 7 + [264, 264, 263] + [224] * 3 + [226] * 2 + [164, 88]
    with pytest.raises(ConfigError, match="one per centre"):
        isic2019.parts(5)
