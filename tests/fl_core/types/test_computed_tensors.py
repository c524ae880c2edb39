"""A mean and the model after it that are computed block by block are, to the bit, those of whole tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl_core.aggregation.fixed_point import FixedPointFormat, Ring
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.methods.fedavg import FedAvg
from fl_core.types import tensor_maps
from fl_core.types.computed_tensors import BLOCK, StoredTensors, mean_of, sum_of
from fl_core.types.values import Bundle, Part, RoundContext
from protos.wire import codec

SHAPES: dict[str, tuple[int, ...]] = {
    "none": (0, 3),
    "one": (),
    "few": (7,),
    "less": (BLOCK - 1,),
    "block": (2, BLOCK // 2),
    "more": (BLOCK + 1, 2),
}


def summed(ring: Ring = "ring64") -> tuple[Bundle, Bundle]:
    """Return a sum as the round loop has it, and the same sum in tensors of float64."""
    grid, random = FixedPointFormat(ring, 3, {"delta": 4.0, "delta.weight": 100.0}), torch.Generator().manual_seed(1)
    most = 1 << 28 if ring == "ring32" else 1 << 55
    units = {name: torch.randint(-most, most, shape, generator=random) for name, shape in SHAPES.items()}
    weight = grid.encode("delta.weight", torch.tensor(77.0))[0]
    total = FixedPoint(grid).incoming({"delta": Part(units, weight)}, 3, 0)
    whole = {name: grid.decode("delta", value) for name, value in units.items()}
    return total, {"delta": Part(whole, total["delta"].weight)}


def model(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("ring", ["ring64", "ring32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_computed_mean_and_sum_are_those_of_whole_tensors(ring: Ring, dtype: torch.dtype) -> None:
    total, whole = summed(ring)
    mean, expected = total["delta"].mean(), whole["delta"].mean()
    assert isinstance(mean, StoredTensors)
    assert not isinstance(expected, StoredTensors)
    moved, plain = sum_of(model(dtype), mean), tensor_maps.add(model(dtype), expected)
    for name in SHAPES:
        assert torch.equal(mean[name], expected[name])
        assert torch.equal(moved[name], plain[name])
        assert moved[name].dtype == plain[name].dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert moved[name].shape == plain[name].shape


def test_a_mean_of_weight_0_is_0() -> None:
    total, _ = summed()
    mean = Part(total["delta"].total, torch.tensor(0.0)).mean()
    assert not any(value.any() for value in mean.values())


def test_a_state_that_is_computed_while_it_is_written_has_the_bytes_of_one_in_memory(tmp_path: Path) -> None:
    total, whole = summed()
    codec.write_state({"w": model()}, tmp_path / "before")
    before, context = codec.open_state(tmp_path / "before"), RoundContext(3, 2, 1, 0, 3)
    after = FedAvg().merge(before, total, context)
    expected = FedAvg().merge({"w": model()}, whole, context)
    written = codec.write_state(after, tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == codec.pack_state(expected) == codec.pack_state(after)
    assert written == codec.write_state(expected, tmp_path / "expected")
    assert tensor_maps.digest(codec.open_state(tmp_path / "after")["w"]) == tensor_maps.digest(expected["w"])


def test_what_is_in_memory_is_not_computed_again() -> None:
    total, _ = summed()
    state = {"w": sum_of(model(), total["delta"].mean()), "own": {"a": torch.ones(2)}}
    kept = tensor_maps.in_memory(state)
    assert kept["w"]["few"] is kept["w"]["few"]
    assert kept["own"] is state["own"]
    assert torch.equal(kept["w"]["more"], state["w"]["more"])


def test_asking_for_a_name_reads_nothing() -> None:
    def compute(name: str, size: int) -> object:
        raise AssertionError(name, size)

    stored = mean_of(summed()[0]["delta"].total, torch.tensor(1.0))  # type: ignore[arg-type]
    stored._compute = compute  # type: ignore[assignment]
    assert "few" in stored
    assert "other" not in stored
    assert list(stored) == list(SHAPES)
    assert len(stored) == len(SHAPES)
    with pytest.raises(KeyError):
        stored["other"]
