"""Arithmetic in blocks equals arithmetic in one piece, bit for bit, at the seams too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from fl_core.aggregation.aggregator import Accumulator
from fl_core.aggregation.fixed_point import Grid
from fl_core.blockwise.parallel import BLOCK
from fl_core.errors import ProtocolError
from fl_core.types import tensor_maps as trees
from fl_core.types.values import Part, PartSpec
from protos.storage.digests import file_digest, write_sealed
from protos.wire import codec

SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7)


def values(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e3


@pytest.mark.parametrize("n", SIZES)
def test_adding_in_blocks_equals_rounding_the_whole(n: int) -> None:
    grid, value, into = Grid("ring64", 3), values(n), torch.arange(n)
    assert grid.add("delta", value, into) == 0
    assert torch.equal(into, torch.arange(n) + torch.round(value.double() * 2.0 ** grid.frac_bits("delta")).long())


def test_values_outside_the_bound_are_clipped_and_counted_in_every_block() -> None:
    grid, value = Grid("ring64", 2, {"delta": 1.0}), torch.zeros(2 * BLOCK + 7)
    value[[0, BLOCK, 2 * BLOCK + 6]] = torch.tensor([5.0, -7.0, 1.0])
    units, clipped = grid.encode("delta", value)
    top = 2 ** grid.frac_bits("delta")
    assert clipped == 2
    assert units[[0, BLOCK, 2 * BLOCK + 6]].tolist() == [top, -top, top]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, BLOCK + 3, 2 * BLOCK + 6])
def test_a_number_that_is_none_changes_nothing_wherever_it_is(bad: float, at: int, first: bool) -> None:
    good, wrong = values(2 * BLOCK + 7), values(2 * BLOCK + 7, seed=1)
    wrong[[1, BLOCK]] = 1e12  # outside the bound: what is taken back was clipped
    one, whole = torch.ones(()), torch.arange(BLOCK + 9)
    kept = {"a": Part({"x": good}, one), "b": Part({"y": good}, one), "c": Part({"z": whole}, one)}
    broken = {"a": Part({"x": wrong.clone()}, one), "b": Part({"y": wrong}, one), "c": Part({"z": whole}, one)}
    broken["b"].total["y"][at] = bad
    layout = {name: PartSpec.of(part) for name, part in kept.items()}
    sums, expected = Accumulator(layout, Grid("ring64", 2)), Accumulator(layout, Grid("ring64", 2))
    expected.fold(kept)
    if not first:
        sums.fold(kept)
    with pytest.raises(ProtocolError, match="E-WIRE-05"):
        sums.fold(broken)
    if first:
        sums.fold(kept)
    for name, part in sums.total().items():
        for key, total in part.total.items():
            assert torch.equal(total, expected.total()[name].total[key])
        assert torch.equal(part.weight, expected.total()[name].weight)
    assert (sums.count, sums.clipped) == (1, 0)


@pytest.mark.parametrize("n", SIZES)
def test_a_mean_in_blocks_equals_the_division_of_the_whole(n: int) -> None:
    value, weight = values(n).double(), torch.tensor(7.0, dtype=torch.float64)
    found = Part({"x": value.reshape(1, n)}, weight).mean()["x"]
    assert found.shape == (1, n)
    assert torch.equal(found[0], (value / weight).float())


def test_an_update_without_any_bundle_is_zero() -> None:
    sums = Accumulator({"a": PartSpec({"x": (3,)}, ())}, Grid("ring64", 2))
    assert sums.total()["a"].total["x"].tolist() == [0, 0, 0]


def test_files_hold_the_bytes_of_the_messages(tmp_path: Path) -> None:
    state = {"w": {"x": values(10), "y": torch.zeros(2, 3).t()}, "empty": {}}
    bundle = {
        "delta": Part({"x": values(BLOCK)}, torch.ones(())),
        "metrics": Part({"c": torch.zeros(3)}, torch.ones(3)),
    }
    found = codec.write_state(state, tmp_path / "state"), codec.write_bundle(bundle, tmp_path / "bundle")
    for sealed, name, data in (
        (found[0], "state", codec.pack_state(state)),
        (found[1], "bundle", codec.pack_bundle(bundle)),
    ):
        file = tmp_path / name
        assert file.read_bytes() == data
        assert file.stat().st_mode & 0o077 == 0
        assert sealed == (file_digest(file), len(data)) == (codec.digest(data), len(data))


def test_messages_are_those_of_the_safetensors_library() -> None:
    types = (torch.bool, torch.int64, torch.float16, torch.float32, torch.uint8, torch.int8, torch.bfloat16,
             torch.int16, torch.float64, torch.int32)  # fmt: skip
    group = {f'n{i:02d} ä"\\': values(3 * i).reshape(3, i).t().to(kind) for i, kind in enumerate(types)}
    group |= {"scalar": torch.tensor(2.5), "long": values(3 << 18), "learnt": values(4).requires_grad_()}
    names = sorted(group)
    header = json.dumps({"groups": ["w"], "paths": [["w", name] for name in names]}, separators=(",", ":"))
    numbered = {f"{i:06d}": group[name].detach().contiguous() for i, name in enumerate(names)}
    assert codec.pack_state({"w": group}) == save(numbered, {"consilium": header})
    assert codec.pack_state({}) == save({}, {"consilium": '{"groups":[],"paths":[]}'})


def test_numbers_of_a_kind_that_no_file_holds_are_refused_before_anything_is_written() -> None:
    with pytest.raises(ValueError, match=r"expected numbers of the kinds .*float32.*, found .*complex64"):
        codec.pack_state({"w": {"x": torch.zeros(2, dtype=torch.complex64)}})


def test_a_file_is_written_over_in_place_and_ends_where_its_content_ends(tmp_path: Path) -> None:
    file, data = tmp_path / "file", bytes(range(256)) * (9 << 12)
    for content in (data, data[:70], data[1:]):
        assert write_sealed(file, [memoryview(content[:5]), memoryview(content[5:])]) == (
            codec.digest(content), len(content)
        )  # fmt: skip
        assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
        (102400, "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"),
    ],
)
def test_objects_are_named_by_blake3(size: int, expected: str, tmp_path: Path) -> None:
    """The vectors of the algorithm's authors: https://github.com/BLAKE3-team/BLAKE3/tree/master/test_vectors."""
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    assert codec.digest(data) == file_digest(tmp_path / "file") == expected
    assert write_sealed(tmp_path / "sealed", [memoryview(data)]) == (expected, size)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_sealed(tmp_path / "absent" / "file", [])


def test_the_digest_of_tensors_reads_them_as_they_are_numbered() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert trees.digest({"x": x.t()}) == trees.digest({"x": x.t().contiguous()}) != trees.digest({"x": x})
    assert trees.digest({"x": torch.tensor(1.0)}) != trees.digest({"x": torch.tensor(2.0)})
