"""Norms that are bounded by earlier rounds: who is refused, who is cut, and how far one silo can move the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from consilium.research.engines.in_process import SiloShare, local_ports
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.options import Mean, NormClipped
from fl_core.aggregation.round_sum import AggregationDecision, NormClippedSum, NormHistory, RoundSum, lower_median
from fl_core.aggregation.update_check import UpdateCheck
from fl_core.errors import FederationError
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind, Weighing
from fl_core.types.interfaces import SiloPort
from fl_core.types.metric_parts import METRICS
from fl_core.types.records import RoundRecord, TrainConfig
from fl_core.types.values import Bundle, Layout, Part, PartRule, PartSpec, RoundContext, State
from tests.oracles.equations import slow_lower_median
from tests.support.federations import NAMES, Failing, Given, go, manifest, same, same_bundle, shares

D = 6
LAYOUT: Layout = {
    "delta": PartSpec({"w": (D,), "bn.running_mean": (2,)}, ()),
    "metrics": PartSpec({"correct": (2,)}, (2,)),
    "prototypes": PartSpec({"offset": (2, 3)}, (2,)),
}
GRID = FixedPointFormat("ring64", 12)
LIMITS = NormClipped()


def update(values: Sequence[float], weight: float = 10.0, buffers: float = 1.0, row: float = 1.0) -> dict[str, Part]:
    """Write an update whose mean is these values."""
    return {
        "delta": Part.of({"w": torch.tensor(values), "bn.running_mean": torch.tensor([buffers, 0.0])}, weight),
        "metrics": Part({"correct": torch.zeros(2)}, torch.zeros(2)),
        "prototypes": Part.of({"offset": torch.tensor([[row, 0, 0], [0, 0, 0.0]])}, torch.tensor([4.0, 0.0])),
    }


def along(length: float, axis: int = 0) -> list[float]:
    return [length if i == axis else 0.0 for i in range(D)]


def aggregated(
    sent: dict[str, dict[str, Part]],
    history: NormHistory | None = None,
    options: NormClipped | Mean = LIMITS,
    layout: Layout = LAYOUT,
) -> tuple[Bundle, AggregationDecision]:
    """Aggregate a round; return its sums as floats, and what was decided."""
    check = UpdateCheck(layout, GRID, {"delta": PartRule(Weighing.EXAMPLES)})
    sums = Aggregator(layout, GRID)
    way = (
        RoundSum(sums, check)
        if isinstance(options, Mean)
        else NormClippedSum(sums, check, options, history or NormHistory())
    )
    for name, one in sent.items():
        way.add(one, name, sorted(sent).index(name), way.measure(one, name))
    decided = way.finish()
    return FixedPoint(GRID).incoming(way.sums.total(), len(sent), 0), decided


def mean(total: Bundle) -> torch.Tensor:
    return total["delta"].mean()["w"].double()


HONEST = {name: update(along(1.0 + 0.1 * k, k), 10.0 + k) for k, name in enumerate("abcde")}
BEFORE = NormHistory.of([{"delta": 1.0, "delta.buffers": 1.0}])


def test_an_honest_round_has_the_bytes_of_the_mean() -> None:
    for history in (None, BEFORE):
        bounded, decided = aggregated(HONEST, history)
        assert same_bundle(bounded, aggregated(HONEST, options=Mean())[0])
        assert not decided.refused
        assert not decided.cut
        assert decided.medians == pytest.approx({"delta": 1.2, "delta.buffers": 1.0})


@pytest.mark.integration
def test_the_order_of_arrival_changes_nothing() -> None:
    sent = {**HONEST, "x": update(along(2.7), row=90.0), "y": update(along(90.0)), "z": update(along(0.0), row=1e-30)}
    for history in (None, BEFORE):
        first, decided = aggregated(sent, history)
        for order in itertools.islice(itertools.permutations(sent), 0, 40_000, 997):
            again, same_again = aggregated({name: sent[name] for name in order}, history)
            assert same_bundle(again, first)
            assert same_again == decided


@pytest.mark.parametrize("history", [None, BEFORE])
@pytest.mark.parametrize("factor", [130.0, 1000.0, -1000.0, 1e30, 1e-40])
@pytest.mark.fault(
    "a hospital", "multiplies its update by 1,000, flips its sign, or both", "refused and reported by name (E-RUN-44)"
)
def test_an_update_above_a_hundred_medians_is_refused_and_leaves_no_trace(
    factor: float, history: NormHistory | None
) -> None:
    lie = update(along(1.0), 1e-38, buffers=0.0) if factor == 1e-40 else update(along(factor))
    if factor == 1e-40:  # a weight next to nothing makes a long mean of ordinary values
        lie["delta"] = Part({"w": torch.tensor(along(1.0)), "bn.running_mean": torch.zeros(2)}, torch.tensor(1e-38))
    total, decided = aggregated({**HONEST, "north": lie}, history)
    assert list(decided.refused) == ["north"]
    assert decided.refused["north"].startswith("E-RUN-44: north: update refused: its norm is ")
    assert "times the usual norm (limit 100)" in decided.refused["north"]
    honest = aggregated(HONEST, history)[0]
    assert same_bundle(total, honest)


@pytest.mark.fault("a hospital", "moves batch norm's statistics far", "refused and reported by name (E-RUN-44)")
def test_statistics_of_batch_norm_are_bounded_apart() -> None:
    _, decided = aggregated({**HONEST, "north": update(along(1.0), buffers=101.0)}, BEFORE)
    assert list(decided.refused) == ["north"]
    total, decided = aggregated({"north": update(along(1.0), buffers=8.0), **HONEST}, BEFORE)
    assert decided.cut == {"north": "update clipped to 4 times the usual norm"}
    cut = aggregated({"north": update(along(1.0), buffers=4.0), **HONEST}, BEFORE)[0]
    assert same_bundle(total, cut)  # the values beside it are as they were


@pytest.mark.fault("a hospital", "sends an update of fifty medians", "clipped to four medians, and reported by name")
def test_an_update_between_four_and_a_hundred_medians_is_cut_to_four() -> None:
    total, decided = aggregated({**HONEST, "north": update(along(50.0, 5))}, BEFORE)
    assert not decided.refused
    assert decided.cut == {"north": "update clipped to 4 times the usual norm"}
    weight = float(total["delta"].weight)
    assert mean(total)[5] * weight == pytest.approx(4.0 * 10.0, rel=1e-6)


@pytest.mark.fault(
    "an honest hospital", "still takes large steps when the others have converged", "accepted without clipping"
)
def test_an_honest_update_that_is_long_beside_a_model_that_has_converged_is_taken_as_it_is() -> None:
    """FedMR on digits, seed 225: norms of 3.0, 2.8 and 2.7 in the first round, in the fifth 0.6, 2.0 and 7.1."""
    converged = NormHistory.of([{"delta": 2.8}, {"delta": 0.6}])
    sent = {name: update(along(length, k)) for k, (name, length) in enumerate({"a": 0.6, "b": 2.0, "c": 7.1}.items())}
    total, decided = aggregated(sent, converged)
    assert not decided.refused
    assert not decided.cut
    assert same_bundle(total, aggregated(sent, options=Mean())[0])


@pytest.mark.fault("an honest hospital", "is large among small ones", "clipped, never refused")
def test_an_honest_update_of_many_medians_is_cut_and_not_refused() -> None:
    """Uneven sizes (FedROD, 300 examples among hospitals of three to 65) and FedRep's first rounds gave 20 and 33."""
    for history in (None, BEFORE):
        _, decided = aggregated({**HONEST, "north": update(along(33.0))}, history)
        assert not decided.refused
        assert decided.cut == {"north": "update clipped to 4 times the usual norm"}


@pytest.mark.fault("a hospital", "raises the norms of all updates round by round", "the bound does not rise")
def test_the_bound_does_not_follow_the_damage() -> None:
    history = NormHistory.of([{"delta": 1.0}])
    for _ in range(10):
        history = history.after({"delta": 10.0 * history.largest["delta"]})
    assert history.reference("delta", LIMITS.ceiling) == 1.0
    assert history.reference("delta", 2.0) == 2.0
    assert history.first == {"delta": 1.0}


@pytest.mark.fault("a hospital", "sends nothing, so that the usual length falls", "the bound does not fall")
def test_the_bound_does_not_fall_once_it_is_known() -> None:
    history = NormHistory.of([{"delta": 1.0}, {"delta": 1e-9}, {"delta": 0.0}])
    for ceiling in (1.0, 2.0):
        assert history.reference("delta", ceiling) == 1.0


def test_a_round_in_which_half_is_absurdly_long_is_cut_and_nobody_is_refused() -> None:
    """A minority cannot do that, so it is the round that changed; the bound holds, and the run goes on."""
    sent = {name: update(along(150.0, k)) for k, name in enumerate("abc")} | {"d": update(along(1.0)), "e": HONEST["e"]}
    total, decided = aggregated(sent, BEFORE)
    assert not decided.refused
    assert set(decided.cut) == {"a", "b", "c"}
    assert float(mean(total).norm()) <= 4.0


# ---- before a round had three updates -------------------------------------------------------------------------------

BEGUN = NormHistory(initial={"delta": 1.0, "delta.buffers": 1.0})
"""Nothing is known but the weights that the manifest's seed draws."""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("factor", [10.0, -1000.0, 1e30])
@pytest.mark.fault(
    "a hospital",
    "is one of two hospitals and sends any update",
    "clipped to four times the norm of the initial weights",
)
def test_fewer_than_three_updates_are_bounded_by_the_initial_weights(count: int, factor: float) -> None:
    sent = {"a": update(along(factor))} | {name: HONEST[name] for name in "b"[: count - 1]}
    total, decided = aggregated(sent, BEGUN)
    assert decided.unbounded
    assert not decided.refused
    assert decided.cut == {"a": "update clipped to 4 times the usual norm"}
    assert float(mean(total).norm()) <= 4.0 * (1 + 1e-6)


def test_fewer_than_three_ordinary_updates_are_added_as_they_are_and_the_round_says_so() -> None:
    sent = {name: HONEST[name] for name in "ab"}
    total, decided = aggregated(sent, BEGUN)
    assert same_bundle(total, aggregated(sent, options=Mean())[0])
    assert decided == AggregationDecision(unbounded=True)


def test_two_updates_of_a_later_round_are_bounded_by_the_earlier_ones() -> None:
    layout = {name: LAYOUT[name] for name in ("delta", "metrics")}
    sent = {
        name: {part: one[part] for part in layout} for name, one in (("a", update(along(50.0))), ("b", HONEST["b"]))
    }
    total, decided = aggregated(sent, BEFORE, layout=layout)
    assert decided.cut == {"a": "update clipped to 4 times the usual norm"}
    assert not decided.unbounded
    assert float(mean(total).norm()) <= 4.0


def test_prototypes_of_two_hospitals_count_as_unbounded_however_late() -> None:
    assert aggregated({name: HONEST[name] for name in "ab"}, BEFORE)[1].unbounded
    assert not aggregated(HONEST, BEFORE)[1].unbounded


@pytest.mark.fault("most hospitals", "send an empty update in the first round", "the others are not clipped to zero")
def test_a_first_median_of_zero_cuts_nobody_to_nothing() -> None:
    still = {name: update(along(0.0), buffers=0.0) for name in "abcd"}
    total, decided = aggregated({**still, "north": update(along(1.0), buffers=0.0)}, BEGUN)
    assert not decided.refused
    assert not decided.cut
    assert float(mean(total).norm()) > 0


def test_what_the_initial_weights_explain_is_cut_and_not_refused_however_short_the_others_are() -> None:
    """A run that goes on from a trained model may begin with updates next to nothing."""
    tiny = NormHistory.of([{"delta": 1e-4}], BEGUN.initial)
    settled = {name: update(along(1e-4, k)) for k, name in enumerate("abcd")}
    _, decided = aggregated({**settled, "north": update(along(3.9, 5))}, tiny)
    assert not decided.refused
    assert list(decided.cut) == ["north"]
    _, decided = aggregated({**settled, "north": update(along(4.1, 5))}, tiny)
    assert list(decided.refused) == ["north"]


def test_two_updates_do_not_move_the_median_of_later_rounds() -> None:
    _, decided = aggregated({"a": update(along(1e-9)), "b": update(along(1.0))}, BEFORE)
    assert decided.medians == {}


@pytest.mark.fault("a hospital", "sends false prototypes", "each row is clipped to four medians of its contributors")
def test_rows_are_cut_to_four_medians_of_their_contributors() -> None:
    total, decided = aggregated({**HONEST, "north": update(along(1.0), row=1e6)}, BEFORE)
    assert decided.cut == {"north": "1 rows of prototypes clipped to 4 times the median"}
    assert decided.cut_rows == 1
    assert float(total["prototypes"].total["offset"][0, 0]) == pytest.approx(4.0 * (5 + 4.0), rel=1e-6)


def test_a_row_of_a_single_holder_is_bounded_by_the_rows_of_all() -> None:
    lie = update(along(1.0))
    lie["prototypes"] = Part.of({"offset": torch.tensor([[0, 0, 0], [0, 1e9, 0.0]])}, torch.tensor([0.0, 2.0]))
    total, _ = aggregated({**HONEST, "north": lie}, BEFORE)
    assert float(total["prototypes"].mean()["offset"][1].norm()) <= 4.0 + 1e-6


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_the_lower_median(values: list[float]) -> None:
    assert lower_median(values) == slow_lower_median(values)


# ---- how far one silo moves the model -------------------------------------------------------------------------------


@pytest.mark.integration
@given(
    st.lists(st.lists(st.floats(-1, 1), min_size=D, max_size=D), min_size=3, max_size=7),
    st.lists(st.floats(1, 500), min_size=8, max_size=8),
    st.lists(st.floats(-1e3, 1e3), min_size=D, max_size=D),
    st.floats(0.1, 50),
)
@pytest.mark.fault("a hospital", "sends the worst update that passes", "the model moves at most 8 p M_0 per round")
def test_one_silo_moves_the_model_by_at_most_8_p_m0_per_round(
    honest: list[list[float]], weights: list[float], lie: list[float], length: float
) -> None:
    """Its share is p = n_k / sum n; compared with the round without it, and with one in which it sends nothing."""
    sent = {f"h{k}": update(v, weights[k], buffers=0.0) for k, v in enumerate(honest)}
    _, first = aggregated(sent)
    m0 = first.medians.get("delta", 0.0)
    assume(m0 > 1e-3)
    history = NormHistory.of([first.medians, {"delta": 10 * m0}])  # the worst that earlier rounds can have left
    norm = math.sqrt(sum(v * v for v in lie)) or 1.0
    bound = 4 * m0
    for scaled in (length, bound / norm * 0.999, -bound / norm * 0.999):
        attack = {**sent, "x": update([v * scaled for v in lie], weights[7], buffers=0.0)}
        try:
            moved = mean(aggregated(attack, history)[0])
        except FederationError:
            continue
        p = weights[7] / (sum(weights[: len(honest)]) + weights[7])
        quiet = {**sent, "x": update(along(0.0), weights[7], buffers=0.0)}
        for reference in (mean(aggregated(sent, history)[0]), mean(aggregated(quiet, history)[0])):
            assert float((moved - reference).norm()) <= 8 * p * m0 * (1 + 1e-4) + 1e-7


class Altered:
    """A silo that changes what it sends, from a round on."""

    def __init__(self, inner: SiloPort, change: object, since: int = 0) -> None:
        self.name, self.settle, self._inner, self._change, self._since = inner.name, inner.settle, inner, change, since

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        sent = self._inner.round(msg, context, kind)
        return self._change(sent) if kind is TaskKind.TRAIN and context.round >= self._since else sent  # type: ignore[operator, no-any-return]


def ports_of(run: RunManifest) -> Sequence[SiloPort]:
    return local_ports(RunSetup.of(run), shares())


def scaled_delta(factor: float) -> object:
    def change(sent: Bundle) -> Bundle:
        part = sent["delta"]
        return {**sent, "delta": Part({k: v * factor for k, v in part.total.items()}, part.weight)}

    return change


@pytest.mark.parametrize("factor", [1000.0, -1000.0, math.nan])
def test_a_run_with_a_liar_ends_as_if_it_had_been_absent(factor: float) -> None:
    run = manifest("fedavg", quorum=2, rounds=4)
    north, east, south = ports_of(run)
    lied, kept = go(run, [north, Altered(east, scaled_delta(factor), 1), south])
    north, east, south = ports_of(run)
    absent, _ = go(run, [north, Failing(east, [1, 2, 3]), south])
    assert same(lied["w"], absent["w"])
    assert all("east" in kept.records[t].missing for t in (1, 2, 3))
    assert kept.records[4].included == tuple(sorted(NAMES))


def claims(correct: float, more: int = 10) -> Callable[[Bundle], Bundle]:
    """Have so many times as many test examples (of fewer than 20 no sign is looked at), this share of them right."""

    def change(sent: Bundle) -> Bundle:
        weight = more * sent[METRICS].weight
        return {**sent, METRICS: Part({"correct": correct * weight}, weight)}

    return change


def turned(sent: Bundle) -> Bundle:
    """Train as if the labels were in reversed order."""
    delta = sent["delta"]
    total = {k: v.flip(0) if k.startswith("head.") else v for k, v in delta.total.items()}
    return {**sent, "delta": Part(total, delta.weight)}


def first_round(correct: float, coarse: bool = False) -> RoundRecord:
    """Run a round in which the labels of one of three are in another order and the model knows this share of tests."""
    run = manifest("fedavg", quorum=2, rounds=1)
    if coarse:
        run = replace(run, members=(replace(run.members[0], labels="0" * 64, coarse=True), *run.members[1:]))
    north, east, south = ports_of(run)
    known = claims(correct)
    _, kept = go(run, [Altered(north, lambda sent: turned(known(sent))), Altered(east, known), Altered(south, known)])
    return kept.records[0]


@pytest.mark.fault(
    "a hospital", "trains on labels in another order than those of its test images", "refused (E-RUN-44)"
)
def test_an_update_that_lowers_its_own_classes_is_refused() -> None:
    for correct in (0.0, 0.4):
        found = first_round(correct)
        assert set(found.missing) == {"north"}
        assert found.missing["north"] == (
            "E-RUN-44: north: update refused: it lowers the scores of the hospital's own classes. Check the label order"
        )


def test_a_direction_says_nothing_of_a_hospital_that_trains_on_coarse_labels() -> None:
    """Its test examples, which are of no coarse label, do not show which classes' scores its training raises."""
    assert not first_round(0.0, coarse=True).missing


@pytest.mark.fault(
    "an honest hospital",
    "still has to learn only a class for which it has no test image",
    "accepted: its direction is not checked",
)
def test_no_direction_is_held_against_a_hospital_whose_classes_the_model_knows() -> None:
    """Of 172 training images two were of a class without a test image; the model had all the others right."""
    for correct in (0.5, 1.0):
        assert not first_round(correct).missing


@pytest.mark.fault(
    "an honest hospital",
    "has a converged model that is changed only by weight decay",
    "accepted: weight decay does not count as a direction",
)
def test_weight_decay_of_a_converged_model_is_held_against_nobody() -> None:
    easy, rounds = [], 6
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        y = torch.arange(24) % 2
        x = 0.1 * torch.rand(24, 1, 8, 8, generator=draw)
        x[torch.arange(24), 0, 4 * y] += 1.0
        easy.append(SiloShare(Given(x, y), Given(x, y)))
    schedule = TrainConfig(batch_size=6, epochs=4, lr=0.1, weight_decay=1e-3)
    run = manifest("fedavg", model="digits_mlp", rounds=rounds, train=schedule)

    def lowers(sent: Bundle) -> Bundle:
        total, weight = sent["delta"].total, sent["delta"].weight
        bias = total["head.bias"] - weight * torch.tensor([0.1, 0.1, 0.0, 0.0])
        return {**sent, "delta": Part({**total, "head.bias": bias}, weight)}

    def unknown() -> list[SiloPort]:
        """Have the model know nobody's test images, so that directions are looked at."""
        return [Altered(port, claims(0.0, more=1)) for port in local_ports(RunSetup.of(run), easy)]

    _, kept = go(run, unknown())
    assert all(not record.missing for record in kept.records)
    north, east, south = unknown()
    _, kept = go(run, [Altered(north, lowers, rounds - 1), east, south])
    assert set(kept.records[rounds - 1].missing) == {"north"}  # far more than the decay explains


def test_a_resumed_run_goes_on_with_the_bound_of_its_earlier_rounds() -> None:
    run = manifest("fedavg", rounds=4)

    def with_liar() -> list[SiloPort]:
        north, east, south = ports_of(run)
        return [north, Altered(east, scaled_delta(20.0), 1), south]

    straight, kept = go(run, with_liar())
    assert any(record.cut for record in kept.records)
    for start in (1, 2, 3):
        state, closed = kept.states[start - 1], [r.medians for r in kept.records[:start]]
        resumed, again = go(run, with_liar(), start=start, state=state, closed=closed)
        assert same(resumed["w"], straight["w"])
        assert [r.cut for r in again.records] == [r.cut for r in kept.records[start:]]
