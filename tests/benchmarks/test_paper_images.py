"""The images of the papers' tables: cut once from their owner's copy, and asked for where there is none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.paper import images
from fl_core.datasets.sources import isic2019
from fl_core.errors import ConfigError, DataError


def test_images_are_cut_once_and_asked_for_where_they_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setenv("CONSILIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CONSILIUM_TEST_DATA", raising=False)
    words = ["method=fedavg", "images=cifar10-1-1"]
    with pytest.raises(DataError, match="--data-root"):
        images.resolved(words, None)
    for split in ("train", "test"):
        for name in images.CIFAR10:
            (folder := tmp_path / "own" / "cifar10-jpeg" / split / name).mkdir(parents=True)
            for k in range(2):
                Image.new("RGB", (32, 32), (k, 0, 0)).save(folder / f"{k:04}.jpg")
    found = images.resolved(words, tmp_path / "own")
    cut = tmp_path / "cache" / "cifar10-1-1"
    assert found[:3] == ["method=fedavg", "data=folder", f"data.path={cut}"]
    assert sorted(p.name for p in cut.rglob("*.jpg")) == ["0000.jpg"] * 20
    assert images.resolved(words, tmp_path / "own") == found
    with pytest.raises(ConfigError, match="expected images="):
        images.resolved(["images=cifar11-1-1"], tmp_path)


def test_isic_images_are_cut_by_centre_and_class_to_the_first_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.setenv("CONSILIUM_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "own" / "isic2019"
    (source / isic2019.IMAGES).mkdir(parents=True)
    rows = ["image,target,center,fold"]
    for k, (center, fold, target) in enumerate(itertools.product((1, 3), ("train", "test"), (1, 1, 1, 0))):
        rows.append(f"ISIC_{16 - k:04},{target},{center},{fold}")
        Image.new("RGB", (224, 224), (k, 0, 0)).save(source / isic2019.IMAGES / f"ISIC_{16 - k:04}.jpg")
    (source / isic2019.SPLIT_FILE).write_text("\n".join(rows) + "\n")
    words = ["images=isic2019-32-2-1"]
    assert images.resolved(words, tmp_path / "own") == ["data=isic2019", "data.image_size=32"]
    cut = images.root_of(words, tmp_path / "own")
    assert cut == tmp_path / "cache" / "isic2019-36-2-1"
    assert images.root_of(["images=isic2019-32"], tmp_path / "own") == tmp_path / "cache" / "isic2019-36"
    found = isic2019.scan(cut, 3, None)
    assert not found.problems
    assert [f"{item.name[-2:]} {item.label} {item.split.value}" for item in found.items] == [
        *("01 MEL test", "02 NV test", "05 MEL train", "06 NV train", "07 NV train"),
    ]
    assert len(list((cut / isic2019.IMAGES).glob("*.jpg"))) == 10
