"""No way of storing, naming or grouping the same records gives them a second budget."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fl_core import datasets
from fl_core.datasets import SiloDataset, TensorExamples
from fl_core.errors import DataError, RefusedError
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import content_names, register, unit_names

LABELS = ("benign", "malignant")


def photographs(folder: Path, suffix: str = ".png") -> Path:
    """Write twelve different images of a size of their own, and a list of them with patients."""
    rng = np.random.default_rng(5)
    rows = []
    for k in range(12):
        label, split = LABELS[k % 2], "train" if k < 8 else "test"
        file = folder / split / label / f"{k}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20 + k, 31, 3), dtype=np.uint8)).save(file)
        rows.append((file.relative_to(folder).as_posix(), label, f"patient {k // 2}", split))
    listed(folder, rows)
    return folder


def listed(folder: Path, rows: list[tuple[str, str, str, str]]) -> None:
    with (folder / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label", "group", "split"))
        writer.writerows(rows)


def rows_of(folder: Path) -> list[tuple[str, str, str, str]]:
    with (folder / "list.csv").open() as file:
        return [(r["path"], r["label"], r["group"], r["split"]) for r in csv.DictReader(file)]


def as_list(folder: Path) -> SiloDataset:
    return datasets.load(f"manifest:{folder / 'list.csv'}", datasets.DataRequest(classes=LABELS))


def as_folder(folder: Path) -> SiloDataset:
    return datasets.load(f"folder:{folder}", datasets.DataRequest(classes=LABELS))


def one_byte_more(folder: Path) -> SiloDataset:
    for file in folder.rglob("*.png"):
        file.write_bytes(file.read_bytes() + b"\0")
    return as_list(folder)


def renamed(folder: Path) -> SiloDataset:
    rows = []
    for k, (path, *rest) in enumerate(rows_of(folder)):
        new = Path(path).with_name(f"other-{k}.png")
        (folder / path).rename(folder / new)
        rows.append((new.as_posix(), *rest))
    listed(folder, rows)
    return as_list(folder)


def regrouped(folder: Path) -> SiloDataset:
    listed(folder, [(p, label, f"{s}-{k // 3}", s) for k, (p, label, _, s) in enumerate(rows_of(folder))])
    return as_list(folder)


def ungrouped(folder: Path) -> SiloDataset:
    return as_folder(folder)


def relabelled(folder: Path) -> SiloDataset:
    other = dict(zip(LABELS, reversed(LABELS), strict=True))
    listed(folder, [(p, other[label], f"new {g}", s) for p, label, g, s in rows_of(folder)])
    return as_list(folder)


def stored_anew(folder: Path) -> SiloDataset:
    """Without loss: as BMP files."""
    rows = []
    for path, *rest in rows_of(folder):
        with Image.open(folder / path) as image:
            image.save(folder / Path(path).with_suffix(".bmp"))
        (folder / path).unlink()
        rows.append((Path(path).with_suffix(".bmp").as_posix(), *rest))
    listed(folder, [(p, label, f"new {g}", s) for p, label, g, s in rows])
    return as_list(folder)


def some_of_them(folder: Path) -> SiloDataset:
    rows = rows_of(folder)
    listed(folder, [(p, label, f"new {g}", s) for p, label, g, s in rows[3:5] + rows[9:]])
    return as_list(folder)


@pytest.mark.parametrize("first", [as_list, as_folder])
@pytest.mark.parametrize("again", [one_byte_more, renamed, regrouped, ungrouped, relabelled, stored_anew, some_of_them])
def test_the_same_images_under_another_name_have_no_second_budget(
    tmp_path: Path, first: Callable[[Path], SiloDataset], again: Callable[[Path], SiloDataset]
) -> None:
    folder = photographs(tmp_path / "images")
    ledger = Ledger(tmp_path / "ledger.db")
    register(ledger, first(folder), "skin")
    stored = again(folder)
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(ledger, stored, "mine")
    assert not {c for c in ledger.collections() if c.startswith("mine")}
    found = register(ledger, stored, "skin")  # under its own name it is the same collection, with its spending
    assert set(found) == {"skin/train", "skin/test", "hospital"}
    ledger.verify()


def test_moving_records_between_the_splits_is_noticed_too(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images")
    ledger = Ledger(tmp_path / "ledger.db")
    register(ledger, as_list(folder), "skin")
    other = {"train": "test", "test": "train"}
    listed(folder, [(p, label, f"new {g}", other[s]) for p, label, g, s in rows_of(folder)])
    with pytest.raises(RefusedError, match=r"E-BUDGET-04.*files: .*\.png"):
        register(ledger, as_list(folder), "skin")


def test_what_the_run_asks_of_size_and_classes_changes_no_identity(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images")
    names = {
        tuple(
            content_names(
                datasets.load(f"folder:{folder}", datasets.DataRequest(classes=classes, image_size=size)).train
            )
        )
        for size in (8, 64)
        for classes in (LABELS, LABELS[::-1])
    }
    assert len(names) == 1
    assert len(set(next(iter(names)))) == 8


def test_an_image_that_lost_something_is_a_new_record(tmp_path: Path) -> None:
    """The stated limit: identity is that of pixels."""
    folder = photographs(tmp_path / "images")
    before = set(content_names(as_folder(folder).train))
    for file in (folder / "train").rglob("*.png"):
        with Image.open(file) as image:
            image.crop((0, 0, 30, image.height)).save(file)
    assert not before & set(content_names(as_folder(folder).train))


def test_numbers_are_known_by_their_values_and_shape(tmp_path: Path) -> None:
    x = torch.rand(6, 1, 4, 4)
    x[0, 0, 0, 0] = 0.0
    y = torch.zeros(6)
    own = TensorExamples(x, y)
    minus = x.clone()
    minus[0, 0, 0, 0] = -0.0
    assert unit_names(own) == unit_names(TensorExamples(minus, y + 1))
    assert not set(unit_names(own)) & set(unit_names(TensorExamples(x.view(6, 1, 2, 8), y)))
    whole = datasets.load("digits/p3c4/1")
    ledger = Ledger(tmp_path / "ledger.db")
    register(ledger, whole, "digits")
    groups = tuple(f"patient {k}" for k in range(len(whole.train)))
    grouped = TensorExamples(whole.train.x, whole.train.labels, groups)  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(ledger, replace(whole, train=grouped, fingerprint="grouped"), "mine")


def test_an_image_that_cannot_be_decoded_registers_nothing(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images")
    (broken,) = (folder / "train").rglob("3.png")
    broken.write_bytes(broken.read_bytes()[:200])
    ledger = Ledger(tmp_path / "ledger.db")
    with pytest.raises(DataError, match="E-DATA-04"):
        register(ledger, as_folder(folder), "skin")
    assert ledger.collections() == []
