"""The grid: exact sums, counted clipping, refused NaN, and the proof that n silos never overflow."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import RING64_BOUND, FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.update_check import UpdateCheck
from fl_core.errors import ConfigError, ProtocolError
from fl_core.types.values import Part, PartSpec
from tests.oracles.equations import units
from tests.support.federations import same_bundle

LAYOUT = {"p": PartSpec({"v": (2,)}, ())}
values = st.floats(-1e4, 1e4, width=32)


def bundle(v: float, w: float = 1.0) -> dict[str, Part]:
    return {"p": Part({"v": torch.tensor([v, -v])}, torch.tensor(w))}


@example([1024.0, 1e-06], "ring64")
@given(st.lists(values, min_size=1, max_size=8), st.sampled_from(["ring64", "ring32"]))
def test_sum_is_exact(sent: list[float], ring: str) -> None:
    grid = FixedPointFormat("ring64" if ring == "ring64" else "ring32", 8, {"p": 1e4, "p.weight": 1.0})
    sums = Aggregator(LAYOUT, grid)
    for v in sent:
        sums.add(bundle(v))
    bits = grid.frac_bits("p")
    wanted = units(sent, bits)  # Python's integers
    assert sums.total()["p"].total["v"].tolist() == [wanted, -wanted]
    decoded = FixedPoint(grid).incoming(sums.total(), len(sent), 0)["p"]
    assert float(decoded.total["v"][0]) == wanted / 2**bits  # the float64 next to the exact integer sum
    assert abs(Fraction(wanted, 2**bits) - sum(map(Fraction, sent))) <= Fraction(len(sent), 2 ** (bits + 1))
    assert float(decoded.weight) == len(sent)
    assert sums.clipped == 0


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=6, max_size=6), st.sampled_from([1.0, 2.0**-40, 2.0**10]))
def test_parts_on_one_grid_and_on_several_add_up_alike(v: list[float], scale: float) -> None:
    layout = {"p": PartSpec({"a": (2,), "b": (1, 2)}, ()), "q": PartSpec({"c": (1,)}, (1,))}
    t = torch.tensor(v, dtype=torch.float64).mul(scale).float()
    sent = {"p": Part({"a": t[:2], "b": t[2:4].view(1, 2)}, torch.tensor(3.0)), "q": Part({"c": t[4:5]}, t[5:].abs())}
    one, several = (
        Aggregator(layout, FixedPointFormat(n_max=3)),
        Aggregator(layout, FixedPointFormat(n_max=3, bounds={"q.weight": 2.0**24 + 2})),
    )
    for sums in (one, several):
        sums.add(sent)
        sums.add(sent)
    assert same_bundle(one.total(), several.total())
    bits = one.grid.frac_bits("p")
    assert one.total()["p"].total["b"].tolist() == [[units([float(x)] * 2, bits) for x in t[2:4]]]
    assert float(several.total()["p"].weight) == units([3.0, 3.0], bits)


def test_a_bundle_in_float64_is_summed_and_not_changed() -> None:
    sums, value = Aggregator(LAYOUT, FixedPointFormat(n_max=2)), torch.tensor([1 / 3, 2.0**25], dtype=torch.float64)
    sums.add({"p": Part({"v": value}, torch.tensor(1.0, dtype=torch.float64))})
    assert value.tolist() == [1 / 3, 2.0**25]
    bits = sums.grid.frac_bits("p")
    assert sums.total()["p"].total["v"].tolist() == [round(1 / 3 * 2**bits), 2 ** (24 + bits)]
    assert sums.clipped == 1


def test_a_bundle_in_float16_is_scaled_without_overflow() -> None:
    sums = Aggregator(LAYOUT, FixedPointFormat(n_max=2))
    sums.add({"p": Part({"v": torch.tensor([0.25, -60000.0]).half()}, torch.tensor(1.0))})
    bits = sums.grid.frac_bits("p")
    assert sums.total()["p"].total["v"].tolist() == [2 ** (bits - 2), -60000 * 2**bits]


@given(st.permutations([0.1, -7.3, 1e4, 2.0**-40, -1e4, 3.0]))
def test_order_does_not_matter(order: list[float]) -> None:
    def folded(sent: list[float]) -> Aggregator:
        sums = Aggregator(LAYOUT, FixedPointFormat(n_max=6))
        for v in sent:
            sums.add(bundle(v))
        return sums

    assert same_bundle(folded(order).total(), folded(sorted(order)).total())


@pytest.mark.parametrize("ring", ["ring64", "ring32"])
@pytest.mark.parametrize("bound", [1e-3, 1.0, 3.7, 1e4])
@pytest.mark.parametrize("n_max", [1, 3, 50, 1000])
def test_as_many_silos_as_agreed_never_overflow(ring: str, bound: float, n_max: int) -> None:
    """At both extremes, in Python's integers: n clip(+-B) stays inside the ring; one more bit would not."""
    grid = FixedPointFormat("ring64" if ring == "ring64" else "ring32", n_max, {"p": bound})
    top = 2 ** (63 if ring == "ring64" else 31)
    for extreme in (bound, -bound, 10 * bound, -10 * bound):
        encoded, _ = grid.encode("p", torch.tensor([extreme], dtype=torch.float64))
        assert -top <= n_max * int(encoded) <= top - 1
    finer = grid.frac_bits("p") + 1
    assert n_max * math.ceil(Fraction(bound) * 2**finer) > top - 1  # no resolution is given away


@pytest.mark.parametrize("ring", ["ring64", "ring32"])
def test_decoding_the_extremes_gives_them_back(ring: str) -> None:
    grid = FixedPointFormat("ring64" if ring == "ring64" else "ring32", 7, {"p": 100.0, "p.weight": 1.0})
    for v in (100.0, -100.0):
        sums = Aggregator(LAYOUT, grid)
        for _ in range(7):
            sums.add(bundle(v))
        assert FixedPoint(grid).incoming(sums.total(), 7, 0)["p"].total["v"].tolist() == [7 * v, -7 * v]


def test_clipping_is_counted_and_cuts_at_the_bound() -> None:
    grid = FixedPointFormat("ring64", 2, {"p": 1.5, "p.weight": 10.0})
    encoded, clipped = grid.encode("p", torch.tensor([1.5, 1.6, -100.0, -1.5, 0.2]))
    assert clipped == 2
    back = grid.decode("p", encoded)
    assert back[:4].tolist() == pytest.approx([1.5, 1.5, -1.5, -1.5], abs=1e-9)
    sums = Aggregator(LAYOUT, grid)
    sums.add(bundle(2.0, w=11.0))
    assert sums.clipped == 3  # both totals and the weight
    guard = FixedPoint(grid)
    guard.outgoing(bundle(2.0, w=11.0), 0, 0)
    assert guard.clipped == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["total", "weight"])
def test_nan_is_refused_and_changes_nothing(bad: float, where: str) -> None:
    layout = {"a": LAYOUT["p"], "p": LAYOUT["p"]}
    sums = Aggregator(layout, FixedPointFormat(n_max=3))
    sums.add({"a": bundle(1.0)["p"], "p": bundle(2.0)["p"]})
    before = {
        name: Part({k: v.clone() for k, v in p.total.items()}, p.weight.clone()) for name, p in sums.total().items()
    }
    poison = bundle(bad)["p"] if where == "total" else bundle(1.0, w=bad)["p"]
    with pytest.raises(ProtocolError) as caught:
        UpdateCheck(sums.layout, sums.grid).check({"a": bundle(5.0)["p"], "p": poison})
    assert caught.value.code == "E-WIRE-05"
    assert same_bundle(sums.total(), before)
    assert sums.clipped == 0
    with pytest.raises(ProtocolError):
        FixedPoint(FixedPointFormat(n_max=3)).outgoing({"p": poison}, 0, 0)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"q": bundle(1.0)["p"]},
        {"p": Part({"v": torch.zeros(3)}, torch.tensor(1.0))},
        {"p": Part({"v": torch.zeros(2)}, torch.zeros(2))},
        {"p": bundle(1.0)["p"], "q": bundle(1.0)["p"]},
    ],
)
def test_a_bundle_of_another_layout_is_refused_and_changes_nothing(odd: dict[str, Part]) -> None:
    sums = Aggregator(LAYOUT, FixedPointFormat())
    with pytest.raises(ProtocolError) as caught:
        UpdateCheck(sums.layout, sums.grid).check(odd)
    assert caught.value.code == "E-WIRE-06"
    assert not sums.total()["p"].total["v"].any()


def test_ring32_wraps_around() -> None:
    """Masked units are any numbers below 2^32; only their sum modulo 2^32 means something."""
    grid = FixedPointFormat("ring32", 4, {"p": 10.0})
    encoded, _ = grid.encode("p", torch.tensor([-9.5, 3.25, 0.0]))
    mask = torch.tensor([2**32 - 1, 2**31, 12345])
    masked = (encoded + mask).remainder(2**32)
    assert bool((masked >= 0).all())
    assert grid.decode("p", masked - mask).tolist() == pytest.approx([-9.5, 3.25, 0.0], abs=1e-7)
    assert grid.decode("p", masked - mask + 5 * 2**32).tolist() == grid.decode("p", encoded).tolist()


def test_grids_without_room_or_without_a_bound_are_refused() -> None:
    for grid, segment in (
        (FixedPointFormat("ring32", 10, {"p": 1.0}), "q"),
        (FixedPointFormat("ring32", 2**16, {"p": 1.0}), "p"),  # 15 bits
    ):
        with pytest.raises(ConfigError) as caught:
            grid.encode(segment, torch.zeros(1))
        assert caught.value.code == "E-CFG-08"
    assert FixedPointFormat().bound("anything") == RING64_BOUND


@given(st.floats(-2e8, 2e8), st.sampled_from([2e8, 1e3, 0.7]))
def test_a_number_comes_back_within_half_a_unit_also_of_units_larger_than_one(value: float, bound: float) -> None:
    """T-33: 50 silos and a bound of 2e8 leave -3 bits on ring32."""
    grid = FixedPointFormat("ring32", 50, {"p": bound})
    f = math.floor(math.log2((2**31 - 1) / (50 * Fraction(bound))))
    assert grid.frac_bits("p") == f
    inside = max(-bound, min(bound, value))
    units_, _ = grid.encode("p", torch.tensor([inside], dtype=torch.float64))
    assert abs(Fraction(float(grid.decode("p", units_))) - Fraction(inside)) <= Fraction(2) ** -(f + 1)
    assert f == {2e8: -3, 1e3: 15, 0.7: 25}[bound]


@pytest.mark.parametrize("bound", [2e8, 4.0])
def test_silos_at_the_bound_do_not_wrap_and_one_unit_more_does(bound: float) -> None:
    """T-33, in words of 32 bits as they are added under masks."""
    grid = FixedPointFormat("ring32", 6, {"p": bound})
    unit = 2.0 ** -grid.frac_bits("p")
    most = torch.tensor([bound], dtype=torch.float64)
    words = grid.encode("p", most)[0].int()
    total = sum((words for _ in range(6)), torch.zeros(1, dtype=torch.int32))
    assert float(grid.decode("p", total.long())) == pytest.approx(6 * bound, rel=1e-6)
    room = (2**31 - 1) // 6 + 1  # the first number of units of which six do not fit
    wrapped = sum((torch.tensor([room]).int() for _ in range(6)), torch.zeros(1, dtype=torch.int32))
    assert float(grid.decode("p", wrapped.long())) < 0 < room * unit
    assert room > int(words)


def test_statistics_of_batch_norm_have_a_segment_of_their_own_where_they_have_a_bound() -> None:
    """T-33: weights to 2^-25, variances up to 4,096, in one part."""
    keys = ("norm.weight", "norm.running_mean", "norm.running_var")
    sent = {
        "p": Part({key: torch.tensor([v]) for key, v in zip(keys, (0.001, 3.0, 4000.0), strict=True)}, torch.ones(()))
    }
    bounds = {"p": 4.0, "p.weight": 1.0}
    own = FixedPoint(FixedPointFormat("ring32", 6, {**bounds, "p.buffers": 4096.0}))
    back = own.incoming(own.outgoing(sent, 0, 0), 1, 0)["p"].total
    assert own.clipped == 0
    assert [own.grid.segment("p", key) for key in (*keys, None)] == ["p", "p.buffers", "p.buffers", "p.weight"]
    assert float(back["norm.running_var"]) == 4000
    assert abs(float(back["norm.weight"]) - float(torch.tensor(0.001))) <= 2.0 ** -(own.grid.frac_bits("p") + 1)
    shared = FixedPoint(FixedPointFormat("ring32", 6, bounds))
    assert shared.grid.segment("p", keys[2]) == "p"
    assert float(shared.incoming(shared.outgoing(sent, 0, 0), 1, 0)["p"].total[keys[2]]) == pytest.approx(4.0)
    assert shared.clipped == 1
    assert FixedPointFormat().segment("p", keys[2]) == "p"  # a plain run's bits stay what they were


@pytest.mark.parametrize("bound", [0.0, -1.0, 1e-300, 1e300, math.inf, math.nan])
def test_a_grid_of_impossible_bounds_or_for_fewer_silos_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*grid\.bounds\.p"):
        FixedPointFormat("ring32", 3, {"p": bound}).check(3)
    with pytest.raises(ConfigError, match=r"E-CFG-02.*a grid for 4 silos"):
        FixedPointFormat("ring32", 3, {"p": 1.0}).check(4)
    FixedPointFormat("ring32", 3, {"p": 1.0}).check(3)


def test_empty_tensors_and_no_silo_at_all() -> None:
    assert FixedPointFormat().encode("p", torch.zeros(0))[1] == 0
    nothing = FixedPoint(FixedPointFormat()).incoming(Aggregator(LAYOUT, FixedPointFormat()).total(), 0, 0)["p"]
    assert nothing.total["v"].tolist() == [0, 0]
    assert float(nothing.weight) == 0
