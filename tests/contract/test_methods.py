"""What every registered method owes, whatever it computes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPoint, FixedPointFormat
from fl_core.methods import METHODS
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import SiloRuntime, run_silo_round
from fl_core.simulation.in_process import InProcessSilo
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle, Part, PartSpec
from tests.support.federations import METHOD_OPTIONS, SCHEMA, Given, manifest, same, same_bundle, shares
from tests.support.methods import (
    CONTEXT,
    TRAIN,
    answers,
    copied,
    copied_bundle,
    local,
    made,
    merged_total,
    model_of,
    same_state,
    server_after_a_round,
    server_of,
    total_of,
)


def poisoned() -> nn.Module:
    model = model_of(1)
    with torch.no_grad():
        for v in model.state_dict().values():
            v.fill_(float("nan") if v.is_floating_point() else -7)
    return model


every_method = pytest.mark.parametrize("name", METHODS)


@every_method
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_derived_layout_is_the_layout_of_real_bundles(name: str, norm: str) -> None:
    run = manifest(name, METHOD_OPTIONS.get(name, {}), train=TRAIN, model_options={"norm": norm})
    runtime = RunSetup.of(run).silo_runtime()
    server = made(name).init_server(runtime.model, CONTEXT)
    msg = made(name).broadcast(server)
    for k, share in enumerate(shares()):
        context = CONTEXT.for_silo(k, 0, prototypes=k != 1)
        outcome = run_silo_round(
            runtime, msg, None, PlainLocalData(share.train, share.test, TRAIN, context), context, TaskKind.TRAIN
        )
        assert {part: PartSpec.of(p) for part, p in outcome.bundle.items()} == run.layout


@every_method
def test_a_method_names_what_it_sends(name: str) -> None:
    layout = derive_layout(made(name), model_of(), SCHEMA)
    assert sorted(layout) == sorted([*METHODS[name](**METHOD_OPTIONS.get(name, {})).sends, "metrics"])


@every_method
def test_contents_of_the_scratch_model_change_nothing(name: str) -> None:
    method, server = made(name), server_after_a_round(name)
    clean = SiloRuntime(method, model_of(), derive_layout(method, model_of(), SCHEMA))
    dirty = SiloRuntime(method, poisoned(), clean.layout, initial=clean.initial)
    for k, share in enumerate(shares()):
        context = CONTEXT.for_silo(k, 0)
        a, b = (
            run_silo_round(
                runtime,
                method.broadcast(server),
                None,
                PlainLocalData(share.train, share.test, TRAIN, context),
                context,
                TaskKind.TRAIN,
            )
            for runtime in (clean, dirty)
        )
        assert same_bundle(a.bundle, b.bundle)
        assert same_state(a.state, b.state)


@every_method
def test_a_silo_s_second_round_uses_its_state_alone_and_leaves_it_as_it_is(name: str) -> None:
    method, server = made(name), server_after_a_round(name)
    layout, share, context = derive_layout(method, model_of(), SCHEMA), shares()[1], CONTEXT.for_silo(1, 0)
    initial, outcomes = tensor_maps.copy_state(model_of()), []
    for model in (model_of(), poisoned()):
        runtime, msg = SiloRuntime(method, model, layout, initial=initial), method.broadcast(server)
        first = run_silo_round(
            runtime, msg, None, PlainLocalData(share.train, share.test, TRAIN, context), context, TaskKind.TRAIN
        )
        before = copied(first.state)
        again = run_silo_round(
            runtime, msg, first.state, PlainLocalData(share.train, share.test, TRAIN, context), context, TaskKind.TRAIN
        )
        assert same_state(first.state, before)
        assert all(tensor_maps.all_finite(values) for values in again.state.values())
        outcomes.append(again)
    assert same_bundle(outcomes[0].bundle, outcomes[1].bundle)
    assert same_state(outcomes[0].state, outcomes[1].state)


@every_method
def test_evaluation_reads_nothing_of_the_scratch_model(name: str) -> None:
    method, share, context = made(name), shares()[0], CONTEXT.for_silo(0, 0)
    msg = method.broadcast(server_after_a_round(name))
    layout = derive_layout(method, model_of(), SCHEMA)
    parts = [
        run_silo_round(
            SiloRuntime(method, model, layout, initial=tensor_maps.copy_state(model_of())),
            msg,
            None,
            PlainLocalData(share.train, share.test, TRAIN, context),
            context,
            TaskKind.EVALUATE,
        ).bundle
        for model in (model_of(), poisoned())
    ]
    assert set(parts[0]) == {"metrics"}
    assert same_bundle(parts[0], parts[1])


@every_method
def test_local_mutates_nothing_of_its_arguments(name: str) -> None:
    method = made(name)
    server, silo = server_after_a_round(name), method.init_silo(model_of(), CONTEXT)
    before_server, before_silo = copied(server), copied(silo)
    local(method, server, 0, silo=silo)
    assert same_state(server, before_server)
    assert same_state(silo, before_silo)


@every_method
def test_bundles_do_not_share_memory_with_the_model(name: str) -> None:
    method, model = made(name), model_of()
    outcome = local(method, server_after_a_round(name), 0, model)
    before = {part: {key: v.clone() for key, v in p.total.items()} for part, p in outcome.bundle.items()}
    with torch.no_grad():
        for v in model.state_dict().values():
            v.zero_()
    assert all(same(p.total, before[part]) for part, p in outcome.bundle.items())


@every_method
def test_merge_of_an_empty_cohort_changes_nothing(name: str) -> None:
    method = made(name)
    server = server_after_a_round(name)
    empty = dict.fromkeys(method.unsummed_parts, (0,))  # no silo to stack
    nothing = {
        part: Part(
            {key: torch.zeros((*empty.get(part, ()), *s)) for key, s in spec.shapes.items()},
            torch.zeros((*empty.get(part, ()), *spec.weight_shape)),
        )
        for part, spec in derive_layout(method, model_of(), SCHEMA).items()
        if part != "metrics"
    }
    assert same_state(method.merge(server, nothing, replace(CONTEXT, cohort=0)), server)


@every_method
def test_merge_mutates_neither_the_state_nor_the_sum(name: str) -> None:
    method = made(name)
    server = server_after_a_round(name)
    before, total = copied(server), merged_total(method, answers(name)[:2])
    kept = copied_bundle(total)
    method.merge(server, total, CONTEXT)
    assert same_state(server, before)
    assert same_bundle(total, kept)


@every_method
def test_equal_inputs_give_equal_bytes(name: str) -> None:
    method = made(name)
    server = server_after_a_round(name)
    first, second = local(method, server, 1), local(method, server, 1)
    assert same_bundle(first.bundle, second.bundle)
    assert same_state(server, server_of(method))


@every_method
def test_arrival_order_does_not_matter(name: str) -> None:
    method = made(name)
    server = server_after_a_round(name)
    bundles = answers(name)
    layout = {part: spec for part, spec in derive_layout(method, model_of(), SCHEMA).items() if part != "metrics"}
    grid = FixedPointFormat("ring64", 3)
    merged = []
    for order in itertools.permutations(enumerate(bundles)):
        sums = Aggregator(layout, grid, method.unsummed_parts)
        for place, bundle in order:
            sums.add(bundle, place)
        merged.append(method.merge(server, FixedPoint(grid).incoming(sums.total(), 3, 0), CONTEXT))
    assert all(same_state(state, merged[0]) for state in merged)


@every_method
@pytest.mark.parametrize("ring", ["ring64", "ring32"])
def test_integer_bundles_give_the_same_sum_as_float_bundles(name: str, ring: str) -> None:
    """A mask needs integers at the silo: encoding there or on arrival must agree to the last bit, modulo the ring."""
    bundles = answers(name)
    layout = {part: spec for part, spec in derive_layout(made(name), model_of(), SCHEMA).items() if part != "metrics"}
    peak = {part: max(float(v.abs().max()) for b in bundles for v in b[part].total.values()) for part in layout}
    bounds = {part: 1.01 * peak[part] + 1e-3 for part in layout} | {f"{part}.weight": 100.0 for part in layout}
    grid = FixedPointFormat("ring32" if ring == "ring32" else "ring64", 3, bounds)
    plain, coded, masked = Aggregator(layout, grid), Aggregator(layout, grid), Aggregator(layout, grid)
    masks = torch.Generator().manual_seed(0)
    spent: list[Bundle] = []
    for k, bundle in enumerate(bundles):
        plain.add(bundle)
        units = FixedPoint(grid).outgoing(bundle, k, 0)
        coded.add(units)
        mask = {part: _noise(p, masks) for part, p in units.items()} if k < 2 else _negative_sum(spent)
        spent.append(mask)
        masked.add({part: _wrap(p + mask[part], ring) for part, p in units.items()})
    sums = [FixedPoint(grid).incoming(a.total(), 3, 0) for a in (plain, coded)]
    assert plain.clipped == 0
    assert same_bundle(sums[0], sums[1])
    if ring == "ring32":
        assert same_bundle(sums[0], FixedPoint(grid).incoming(masked.total(), 3, 0))


def _noise(part: Part, generator: torch.Generator) -> Part:
    def draw(v: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, 2**32, v.shape, generator=generator)

    return Part({key: draw(v) for key, v in part.total.items()}, draw(part.weight))


def _negative_sum(parts: list[Bundle]) -> Bundle:
    total = total_of(parts)
    return {name: Part({k: -v for k, v in p.total.items()}, -p.weight) for name, p in total.items()}


def _wrap(part: Part, ring: str) -> Part:
    if ring == "ring64":
        return part
    return Part({key: v.remainder(2**32) for key, v in part.total.items()}, part.weight.remainder(2**32))


@every_method
def test_rounds_through_a_port_repeat(name: str) -> None:
    run, share = manifest(name, METHOD_OPTIONS.get(name, {}), train=TRAIN), shares()[0]
    msg = made(name).broadcast(made(name).init_server(RunSetup.of(run).silo_runtime().model, CONTEXT))

    def port() -> InProcessSilo:
        return InProcessSilo(run, 0, share, RunSetup.of(run).silo_runtime())

    used = port()
    used.round(msg, CONTEXT, TaskKind.EVALUATE)  # an evaluation leaves no trace
    assert same_bundle(used.round(msg, CONTEXT, TaskKind.TRAIN), port().round(msg, CONTEXT, TaskKind.TRAIN))


@every_method
def test_a_silo_with_one_class_takes_part(name: str) -> None:
    method, context = made(name), CONTEXT.for_silo(0, 0)
    server = server_after_a_round(name)
    only = Given(torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.full((5,), 2))
    data = PlainLocalData(only, only, TRAIN, context)
    bundle = method.local(
        model_of(), method.broadcast(server), method.init_silo(model_of(), CONTEXT), data, context
    ).bundle
    assert all(tensor_maps.all_finite(p.total) for p in bundle.values())
