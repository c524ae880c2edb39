"""Bundles in files: read as they were written, and what a sender may have made of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fl_core.errors import ProtocolError
from fl_core.types.values import Part, PartSpec
from protos.wire.codec import BundleFile
from tests.support.federations import drawn, stored


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
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.*large.* of bundle cannot be read"):
        _ = found.total["large"]


GOOD = {"groups": ["p"], "paths": [["p", "total", "v"], ["p", "weight"]]}


@pytest.mark.parametrize(
    "header",
    [
        GOOD | {"groups": [["p"]]},
        GOOD | {"groups": "p"},
        GOOD | {"groups": [1]},
        GOOD | {"groups": ["p", 1]},
        GOOD | {"groups": None},
        GOOD | {"paths": [[["p"], "total", "v"], ["p", "weight"]]},
        GOOD | {"paths": [["p", "total", ["v"]], ["p", "weight"]]},
        GOOD | {"paths": [["p", "total", 1], "p"]},
        GOOD | {"paths": {"p": 1, "q": 2}},
        GOOD | {"paths": 3},
        GOOD | {"paths": [["p", "sum", "v"], ["p", "weight"]]},
        GOOD | {"paths": [["p", "total", "v"], ["q", "weight"]]},
        GOOD | {"groups": ["p", "q"]},
        [],
        3,
        None,
        "text",
        {"groups": ["p"]},
    ],
)
def test_an_index_of_another_form_is_an_error_of_its_sender(tmp_path: Path, header: object) -> None:
    """Any other exception would end the run, and end it again whenever it is resumed."""
    tensors = {"000000": torch.zeros(3), "000001": torch.ones(())}
    (tmp_path / "bundle").write_bytes(save(tensors, {"consilium": json.dumps(GOOD)}))
    assert set(BundleFile(tmp_path / "bundle")) == {"p"}
    (tmp_path / "bundle").write_bytes(save(tensors, {"consilium": json.dumps(header)}))
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        BundleFile(tmp_path / "bundle")


def test_an_index_that_is_nested_deeper_than_can_be_read_is_an_error_of_its_sender(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(save({"000000": torch.zeros(3)}, {"consilium": "[" * 200_000}))
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        BundleFile(tmp_path / "bundle")
