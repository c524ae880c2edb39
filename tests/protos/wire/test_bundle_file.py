"""Bundles in files: read as they were written, and what a sender may have made of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers_stored import drawn, stored
from safetensors.torch import save

from fl_core.errors import ProtocolError
from fl_core.types.values import Part, PartSpec
from protos.wire import codec
from protos.wire.bundle_file import FileBundle


def test_a_stored_bundle_is_read_as_it_was_written(tmp_path: Path) -> None:
    bundle = drawn(0) | {"q": Part({"i": torch.arange(7), "b": torch.ones(2, 3).bfloat16()}, torch.arange(3.0))}
    found = stored(bundle, tmp_path)
    assert set(found) == {"p", "q"}
    for name, part in bundle.items():
        assert PartSpec.of(found[name]) == PartSpec.of(part)
        assert torch.equal(found[name].weight, part.weight)
        for key, value in part.total.items():
            assert torch.equal(found[name].total[key], value)
            assert found[name].total[key].dtype == value.dtype


def test_a_stored_bundle_that_was_cut_is_an_error(tmp_path: Path) -> None:
    found = stored(drawn(0), tmp_path)["p"]
    with (tmp_path / "bundle").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.*large.*ends before it"):
        _ = found.total["large"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [(2, ["000000"]), (1, ["000000", "000001"]), (2, ["000000", "000002"]), (1, ["v"]), (0, ["000000"])],
)
def test_an_index_that_disagrees_with_its_tensors_is_an_error(tmp_path: Path, paths: int, names: list[str]) -> None:
    header = json.dumps({"groups": ["p"], "paths": [["p", "total", f"k{i}"] for i in range(paths)]})
    (tmp_path / "bundle").write_bytes(save({name: torch.zeros(3) for name in names}, {"consilium": header}))
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.*header and the tensors disagree"):
        codec.Tensors(tmp_path / "bundle")


@pytest.mark.parametrize("length", [(16 << 20) + 1, 1 << 40])
def test_an_index_that_is_longer_than_any_models_is_not_read(tmp_path: Path, length: int) -> None:
    (tmp_path / "bundle").write_bytes(length.to_bytes(8, "little") + b"{" * 100)
    with pytest.raises(ProtocolError, match=rf"E-WIRE-06.*an index of {length} bytes, more than 16777216"):
        codec.Tensors(tmp_path / "bundle")


@pytest.mark.parametrize("shape", [[1] * 65, [-1], [1 << 48], [2.0], ["2"], [None]])
def test_a_shape_whose_size_would_take_long_to_compute_is_refused(shape: list[object]) -> None:
    """The product of a hundred thousand sizes would stop the whole process meanwhile."""
    with pytest.raises(ValueError, match="a shape that is not of up to 64 integers from 0 to 281474976710655"):
        codec.entries_of({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}, 8)


GOOD = {"groups": ["p"], "paths": [["p", "total", "v"], ["p", "weight"]]}


@pytest.mark.parametrize(
    "header",
    [
        GOOD | {"groups": [["p"]]}, GOOD | {"groups": "p"}, GOOD | {"groups": [1]}, GOOD | {"groups": ["p", 1]},
        GOOD | {"groups": None}, GOOD | {"paths": [[["p"], "total", "v"], ["p", "weight"]]},
        GOOD | {"paths": [["p", "total", ["v"]], ["p", "weight"]]}, GOOD | {"paths": [["p", "total", 1], "p"]},
        GOOD | {"paths": {"p": 1, "q": 2}}, GOOD | {"paths": 3}, GOOD | {"paths": [["p", "sum", "v"], ["p", "weight"]]},
        GOOD | {"paths": [["p", "total", "v"], ["q", "weight"]]}, GOOD | {"groups": ["p", "q"]}, [], 3, None, "text",
        {"groups": ["p"]},
    ],
)  # fmt: skip
def test_an_index_of_another_form_is_an_error_of_its_sender(tmp_path: Path, header: object) -> None:
    """Any other exception would end the run, and end it again whenever it is resumed."""
    tensors = {"000000": torch.zeros(3), "000001": torch.ones(())}
    (tmp_path / "bundle").write_bytes(save(tensors, {"consilium": json.dumps(GOOD)}))
    assert set(FileBundle(tmp_path / "bundle")) == {"p"}
    (tmp_path / "bundle").write_bytes(save(tensors, {"consilium": json.dumps(header)}))
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        FileBundle(tmp_path / "bundle")


def test_an_index_that_is_nested_deeper_than_can_be_read_is_an_error_of_its_sender(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(save({"000000": torch.zeros(3)}, {"consilium": "[" * 200_000}))
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        FileBundle(tmp_path / "bundle")
