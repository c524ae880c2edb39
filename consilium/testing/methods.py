"""The contract that every method must fulfil, as checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from consilium.research.engines.in_process import InProcessSilo, thread_count
from consilium.testing.federation import (
    SCHEMA,
    MadeUp,
    copied,
    copied_bundle,
    manifest,
    merged_total,
    same,
    same_bundle,
    same_state,
    shares,
    total_of,
)
from fl_core import rng
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.converter import Option
from fl_core.extensions import loading
from fl_core.methods import build_method
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import SiloRound, SiloRuntime, run_silo_round
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling, TaskKind
from fl_core.types.interfaces import Method, RoundData
from fl_core.types.metric_parts import METRIC_PARTS
from fl_core.types.records import TrainConfig
from fl_core.types.values import (
    AS_SCHEDULED,
    Bundle,
    Layout,
    LocalResult,
    LossFn,
    Part,
    PartSpec,
    RoundContext,
    SgdOptions,
    State,
)
from service_core.progress import still_working

__all__ = ["CHECKS", "MethodCase", "check_method"]

T = TypeVar("T")
TRAIN = TrainConfig(lr=0.05, batch_size=5, epochs=1)
CONTEXT = RoundContext(n_silos=3, n_classes=4, rounds=5, round=2, cohort=3)


@dataclass(frozen=True)
class MethodCase:
    """A method by name, with options that use all of its parts."""

    name: str
    options: Mapping[str, Option]

    @property
    def method(self) -> Method:
        return build_method(self.name, self.options)

    @cached_property
    def _after_a_round(self) -> tuple[State, tuple[Bundle, ...]]:
        method = self.method
        start = method.init_server(model_of(), CONTEXT)
        server = method.merge(start, merged_total(method, [self.local(start, k).bundle for k in range(3)]), CONTEXT)
        return server, tuple(self.local(copied(server), k).bundle for k in range(3))

    @property
    def server(self) -> State:
        """A copy of the server's state after one round, so that it differs from the initial state."""
        return copied(self._after_a_round[0])

    @property
    def answers(self) -> list[Bundle]:
        """Copies of the three silos' bundles for that state."""
        return [copied_bundle(bundle) for bundle in self._after_a_round[1]]

    @property
    def layout(self) -> Layout:
        return derive_layout(self.method, model_of(), SCHEMA)

    @property
    def sent(self) -> Layout:
        """The layout without metrics."""
        return {part: spec for part, spec in self.layout.items() if part not in METRIC_PARTS}

    def local(self, server: State, k: int, model: nn.Module | None = None, silo: State | None = None) -> LocalResult:
        model = model_of() if model is None else model
        share, context = shares()[k], CONTEXT.for_silo(k, 0)
        silo = self.method.init_silo(model_of(), CONTEXT) if silo is None else silo
        data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
        return self.method.local(model, self.method.broadcast(server), silo, data, context)

    def round(self, k: int, model: nn.Module, silo: State | None = None, kind: TaskKind = TaskKind.TRAIN) -> SiloRound:
        """Run a silo's whole round, with a scratch model whose contents must not matter."""
        runtime = SiloRuntime(self.method, model, self.layout, initial=tensor_maps.copy_state(model_of()))
        share, context = shares()[k], CONTEXT.for_silo(k, 0)
        data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
        return run_silo_round(runtime, self.method.broadcast(self.server), silo, data, context, kind)

    def manifest(self, norm: str = "group") -> RunManifest:
        return manifest(self.name, self.options, train=TRAIN, model_options={"norm": norm})


def model_of(seed: int = 0, norm: str = "batch") -> nn.Module:
    return build_model("digits_cnn", {"norm": norm}, SCHEMA, seed)


def poisoned() -> nn.Module:
    model = model_of(1)
    with torch.no_grad():
        for v in model.state_dict().values():
            v.fill_(float("nan") if v.is_floating_point() else -7)
    return model


def run_checks(checks: Sequence[Callable[[T], None]], case: T, name: str) -> None:
    broken = []
    for check in checks:
        try:
            with thread_count(1):  # with few examples, more threads are slower
                check(case)
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            broken.append(f"{check.__name__.replace('_', ' ')}: {type(error).__name__}{text and f': {text}'}")
    if broken:
        lines = "".join(f"\n  {line}" for line in broken)
        raise AssertionError(f"{name} fails {len(broken)} of {len(checks)} checks:{lines}")


# ---- the checks ------------------------------------------------------------------------------------------------------


def derived_layout_is_the_layout_of_real_bundles(case: MethodCase) -> None:
    for norm in ("group", "batch"):
        run = case.manifest(norm)
        runtime = RunSetup.of(run).silo_runtime()
        msg = case.method.broadcast(case.method.init_server(runtime.model, CONTEXT))
        for k, share in enumerate(shares()):
            context = CONTEXT.for_silo(k, 0, prototypes=k != 1)
            data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
            outcome = run_silo_round(runtime, msg, None, data, context, TaskKind.TRAIN)
            assert {part: PartSpec.of(p) for part, p in outcome.bundle.items()} == run.layout


def a_method_names_what_it_sends(case: MethodCase) -> None:
    assert sorted(case.sent) == sorted(build_method(case.name, case.options).sends)


def options_survive_the_manifest(case: MethodCase) -> None:
    run = case.manifest()
    read = RunManifest.from_json(run.to_json())
    assert (read, read.digest()) == (run, run.digest())
    assert build_method(read.method.name, read.method.options) == case.method


def contents_of_the_scratch_model_change_nothing(case: MethodCase) -> None:
    clean, dirty = model_of(), poisoned()
    for k in range(3):
        a, b = case.round(k, clean), case.round(k, dirty)
        assert same_bundle(a.bundle, b.bundle)
        assert same_state(a.state, b.state)


def a_silo_s_second_round_uses_its_state_alone_and_leaves_it_as_it_is(case: MethodCase) -> None:
    outcomes = []
    for model in (model_of(), poisoned()):
        first = case.round(1, model)
        before = copied(first.state)
        again = case.round(1, model, first.state)
        assert same_state(first.state, before)
        assert all(tensor_maps.all_finite(values) for values in again.state.values())
        outcomes.append(again)
    assert same_bundle(outcomes[0].bundle, outcomes[1].bundle)
    assert same_state(outcomes[0].state, outcomes[1].state)


def evaluation_reads_nothing_of_the_scratch_model(case: MethodCase) -> None:
    a, b = (case.round(0, model, kind=TaskKind.EVALUATE).bundle for model in (model_of(), poisoned()))
    assert set(a) <= METRIC_PARTS
    assert same_bundle(a, b)


def local_mutates_nothing_of_its_arguments(case: MethodCase) -> None:
    server, silo = case.server, case.method.init_silo(model_of(), CONTEXT)
    before_server, before_silo = copied(server), copied(silo)
    case.local(server, 0, silo=silo)
    assert same_state(server, before_server)
    assert same_state(silo, before_silo)


def bundles_do_not_share_memory_with_the_model(case: MethodCase) -> None:
    model = model_of()
    outcome = case.local(case.server, 0, model)
    before = {part: {key: v.clone() for key, v in p.total.items()} for part, p in outcome.bundle.items()}
    with torch.no_grad():
        for v in model.state_dict().values():
            v.zero_()
    assert all(same(p.total, before[part]) for part, p in outcome.bundle.items())


def merge_of_an_empty_cohort_changes_nothing(case: MethodCase) -> None:
    method, server = case.method, case.server
    empty = dict.fromkeys(method.unsummed_parts, (0,))  # no silo to stack
    nothing = {
        part: Part(
            {key: torch.zeros((*empty.get(part, ()), *s)) for key, s in spec.shapes.items()},
            torch.zeros((*empty.get(part, ()), *spec.weight_shape)),
        )
        for part, spec in case.sent.items()
    }
    assert same_state(method.merge(server, nothing, replace(CONTEXT, cohort=0)), server)


def merge_mutates_neither_the_state_nor_the_sum(case: MethodCase) -> None:
    method, server = case.method, case.server
    before, total = copied(server), merged_total(method, case.answers[:2])
    kept = copied_bundle(total)
    method.merge(server, total, CONTEXT)
    assert same_state(server, before)
    assert same_bundle(total, kept)


def equal_inputs_give_equal_bytes(case: MethodCase) -> None:
    server = case.server
    first, second = case.local(server, 1), case.local(server, 1)
    assert same_bundle(first.bundle, second.bundle)
    assert same_state(server, replace(case).server)


def arrival_order_does_not_matter(case: MethodCase) -> None:
    method, server, grid = case.method, case.server, FixedPointFormat("ring64", 3)
    merged = []
    for order in itertools.permutations(enumerate(case.answers)):
        sums = Aggregator(case.sent, grid, method.unsummed_parts)
        for place, bundle in order:
            sums.add(bundle, place)
        merged.append(method.merge(server, FixedPoint(grid).incoming(sums.total(), 3, 0), CONTEXT))
    assert all(same_state(state, merged[0]) for state in merged)


def integer_bundles_give_the_same_sum_as_float_bundles(case: MethodCase) -> None:
    # Masks need integers at the silo, so encoding there or on arrival must agree to the last bit, modulo the ring.
    for ring in ("ring64", "ring32"):
        _check_ring(case, ring)


def _check_ring(case: MethodCase, ring: str) -> None:
    bundles, layout = case.answers, case.sent
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
    def draw(v: Tensor) -> Tensor:
        return torch.randint(0, 2**32, v.shape, generator=generator)

    return Part({key: draw(v) for key, v in part.total.items()}, draw(part.weight))


def _negative_sum(parts: list[Bundle]) -> Bundle:
    total = total_of(parts)
    return {name: Part({k: -v for k, v in p.total.items()}, -p.weight) for name, p in total.items()}


def _wrap(part: Part, ring: str) -> Part:
    if ring == "ring64":
        return part
    return Part({key: v.remainder(2**32) for key, v in part.total.items()}, part.weight.remainder(2**32))


def rounds_through_a_port_repeat(case: MethodCase) -> None:
    run, share = case.manifest(), shares()[0]
    msg = case.method.broadcast(case.method.init_server(RunSetup.of(run).silo_runtime().model, CONTEXT))

    def port() -> InProcessSilo:
        return InProcessSilo(run, 0, share, RunSetup.of(run).silo_runtime())

    used = port()
    used.round(msg, CONTEXT, TaskKind.EVALUATE)  # an evaluation leaves no trace
    assert same_bundle(used.round(msg, CONTEXT, TaskKind.TRAIN), port().round(msg, CONTEXT, TaskKind.TRAIN))


def a_silo_with_one_class_takes_part(case: MethodCase) -> None:
    context = CONTEXT.for_silo(0, 0)
    only = MadeUp(torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.full((5,), 2))
    data = PlainLocalData(RoundData(only, only, TRAIN, context))
    silo = case.method.init_silo(model_of(), CONTEXT)
    bundle = case.method.local(model_of(), case.method.broadcast(case.server), silo, data, context).bundle
    assert all(tensor_maps.all_finite(p.total) for p in bundle.values())


def the_loss_mixes_examples_only_where_the_method_says_so(case: MethodCase) -> None:
    """Check that entry i of `per_example` depends only on example i, and that only BATCH coupling has a coupled term.

    Differential privacy for records clips each entry as one record's contribution.
    """
    method = case.method
    server = method.init_server(model_of(norm="group"), CONTEXT)
    share, context = shares()[1], CONTEXT.for_silo(1, 0)
    data = _Watched(RoundData(share.train, share.test, TRAIN, context))
    silo = method.init_silo(model_of(norm="group"), CONTEXT)
    method.local(model_of(norm="group"), method.broadcast(server), silo, data, context)
    assert getattr(data, "mixed", []) == [] if method.coupling is Coupling.EXAMPLE else True


class _Watched(PlainLocalData):
    """Tests each loss with changed examples before training with it."""

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        self.mixed = getattr(self, "mixed", [])
        draw = torch.Generator().manual_seed(1)
        x, other = (torch.rand(4, *SCHEMA.shape, generator=draw) for _ in range(2))
        y = torch.tensor([1, 2, 1, 2])
        other[0] = x[0]
        with rng.torch_scope(0, "contract"):
            a = loss(model, x, y)
        with rng.torch_scope(0, "contract"):
            b = loss(model, other, y)
        if a.coupled is not None or not torch.allclose(a.per_example[0], b.per_example[0], rtol=1e-4, atol=1e-6):
            self.mixed.append(loss)
        return super().sgd(model, loss, options)


CHECKS: tuple[Callable[[MethodCase], None], ...] = (
    derived_layout_is_the_layout_of_real_bundles,
    a_method_names_what_it_sends,
    options_survive_the_manifest,
    contents_of_the_scratch_model_change_nothing,
    a_silo_s_second_round_uses_its_state_alone_and_leaves_it_as_it_is,
    evaluation_reads_nothing_of_the_scratch_model,
    local_mutates_nothing_of_its_arguments,
    bundles_do_not_share_memory_with_the_model,
    merge_of_an_empty_cohort_changes_nothing,
    merge_mutates_neither_the_state_nor_the_sum,
    equal_inputs_give_equal_bytes,
    arrival_order_does_not_matter,
    integer_bundles_give_the_same_sum_as_float_bundles,
    rounds_through_a_port_repeat,
    a_silo_with_one_class_takes_part,
    the_loss_mixes_examples_only_where_the_method_says_so,
)
"""Each check raises AssertionError, or the method's own error."""


def check_method(method: type[FedAvg], **options: Option) -> None:
    """Run all CHECKS on your method, in about a second. options: choose those that use all of its parts.

    Raises AssertionError that lists every failed check.
    """
    with still_working(f"checks {method.__name__}"), loading.registered("method", method) as name:
        run_checks(CHECKS, MethodCase(name, options), method.__name__)
