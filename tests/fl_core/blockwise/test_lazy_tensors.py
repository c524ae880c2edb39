"""Tensors that are computed when they are read: the bits of step after step, wherever they lie and whoever reads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_stored import LAYOUT, SHAPES, drawn, stored
from hypothesis import given
from hypothesis import strategies as st
from oracles import units
from torch import Tensor

from fl_core.aggregation import partial_sums as sums
from fl_core.aggregation.aggregator import Accumulator
from fl_core.aggregation.fixed_point import FixedPoint, Grid, Ring
from fl_core.blockwise.lazy_tensors import Deferred, Filler, Numbers
from fl_core.errors import ProtocolError
from fl_core.types import tensor_maps as trees
from fl_core.types.values import Part, PartSpec
from protos.wire import codec


def exact(bundles: list[dict[str, Part]], bits: int) -> dict[str, Tensor]:
    """The sum of what is put on the grid, in one go and in integers."""
    return {
        key: torch.stack([(b["p"].total[key].double() * 2.0**bits).round().long() for b in bundles]).sum(0)
        for key in SHAPES
    }


class Counting(Deferred):
    """0, 1, 2, ... as float32."""

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.float32

    def filler(self, name: str) -> Filler:
        def fill(start: int, out: Numbers) -> None:
            out[:] = range(start, start + len(out))

        return fill


def test_a_tensor_that_is_read_at_once_and_one_that_is_filled_block_by_block_have_the_same_bits() -> None:
    found = Counting(SHAPES)
    for name, shape in SHAPES.items():
        wanted = torch.arange(torch.Size(shape).numel()).float()
        assert torch.equal(found[name], wanted.view(shape))
    model = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    for name, value in trees.add(model, found).items():
        assert torch.equal(value, model[name] + found[name])


def test_several_threads_may_read_at_the_same_time(tmp_path: Path) -> None:
    """A sum of stored updates: threads share their files and the memory of blocks."""
    grid, start = Grid(n_max=3), threading.Barrier(4)
    folded = Accumulator(LAYOUT, grid)
    for k in range(3):
        folded.fold(stored(drawn(k), tmp_path, str(k)))
    mean = FixedPoint(grid).incoming(folded.total(), 3, 0)["p"].mean()
    wanted = dict(mean)

    def read(_: int) -> list[dict[str, Tensor]]:
        start.wait(20)
        return [dict(mean) for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        for found in itertools.chain(*pool.map(read, range(4))):
            assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)


def test_a_deferred_tensor_that_is_added_to_is_computed_once() -> None:
    class Counted(Counting):
        filled = 0

        def filler(self, name: str) -> Filler:
            plain = super().filler(name)

            def fill(start: int, out: Numbers) -> None:
                self.filled += len(out)
                plain(start, out)

            return fill

    a = Counted({"v": (5,)})
    assert trees.add(a, {"v": torch.ones(5)})["v"].tolist() == [1, 2, 3, 4, 5]
    assert a.filled == 5


def test_what_cannot_be_added_block_by_block_is_added_whole() -> None:
    b = Counting({"double": (4,), "row": (3,), "gradient": (3,)})
    a = {
        "double": torch.ones(4, dtype=torch.float64),
        "row": torch.ones(2, 3),
        "gradient": torch.ones(3, requires_grad=True),
    }
    found = trees.add(a, b)
    assert found["double"].dtype == torch.float64
    assert found["row"].tolist() == [[1, 2, 3], [1, 2, 3]]
    assert found["gradient"].requires_grad


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 2.0**17, 1e7, 1e9])
def test_the_next_model_is_that_of_the_steps_one_by_one(scale: float, on_disk: bool, tmp_path: Path) -> None:
    """Also where units leave float64's exact integers (2^17 and above), and where values are clipped (1e7)."""
    bundles, grid, server = [drawn(k, scale) for k in range(3)], Grid(n_max=3), drawn(9, scale)["p"].total
    folded = Accumulator(LAYOUT, grid)
    for k, bundle in enumerate(bundles):
        folded.fold(stored(bundle, tmp_path, str(k)) if on_disk else bundle)
    encoded = [{key: grid.encode("p", value) for key, value in b["p"].total.items()} for b in bundles]
    assert folded.clipped == sum(clipped for e in encoded for _, clipped in e.values())
    assert (folded.clipped > 0) == (scale >= 1e7)
    total = FixedPoint(grid).incoming(folded.total(), 3, 0)["p"]
    found = trees.add(server, total.mean())
    for key in SHAPES:
        whole = sum((e[key][0] for e in encoded), torch.zeros(SHAPES[key], dtype=torch.int64))
        assert torch.equal(folded.total()["p"].total[key], whole)
        assert torch.equal(total.total[key], grid.decode("p", whole))
        assert torch.equal(found[key], server[key] + (grid.decode("p", whole) / 9.0).float())


@pytest.mark.parametrize("waiting", [0, 1 << 22, 1 << 30])
def test_the_sum_is_the_same_whatever_waits(waiting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "WAITING", waiting)
    bundles, grid = [drawn(k) for k in range(7)], Grid(n_max=7)
    found = Accumulator(LAYOUT, grid)
    for k, bundle in enumerate(bundles):
        found.fold(bundle if k == 4 else stored(bundle, tmp_path, str(k)))  # one lies in memory
        wanted = exact(bundles[: k + 1], grid.frac_bits("p"))
        for _ in range(2):  # a sum may be read in the middle, and again
            assert all(torch.equal(found.total()["p"].total[key], wanted[key]) for key in SHAPES)


def test_integers_and_floats_wait_for_each_other(tmp_path: Path) -> None:
    """Of a run whose silos use the grid: what is on it already is added as it is."""
    grid, floats = Grid(n_max=3), drawn(0)
    whole = FixedPoint(grid).outgoing(drawn(1), 1, 0)
    found = Accumulator(LAYOUT, grid)
    for k, bundle in enumerate((floats, whole, drawn(2))):
        found.fold(stored(bundle, tmp_path, str(k)))
    wanted = exact([floats, drawn(1), drawn(2)], grid.frac_bits("p"))
    assert all(torch.equal(found.total()["p"].total[key], wanted[key]) for key in SHAPES)


@given(st.lists(st.floats(-(2.0**16), 2.0**16, width=32), min_size=1, max_size=3))
def test_sums_in_float64_are_those_of_integers(sent: list[float]) -> None:
    """At the edge of what float64 holds exactly: 2^37 units a piece for three silos, 2^53 of them at 65536."""
    n, grid = 3, Grid(n_max=3)
    large = sums.Large({("p", "v"): (n,)}, grid)
    for value in sent:
        large.add(large.look({"p": Part(_There({"v": torch.full((n,), value)}), torch.tensor(1.0))}))
    out = torch.empty(n, dtype=torch.float64)
    large.floats(("p", "v"))(0, out.numpy())
    assert out[0] == out[-1] == float(units(sent, grid.frac_bits("p")))


class _There(Deferred):
    """Tensors that wait, as those of a file do."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__({name: tuple(value.shape) for name, value in values.items()})
        self._values = values

    def dtype_of(self, name: str) -> torch.dtype:
        return self._values[name].dtype

    def filler(self, name: str) -> Filler:
        def fill(start: int, out: Numbers) -> None:
            out[:] = self._values[name].view(-1).numpy()[start : start + len(out)]

        return fill


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["large", "small"])
def test_a_stored_bundle_with_a_number_that_is_none_changes_nothing(bad: float, key: str, tmp_path: Path) -> None:
    grid, poison = Grid(n_max=3), drawn(1)
    poison["p"].total[key].view(-1)[-1] = bad
    found = Accumulator(LAYOUT, grid)
    found.fold(stored(drawn(0), tmp_path, "good"))
    with pytest.raises(ProtocolError, match="E-WIRE-05"):
        found.fold(stored(poison, tmp_path, "bad"))
    wanted = exact([drawn(0)], grid.frac_bits("p"))
    assert all(torch.equal(found.total()["p"].total[k], wanted[k]) for k in SHAPES)
    assert (found.count, found.clipped) == (1, 0)


def test_a_mean_beyond_float32_is_infinite() -> None:
    huge = Part(_There({"v": torch.full((3,), 1e300, dtype=torch.float64)}), torch.tensor(1.0))
    assert torch.isinf(huge.mean()["v"]).all()


@given(
    st.lists(st.floats(-(2.0**16), 2.0**16, width=32), min_size=1, max_size=3),
    st.floats(1e-300, 1e300) | st.sampled_from([1.0, 3.0, 2.0**1000, 1.7e308]),
    st.sampled_from(["ring64", "ring32"]),
)
def test_sums_that_are_decoded_and_divided_in_one_step_have_the_bits_of_two(
    sent: list[float], weight: float, ring: Ring
) -> None:
    layout, grid = {"p": PartSpec({"v": (2,)}, ())}, Grid(ring, 3, {"p": 2.0**16, "p.weight": 1.0})
    found = Accumulator(layout, grid)
    for value in sent:
        found.fold({"p": Part.of({"v": torch.full((2,), value)}, 1.0)})
    decoded = FixedPoint(grid).incoming(found.total(), len(sent), 0)["p"].total
    assert isinstance(decoded, Deferred)
    out = np.empty(2)
    decoded.quotients("v", weight)(0, out)
    assert out.tolist() == (decoded["v"] / weight).tolist()


@pytest.mark.parametrize("waiting", [0, 1 << 30])
def test_a_sum_of_units_that_are_zero_has_no_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    """Wherever updates lie: integers have no -0, and digests tell it from 0."""
    monkeypatch.setattr(sums, "WAITING", waiting)
    sent = {"p": Part.of({k: torch.full(s, -1e-13) for k, s in SHAPES.items()}, 1.0)}
    grid, here, there = Grid(n_max=2), Accumulator(LAYOUT, Grid(n_max=2)), Accumulator(LAYOUT, Grid(n_max=2))
    for k in range(2):
        here.fold(sent)
        there.fold(stored(sent, tmp_path, str(k)))
    found = [FixedPoint(grid).incoming(folded.total(), 2, 0)["p"].mean() for folded in (here, there)]
    for mean in found:
        assert not any(torch.signbit(value).any() for value in mean.values())
        assert not any(value.any() for value in mean.values())
    assert codec.pack_state({"w": dict(found[0])}) == codec.pack_state({"w": dict(found[1])})
