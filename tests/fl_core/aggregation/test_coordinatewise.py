"""Medians, trimmed means and geometric medians equal slow ones, in any order and wherever updates lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.coordinatewise import CoordinatewiseSum
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.options import AGGREGATORS, GeometricMedian, Median, TrimmedMean, read
from fl_core.aggregation.update_check import UpdateCheck
from fl_core.errors import ConfigError
from fl_core.methods import METHODS
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.computed_tensors import BLOCK
from fl_core.types.values import Bundle, Layout, Part, PartSpec
from tests.oracles.equations import slow_geometric_median, slow_trimmed_mean
from tests.support.federations import go, manifest, same, same_bundle, stored

D = BLOCK + 3
LAYOUT: Layout = {"delta": PartSpec({"a": (D,), "b": (2, 2)}, ()), "metrics": PartSpec({"correct": (2,)}, (2,))}
GRID = FixedPointFormat("ring64", 9)
KINDS = [Median(), TrimmedMean(trim=0.3), GeometricMedian(steps=4)]


def update(seed: int, weight: float = 1.0) -> dict[str, Part]:
    draw = torch.Generator().manual_seed(seed)
    values = {"a": torch.randn(D, generator=draw), "b": torch.randn(2, 2, generator=draw)}
    counts = Part({"correct": torch.tensor([1.0, 0.0])}, torch.tensor([2.0, 1.0]))
    return {"delta": Part.of(values, weight), "metrics": counts}


def aggregated(sent: Sequence[tuple[int, Bundle]], options: Median | TrimmedMean | GeometricMedian) -> Bundle:
    sums = CoordinatewiseSum(Aggregator(LAYOUT, GRID), UpdateCheck(LAYOUT, GRID), options)
    for silo, one in sent:
        sums.add(one, str(silo), silo, sums.measure(one, str(silo)))
    assert not sums.finish().refused
    return FixedPoint(GRID).incoming(sums.sums.total(), len(sent), 0)


@pytest.mark.parametrize("options", KINDS, ids=lambda o: o.name)
@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_values_are_those_of_the_slow_aggregate_and_weights_and_metrics_are_summed(n: int, options: Median) -> None:
    sent = [(k, update(k, 2.0 + k)) for k in range(n)]
    total = aggregated(sent, options)
    assert float(total["delta"].weight) == sum(2.0 + k for k in range(n))
    assert total["metrics"].weight.tolist() == [2.0 * n, float(n)]
    found, places = total["delta"].mean()["a"], [0, 1, BLOCK - 1, BLOCK, D - 1]
    means = [(one["delta"].total["a"].double() / one["delta"].weight).tolist() for _, one in sent]
    if isinstance(options, GeometricMedian):
        whole = [
            [*m, *(one["delta"].total["b"].double() / one["delta"].weight).flatten().tolist()]
            for m, (_, one) in zip(means, sent, strict=True)
        ]
        wanted = slow_geometric_median(whole, [2.0 + k for k in range(n)], options.steps, options.smoothing)
        assert [float(found[i]) for i in places] == pytest.approx([wanted[i] for i in places], abs=1e-6)
        return
    for i in places:
        column = [m[i] for m in means]
        left_out = (n - 1) // 2 if isinstance(options, Median) else min(max(1, math.floor(0.3 * n)), (n - 1) // 2)
        assert float(found[i]) == pytest.approx(slow_trimmed_mean(column, left_out), abs=1e-6)


@pytest.mark.parametrize("options", KINDS, ids=lambda o: o.name)
def test_the_order_of_arrival_and_where_updates_lie_change_nothing(options: Median, tmp_path: Path) -> None:
    sent = [(k, update(k, 1.0 + k)) for k in range(4)]
    first = aggregated(sent, options)
    for order in itertools.islice(itertools.permutations(sent), 5, 24, 6):
        assert same_bundle(aggregated(order, options), first)
    assert same_bundle(aggregated([(k, stored(one, tmp_path, str(k))) for k, one in sent], options), first)


@given(st.integers(0, 3), st.floats(-1e30, 1e30))
def test_one_of_five_cannot_carry_a_number_outside_the_others(place: int, lie: float) -> None:
    sent = [(k, update(k)) for k in range(5)]
    sent[place][1]["delta"].total["b"].fill_(lie)  # type: ignore[attr-defined]
    others = torch.stack([one["delta"].total["b"] for k, one in sent if k != place])
    for options in KINDS[:2]:
        found = aggregated(sent, options)["delta"].mean()["b"]
        assert bool((found >= others.amin(0) - 1e-5).all())
        assert bool((found <= others.amax(0) + 1e-5).all())


@pytest.mark.parametrize("aggregator", ["median", "trimmed_mean", "geometric_median"])
def test_which_methods_they_go_with(aggregator: str) -> None:
    refused = {
        "analytic",
        "fedmr",
        "fedproto",
        "fedproc",
        "fednh",
        "fedgen",
        "fedcd",
        "creff",
        "scaffold",
        "feddyn",
        "feddc",
    }
    for name in METHODS:
        run = manifest(name, {}, aggregator=aggregator)
        if name not in refused:
            assert RunSetup.of(run).aggregator == AGGREGATORS[aggregator]()
            continue
        with pytest.raises(ConfigError, match=f"E-CFG-08: method {name} .*{aggregator}: .*use norm_clipped"):
            RunSetup.of(run)


@pytest.mark.parametrize("aggregator", ["median", "trimmed_mean", "geometric_median"])
def test_a_run_repeats_to_the_last_bit(aggregator: str) -> None:
    run = manifest("fedavg", aggregator=aggregator)
    first, kept = go(run)
    assert same(go(run)[0]["w"], first["w"])
    assert not same(go(manifest("fedavg"))[0]["w"], first["w"])
    assert kept.records[0].medians == {}


def test_an_aggregator_that_does_not_exist_or_a_number_out_of_range_is_refused() -> None:
    for name, options, code in (
        ("medain", {}, "E-CFG-01"),
        ("trimmed_mean", {"trim": 0.5}, "E-CFG-02"),
        ("trimmed_mean", {"trim": math.nan}, "E-CFG-02"),
        ("norm_clipped", {"clip_at": 0.0}, "E-CFG-02"),
        ("norm_clipped", {"ceiling": -1.0}, "E-CFG-02"),
        ("geometric_median", {"steps": 10**6}, "E-CFG-02"),
        ("median", {"trim": 0.1}, "E-CFG-01"),
    ):
        with pytest.raises(ConfigError) as caught:
            read(name, options)
        assert caught.value.code == code
