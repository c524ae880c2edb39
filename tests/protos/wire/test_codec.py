"""States and bundles as bytes and as files: the format that homes and silos hold, and what no sender may make of it."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fl_core.errors import ProtocolError
from fl_core.tensors import functions
from fl_core.types import tensor_maps
from fl_core.types.computed_tensors import StoredTensors
from fl_core.types.values import Part
from protos.wire import codec
from service_core.storage import digests

KINDS = (
    torch.bool,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.int8,
    torch.bfloat16,
    torch.int16,
    torch.float64,
    torch.int32,
)


def test_equal_states_and_bundles_give_the_bytes_that_are_in_homes(tmp_path: Path) -> None:
    """The digests are of files that earlier versions wrote: they name the objects of runs under way."""
    group = {f'n{i} ä"\\': torch.arange(3.0 * i).reshape(3, i).t().to(kind) for i, kind in enumerate(KINDS)}
    state = {"w": group | {"scalar": torch.tensor(2.5, requires_grad=True)}, "empty": {}}
    bundle = {"p": Part({"a": torch.arange(3.0)}, torch.tensor(2.0)), "m": Part({}, torch.ones(2))}
    names = (
        "d8fe8e9f5058b9ddf033981d541558663d4a6a8c7eaf0042178de8f4e5b2deaf",
        "18031cff4b018852d1e0135699fcdfca13ae7963a2f1dec76a96f1540aebab08",
    )
    packed = codec.pack_state(state), codec.pack_bundle(bundle)
    assert tuple(map(digests.digest, packed)) == names
    written = codec.write_state(state, tmp_path / "state"), codec.write_bundle(bundle, tmp_path / "bundle")
    assert written == tuple((name, len(data)) for name, data in zip(names, packed, strict=True))
    for name, data in zip(("state", "bundle"), packed, strict=True):
        assert (tmp_path / name).read_bytes() == data
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    found = codec.read_state(tmp_path / "state")
    assert found.keys() == state.keys()
    for name, value in state["w"].items():
        assert found["w"][name].dtype == value.dtype
        assert torch.equal(found["w"][name], value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path: Path, kind: torch.dtype) -> None:
    large = torch.arange((3 << 20) // kind.itemsize).remainder(100).to(kind)
    state = {"w": {"large": large, "none": torch.zeros(0, 3), "b/\x7f é": torch.ones(2, 3).t(), "one": torch.tensor(1)}}
    paths = {"groups": ["w"], "paths": [["w", name] for name in sorted(state["w"])]}
    tensors = {f"{i:06d}": state["w"][name].contiguous() for i, name in enumerate(sorted(state["w"]))}
    expected = save(tensors, {"consilium": json.dumps(paths, separators=(",", ":"))})
    assert codec.pack_state(state) == expected
    assert codec.write_state(state, tmp_path / "state") == (digests.digest(expected), len(expected))
    assert (tmp_path / "state").read_bytes() == expected


def test_blocks_of_a_tensor_are_its_numbers_in_order_and_need_memory_for_one(tmp_path: Path) -> None:
    total = {"a": torch.randn(100, 33), "b": torch.arange(7), "c": torch.zeros(0), "d": torch.ones(3).bfloat16()}
    codec.write_bundle({"p": Part(total, torch.tensor(2.0))}, tmp_path / "bundle")
    stored = codec.BundleFile(tmp_path / "bundle")["p"].total
    assert isinstance(stored, StoredTensors)
    (tmp_path / "bundle").unlink()  # as a round that ends does, while an update waits
    for name, value in total.items():
        pieces, places = list[torch.Tensor](), set[int]()
        for block in stored.blocks(name, 1000):
            pieces.append(block.clone())
            places.add(block.data_ptr())
        assert torch.equal(torch.cat([value[:0].reshape(-1), *pieces]), value.reshape(-1))
        assert torch.equal(stored[name], value)
        assert max(map(len, pieces), default=0) <= 1000
        assert len(places) <= 1


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    codec.write_bundle({"p": Part({"a": torch.randn(5000)}, torch.tensor(2.0))}, tmp_path / "bundle")
    stored = codec.BundleFile(tmp_path / "bundle")["p"].total
    assert isinstance(stored, StoredTensors)
    read = stored.blocks("a", 1000)
    next(read)
    os.truncate(tmp_path / "bundle", (tmp_path / "bundle").stat().st_size - 100)
    with pytest.raises(ProtocolError, match=r"E-WIRE-06: tensor 'p/total/a' of bundle cannot be read"):
        list(read)
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        stored["a"]


def test_a_file_of_tensors_is_closed_with_its_last_reader(tmp_path: Path) -> None:
    codec.write_bundle({"p": Part({"a": torch.randn(50)}, torch.tensor(2.0))}, tmp_path / "bundle")

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what earlier tests have left
    before = open_files()
    for _ in range(5):
        codec.BundleFile(tmp_path / "bundle")
        with pytest.raises(ProtocolError):
            codec.read_weights(tmp_path / "bundle")
    gc.collect()
    assert open_files() == before


def test_tensors_that_share_memory_are_written_one_by_one(tmp_path: Path) -> None:
    row = torch.arange(6.0)
    state = {"w": {"a": row, "b": row, "c": row[2:5], "none": row[:0]}}
    codec.write_state(state, tmp_path / "state")
    found = codec.read_state(tmp_path / "state")["w"]
    assert {name: value.tolist() for name, value in found.items()} == {k: v.tolist() for k, v in state["w"].items()}


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent/file cannot be written"):
        codec.write_state({}, tmp_path / "absent" / "file")


@pytest.mark.parametrize(
    ("paths", "names"),
    [(2, ["000000"]), (1, ["000000", "000001"]), (2, ["000000", "000002"]), (1, ["v"]), (0, ["000000"])],
)
def test_a_header_that_disagrees_with_its_tensors_is_refused(tmp_path: Path, paths: int, names: list[str]) -> None:
    header = json.dumps({"groups": ["p"], "paths": [["p", "total", f"k{i}"] for i in range(paths)]})
    (tmp_path / "file").write_bytes(save({name: torch.zeros(3) for name in names}, {"consilium": header}))
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.*header and the tensors disagree"):
        codec.TensorFile(tmp_path / "file")


@pytest.mark.parametrize("length", [(16 << 20) + 1, 1 << 40])
def test_a_header_that_is_longer_than_any_models_is_not_read(tmp_path: Path, length: int) -> None:
    (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + b"{" * 100)
    with pytest.raises(ProtocolError, match=rf"E-WIRE-06.*a header of {length} bytes, more than 16777216"):
        codec.TensorFile(tmp_path / "file")


def entry(*shape: object, kind: str = "F32", at: tuple[int, int] = (0, 8)) -> dict[str, object]:
    return {"dtype": kind, "shape": list(shape), "data_offsets": list(at)}


@pytest.mark.parametrize(
    ("tensors", "body", "reason"),
    [
        ([entry(2), entry(2, at=(4, 12))], 12, "invalid offset"),
        ([entry(2), entry(2)], 8, "invalid offset"),
        ([entry(2, at=(4, 12))], 12, "invalid offset"),
        ([entry(2)], 9, "file not fully covered"),
        ([entry(2)], 4, "file not fully covered"),
        ([entry(3)], 8, "invalid shape, data type, or offset"),
        ([entry(1 << 62, 1 << 62)], 8, "overflow"),
        ([entry(-2)], 8, "invalid value"),
        ([entry(2.0)], 8, "invalid type"),
        ([entry(2, kind="X9")], 8, "unknown variant"),
        ([entry(8, kind="F8_E4M3")], 8, r"numbers of the kinds \['F8_E4M3'\]"),
        ([entry(1, kind="C64")], 8, r"numbers of the kinds \['C64'\]"),
        ([entry(0, 1 << 40, 1 << 40, at=(0, 0))], 0, "a shape of more than"),
        ([entry(*[1] * 65, 2)], 8, "a shape of more than 64 dimensions"),
        ([entry(*[1] * 100_000, 2)], 8, "a shape of more than 64 dimensions"),
    ],
)
def test_tensors_that_do_not_lie_as_the_header_says_are_refused(
    tmp_path: Path, tensors: list[dict[str, object]], body: int, reason: str
) -> None:
    paths = json.dumps({"groups": ["w"], "paths": [["w", str(i)] for i in range(len(tensors))]})
    header: dict[str, object] = {"__metadata__": {"consilium": paths}}
    text = json.dumps(header | {f"{i:06d}": found for i, found in enumerate(tensors)}).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(body))
    with pytest.raises(ProtocolError, match=rf"E-WIRE-06: file does not contain tensors of Consilium: .*{reason}"):
        codec.read_state(tmp_path / "file")


def test_two_tensors_of_one_path_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"groups": ["w"], "paths": [["w", "a"], ["w", "a"]]})
    (tmp_path / "file").write_bytes(save({f"{i:06d}": torch.zeros(3) for i in range(2)}, {"consilium": header}))
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        codec.read_state(tmp_path / "file")


@pytest.mark.parametrize("raw", [b"", b"abc", b"\x00" * 8, b"[" * 4096, bytes(range(256)) * 16])
def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        codec.read_state(tmp_path / "file")


def test_a_file_of_safetensors_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(save({"w": torch.zeros(3)}))
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        codec.read_state(tmp_path / "file")


def test_a_digest_from_the_file_is_that_of_the_tensors(tmp_path: Path) -> None:
    values = {
        "b": torch.arange(12).reshape(3, 4),
        "a.weight": torch.randn(700, 1000, dtype=torch.float64),
        "a": torch.tensor(1.5),
        "none": torch.zeros(0, 3, dtype=torch.float16),
        "mask": torch.tensor([True, False]),
    }
    codec.write_state({"w": values, "other": {"x": torch.ones(2)}, "empty": {}}, tmp_path / "state")
    file = codec.TensorFile(tmp_path / "state")
    assert file.digest("w") == tensor_maps.digest(values)
    assert file.digest("empty") == tensor_maps.digest({})


def test_numbers_that_numpy_does_not_have_are_refused_without_torch(tmp_path, monkeypatch):
    codec.write_state({"w": {"m": torch.ones(3, dtype=torch.bfloat16)}}, tmp_path / "state")
    assert codec.read_state(tmp_path / "state")["w"]["m"].tolist() == [1, 1, 1]
    monkeypatch.setattr("fl_core.tensors.torch", functions)
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.*BF16"):
        codec.read_state(tmp_path / "state")
