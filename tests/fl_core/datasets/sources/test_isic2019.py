"""The FLamby layout of Fed-ISIC2019: what is read of one centre, and every fault found before any training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_core.datasets import DATA_ROOT, DataRequest, check, load
from fl_core.errors import DataError
from tests.support.data import isic_row, refuse, truncate, write_csv, write_image, write_isic


def isic_rows() -> list[list[object]]:
    rows = [isic_row(f"ISIC_{k:03d}", k % 3, 3, "train" if k < 9 else "test") for k in range(12)]
    return [*rows, *(isic_row(f"ISIC_{k:03d}", 1, 1, "train") for k in range(100, 103))]


def test_isic_reads_one_centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_isic(tmp_path, isic_rows())
    for root in (tmp_path, folder):
        silo = load("isic2019/center3", DataRequest(image_size=32), data_root=root)
        assert silo.schema.shape == (3, 32, 32)
        assert silo.train.labels.tolist() == [k % 3 for k in range(9)]
        assert silo.test.labels.tolist() == [0, 1, 2]
        assert silo.train.groups is None
        assert silo.train.batch(torch.tensor([0, 5]))[0].shape == (2, 3, 32, 32)
    monkeypatch.setenv(DATA_ROOT, str(tmp_path))
    assert len(load("isic2019/center3").train) == 9
    assert load("isic2019/center3", DataRequest(image_size=16)).train.batch(torch.tensor([0]))[0].shape == (
        1,
        3,
        16,
        16,
    )


def test_isic_groups_are_lesions_and_torn_ones_are_noted(tmp_path: Path) -> None:
    folder = write_isic(tmp_path, isic_rows())
    groups = [(f"ISIC_{k:03d}", f"lesion{k // 2}") for k in range(12)]
    write_csv(folder / "groups.csv", ("image", "lesion_id"), groups)
    silo = load("isic2019/center3", data_root=tmp_path)
    assert silo.train.groups == tuple(f"lesion{k // 2}" for k in range(9))
    report = check("isic2019/center3", data_root=tmp_path)
    assert report.groups == 6
    assert report.notes[:1] == ("1 lesions have images in both train and test, as in FLamby's split",)
    write_csv(folder / "groups.csv", ("image", "lesion_id"), groups[:-2])
    refuse("without a group", "E-DATA-07", "isic2019/center3", data_root=tmp_path)


def test_isic_needs_the_images_of_its_own_centre_alone(tmp_path: Path) -> None:
    folder = write_isic(tmp_path, isic_rows())
    images = folder / "ISIC_2019_Training_Input_preprocessed"
    (images / "ISIC_100.jpg").unlink()
    assert check("isic2019/center3", data_root=tmp_path).problems == ()
    (images / "ISIC_004.jpg").unlink()
    assert [p.count for p in check("isic2019/center3", data_root=tmp_path).problems] == [1]
    assert len(load("isic2019/center3", data_root=tmp_path).train) == 9  # one is left out when it is read
    (images / "ISIC_005.jpg").unlink()
    refuse(r"2 \(ISIC_004, ISIC_005\)", "E-DATA-04", "isic2019/center3", data_root=tmp_path)


def test_isic_split_file_that_disagrees(tmp_path: Path) -> None:
    rows = isic_rows()
    rows[0][10] = 5  # the target is not the marked class
    rows[1][12] = "valid"
    rows[2][13] = "train_1"
    rows[3][10] = "x"
    rows.append(list(rows[4]))
    folder = write_isic(tmp_path, [r for r in rows if r[10] != "x"])
    write_csv(folder / "train_test_split", list_header(folder), rows)
    images = folder / "ISIC_2019_Training_Input_preprocessed"
    write_image(images / "ISIC_003.jpg")
    write_image(images / "ISIC_777.jpg")
    report = check("isic2019/center3", data_root=tmp_path)
    assert [(p.code, p.count) for p in report.problems] == [("E-DATA-07", 4), ("E-DATA-07", 1), ("E-DATA-07", 1)]
    assert "ISIC_000: target 5 but marked MEL" in report.problems[0].first
    assert report.problems[1].first == ("ISIC_004",)
    assert report.problems[2].first == ("ISIC_777",)
    refuse("ISIC_777", "E-DATA-07", "isic2019/center3", data_root=tmp_path)


def list_header(folder: Path) -> list[str]:
    return (folder / "train_test_split").read_text().splitlines()[0].split(",")


def test_isic_unknown_class_is_no_diagnosis(tmp_path: Path) -> None:
    write_isic(tmp_path, [*isic_rows(), isic_row("ISIC_500", 8, 3, "train")])
    refuse("'UNK': 1", "E-DATA-05", "isic2019/center3", data_root=tmp_path)


def test_isic_faults_of_the_layout(tmp_path: Path) -> None:
    refuse("expected train_test_split and", "E-DATA-02", "isic2019/center3", data_root=tmp_path)
    folder = write_isic(tmp_path, isic_rows())
    refuse("found the centres 1, 3", "E-DATA-08", "isic2019/center0", data_root=tmp_path)
    refuse(r"1 \(test\)", "E-DATA-08", "isic2019/center1", data_root=tmp_path)
    write_csv(folder / "train_test_split", ("image", "label"), [])
    refuse("without target, center, fold", "E-DATA-07", "isic2019/center3", data_root=tmp_path)


def test_isic_corrupt_image(tmp_path: Path) -> None:
    folder = write_isic(tmp_path, isic_rows())
    file = folder / "ISIC_2019_Training_Input_preprocessed" / "ISIC_002.jpg"
    truncate(write_image(file, size=(64, 64)))
    report = check("isic2019/center3", data_root=tmp_path, deep=True)
    assert [(p.code, p.count) for p in report.problems] == [("E-DATA-04", 1)]
    with pytest.raises(DataError, match=r"ISIC_002\.jpg"):
        load("isic2019/center3", data_root=tmp_path).train.batch(torch.tensor([2]))
