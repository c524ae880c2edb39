"""Bounds of a masked run's grid: the table of the module, row by row, and no bound that an honest update is beyond."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.grid_bounds import bounded_grid
from fl_core.aggregation.update_check import DeclaredSize, NoisyRows, UpdateCheck
from fl_core.errors import ConfigError
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import Weighing
from fl_core.types.records import TrainConfig
from fl_core.types.secagg import Secagg
from fl_core.types.values import Layout, PartRule, PartSpec
from tests.support.federations import METHOD_OPTIONS, go, manifest, shares

pytestmark = pytest.mark.integration

C = 4
LAYOUT: Layout = {
    "delta": PartSpec({"w": (3,), "n.running_mean": (2,)}, ()),
    "control": PartSpec({"c": (3,)}, ()),
    "steps": PartSpec({"tau": (1,)}, ()),
    "census": PartSpec({"n": (1,)}, ()),
    "labels": PartSpec({"n": (C,)}, ()),
    "prototypes": PartSpec({"p": (C, 2)}, (C,)),
    "quality": PartSpec({"h": (C, 2)}, (C,)),
    "once": PartSpec({"g": (C, 2)}, (C,)),
    "metrics": PartSpec({"correct": (C,)}, (C,)),
    "clinical": PartSpec({"confusion": (C, C)}, ()),
    "personal": PartSpec({"pa": ()}, ()),
}
RULES = {
    "control": PartRule(Weighing.ONCE),
    "steps": PartRule(steps="tau"),
    "census": PartRule(Weighing.ONCE, counts="n"),
    "labels": PartRule(Weighing.ONCE, counts="n"),
    "quality": PartRule(Weighing.QUALITY),
    "once": PartRule(Weighing.ONCE),
}
TRAIN = TrainConfig(batch_size=10, epochs=2, momentum=0.5)
CHECK = UpdateCheck(LAYOUT, FixedPointFormat(), RULES, TRAIN)
LARGEST = DeclaredSize(200.0, 50.0)


def test_each_segment_has_the_bound_of_its_row() -> None:
    grid = bounded_grid("ring32", 6, CHECK, LARGEST, {})
    steps = 2 * 20 / 0.5  # epochs x batches, as far as they reach with momentum
    assert dict(grid.bounds) == {
        "delta": 800.0,
        "delta.weight": 200.0,
        "delta.buffers": 4096 * 200.0,
        "control": 4.0,
        "control.weight": 1.0,
        "steps": 200 * steps,
        "steps.weight": 200.0,
        "census": 200.0,
        "census.weight": 1.0,
        "labels": 200.0,
        "labels.weight": 1.0,
        "prototypes": 64 * 200.0,
        "prototypes.weight": 200.0,
        "quality": 64 * 200.0,
        "quality.weight": 200.0,
        "once": 64.0,
        "once.weight": 1.0,
        "metrics": 50.0,
        "metrics.weight": 50.0,
        "clinical": 50.0,
        "clinical.weight": 50.0,
        "personal": 1.0,
        "personal.weight": 1.0,
        "hospitals.weight": 2.0**28,
    }
    assert (grid.ring, grid.n_max) == ("ring32", 6)
    assert bounded_grid("ring32", 6, CHECK, DeclaredSize(2.0, 1.0), {}).bounds["quality.weight"] == math.e


def test_answers_about_several_labels_add_up_to_as_many_times_the_examples() -> None:
    several = bounded_grid("ring32", 6, replace(CHECK, multi_label=True), LARGEST, {}).bounds
    alone = bounded_grid("ring32", 6, CHECK, LARGEST, {}).bounds
    assert (several["clinical"], several["clinical.weight"]) == (C * 50.0, C * 50.0)
    assert {name: bound for name, bound in several.items() if not name.startswith("clinical")} == {
        name: bound for name, bound in alone.items() if not name.startswith("clinical")
    }


def test_six_silos_have_26_bits_of_a_difference_twenty_24_and_fifty_23() -> None:
    """The specification's example: a bound of 4."""
    once = replace(CHECK, rules={**RULES, "delta": PartRule(Weighing.ONCE)})
    assert bounded_grid("ring32", 6, once, LARGEST, {}).bounds["clinical.weight"] == 50  # counts, whatever weighs
    assert [bounded_grid("ring32", n, once, LARGEST, {}).frac_bits("delta") for n in (6, 20, 50)] == [26, 24, 23]


def test_a_sum_over_many_examples_has_units_above_one_and_a_fine_mean() -> None:
    """4e4 examples, variances to 4,096 and 50 silos: -2 bits, and 1e-4 after the division."""
    grid = bounded_grid("ring32", 50, CHECK, DeclaredSize(4e4, 1e4), {})
    assert grid.frac_bits("delta.buffers") == -2
    assert 50 * 2.0 ** (2 - 1) / (50 * 4e4) <= 1e-4
    assert grid.frac_bits("delta.weight") >= 0


def test_noise_of_a_known_size_widens_counts_and_sums_per_class() -> None:
    noise = dict.fromkeys(LAYOUT, math.inf) | {"metrics": 3.0, "clinical": 0.0}
    private = replace(CHECK, noise=noise, noisy_rows=NoisyRows(length=2.0, count=5.0, value=7.0))
    plain = {name: spec for name, spec in LAYOUT.items() if name != "labels"}
    bounds = bounded_grid("ring32", 6, replace(private, layout=plain), LARGEST, {}).bounds
    assert bounds["prototypes.weight"] == 200 + 13.5 * 5
    assert bounds["prototypes"] == 2 * (200 + 13.5 * 5) + 13.5 * 7
    assert bounds["metrics"] == bounds["metrics.weight"] == 50 + 13.5 * 3
    assert bounds["once.weight"] == 1
    assert bounds["delta"] == 800  # its noise is inside each step
    with pytest.raises(ConfigError, match=r"E-CFG-08.*'labels'.*secagg\.ring=ring64"):
        bounded_grid("ring32", 6, private, LARGEST, {})


def test_what_a_guard_clips_has_its_bound_and_what_moves_has_none() -> None:
    bounds = bounded_grid("ring32", 6, CHECK, LARGEST, {"delta": 9.0, "prototypes": 30.0}).bounds
    assert (bounds["delta"], bounds["delta.weight"]) == (9, 1)
    assert (bounds["prototypes"], bounds["prototypes.weight"]) == (30, 30)
    assert "delta.buffers" not in bounds
    with pytest.raises(ConfigError, match=r"E-CFG-08.*'control'.*secagg\.ring=ring64"):
        bounded_grid("ring32", 6, CHECK, LARGEST, {"control": None})
    assert bounded_grid("ring64", 6, CHECK, LARGEST, {"control": None}).bounds == {"hospitals.weight": 2.0**60}


def test_who_declares_nothing_may_have_a_million() -> None:
    bounds = bounded_grid("ring32", 6, CHECK, DeclaredSize(), {}).bounds
    assert bounds["delta.weight"] == bounds["metrics.weight"] == 2**20


def masked32(plain: RunManifest) -> RunManifest:
    sets = shares()
    members = tuple(replace(m, units=len(s.train)) for m, s in zip(plain.members, sets, strict=True))
    made = replace(plain, members=members, secagg=Secagg(1))
    run = RunSetup(made)
    made = replace(made, layout={**made.layout, **run.guard_parts})
    largest = DeclaredSize(max(m.units for m in members), max(len(s.test) for s in sets))
    return replace(made, grid=bounded_grid("ring32", 3, RunSetup(made).update_check(), largest, {}))


METHODS = ["fedavg", "fedmr", "fednh", "scaffold", "fednova", "feddyn", "feddc", "fedproto", "fedrod", "creff"]


@pytest.mark.parametrize("method", METHODS)
def test_honest_updates_are_inside_the_bounds_and_the_model_is_that_of_the_wide_ring(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = METHOD_OPTIONS.get(method, {})
    run = masked32(manifest(method, options, rounds=2, aggregator="mean", personal=True))
    (narrow, found), (wide, _) = go(run), go(replace(run, grid=bounded_grid("ring64", 3, CHECK, LARGEST, {})))
    assert run.grid.ring == "ring32"
    assert [r.missing for r in found.records] == [{}] * 3
    assert all(r.clipped == 0 for r in found.records)
    assert "exceeded the run's bounds" not in caplog.text
    for name, value in wide["w"].items():
        assert torch.allclose(narrow["w"][name], value, atol=2e-5), name


def test_what_bounds_cut_off_is_counted_in_the_silos_own_log_and_not_at_the_coordinator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = masked32(manifest("fedavg", rounds=1, aggregator="mean"))
    tight = replace(run, grid=replace(run.grid, bounds={**run.grid.bounds, "delta": 1e-6}))
    _, history = go(tight)
    assert [r.clipped for r in history.records] == [0, 0]
    assert caplog.text.count("numbers of the update exceeded the run's bounds") == 3


def test_a_part_that_is_a_weight_alone_has_no_bound_for_values() -> None:
    grid = bounded_grid("ring32", 6, replace(CHECK, layout={**LAYOUT, "buffers": PartSpec({}, ())}), LARGEST, {})
    assert "buffers" not in grid.bounds
    assert grid.bounds["buffers.weight"] == LARGEST.train
