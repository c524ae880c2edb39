"""The sum of a round's updates: exact integers wherever updates lie, and all of an update or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.update_check import UpdateCheck
from fl_core.errors import ProtocolError
from fl_core.types import tensor_maps
from fl_core.types.computed_tensors import BLOCK
from fl_core.types.values import Bundle, Part, PartSpec
from tests.oracles.equations import units
from tests.support.federations import LAYOUT, SHAPES, drawn, stored

EXTREMES = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1.2e-38,
    2.0**-37,
    -(2.0**-38),
    1 / 3,
    2.0**24,
    -(2.0**24),
    2.0**24 + 2,
    1e38,
    -1e38,
]


def exact(bundles: list[dict[str, Part]], bits: int) -> dict[str, Tensor]:
    """The sum of what is encoded, in one go and in integers."""
    return {
        key: torch.stack([(b["p"].total[key].double() * 2.0**bits).round().long() for b in bundles]).sum(0)
        for key in SHAPES
    }


def added(sums: Aggregator, update: Bundle, silo: int = 0) -> Aggregator:
    UpdateCheck(sums.layout, sums.grid).check(update)
    sums.add(update, silo)
    return sums


@pytest.mark.parametrize("on_disk", [False, True])
def test_extreme_numbers_are_clipped_and_rounded_as_pythons_integers_are(on_disk: bool, tmp_path: Path) -> None:
    sums, bound = Aggregator({"p": PartSpec({"v": (len(EXTREMES),)}, ())}, FixedPointFormat(n_max=2)), 2.0**24
    sent = [torch.tensor(EXTREMES), torch.tensor(EXTREMES[::-1])]
    for k, value in enumerate(sent):
        update = {"p": Part({"v": value}, torch.tensor(1.0))}
        added(sums, stored(update, tmp_path, str(k)) if on_disk else update)
    bits = sums.grid.frac_bits("p")
    clipped = [[min(max(v, -bound), bound) for v in value.tolist()] for value in sent]
    assert sums.total()["p"].total["v"].tolist() == [units([*pair], bits) for pair in zip(*clipped, strict=True)]
    assert sums.clipped == 6


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 2.0**17, 1e7, 1e9])
def test_the_next_model_is_that_of_the_steps_one_by_one(scale: float, on_disk: bool, tmp_path: Path) -> None:
    """Also where units leave float64's exact integers (2^17 and above), and where values are clipped (1e7)."""
    bundles, grid, server = [drawn(k, scale) for k in range(3)], FixedPointFormat(n_max=3), drawn(9, scale)["p"].total
    sums = Aggregator(LAYOUT, grid)
    for k, bundle in enumerate(bundles):
        added(sums, stored(bundle, tmp_path, str(k)) if on_disk else bundle)
    encoded = [{key: grid.encode("p", value) for key, value in b["p"].total.items()} for b in bundles]
    assert sums.clipped == sum(clipped for e in encoded for _, clipped in e.values())
    assert (sums.clipped > 0) == (scale >= 1e7)
    total = FixedPoint(grid).incoming(sums.total(), 3, 0)["p"]
    found = tensor_maps.add(server, total.mean())
    for key in SHAPES:
        whole = sum((e[key][0] for e in encoded), torch.zeros(SHAPES[key], dtype=torch.int64))
        assert torch.equal(sums.total()["p"].total[key], whole)
        assert torch.equal(total.total[key], grid.decode("p", whole))
        assert torch.equal(found[key], server[key] + (grid.decode("p", whole) / 9.0).float())


def test_integers_and_floats_are_added_together(tmp_path: Path) -> None:
    """Of a run whose silos encode: what is encoded already is added as it is."""
    grid, floats = FixedPointFormat(n_max=3), drawn(0)
    whole = FixedPoint(grid).outgoing(drawn(1), 1, 0)
    sums = Aggregator(LAYOUT, grid)
    for k, bundle in enumerate((floats, whole, drawn(2))):
        added(sums, stored(bundle, tmp_path, str(k)))
    wanted = exact([floats, drawn(1), drawn(2)], grid.frac_bits("p"))
    assert all(torch.equal(sums.total()["p"].total[key], wanted[key]) for key in SHAPES)


def test_parts_that_are_not_summed_are_stacked_in_the_order_of_the_roster() -> None:
    layout = {"p": PartSpec({"v": (2,)}, ()), "apart": PartSpec({"v": (1, 2)}, (1,))}
    sums = Aggregator(layout, FixedPointFormat(n_max=3), ["apart"])
    assert sums.total()["apart"].total["v"].shape == (0, 1, 2)
    for silo in (2, 0, 1):
        part = Part({"v": torch.tensor([1.0, -1.0]) * silo}, torch.tensor(1.0))
        added(sums, {"p": part, "apart": Part({"v": part.total["v"].unsqueeze(0)}, torch.tensor([float(silo)]))}, silo)
    total = FixedPoint(sums.grid).incoming(sums.total(), 3, 0)
    assert total["apart"].total["v"].tolist() == [[[0, 0]], [[1, -1]], [[2, -2]]]
    assert total["apart"].weight.tolist() == [[0], [1], [2]]
    assert total["p"].total["v"].tolist() == [3, -3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, BLOCK + 5, None])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_number_that_is_not_finite_is_refused_wherever_it_is(
    bad: float, at: int | None, on_disk: bool, tmp_path: Path
) -> None:
    broken = drawn(1, 1e12)  # outside the bound, too
    if at is None:
        broken = {"p": Part(broken["p"].total, torch.tensor(bad))}
    else:
        broken["p"].total["large"].view(-1)[at] = bad
    sums = added(Aggregator(LAYOUT, FixedPointFormat(n_max=2)), drawn(0))
    with pytest.raises(ProtocolError, match=r"E-WIRE-05.*NaN or infinity"):
        UpdateCheck(sums.layout, sums.grid).check(stored(broken, tmp_path) if on_disk else broken)
    wanted = exact([drawn(0)], sums.grid.frac_bits("p"))
    assert all(torch.equal(sums.total()["p"].total[key], wanted[key]) for key in SHAPES)
    assert sums.clipped == 0


def test_a_stored_update_of_another_layout_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    update = stored(drawn(0), tmp_path)
    (tmp_path / "bundle").write_bytes(b"")  # nothing can be read any more
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        UpdateCheck({"p": PartSpec(SHAPES | {"small": (6,)}, ())}, FixedPointFormat()).check(update)
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        UpdateCheck(LAYOUT, FixedPointFormat()).check(update)


def test_values_outside_the_bound_are_clipped_and_counted_in_every_block() -> None:
    value = torch.zeros(2 * BLOCK + 7)
    value[[0, BLOCK, 2 * BLOCK + 6]] = torch.tensor([5.0, -7.0, 1.0])
    sums = Aggregator({"p": PartSpec({"v": (len(value),)}, ())}, FixedPointFormat("ring64", 2, {"p": 1.0}))
    sums.add({"p": Part({"v": value}, torch.tensor(1.0))})
    top = 2 ** sums.grid.frac_bits("p")
    assert sums.clipped == 2
    assert sums.total()["p"].total["v"][[0, BLOCK, 2 * BLOCK + 6]].tolist() == [top, -top, top]


def test_a_value_is_encoded_alike_whatever_lies_beside_it() -> None:
    """A bound that is no whole number of units: only what is beyond it is cut at the last unit inside."""
    grid = FixedPointFormat("ring32", 3, {"p": 0.7})
    alone, _ = grid.encode("p", torch.tensor([0.7], dtype=torch.float64))
    beside, clipped = grid.encode("p", torch.tensor([0.7, 5.0], dtype=torch.float64))
    assert clipped == 1
    assert int(alone[0]) == int(beside[0]) == round(0.7 * 2 ** grid.frac_bits("p"))
    assert int(beside[1]) == int(0.7 * 2 ** grid.frac_bits("p"))


def test_a_sum_that_is_zero_has_no_sign() -> None:
    """Integers have no -0, and digests tell it from 0."""
    sums = Aggregator(LAYOUT, FixedPointFormat(n_max=2))
    for _ in range(2):
        sums.add({"p": Part.of({k: torch.full(s, -1e-13) for k, s in SHAPES.items()}, 1.0)})
    mean = FixedPoint(sums.grid).incoming(sums.total(), 2, 0)["p"].mean()
    assert not any(torch.signbit(value).any() or value.any() for value in mean.values())


def test_without_any_update_the_sum_is_zero() -> None:
    assert Aggregator(LAYOUT, FixedPointFormat()).total()["p"].total["small"].tolist() == [0] * 5
