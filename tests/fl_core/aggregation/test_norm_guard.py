"""The norm guard: medians from histograms, each silo's own bound, and what a liar's sum or setting does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_core.aggregation.adaptive_guards import current_settings, guards_for_round, next_settings
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.norm_guard import BINS, NORMS, NormGuard, bin_of, blocks_of, norms_layout, upper_edge
from fl_core.aggregation.options import NormClipped
from fl_core.aggregation.round_sum import lower_median
from fl_core.errors import ProtocolError, RefusedError
from fl_core.types.enums import Weighing
from fl_core.types.values import Bundle, Part, PartRule, PartSpec, Tensors
from tests.support.federations import total_of

LAYOUT = {
    "delta": PartSpec({"a": (3,), "n.running_var": (2,)}, ()),
    "metrics": PartSpec({"correct": (4,)}, (4,)),
    "prototypes": PartSpec({"p": (4, 2)}, (4,)),
    "steps": PartSpec({"tau": (1,)}, ()),
    "head": PartSpec({"h": (2,)}, ()),
}
RULES = {
    "steps": PartRule(steps="tau"),
    "head": PartRule(Weighing.ONCE, level=True),
}
BLOCKS = blocks_of(LAYOUT, RULES)
OPTIONS = NormClipped(refuse_above=5.0, clip_at=2.0, ceiling=2.0)
GRID = FixedPointFormat("ring64", 9)
GUARD = NormGuard(OPTIONS, BLOCKS, {"delta": 3, "delta.buffers": 2}, GRID)


def update(norm: float, buffers: float = 1.0, weight: float = 10.0) -> Bundle:
    """Make an update whose mean values have these norms."""
    a = torch.tensor([2.0, -1.0, 2.0]) / 3 * norm * weight
    return {
        "delta": Part({"a": a, "n.running_var": torch.tensor([buffers * weight, 0.0])}, torch.tensor(weight)),
        "metrics": Part({"correct": torch.zeros(4)}, torch.zeros(4)),
    }


def setting(first: float, largest: float, buffers: float = 0.0) -> Tensors:
    return {"first": torch.tensor([first, buffers]), "largest": torch.tensor([largest, buffers])}


def norm_of(sent: Bundle) -> float:
    return float(sent["delta"].total["a"].double().norm()) / float(sent["delta"].weight)


def test_blocks_are_differences_alone_and_statistics_of_batch_norm_apart() -> None:
    assert BLOCKS == {"delta": (("delta", "a"),), "delta.buffers": (("delta", "n.running_var"),)}
    assert norms_layout(BLOCKS) == {NORMS: PartSpec({"delta": (BINS,), "delta.buffers": (BINS,)}, ())}


@given(st.floats(2.0**-15, 2.0**15.9))
def test_the_upper_edge_of_a_norms_bin_is_at_most_19_percent_above_it(norm: float) -> None:
    assert norm < upper_edge(bin_of(norm)) * (1 + 1e-12)
    assert upper_edge(bin_of(norm)) <= 1.19 * norm


def test_norms_beyond_the_histogram_are_in_its_outer_bins_and_the_first_says_nothing() -> None:
    assert [bin_of(n) for n in (0.0, 2.0**-30, 2.0**-16, 1.0, 2.0**15.9, 1e30)] == [0, 0, 0, 64, 127, 127]
    assert upper_edge(0) == 0


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=9))
def test_the_next_setting_is_the_lower_median_to_within_a_bin(norms: list[float]) -> None:
    first = GUARD.with_setting(GUARD.initial_setting())
    total = total_of([first.outgoing(update(n), k, 0) for k, n in enumerate(norms)])
    after = GUARD.next_setting(GUARD.initial_setting(), total[NORMS])
    median = lower_median(norms)
    assert median * (1 - 1e-5) <= float(after["first"][0]) <= 1.19 * median * (1 + 1e-5)
    assert torch.equal(after["first"], after["largest"])


def test_medians_of_later_rounds_move_the_largest_alone() -> None:
    now = GUARD.initial_setting()
    for norm in (1.0, 3.0, 0.5):
        guard = GUARD.with_setting(now)
        now = guard.next_setting(now, total_of([guard.outgoing(update(norm), k, 0) for k in range(3)])[NORMS])
    assert now["first"][0] == pytest.approx(upper_edge(bin_of(1.0)))
    assert now["largest"][0] == pytest.approx(upper_edge(bin_of(3.0)))


def test_two_updates_make_no_median() -> None:
    guard = GUARD.with_setting(GUARD.initial_setting())
    total = total_of([guard.outgoing(update(1.0), k, 0) for k in range(2)])
    assert not GUARD.next_setting(GUARD.initial_setting(), total[NORMS])["first"].any()


def test_each_silo_cuts_itself_to_twice_the_reference_and_one_block_alone() -> None:
    guard = GUARD.with_setting(setting(1.0, 1.5))  # R = 1.5, below twice the first
    sent = guard.outgoing(update(7.0, buffers=9.0), 0, 1)
    assert norm_of(sent) == pytest.approx(3.0)
    assert float(sent["delta"].total["n.running_var"][0]) == 90  # has no reference
    assert float(sent["delta"].weight) == 10
    assert sent["metrics"].total["correct"].tolist() == [0, 0, 0, 0]
    assert int(sent[NORMS].total["delta"].argmax()) == bin_of(7.0)  # as it was before the cut
    capped = GUARD.with_setting(setting(1.0, 8.0))
    assert norm_of(capped.outgoing(update(5.0), 0, 1)) == pytest.approx(4.0)  # R = 2 x the first


def test_what_is_within_the_bound_keeps_its_bits() -> None:
    sent = update(2.9)
    found = GUARD.with_setting(setting(1.0, 1.5)).outgoing(sent, 0, 1)
    assert found["delta"].total["a"].equal(sent["delta"].total["a"])
    assert found["delta"].total["a"].dtype == torch.float32
    before = GUARD.with_setting(GUARD.initial_setting()).outgoing(update(1e6), 0, 0)
    assert norm_of(before) == pytest.approx(1e6)  # in the first round the grid alone bounds


def test_an_update_of_another_scale_stays_and_the_refusal_names_no_number_of_it() -> None:
    guard = GUARD.with_setting(setting(1.0, 1.0))
    with pytest.raises(RefusedError, match=r"E-RUN-44.*more than 5 times") as caught:
        guard.outgoing(update(5.123456), 0, 1)
    assert "5.12" not in str(caught.value)
    never = replace(guard, options=replace(OPTIONS, refuse_above=math.inf))
    assert norm_of(never.outgoing(update(1e4), 0, 1)) == pytest.approx(2.0)  # private runs cut alone


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_in_no_bin_and_left_to_the_check_of_numbers(odd: float) -> None:
    sent = GUARD.with_setting(setting(1.0, 1.0)).outgoing(update(odd), 0, 1)
    assert not sent[NORMS].total["delta"].any()
    assert not bool(torch.isfinite(sent["delta"].total["a"]).all())


def test_an_evaluation_and_an_empty_part_have_no_histogram() -> None:
    guard = GUARD.with_setting(GUARD.initial_setting())
    only = {"metrics": update(1.0)["metrics"]}
    assert guard.outgoing(only, 0, 3) == only
    nothing = update(0.0, weight=1.0)
    empty = {**nothing, "delta": Part({k: v * 0 for k, v in nothing["delta"].total.items()}, torch.tensor(0.0))}
    assert not guard.outgoing(empty, 0, 0)[NORMS].total["delta"].any()


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        {"first": torch.zeros(2)},
        {"first": torch.zeros(3), "largest": torch.zeros(3)},
        {"first": torch.tensor([math.nan, 0.0]), "largest": torch.zeros(2)},
        {"first": torch.tensor([-1.0, 0.0]), "largest": torch.zeros(2)},
        {"first": torch.tensor([math.inf, 0.0]), "largest": torch.zeros(2)},
    ],
)
def test_a_setting_that_is_none_is_refused(wrong: Tensors | None) -> None:
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.*median norms of 2 blocks"):
        GUARD.with_setting(wrong)


def summed(sent: list[Bundle]) -> Bundle:
    encoder = FixedPoint(GRID)
    return encoder.incoming(total_of([encoder.outgoing(u, k, 1) for k, u in enumerate(sent)]), len(sent), 1)


def test_sums_of_honest_silos_pass_and_longer_means_do_not() -> None:
    guard = GUARD.with_setting(setting(1.0, 1.0, buffers=1.0))
    honest = [guard.outgoing(update(4.0, buffers=1.5), k, 1) for k in range(3)]
    assert guard.incoming(summed(honest), 3, 1)[NORMS].total["delta"].sum() == 3
    liar = GUARD.with_setting(setting(100.0, 100.0)).outgoing(update(20.0), 0, 1)
    with pytest.raises(RefusedError, match=r"E-RUN-48.*mean of 'delta'.*nothing is merged"):
        guard.incoming(summed([*honest[:2], liar]), 3, 1)


@pytest.mark.parametrize("count", [-1.0, 2.0])
def test_counts_of_norms_that_no_silos_have_are_refused(count: float) -> None:
    guard = GUARD.with_setting(GUARD.initial_setting())
    honest = [guard.outgoing(update(1.0), k, 0) for k in range(3)]
    histogram = {**honest[0][NORMS].total}
    histogram["delta"] = histogram["delta"].clone()
    histogram["delta"][3] += count
    liar = {**honest[0], NORMS: Part(histogram, torch.tensor(1.0))}
    with pytest.raises(RefusedError, match=r"E-RUN-48.*counts of norms"):
        guard.incoming(summed([liar, *honest[1:]]), 3, 0)


def test_the_setting_travels_as_other_guards_settings_do() -> None:
    assert set(current_settings([GUARD], {}, 0)) == {NORMS}
    now = current_settings([GUARD], {}, 0)
    guard = guards_for_round([GUARD], now)[0]
    total = total_of([guard.outgoing(update(1.0), k, 0) for k in range(3)])
    after = next_settings([GUARD], now, total)
    assert float(after[NORMS]["first"][0]) > 1
    assert next_settings([GUARD], after, {"metrics": total["metrics"]}) == after  # an evaluation
