"""What is noted of a file's numbers while it arrives: all of it, or nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fl_core.aggregation.aggregator import Accumulator
from fl_core.aggregation.fixed_point import Grid
from fl_core.blockwise.lazy_tensors import Filler
from fl_core.errors import ProtocolError
from fl_core.types.values import Bundle, Part, PartSpec
from protos.wire import codec
from protos.wire import streaming_minmax as extremes
from protos.wire.bundle_file import FileBundle, FileTensors, Known
from protos.wire.streaming_minmax import Extremes

LARGE = 1 << 15
TYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.bfloat16)
FOLLOWED = (torch.float32, torch.float64)


def made(seed: int, types: Sequence[torch.dtype] = TYPES) -> dict[str, Part]:
    """A part of each type, with an empty tensor in the middle; sizes that leave no other place even."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (torch.randn(shape, generator=generator) * 100).to(dtype)

    return {
        f"p{k}": Part(
            {"a": drawn((3, 5 + k), t), "b": torch.zeros((0, 2), dtype=t), "c": drawn((7,), t)}, drawn((2,), t)
        )
        for k, t in enumerate(types)
    }


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extremes, "SMALL", 0)


def told(raw: bytes, cuts: Sequence[int] = ()) -> Extremes:
    found, edges = Extremes(), [0, *sorted(cuts), len(raw)]
    for begin, end in pairwise(edges):
        found.update(raw[begin:end])
    return found


def end_of(entry: codec.Entry) -> int:
    return entry.begin + entry.numbers * entry.dtype.itemsize


def wanted(raw: bytes, folder: Path) -> dict[codec.Entry, tuple[float, float]]:
    """What NumPy says of the tensors of the whole file."""
    (folder / "whole").write_bytes(raw)
    kept = {}
    with (tensors := codec.Tensors(folder / "whole")).file:
        for entry in tensors.entries:
            if entry.dtype in FOLLOWED and entry.numbers:
                numbers = torch.frombuffer(bytearray(raw[entry.begin : end_of(entry)]), dtype=entry.dtype).numpy()
                kept[entry] = (float(numbers.min()), float(numbers.max()))
    return kept


@given(st.integers(0, 2**32), st.lists(st.integers(0, 2000), max_size=6))
def test_pieces_of_any_size_say_what_the_whole_says_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, cuts: list[int]
) -> None:
    raw = codec.pack_bundle(made(seed))
    whole = wanted(raw, tmp_path_factory.getbasetemp())
    assert len(whole) == 6
    assert told(raw, [cut - cut % 8 for cut in cuts]).found == whole
    assert told(raw, cuts).found in ({}, whole)


def test_a_piece_that_cuts_a_number_ends_it() -> None:
    raw = codec.pack_bundle(made(1))
    last = max(told(raw).found, key=lambda entry: entry.begin)
    assert told(raw, [last.begin + 2]).found == {}
    assert told(raw, range(1, 200)).found == told(raw).found  # the index may be cut anywhere


def test_found_holds_tensors_that_have_arrived_whole_and_no_others(tmp_path: Path) -> None:
    raw = codec.pack_bundle(made(2))
    for end in range(0, len(raw) + 1, 8):
        whole = {entry: numbers for entry, numbers in wanted(raw, tmp_path).items() if end_of(entry) <= end}
        assert told(raw[:end]).found == whole


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("cut", [0, 8, 16])
def test_a_number_that_is_none_shows_wherever_it_lies(bad: float, at: int, cut: int) -> None:
    bundle = made(3, (torch.float64,))
    bundle["p0"].total["c"][at] = bad
    raw = codec.pack_bundle(bundle)
    entry = next(e for e in told(raw).found if e.shape == (7,))
    low, high = told(raw, [entry.begin + cut]).found[entry]
    assert not (math.isfinite(low) and math.isfinite(high))
    if math.isnan(bad):
        assert math.isnan(low)
        assert math.isnan(high)


def _raw(index: object, data: bytes = bytes(64)) -> bytes:
    text = json.dumps(index).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(begin: object = 0, shape: object = (4,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, 0]}


@pytest.mark.parametrize(
    "raw",
    [
        b"", bytes(8), bytes(64), (1 << 40).to_bytes(8, "little") + bytes(64), b"\x04" + bytes(7) + b"{\xff\xfe}",
        _raw([1, 2]), _raw(3), _raw("text"), _raw({"a": 3}), _raw({"a": {}}), _raw({"a": _entry(dtype="F8")}),
        _raw({"a": _entry(dtype=[1])}), _raw({"a": _entry(shape="ab")}), _raw({"a": _entry(shape=3)}),
        _raw({"a": _entry(shape=[-1])}), _raw({"a": _entry(shape=[2, [1]])}), _raw({"a": _entry(begin="x")}),
        _raw({"a": _entry(begin=-8)}), _raw({"a": _entry(begin=0.5)}), _raw({"a": _entry(begin=math.nan)}),
        _raw({"a": _entry(shape=[1] * 65 + [4])}), _raw({"a": _entry(shape=[1 << 48])}),
        _raw({"a": _entry(shape=[9] * 300_000)}),
        _raw({"a": _entry(shape=[1 << 40])}), _raw({"a": _entry(shape=[0.25])}), _raw({"a": _entry(), "b": _entry()}),
        _raw({"a": _entry(begin=0), "b": _entry(begin=4)}), _raw({"a": _entry(begin=None)}),
        _raw({"a": _entry() | {"data_offsets": []}}), _raw({"a": _entry(begin=0.5, shape=[10**400])}),
        _raw({"a": _entry(shape=[1e308, 10**400])}), _raw({"a": _entry(shape=[1e400])}),
        b"\x20\x4e" + bytes(6) + b"[" * 20_000,
    ],
)  # fmt: skip
def test_of_a_file_that_is_none_of_ours_it_says_nothing_and_raises_nothing(raw: bytes) -> None:
    assert told(raw).found == {}
    assert told(raw, range(len(raw))).found == {}


@given(st.integers(0, 2**32))
def test_a_damaged_file_raises_nothing(seed: int) -> None:
    raw, draw = bytearray(codec.pack_bundle(made(4))), random.Random(seed)
    for _ in range(3):
        raw[draw.randrange(len(raw) // 2)] = draw.randrange(256)
    told(bytes(raw), [draw.randrange(len(raw))])


def test_an_index_is_collected_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = codec.pack_bundle(made(5))
    assert told(raw, range(8, 800, 8)).found
    monkeypatch.setattr(extremes, "MOST_INDEX", 100)
    assert told(raw, range(8, 800, 8)).found == {}


def test_small_tensors_are_left_to_whoever_sums_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extremes, "SMALL", 7)
    assert {entry.shape for entry in told(codec.pack_bundle(made(6))).found} == {(3, 5), (3, 6)}


# ---- what they are for ---------------------------------------------------------------------------------------------


def update(values: Mapping[str, float] = {}) -> Bundle:
    """An update with large tensors, in which some numbers are set."""
    total = {name: torch.randn(LARGE, generator=torch.Generator().manual_seed(k)) for k, name in enumerate("ab")}
    for name, value in values.items():
        total[name][LARGE // 2] = value
    return {"p": Part(total, torch.tensor(2.0))}


def arrived(bundle: Bundle, folder: Path) -> tuple[FileBundle, FileBundle]:
    """The same update as one of which nothing is known, and as one that was looked at while it arrived."""
    raw = codec.pack_bundle(bundle)
    (folder / "update").write_bytes(raw)
    known: Known = told(raw, range(4096, len(raw), 4096)).found
    assert len(known) == 3  # with the weight
    return FileBundle(folder / "update"), FileBundle(folder / "update", known)


def folded(bundle: FileBundle) -> Accumulator:
    sums = Accumulator({"p": PartSpec({"a": (LARGE,), "b": (LARGE,)}, ())}, Grid(n_max=2))
    sums.fold(bundle)
    return sums


def test_an_update_that_was_looked_at_while_it_arrived_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown, known = arrived(update(), tmp_path)
    looked = folded(unknown)
    read: list[str] = []
    filler = FileTensors.filler

    def noted(self: FileTensors, name: str) -> Filler:
        read.append(name)
        return filler(self, name)

    monkeypatch.setattr(FileTensors, "filler", noted)
    sums = folded(known)
    assert not read
    for name, value in looked.total()["p"].total.items():
        assert torch.equal(sums.total()["p"].total[name], value)
    assert set(read) == {"a", "b"}
    assert sums._large._reach == looked._large._reach


def test_one_that_is_clipped_is_clipped_as_if_nothing_were_known(tmp_path: Path) -> None:
    unknown, known = (folded(bundle) for bundle in arrived(update({"a": 2.0**25, "b": -(2.0**24)}), tmp_path))
    assert unknown.clipped == known.clipped == 1
    for name, value in unknown.total()["p"].total.items():
        assert torch.equal(known.total()["p"].total[name], value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_with_a_number_that_is_none_is_refused_as_if_nothing_were_known(tmp_path: Path, bad: float) -> None:
    for bundle in arrived(update({"b": bad}), tmp_path):
        with pytest.raises(ProtocolError, match="E-WIRE-05"):
            folded(bundle)
