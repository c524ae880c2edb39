"""Partial prototype submission: silos drawn before round 1, a silo's own opt-out, single classes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from consilium.research.engines.in_process import InProcessSilo, RoundHistory, simulate
from fl_core.datasets.examples import TensorExamples
from fl_core.methods import build_method
from fl_core.methods.disjoint.analytic import held_out
from fl_core.models import build_model
from fl_core.rounds import sampling
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData
from fl_core.types.values import BatchSums, Bundle, MomentSums, RoundContext, State
from privacy.compiled_run import CompiledRun
from privacy.policy_terms import PrototypePolicy
from privacy.profiles.prototype_filter import DisclosureLimits, PrototypeFilter, with_prototype_filter
from privacy.release_log import InMemoryReleaseLog
from tests.fl_core.methods.disjoint.test_analytic import CLASSES, Rows
from tests.fl_core.methods.disjoint.test_analytic import TRAIN as EXAMPLES_TRAIN
from tests.fl_core.methods.disjoint.test_analytic import model as features
from tests.fl_core.methods.disjoint.test_analytic import records as example_rows
from tests.support.federations import CONTEXT, FED, SCHEMA, manifest, same, same_bundle, shares

pytestmark = pytest.mark.integration

TRAINED = {"fedmr": {"mu1": 1e-4, "mu2": 0.5, "inter_weighting": "example"}, "fedproc": {}, "fednh": {}}
WITHHELD = frozenset({1, 3})


def run_of(method: str, private: bool, **options: object) -> RunManifest:
    made = manifest(method, {**TRAINED.get(method, {}), **options}, rounds=5)  # type: ignore[arg-type]
    members = tuple(replace(m, units=14) for m in made.members)
    terms = {"rng": "test", "prototype_noise": 0.5, "epsilon": 50.0}
    return replace(made, members=members, privacy=NamedOptions("dp_record", terms)) if private else made


def sent(method: str, private: bool, hidden: frozenset[int], **options: object) -> tuple[Bundle, InMemoryReleaseLog]:
    """Run one round of silo 0, which holds classes 0 and 1 of four."""
    run, log = run_of(method, private, **options), InMemoryReleaseLog()
    factory = with_prototype_filter(
        CompiledRun.of(run).profile.data_factory(0, log) if private else PlainLocalData, DisclosureLimits(hidden)
    )
    port = InProcessSilo(run, 0, shares()[0], RunSetup.of(run).silo_runtime(), data_factory=factory)
    msg: State = RunSetup.of(run).method.broadcast(RunSetup.of(run).initial_state())
    return port.round(msg, replace(FED, round=0), TaskKind.TRAIN), log


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("method", sorted(TRAINED))
def test_withheld_classes_are_zeros_whether_present_or_not(method: str, private: bool) -> None:
    """Class 1 is held and class 3 is not: both rows are zeros; the other rows, and the charge, are as without."""
    full, charged = sent(method, private, frozenset())
    part, also = sent(method, private, WITHHELD)
    assert charged.releases == also.releases
    for name in full:
        if name != "prototypes":
            assert same_bundle({name: full[name]}, {name: part[name]})
    whole, shown = full["prototypes"], part["prototypes"]
    for value, rest in ((*whole.total.values(), *shown.total.values()), (whole.weight, shown.weight)):
        assert torch.equal(rest[[0, 2]], value[[0, 2]])
        assert bool(value[1].abs().sum() > 0)
        assert not bool(rest[[1, 3]].any())
    if private:
        assert bool(whole.weight[3] != 0) or bool(whole.weight[1] != 0)  # noise stood in their place


def test_fine_grained_prototypes_are_withheld_class_by_class() -> None:
    part = sent("fedcd", False, WITHHELD, restarts=2, steps=3)[0]["prototypes"]
    fine = len(part.weight) // 4
    assert fine >= 1
    rows = part.weight.reshape(4, fine)
    assert bool(rows[0].any())
    assert not bool(rows[[1, 3]].any())
    assert not bool(part.total["p"].reshape(4, fine, -1)[[1, 3]].any())


def test_withholding_every_class_is_withholding_all() -> None:
    every, _ = sent("fedmr", False, frozenset(range(4)))
    run = run_of("fedmr", False)
    run = replace(run, members=tuple(replace(member, prototypes=False) for member in run.members))
    port = InProcessSilo(run, 0, shares()[0], RunSetup.of(run).silo_runtime())
    none = port.round(
        RunSetup.of(run).method.broadcast(RunSetup.of(run).initial_state()),
        replace(FED, round=0),
        TaskKind.TRAIN,
    )
    assert same_bundle(every, none)


def test_t_29_share_of_silos_is_drawn_before_round_1() -> None:
    """The same list for everybody; 0, 5, 8 and 10 of 10 silos at 0, 50, 80 and 100 %."""
    names = [f"hospital{k}" for k in range(10)]
    lists = [sampling.prototype_submitters(3, names, p) for p in (0.0, 0.5, 0.8, 1.0)]
    assert [sum(drawn) for drawn in lists] == [0, 5, 8, 10]
    backwards = sampling.prototype_submitters(3, names[::-1], 0.5)[::-1]
    assert backwards == lists[1]
    for small, large in itertools.pairwise(lists):
        assert all(b for a, b in zip(small, large, strict=True) if a)  # a larger share adds silos


def final(run: RunManifest) -> State:
    if run.privacy.name == "none":
        return simulate(RunSetup.of(run), shares(), RoundHistory())
    doors = [CompiledRun.of(run).profile.data_factory(k, InMemoryReleaseLog()) for k in range(3)]
    return simulate(RunSetup.of(run), shares(), RoundHistory(), doors)


@pytest.mark.parametrize("pair", [("fedmr", "fedmr"), ("fedproc", "fedavg")])
def test_t_42_share_zero_is_the_intra_loss_alone(pair: tuple[str, str]) -> None:
    """Nobody submits: FedMR is FedMR without prototypes, FedProc is FedAvg, bit for bit."""
    method, fallback = pair
    off = {"mu1": 1e-4, "mu2": 0.0} if fallback == "fedmr" else {}
    nobody = manifest(method, TRAINED[method], share=0.0)  # type: ignore[arg-type]
    alone = manifest(fallback, off)  # type: ignore[arg-type]
    assert not any(m.prototypes for m in nobody.members)
    assert same(final(nobody)["w"], final(alone)["w"])
    sends = build_method(method, {**TRAINED[method], **(build_method(method, {}).without_prototypes or {})}).sends
    assert sends == ("delta",)


def test_t_42_epsilon_infinity_is_the_plain_run_and_share_zero_holds_under_privacy() -> None:
    plain = run_of("fedmr", False)
    members = tuple(replace(m, units=0) for m in plain.members)
    infinite = replace(plain, privacy=NamedOptions("dp_record", {"epsilon": float("inf")}), members=members)
    assert not CompiledRun.of(infinite).private
    assert same(simulate(RunSetup.of(infinite), shares(), RoundHistory())["w"], final(plain)["w"])
    private = run_of("fedmr", True)
    nobody = replace(private, members=tuple(replace(m, prototypes=False) for m in private.members))
    logs = [InMemoryReleaseLog() for _ in range(3)]
    simulate(
        CompiledRun.of(nobody),
        shares(),
        RoundHistory(),
        [CompiledRun.of(nobody).profile.data_factory(k, b) for k, b in enumerate(logs)],
    )
    assert all(r.purpose != "prototypes" for b in logs for r in b.releases)


def test_a_silo_that_submits_none_still_uses_prototypes() -> None:
    """A loss with prototypes is trained on by a silo that withholds its own (MR-10)."""
    run = manifest("fedmr", TRAINED["fedmr"])  # type: ignore[arg-type]
    method = RunSetup.of(run).method
    known = {"g": torch.ones(4, 64), "known": torch.ones(4)}
    start = {**RunSetup.of(run).initial_state()}
    width = start["prototypes"]["g"].shape[1]
    start["prototypes"] = {**known, "g": torch.randn(4, width, generator=torch.Generator().manual_seed(0))}

    def trained(msg: State, prototypes: bool) -> nn.Module:
        model = build_model("digits_cnn", {}, SCHEMA, 0)
        context = replace(FED, round=1).for_silo(0, 0, prototypes)
        data = PlainLocalData(RoundData(shares()[0].train, shares()[0].test, run.train, context))
        method.local(model, msg, {}, data, context)
        return model

    with_own, without = trained(start, True).state_dict(), trained(start, False).state_dict()
    assert same(with_own, without)
    assert not same(without, trained(dict(RunSetup.of(run).initial_state()), False).state_dict())


# ---- exact sums over examples ----------------------------------------------------------------------------------------

EXACT = ({}, {"withdraws": "a,b"}, {"class_weights": "balanced"}, {"release": "noisy"})


def summed(rows: Rows, least: int, hidden: frozenset[int], options: dict[str, object]) -> list[Bundle]:
    """Let a hospital send all exchanges of analytic without privacy, to a server that hears of nobody else."""
    method, found = build_method("analytic", options), list[Bundle]()
    factory = with_prototype_filter(PlainLocalData, DisclosureLimits(hidden, min_examples=least))
    server = method.init_server(features(), RoundContext(1, CLASSES))
    for t in range(method.exchanges):
        now = RoundContext(1, CLASSES, method.exchanges, t, 1).for_silo(0, 0)
        data = factory(RoundData(rows, rows, EXAMPLES_TRAIN, now))
        found.append(method.local(features(), method.broadcast(server), {}, data, now).bundle)
    return found


def without_class(rows: Rows, c: int) -> Rows:
    return Rows(rows.x[rows.labels != c], rows.labels[rows.labels != c])


def of_class(rows: Rows, c: int, n: int) -> Rows:
    """Keep n examples of a class and all others."""
    first = torch.nonzero(rows.labels == c).flatten()[n:]
    keep = torch.ones(len(rows.labels), dtype=torch.bool)
    keep[first] = False
    return Rows(rows.x[keep], rows.labels[keep])


@pytest.mark.parametrize("options", EXACT)
@pytest.mark.parametrize(("n", "shown"), [(1, False), (4, False), (5, True)])
def test_a_class_of_few_examples_is_left_out_of_exact_sums_as_if_there_were_none(
    options: dict[str, object], n: int, shown: bool
) -> None:
    """Bit for bit, of products as well: of what 0.1.0 summed in two, of each by itself."""
    rows = of_class(example_rows(), 2, n)
    least, hidden = PrototypePolicy().min_examples, frozenset[int]()
    held, none = (summed(r, least, hidden, options) for r in (rows, without_class(rows, 2)))
    moments = [t for t, bundle in enumerate(held) if bool(bundle["moments"].total["a"].any())]
    assert moments
    later = held_out(rows.x[rows.labels == 2])
    there = [int((~later).sum()), int(later.sum())] if "withdraws" in options else [n]
    for t, counted in zip(moments, there, strict=True):
        assert same_bundle(_sums(held[t]), _sums(none[t])) is (counted in (0, 1, 2, 3, 4))
    assert shown is (n >= least)


@pytest.mark.parametrize("options", EXACT)
def test_hidden_classes_are_left_out_of_exact_sums(options: dict[str, object]) -> None:
    rows = example_rows()
    held = summed(rows, 0, frozenset({1, 3}), options)
    none = summed(without_class(without_class(rows, 1), 3), 0, frozenset(), options)
    for mine, theirs in list(zip(held, none, strict=True))["class_weights" in options :]:
        assert same_bundle(_sums(mine), _sums(theirs))  # counts, which balanced weights begin with, are of all classes


def _sums(bundle: Bundle) -> Bundle:
    """Drop how many examples there are in all, which noisy counts of classes would say as well."""
    one = torch.ones(())
    return {name: replace(part, weight=one) if name == "moments" else part for name, part in bundle.items()}


def test_in_a_private_run_hidden_classes_add_nothing_to_the_release() -> None:
    """The row of sums stays here; what is charged is what is charged without."""
    rows, query = example_rows(), MomentSums(lambda x, y: x.double() / 10, 6, CLASSES, 1.0)
    found = PrototypeFilter(
        PlainLocalData(RoundData(rows, rows, EXAMPLES_TRAIN, CONTEXT)), DisclosureLimits(frozenset({2}))
    )
    sums = found.sum(query)
    rest = without_class(rows, 2).x.double() / 10
    assert torch.allclose(sums["a"], rest.T @ rest)
    assert not sums["b"][2].any()
    assert bool(sums["b"][3].any())


def test_of_several_labels_hidden_and_rare_ones_are_unknown_in_sums() -> None:
    rows = torch.tensor([[1, 0, 1, -1], [0, 1, -1, -1], [1, 0, 0, 1]])
    share = shares()[0]
    examples = TensorExamples(share.train.batch(torch.arange(3))[0], rows)
    data = PlainLocalData(RoundData(examples, examples, EXAMPLES_TRAIN, CONTEXT.for_silo(0, 0)))
    asked = BatchSums(lambda _, y: {"known": (y != -1).sum(0), "found": (y == 1).sum(0)})
    found = PrototypeFilter(data, DisclosureLimits(frozenset({1}), min_examples=2)).sum(asked)
    assert found["known"].tolist() == [3, 0, 2, 0]  # the second is hidden, the last was looked for once
    assert found["found"].tolist() == [2, 0, 1, 0]
