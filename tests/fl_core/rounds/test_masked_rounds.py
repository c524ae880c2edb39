"""Rounds whose updates are masked, as a simulation does them: the same rules, and no masks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from consilium.research.engines.in_process import InProcessSilo, local_ports
from fl_core.aggregation.flat_blocks import CHECK_WORDS, WORDS
from fl_core.aggregation.masked_sum import MaskedSum
from fl_core.errors import ProtocolError, RefusedError, UnavailableError
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types.clinical import CLINICAL
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import BLOCKS, CLASSES, EACH, MODEL, Secagg
from fl_core.types.values import Bundle, Part, RoundContext, State, Tensors
from privacy.profiles.prototype_filter import DisclosureLimits, with_prototype_filter
from privacy.secagg import messages
from tests.support.federations import METHOD_OPTIONS, Failing, go, manifest, same, shares

ANY = Secagg(1)


def masked(plain: RunManifest, terms: Secagg = ANY) -> RunManifest:
    """Give a run masks, and weights that are those of the plain run."""
    members = tuple(replace(m, units=len(s.train)) for m, s in zip(plain.members, shares(), strict=True))
    return replace(plain, members=members, secagg=terms)


def plain_of(method: str, **options: object) -> RunManifest:
    return replace(manifest(method, **options), aggregator=NamedOptions("mean"))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["fedavg", "fedmr", "fednh", "scaffold", "analytic"])
def test_a_masked_run_ends_in_the_model_of_the_plain_run(method: str) -> None:
    plain = plain_of(method, rounds=2)
    (one, a), (other, b) = go(plain), go(masked(plain))
    assert all(same(one[group], other[group]) for group in one)
    assert a.accuracies == b.accuracies


def test_blocks_have_one_length_and_read_back_as_what_was_laid_out() -> None:
    run = RunSetup.of(masked(plain_of("fedmr")))
    layout = run.updates.layouts[TaskKind.TRAIN]
    flat = {block: torch.arange(layout.words(block), dtype=layout.dtype) for block in BLOCKS}
    read = layout.unflatten(flat)
    again = layout.flatten(read)
    for block in BLOCKS:
        assert again[block].total[WORDS][CHECK_WORDS:].tolist() == flat[block][CHECK_WORDS:].tolist()
        assert again[block].total[WORDS][:CHECK_WORDS].tolist() == [1] * CHECK_WORDS


def test_both_sides_of_the_protocol_put_as_many_check_words_before_a_block() -> None:
    assert messages.CHECK_WORDS == CHECK_WORDS


def test_what_tells_of_single_classes_lies_in_its_own_block() -> None:
    layout = RunSetup.of(masked(plain_of("fednh", metrics=CLINICAL))).updates.layouts[TaskKind.TRAIN]
    found = {part: layout.block_of(part) for part in layout.layout}
    assert found == {"clinical": CLASSES, "delta": MODEL, "metrics": CLASSES, "prototypes": CLASSES}


@pytest.mark.parametrize(("each", "sent", "opened"), [(False, 4, True), (False, 3, False), (True, 3, True)])
def test_sums_per_class_stay_closed_where_a_member_is_absent(each: bool, sent: int, opened: bool) -> None:
    run = RunSetup.of(masked(plain_of("fednh")))
    layout, names = run.updates.layouts[TaskKind.TRAIN], ["a", "b", "c", "d"]
    asked: list[tuple[list[str], list[str]]] = []

    def unmask(sums: Mapping[str, Tensor], members: Collection[str], blocks: Collection[str]) -> None:
        assert set(sums) == set(BLOCKS)
        asked.append((list(members), list(blocks)))

    sums = MaskedSum(layout, run.update_check().of(layout.layout), names, unmask, each)
    for k, name in enumerate(names[:sent]):
        update = layout.flatten(layout.unflatten({b: torch.ones(layout.words(b), dtype=layout.dtype) for b in BLOCKS}))
        sums.add(update, name, k, sums.measure(update, name))
    sums.finish()
    assert asked == [(names[:sent], [*BLOCKS] if opened else [MODEL])]
    total = sums.total()
    assert float(total["delta"].weight) == sent
    assert float(total["metrics"].weight.sum()) == (sent * layout.n_classes if opened else 0)


def test_words_of_another_kind_or_number_are_refused() -> None:
    run = RunSetup.of(masked(plain_of("fedavg")))
    layout = run.updates.layouts[TaskKind.TRAIN]
    sums = MaskedSum(layout, run.update_check().of(layout.layout), ["a"], None, each=False)
    whole = layout.flatten(layout.unflatten({}))
    for block, words in ((MODEL, torch.ones(3)), (CLASSES, torch.ones(layout.words(CLASSES), dtype=torch.int16))):
        with pytest.raises(ProtocolError, match="E-WIRE-06"):
            sums.measure({**whole, block: Part({WORDS: words}, torch.zeros(()))}, "a")
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        sums.measure({MODEL: whole[MODEL]}, "a")


def test_a_round_of_too_few_members_is_not_opened() -> None:
    run = masked(plain_of("fedavg", quorum=1))
    north, *others = local_ports(RunSetup.of(run), shares())
    with pytest.raises(UnavailableError, match="at least 3 of 3"):
        go(run, [Failing(north, [0]), *others])


# ---- how many hospitals a class has ----------------------------------------------------------------------------------


class Spied:
    """A silo whose updates are kept as they leave."""

    def __init__(self, inner: InProcessSilo, kept: list[tuple[TaskKind, Bundle]]) -> None:
        self.name, self._inner, self._kept = inner.name, inner, kept

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        found = self._inner.round(msg, context, kind)
        self._kept.append((kind, found))
        return found

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        self._inner.settle(context, kind, included)


def holders() -> list[int]:
    counts = [torch.bincount(share.train.labels, minlength=4) > 0 for share in shares()]
    return [int(n) for n in torch.stack(counts).sum(0)]


@pytest.mark.parametrize("method", ["fednh", "analytic", "creff", "fedgen", "fedcd"])
def test_rows_of_a_class_that_fewer_than_k_hospitals_have_are_zero_in_every_update(method: str) -> None:
    linear = {"fedgen": {"mode": "secagg"}, "fedcd": {"acla": "counts"}}.get(method, {})
    run = masked(plain_of(method, options={**METHOD_OPTIONS.get(method, {}), **linear}, rounds=2), Secagg(2))
    setup, kept = RunSetup.of(run), list[tuple[TaskKind, Bundle]]()
    go(run, [Spied(port, kept) for port in local_ports(setup, shares())])
    assert [kind for kind, _ in kept[:3]] == [TaskKind.CENSUS] * 3
    few = torch.tensor([h < 2 for h in holders()])
    assert bool(few.any())
    assert not bool(few.all())
    rows = torch.zeros(4, dtype=torch.long)
    for kind, update in kept[3:]:
        parts = setup.updates.layouts[kind].unflatten({b: update[b].total[WORDS] for b in BLOCKS})
        for name in setup.updates.class_rows & set(parts):
            part = parts[name]
            for value in (*part.total.values(), *([part.weight] if part.weight.dim() else [])):
                if value.dim() and len(value) % 4 == 0:
                    rows += value.reshape(4, -1).ne(0).sum(1)
    assert not bool(rows[few].any())
    assert bool((rows[~few] > 0).all())


def test_the_census_counts_hospitals_with_an_example_of_each_class() -> None:
    setup = RunSetup.of(masked(plain_of("fednh"), Secagg(2)))
    loop = setup.round_loop(local_ports(setup, shares()), 1)
    assert loop.census(Observer())["hospitals"].tolist() == holders()


def test_a_census_without_a_member_is_none() -> None:
    run = masked(plain_of("fednh"), Secagg(2))
    north, *others = local_ports(RunSetup.of(run), shares())
    with pytest.raises(UnavailableError, match="census: expected all 3 silos, found 2; north"):
        go(run, [Failing(north, [0]), *others])


@pytest.mark.parametrize("setting", [{}, {"hospitals": torch.zeros(3)}, None])
def test_a_round_without_the_answer_of_the_census_is_refused(setting: Tensors | None) -> None:
    floor = RunSetup.of(masked(plain_of("fednh"), Secagg(2))).updates.floor
    assert floor is not None
    with pytest.raises(RefusedError, match="E-RUN-51"):
        floor.with_setting(setting)


def test_where_hospitals_may_be_absent_so_many_more_must_have_a_class() -> None:
    names = [f"silo{k}" for k in range(6)]
    plain = replace(manifest("fednh", names=names), secagg=Secagg(2, EACH))
    floor = RunSetup.of(plain).updates.floor
    assert floor is not None
    assert floor.least == 2 + 6 - 4


@pytest.mark.parametrize(
    "withheld",
    [DisclosureLimits(hidden=frozenset({1})), DisclosureLimits(min_count=8.0), DisclosureLimits(min_examples=8)],
    ids=["hidden", "min_count", "min_examples"],
)
def test_a_class_is_counted_only_where_no_rule_of_the_hospital_keeps_its_rows_back(withheld: DisclosureLimits) -> None:
    """Else a row of one hospital would pass for one of two."""
    setup = RunSetup.of(masked(plain_of("fednh"), Secagg(2)))
    told = [with_prototype_filter(PlainLocalData, withheld), PlainLocalData, PlainLocalData]
    found = setup.round_loop(local_ports(setup, shares(), told), 1).census(Observer())["hospitals"]
    kept = [torch.bincount(share.train.labels, minlength=4) > 0 for share in shares()[1:]]
    own = torch.bincount(shares()[0].train.labels, minlength=4)
    own[1] = 0 if withheld.hidden else own[1]
    least = max(withheld.min_count, withheld.min_examples, 1)
    assert found.tolist() == (torch.stack([*kept, own >= least]).sum(0)).tolist()


def test_a_hospital_that_submits_no_prototypes_is_counted_for_no_class() -> None:
    run = masked(plain_of("fednh"), Secagg(2))
    silent = replace(run, members=tuple(replace(m, prototypes=False) for m in run.members))
    setup = RunSetup.of(silent)
    assert setup.round_loop(local_ports(setup, shares()), 1).census(Observer())["hospitals"].tolist() == [0.0] * 4
