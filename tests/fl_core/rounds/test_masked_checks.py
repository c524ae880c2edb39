"""T-65: checks of single updates move to the silo, and a sum is held against what its silos may add up to."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from consilium.research.engines.in_process import local_ports
from fl_core.aggregation.flat_blocks import WORDS
from fl_core.aggregation.masked_sum import MaskedSum
from fl_core.errors import ConfigError, FederationError, ProtocolError, RefusedError, UnavailableError
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.clinical import CLINICAL
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import BLOCKS
from fl_core.types.values import Bundle, Part, RoundContext, State, Tensors
from privacy.compiled_run import CompiledRun
from tests.fl_core.aggregation.test_grid_bounds import masked32
from tests.support.federations import go, manifest, shares

N = 3


def run_of(method: str = "fedavg", aggregator: str = "mean", **options: object) -> RunManifest:
    return masked32(manifest(method, aggregator=aggregator, **options))  # type: ignore[arg-type]


def update_of(run: RunManifest) -> tuple[RunSetup, Bundle, RoundContext, Mapping[str, Tensors]]:
    """Make the update of the first silo, as it is before it is laid out flat."""
    setup = RunSetup.of(run)
    runtime = setup.silo_runtime()
    assert runtime.masking is not None
    kept: list[Bundle] = []

    class Seen(type(runtime.masking)):  # type: ignore[misc]
        def flat(self, update: Bundle, kind: TaskKind, context: RoundContext, msg: Mapping[str, Tensors]) -> Bundle:
            kept.append(update)
            return super().flat(update, kind, context, msg)

    masking = Seen(*(getattr(runtime.masking, f) for f in runtime.masking.__dataclass_fields__))
    port = local_ports(setup, shares())[0]
    port.runtime = replace(runtime, masking=masking)
    state = setup.initial_state()
    context = RoundContext(N, 4, run.rounds, 0, N)
    guards = {g.group: g.initial_setting() for g in setup.guards.silo}
    msg = {**setup.method.broadcast(state), **guards}
    port.round(msg, context, TaskKind.TRAIN)
    return setup, kept[0], context.for_silo(0, run.seed, True, run.masked_units(0)), msg


def flat(setup: RunSetup, update: Bundle, context: RoundContext, msg: Mapping[str, Tensors]) -> Bundle:
    masking = setup.silo_runtime().masking
    assert masking is not None
    return masking.flat(update, TaskKind.TRAIN, context, msg)


def changed(update: Bundle, part: str, **new: torch.Tensor) -> Bundle:
    weight = new.pop("weight", update[part].weight)
    return {**update, part: Part({**update[part].total, **new}, weight)}


LIES: Mapping[str, tuple[str, Callable[[Bundle], Bundle]]] = {
    "NaN": ("E-WIRE-05", lambda u: changed(u, "delta", **{"head.bias": torch.full((4,), math.nan)})),
    "infinite": ("E-WIRE-05", lambda u: changed(u, "delta", **{"head.bias": torch.full((4,), math.inf)})),
    "weight above the declared size": ("E-RUN-43", lambda u: changed(u, "delta", weight=torch.tensor(15.0))),
    "negative weight": ("E-RUN-43", lambda u: changed(u, "delta", weight=torch.tensor(-1e-40))),
    "more right than tested": ("E-RUN-43", lambda u: changed(u, "metrics", correct=torch.full((4,), 40.0))),
    "more tested than declared": ("E-RUN-43", lambda u: changed(u, "metrics", weight=torch.full((4,), 40.0))),
    "values of weight 0": ("E-RUN-43", lambda u: changed(u, "delta", weight=torch.tensor(0.0))),
    "clinical counts": ("E-RUN-43", lambda u: changed(u, "clinical", positive=u["clinical"].total["positive"] + 1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_silo_refuses_its_own_impossible_update_and_tells_no_number_of_it(
    lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    """T-65."""
    code, change = LIES[lie]
    setup, update, context, msg = update_of(run_of(metrics=CLINICAL))
    flat(setup, update, context, msg)
    with caplog.at_level(logging.WARNING), pytest.raises(ProtocolError, match=code) as caught:
        flat(setup, change(update), context, msg)
    assert not any(c.isdigit() for c in caught.value.message)
    assert code in caplog.text  # the hospital's own log says more


def test_another_label_order_stays_at_the_silo() -> None:
    """T-65: as in a plain run, by the sign of the head's bias."""
    setup, update, context, msg = update_of(run_of(aggregator="norm_clipped"))
    tested = torch.tensor([12.0, 12.0, 0.0, 0.0])
    known = changed(update, "metrics", weight=tested, correct=torch.zeros(4))
    right, wrong = (torch.tensor([s, s, -s, -s]) for s in (1.0, -1.0))
    roomy = RunSetup(
        replace(
            setup.manifest,
            grid=replace(setup.manifest.grid, bounds={**setup.manifest.grid.bounds, "metrics.weight": 24.0}),
        )
    )
    flat(roomy, changed(known, "delta", **{"head.bias": right}), context, msg)
    with pytest.raises(RefusedError, match=r"E-RUN-44.*label order"):
        flat(roomy, changed(known, "delta", **{"head.bias": wrong}), context, msg)
    assert not RunSetup(replace(roomy.manifest, aggregator=NamedOptions("mean"))).signs


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_in_a_private_run_an_update_that_is_not_finite_is_zeros_of_the_same_weight(odd: float) -> None:
    """An error would tell of records what no noise hides."""
    setup, update, context, msg = update_of(run_of())
    masking = setup.silo_runtime().masking
    assert masking is not None
    private = replace(masking, private=True)
    broken = changed(update, "delta", **{"head.bias": torch.tensor([odd, 0.0, 0.0, 0.0])})
    layout = setup.updates.layouts[TaskKind.TRAIN]
    found = layout.unflatten({b: v.total[WORDS] for b, v in private.flat(broken, TaskKind.TRAIN, context, msg).items()})
    honest = layout.unflatten(
        {b: v.total[WORDS] for b, v in private.flat(update, TaskKind.TRAIN, context, msg).items()}
    )
    assert not any(bool(v.any()) for v in found["delta"].total.values())
    assert any(bool(v.any()) for v in honest["delta"].total.values())
    assert found["delta"].weight.equal(honest["delta"].weight)
    assert found["metrics"].total["correct"].equal(honest["metrics"].total["correct"])


def test_only_private_runs_send_zeros_in_place_of_what_is_not_finite() -> None:
    run = run_of()
    assert not RunSetup(run).private
    assert not CompiledRun(run).private
    masking = CompiledRun(run).silo_runtime().masking
    assert masking is not None
    assert not masking.private


def test_an_update_many_times_as_long_as_usual_stays_at_its_silo_from_the_second_round_on() -> None:
    """T-65: the first round has no medians, and takes it."""
    plain = run_of(aggregator="norm_clipped", rounds=2)
    run = replace(plain, aggregator=NamedOptions("norm_clipped", {"refuse_above": 5.0, "signs": False}))
    north, *others = local_ports(RunSetup.of(run), shares())

    class Hasty:
        name = north.name

        def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
            lr = 3.0 if context.round == 1 else run.train.lr
            north.manifest = replace(run, train=replace(run.train, lr=lr))
            return north.round(msg, context, kind)

        def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
            north.settle(context, kind, included)

    with pytest.raises(
        UnavailableError, match=r"round 2: .*found 2; north: E-RUN-44: .*more than 5 times the usual norm"
    ):
        go(run, [Hasty(), *others])


@pytest.mark.parametrize("aggregator", ["median", "trimmed_mean", "geometric_median"])
def test_aggregators_that_must_see_single_updates_are_refused_on_both_sides(aggregator: str) -> None:
    run = replace(run_of(), aggregator=NamedOptions(aggregator))
    for build in (RunSetup.of, CompiledRun.of):
        with pytest.raises(ConfigError, match=rf"E-CFG-08.*found {aggregator}.*secagg=off"):
            build(run)


@pytest.mark.parametrize("method", ["fedcd", "fedgen"])
def test_methods_whose_server_sees_single_parts_are_refused_on_both_sides(method: str) -> None:
    made = manifest(method, aggregator="mean")
    run = replace(made, secagg=run_of().secagg)
    for build in (RunSetup.of, CompiledRun.of):
        with pytest.raises(ConfigError, match=rf"E-CFG-08.*{method} cannot be used with secure aggregation"):
            build(run)


# ---- the sum ---------------------------------------------------------------------------------------------------------


def sums_of(run: RunManifest, change: Callable[[Bundle], Bundle]) -> MaskedSum:
    """Add the updates of all silos in clear, one of them after it was checked and then changed."""
    setup, update, context, msg = update_of(run)
    layout = setup.updates.layouts[TaskKind.TRAIN]
    names = [m.name for m in run.members]
    sums = MaskedSum(layout, setup.update_check().of(layout.layout), names, None, each=False)
    words = flat(setup, update, context, msg)
    units = layout.unflatten({block: words[block].total[WORDS] for block in BLOCKS})
    for k, name in enumerate(names):
        sent = layout.flatten(change(units)) if k == N - 1 else words
        sums.add(sent, name, k, sums.measure(sent, name))
    return sums


def units(setup: RunManifest, segment: str, value: float) -> int:
    return round(value * 2.0 ** setup.grid.frac_bits(segment))


def test_the_sum_of_honest_updates_passes() -> None:
    run = run_of(metrics=CLINICAL, aggregator="norm_clipped")
    sums = sums_of(run, dict)
    sums.finish()
    assert float(sums.total()["delta"].weight) == N * units(run, "delta.weight", 14)


SUMS: Mapping[str, Callable[[RunManifest, Bundle], Bundle]] = {
    "weights beyond the declared sizes": lambda r, u: changed(
        u, "delta", weight=torch.tensor(units(r, "delta.weight", 14.5))
    ),
    "negative counts": lambda r, u: changed(u, "metrics", weight=u["metrics"].weight - units(r, "metrics", 13)),
    "more right than tested": lambda r, u: changed(
        u, "metrics", correct=u["metrics"].weight * 3 + units(r, "metrics", 1)
    ),
    "once more than once": lambda r, u: changed(u, "census", weight=torch.tensor(units(r, "census.weight", 1.5))),
    "clinical counts": lambda _, u: changed(u, "clinical", positive=u["clinical"].total["positive"] + 100),
}


@pytest.mark.parametrize("lie", SUMS)
def test_a_sum_that_no_set_of_honest_silos_has_ends_the_round_and_names_nobody(lie: str) -> None:
    run = run_of("scaffold", metrics=CLINICAL)
    sums = sums_of(run, lambda u: SUMS[lie](run, u))
    with pytest.raises(RefusedError, match=r"E-RUN-48.*nothing is merged") as caught:
        sums.finish()
    assert not any(m.name in str(caught.value) for m in run.members)


def test_a_hospital_that_withholds_clinical_metrics_leaves_a_sum_that_agrees() -> None:
    run = run_of(metrics=CLINICAL)

    def withheld(u: Bundle) -> Bundle:
        none = u["clinical"]
        return {**u, "clinical": Part({k: v * 0 for k, v in none.total.items()}, none.weight * 0)}

    sums = sums_of(run, withheld)
    sums.finish()
    assert float(sums.total()["clinical"].weight) > 0


def test_masks_that_did_not_cancel_are_found_by_what_their_words_say_too() -> None:
    """Beside the check words: random words are no counts."""
    run = run_of()
    setup = RunSetup.of(run)
    layout = setup.updates.layouts[TaskKind.TRAIN]
    names = [m.name for m in run.members]
    sums = MaskedSum(layout, setup.update_check().of(layout.layout), names, None, each=False)
    draw = torch.Generator().manual_seed(0)
    noise = {
        b: Part({WORDS: torch.randint(-(2**31), 2**31, (layout.words(b),), generator=draw).int()}, torch.zeros(()))
        for b in BLOCKS
    }
    for k, name in enumerate(names):
        sums.add(noise, name, k, sums.measure(noise, name))
    with pytest.raises(FederationError, match="E-RUN-48"):
        sums.finish()


def test_a_masked_run_with_bounded_norms_ends_where_the_plain_one_does() -> None:
    """No update of these three silos is cut by more than a bin's width moves the bound."""
    masked = run_of(aggregator="norm_clipped", rounds=3)
    plain = manifest(aggregator="norm_clipped", rounds=3)
    (one, a), (other, b) = go(masked), go(plain)
    assert [r.missing for r in a.records] == [r.missing for r in b.records] == [{}] * 4
    for name, value in other["w"].items():
        assert torch.allclose(one["w"][name], value, atol=1e-3), name
    assert float(one["norms"]["first"].min()) > 0
