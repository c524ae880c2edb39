"""Fed-ISIC2019's published counts (B.8): on the real images where they are, and on its labels at full size."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch

from fl_core.datasets import DataRequest, check, load
from fl_core.types.enums import Split
from tests.support.data import isic_row, write_isic

# centre -> train, test per class: MEL NV BCC AK BKL DF VASC SCC; FLamby's split of 23,247 images
B8 = {
    0: ((2279, 3363, 2245, 606, 923, 97, 87, 330), (578, 843, 564, 131, 215, 27, 24, 101)),
    1: ((20, 2977, 2, 0, 96, 23, 45, 0), (4, 743, 0, 0, 28, 7, 9, 0)),
    2: ((533, 1470, 174, 20, 379, 40, 64, 11), (147, 362, 37, 1, 96, 11, 18, 0)),
    3: ((276, 649, 223, 86, 406, 20, 3, 144), (66, 154, 73, 23, 84, 10, 0, 42)),
    4: ((166, 349, 0, 0, 140, 0, 0, 0), (49, 66, 0, 0, 49, 0, 0, 0)),
    5: ((58, 276, 5, 0, 6, 4, 2, 0), (9, 74, 0, 0, 4, 0, 1, 0)),
}


def split_rows(root: Path) -> list[dict[str, str]]:
    with (root / "train_test_split").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("center", [1, 2, 3, 5])
def test_real_counts_per_centre_and_class(isic_root: Path, center: int) -> None:
    """The whole set has B.8's counts; a part of it has at most those, and lacks the same classes per centre."""
    rows = split_rows(isic_root)
    report = check(f"isic2019/center{center}", data_root=isic_root)
    assert report.problems == ()
    whole = len(rows) == 23_247
    for split, published in zip((Split.TRAIN, Split.TEST), B8[center], strict=True):
        tally = Counter(int(r["target"]) for r in rows if r["center"] == str(center) and r["fold"] == split.value)
        assert report.counts[split] == tuple(tally[c] for c in range(8))
        assert all(found <= full for found, full in zip(report.counts[split], published, strict=True))
        if whole:
            assert report.counts[split] == published
    present = {c for c in range(8) if report.counts[Split.TRAIN][c]}
    assert present == {c for c in range(8) if B8[center][0][c]}


def test_real_centres_one_and_five_lack_two_diagnoses(isic_root: Path) -> None:
    for center in (1, 5):
        silo = load(f"isic2019/center{center}", data_root=isic_root)
        held = set(silo.train.labels.tolist()) | set(silo.test.labels.tolist())
        assert {silo.schema.classes[c] for c in set(range(8)) - held} == {"AK", "SCC"}


def test_real_groups_are_lesions_that_stay_in_one_split(isic_root: Path) -> None:
    silo = load("isic2019/center3", data_root=isic_root)
    with (isic_root / "groups.csv").open(newline="") as stream:
        lesion = {row["image"]: row["lesion_id"] for row in csv.DictReader(stream)}
    assert silo.train.groups == tuple(lesion[path.stem] for path in silo.train.paths)
    assert not set(silo.train.groups) & set(silo.test.groups)


def test_real_batch_is_decoded_and_normalised(isic_root: Path) -> None:
    silo = load("isic2019/center5", data_root=isic_root.parent)
    index = torch.tensor([3, 0, 170])
    x, y = silo.train.batch(index)
    assert x.shape == (3, 3, 200, 200)
    assert torch.equal(y, silo.train.labels[index])
    assert torch.isfinite(x).all()
    assert -2.2 < x.min() < x.max() < 2.7  # ImageNet's range of [0, 1]
    assert x.std((1, 2, 3)).min() > 0.1
    small = load("isic2019/center5", DataRequest(image_size=64), data_root=isic_root).train.batch(index)[0]
    again = torch.nn.functional.interpolate(x, size=64, mode="bilinear", antialias=True)
    assert (small - again).abs().mean() < 0.05  # the same picture, only smaller
    moved = silo.train.batch(index, torch.Generator().manual_seed(0))[0]
    assert torch.equal(moved, silo.train.batch(index, torch.Generator().manual_seed(0))[0])
    assert not torch.equal(moved, x)


def test_real_images_of_a_centre_all_decode(isic_root: Path) -> None:
    report = check("isic2019/center5", data_root=isic_root, deep=True)
    assert report.problems == ()
    assert report.sizes == {(224, 224): sum(map(sum, report.counts.values()))}


@pytest.mark.parametrize("center", [4, 5])
def test_published_counts_at_full_size(tmp_path: Path, center: int) -> None:
    """A split file with the labels of all 23,247 images; files (empty: nothing decodes them) of one centre."""
    rows = [
        isic_row(f"C{k}_{fold}_{c}_{i}", c, k, fold)
        for k, folds in B8.items()
        for fold, counts in zip(("train", "test"), folds, strict=True)
        for c, n in enumerate(counts)
        for i in range(n)
    ]
    assert len(rows) == 23_247
    folder = write_isic(tmp_path, rows, images=False)
    for row in rows:
        if row[11] == center:
            (folder / "ISIC_2019_Training_Input_preprocessed" / f"{row[0]}.jpg").touch()
    silo = load(f"isic2019/center{center}", data_root=tmp_path)
    for examples, published in zip((silo.train, silo.test), B8[center], strict=True):
        assert tuple(torch.bincount(examples.labels, minlength=8).tolist()) == published
