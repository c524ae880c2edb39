"""LEAF's files: one silo per writer or role, and what is said where they contradict themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consilium.research.datasets import leaf
from fl_core.datasets import federation, load
from fl_core.datasets.catalogue import CHARACTERS
from fl_core.errors import DataError
from tests.support.data import images, write_leaf

pytestmark = pytest.mark.usefixtures("fresh")


def pixel_rows(n: int, seed: int) -> list[object]:
    return [(row / 255).tolist() for row in images(n, 784, seed=seed)]


def write_femnist(root: Path) -> None:
    for split, n in (("train", 4), ("test", 2)):
        users = {f"f{k}": (pixel_rows(n, k), [(k + j) % 62 for j in range(n)]) for k in range(5)}
        if split == "test":
            del users["f3"]  # a writer without test images is no silo
        write_leaf(root / "femnist" / "data" / split, users)


def test_femnist_gives_one_silo_per_writer(tmp_path: Path) -> None:
    write_femnist(tmp_path)
    silos = [load(reference, data_root=tmp_path) for reference in federation("femnist", "users-4")]
    assert [sorted(s.train.labels.tolist()) for s in silos] == [[k, k + 1, k + 2, k + 3] for k in (0, 1, 2, 4)]
    x, _ = silos[3].train.batch(torch.arange(4))
    assert x.shape == (4, 1, 28, 28)
    assert torch.equal((x * 255).round().to(torch.uint8).view(4, 784), torch.from_numpy(images(4, 784, seed=4)))
    assert {len(s.test) for s in silos} == {2}
    with pytest.raises(Exception, match="found 4"):
        load("femnist/users-5/0", data_root=tmp_path)
    drawn = {load(f"femnist/users-1@{seed}/0", data_root=tmp_path).train.labels.min().item() for seed in range(30)}
    assert drawn == {0, 1, 2, 4}


def test_shakespeare_reads_characters_by_leaf_s_alphabet(tmp_path: Path) -> None:
    line = "To be, or not to be: that is the question: Whether 'tis nobler in the mind to suffer"
    for split in ("train", "test"):
        users = {f"role{k}": ([line[:80], line[1:81]], [line[80], line[81]]) for k in range(2)}
        write_leaf(tmp_path / "shakespeare" / "data" / split, users)
    silo = load("shakespeare/users-2/1", data_root=tmp_path)
    x, y = silo.train.batch(torch.arange(2))
    assert x.shape == (2, 80)
    assert "".join(CHARACTERS[int(c)] for c in x[1]) == line[1:81]
    assert "".join(CHARACTERS[int(c)] for c in y) == line[80:82]
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80


@pytest.mark.parametrize(
    ("user", "code", "match"),
    [
        (([[0.5] * 784], [3, 4]), "E-DATA-07", "1 examples, 2 labels"),
        (([[0.5] * 783], [3]), "E-DATA-07", "784 numbers"),
        (([[1.5] * 784], [3]), "E-DATA-07", "pixels from"),
        (([[0.5] * 784], [62]), "E-DATA-05", "labels 0 to 61"),
    ],
)
def test_leaf_files_that_contradict_themselves(user, code: str, match: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_leaf(tmp_path / "femnist" / split, {"f0": user})
    with pytest.raises(DataError, match=match) as caught:
        leaf.read("femnist", tmp_path)
    assert caught.value.code == code


@pytest.mark.parametrize(("x", "y"), [("a" * 80, "~"), ("~" * 80, "a"), ("a" * 79, "a")])
def test_shakespeare_refuses_other_characters_and_lengths(x: str, y: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_leaf(tmp_path / "shakespeare" / split, {"r": ([x], [y])})
    with pytest.raises(DataError, match="characters") as caught:
        leaf.read("shakespeare", tmp_path)
    assert caught.value.code == ("E-DATA-07" if len(x) < 80 else "E-DATA-05")


def test_leaf_files_that_are_no_leaf_files(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "femnist" / split).mkdir(parents=True)
        (tmp_path / "femnist" / split / "x.json").write_text('{"users": ["a"]}')
    with pytest.raises(DataError, match="KeyError"):
        leaf.read("femnist", tmp_path)
