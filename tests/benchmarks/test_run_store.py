"""Stored runs: found by what they compute, kept through interruptions, never replaced by less."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks import run_store
from benchmarks.comparison import run as comparison
from benchmarks.paper import images
from benchmarks.run_store import append, complete, key_of, read, seeded
from coordinator.config import manifest_builder
from coordinator.config.hydra_config import compose_simulation
from fl_core.errors import DataError
from fl_core.rounds import manifest

SPEC = compose_simulation(["method=fedavg", "data=digits", "federation=p5c2"])


@dataclass(frozen=True)
class Item:
    key: str


def work(item: Item) -> dict[str, object]:
    if item.key == "bad":
        raise DataError("E-DATA-02", "no such images")
    return {"key": item.key, "value": len(item.key)}


def test_a_key_says_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    same = [
        replace(SPEC, name="another"),
        replace(SPEC, quorum=3, deadline_s=5.0, patience_s=1.0, silos=("a", "b")),
        replace(SPEC, federation={"name": "p5c2@0", "partition_seed": 0}),
    ]
    other = [
        seeded(SPEC, 1),
        replace(SPEC, rounds=7),
        replace(SPEC, method={**SPEC.method, "weights": "uniform"}),
        replace(SPEC, federation={"name": "p10c2", "partition_seed": 0}),
    ]
    key = key_of(SPEC)
    assert {key_of(s) for s in same} == {key}
    assert len({key, *map(key_of, other), key_of(SPEC, fine_tune=10)}) == 1 + len(other) + 1
    monkeypatch.setattr(manifest, "FORMAT", 99)
    monkeypatch.setattr(manifest_builder, "version", lambda: "99.0")
    assert key_of(SPEC) == key


@pytest.mark.parametrize(
    ("words", "cut", "key"),
    [
        (
            "data=digits federation=hospitals6 model=digits_cnn model.norm=none rounds=20 threads=1 train.momentum=0 "
            "train.weight_decay=1e-5 train.batch_size=32 train.epochs=1 method=fedavg train.lr=0.05",
            "",
            "ab51c0fd4ac2738cc4ef",
        ),
        (
            "federation=p5c2 model=simple_cnn rounds=12 threads=1 personal=true train.augment=false train.momentum=0.9 "
            "train.weight_decay=1e-5 train.batch_size=8 train.epochs=1 method=fedavg train.lr=0.01",
            "images=cifar10-50-30",
            "f8389fe406ebc48e5be8",
        ),
    ],
)
def test_a_run_of_a_frozen_setting_keeps_its_key(words: str, cut: str, key: str) -> None:
    """Each of these was computed and stored: with another key nothing finds it, nor anything else that is stored.

    A key changes where a default changes that changes numbers, and must not change otherwise. An option that a method,
    a model, training or an aggregator gained changes all keys: leave it out of `key_of` where it has its default.
    """
    kept = {key for file in comparison.RESULTS.glob("*.jsonl") for key in read(file)}
    spec = compose_simulation(images.resolved([*words.split(), *([cut] if cut else [])], None, cut=False))
    assert key_of(seeded(spec, 100), cut) == key
    assert key in kept


def test_half_a_line_is_taken_back_and_two_lines_of_a_key_have_the_same_numbers(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "runs.jsonl"
    append(file, {"key": "a", "value": 1, "cpu_seconds": 3})
    append(file, {"key": "a", "value": 1, "cpu_seconds": 4, "device": "another"})
    whole = file.read_text()
    file.write_text(whole + '{"key": "b", "val')
    assert read(file) == {"a": {"key": "a", "value": 1, "cpu_seconds": 3}}
    append(file, {"key": "c"})
    assert file.read_text() == whole + '{"key": "c"}\n'
    append(file, {"key": "a", "value": 2})
    with pytest.raises(
        DataError, match=r"line 4: expected the numbers of an earlier line with the key a, found others"
    ):
        read(file)


@pytest.mark.parametrize("line", ["", "[1]", '{"value": 1}', "{", "null", '"key"'])
def test_a_line_that_is_no_run_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "runs.jsonl").write_text(f'{{"key": "a"}}\n{line}\n{{"key": "b"}}\n')
    with pytest.raises(DataError, match="line 2: expected a run with its key") as caught:
        read(tmp_path / "runs.jsonl")
    assert caught.value.code == "E-DATA-07"


def test_a_run_that_fails_stops_no_other_and_is_tried_again(tmp_path: Path) -> None:
    file, said = tmp_path / "runs.jsonl", list[str]()
    asked = [Item("bad"), Item("a"), Item("bb"), Item("a")]
    with pytest.raises(DataError, match="no such images"):
        complete(asked, file, work, -1, said.append)
    assert {json.loads(line)["key"] for line in file.read_text().splitlines()} == {"a", "bb"}
    found = complete(asked[1:], file, lambda item: pytest.fail(f"{item} was computed twice"), -1, said.append)
    assert {key: run["value"] for key, run in found.items()} == {"a": 1, "bb": 2}
    assert said[-1] == "3 runs, 3 of them done before"
    assert run_store.read(file) == found
