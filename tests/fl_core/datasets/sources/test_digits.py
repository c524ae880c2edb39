"""The digits: real data without a file, among hospitals none of which has seen all classes."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from fl_core.datasets import DataRequest, check, federation, load
from fl_core.datasets.sources import digits
from fl_core.errors import ConfigError, DataError
from fl_core.types.enums import Split
from fl_core.types.records import Schema

pytestmark = pytest.mark.integration


def rows(x: torch.Tensor) -> list[tuple[float, ...]]:
    return sorted(map(tuple, x.flatten(1).tolist()))


@pytest.mark.parametrize("name", ["hospitals6", "p5c2", "p10c3", "dirichlet-0.5-10", "iid-4"])
def test_the_union_of_all_silos_is_every_digit_once(name: str) -> None:
    silos = [load(reference) for reference in federation("digits", name)]
    x = torch.cat([e.batch(torch.arange(len(e)))[0] for s in silos for e in (s.train, s.test)])
    pixels, _ = load_digits(return_X_y=True)
    assert rows(x) == rows(torch.tensor(pixels / 16, dtype=torch.float32))
    assert sum(len(s.test) for s in silos) == pytest.approx(0.2 * 1797, abs=5)


def test_hospitals6_covers_all_classes_and_no_class_is_in_two_hospitals() -> None:
    seen = [set(load(f"digits/hospital{k}").train.labels.tolist()) for k in range(6)]
    assert [len(s) for s in seen] == [2, 2, 2, 2, 1, 1]
    assert sorted(c for s in seen for c in s) == list(range(10))
    for k, mine in enumerate(seen):
        assert set(load(f"digits/hospitals6/{k}").test.labels.tolist()) == mine


def test_a_silo_has_the_schema_and_the_right_labels() -> None:
    silo = load("digits/p5c2/3")
    assert silo.schema == Schema((1, 8, 8), tuple("0123456789"))
    assert silo.origin == "digits/p5c2/3"
    x, y = silo.train.batch(torch.tensor([5, 0, 5]))
    assert x.shape == (3, 1, 8, 8)
    assert x.dtype == torch.float32
    assert 0 <= x.min() < x.max() <= 1
    assert torch.equal(x[0], x[2])
    assert y.dtype == torch.int64
    assert torch.equal(y, silo.train.labels[[5, 0, 5]])
    pixels, labels = load_digits(return_X_y=True)
    known = {tuple((p / 16).tolist()): int(c) for p, c in zip(pixels, labels, strict=True)}
    assert [known[tuple(v.flatten().tolist())] for v in silo.train.batch(torch.arange(len(silo.train)))[0]] == (
        silo.train.labels.tolist()
    )


def test_the_digits_are_scikit_learns_as_it_gives_them() -> None:
    pixels, labels = load_digits(return_X_y=True)
    found, names = digits._digits()
    assert (found.dtype, names.dtype) == (pixels.dtype, labels.dtype)
    assert (found == pixels).all()
    assert (names == labels).all()


def test_digits_that_are_not_there_are_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for found in (None, ModuleSpec("sklearn", None, origin=str(tmp_path / "sklearn/__init__.py"))):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=found: found)
        with pytest.raises(DataError, match=r"E-DATA-02: expected scikit-learn.*digits.*consilium-fl\[research\]"):
            digits._digits.__wrapped__()


def test_an_empty_batch_keeps_its_shape() -> None:
    train = load("digits/p5c2/3").train
    for generator in (None, torch.Generator()):
        x, y = train.batch(torch.zeros(0, dtype=torch.int64), generator)
        assert x.shape == (0, 1, 8, 8)
        assert len(y) == 0


def test_augmentation_is_decided_by_its_generator() -> None:
    train = load("digits/p5c2/0").train
    index = torch.arange(20)
    plain = train.batch(index)[0]
    one, again, other = (train.batch(index, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, plain)
    assert torch.equal(train.batch(index)[0], plain)


def test_the_same_in_another_process() -> None:
    here = [load(reference).fingerprint for reference in federation("digits", "p10c3")]
    assert here == [load(reference).fingerprint for reference in federation("digits", "p10c3")]
    assert len(set(here)) == 10
    code = (
        "from fl_core.datasets import federation, load\n"
        "print(*[load(r).fingerprint for r in federation('digits', 'p10c3')])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert there.stdout.split() == here


def test_another_label_space_maps_by_name() -> None:
    space = [str(c) for c in reversed(range(10))]
    silo = load("digits/hospital0", DataRequest(classes=space))
    assert set(silo.train.labels.tolist()) == {9, 8}
    assert silo.schema.classes == tuple(space)


def test_digits_outside_the_label_space_are_counted() -> None:
    with pytest.raises(DataError, match=r"'1': 182") as caught:
        load("digits/hospital0", DataRequest(classes=["0", "2"]))
    assert caught.value.code == "E-DATA-05"


def test_check_counts_per_split_and_class() -> None:
    report = check("digits/hospital4")
    assert report.problems == ()
    assert report.counts[Split.TRAIN][8] + report.counts[Split.TEST][8] == 174
    assert sum(report.counts[Split.TRAIN]) == report.counts[Split.TRAIN][8]
    assert report.fingerprint == load("digits/hospital4").fingerprint
    assert report.sizes == {(8, 8): 174}


def test_more_silos_than_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match="silos") as caught:
        load("digits/iid-2000/0")
    assert caught.value.code == "E-CFG-08"


def test_where_a_fifth_is_held_out_it_is_the_test_split_and_the_test_split_is_public() -> None:
    silos = [load(f"digits/map-10/{k}") for k in range(10)]
    whole = load("digits/p1c10/0")
    known = set(rows(whole.train.batch(torch.arange(len(whole.train)))[0]))
    for silo in silos:
        assert len(silo.test) == max(1, (len(silo.train) + len(silo.test)) // 5)
        assert set(rows(silo.test.batch(torch.arange(len(silo.test)))[0])) <= known
        assert silo.public is not None
        assert torch.equal(silo.public.labels.bincount(), whole.test.labels.bincount())
        assert rows(silo.public.batch(torch.arange(359))[0]) == rows(whole.test.batch(torch.arange(359))[0])
    assert whole.public is None
