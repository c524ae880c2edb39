"""A run that cannot be finished at one hospital is begun at none: nothing is charged, and all reasons are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.runs import preflight
from coordinator.storage.records import RunState, StoredRun
from fl_core.rounds.manifest import RunManifest
from privacy.accounting.accountant import Mechanism, PrivacyFilter
from privacy.compiled_run import CompiledRun
from tests.support import until
from tests.support.coordinator import World, events, heard, online
from tests.support.fake_coordinator import MEMBERS
from tests.support.federation import COLLECTION, DELTA, Hospital, budgeted
from tests.support.privacy import private

pytestmark = pytest.mark.integration

DATA = {name: f"digits/p3c4/{k}" for k, name in enumerate(MEMBERS)}
RUN = private(physical_batch=16)
FEW = 0.05
"""A budget that no round fits."""


def began(world: World, run_id: str) -> bool:
    assert world.server is not None
    return world.server.store.runs.round(run_id, 0) is not None


def refused(world: World, run: StoredRun) -> StoredRun:
    """Wait for a run's end, which must come before its round 0."""
    ended = world.ended(run.id, 90)
    assert ended.state is RunState.PAUSED
    assert not began(world, run.id)
    assert ended.closed == 0
    return ended


def uncharged(sites: dict[str, Hospital]) -> bool:
    return all(site.entries() == [] for site in sites.values())


def started(sites: dict[str, Hospital], *but: str) -> None:
    for name, site in sites.items():
        if name not in but:
            site.start()


def small_budget(site: Hospital) -> None:
    site.budget(FEW)


def small_cap(site: Hospital) -> None:
    site.policy(f'[privacy]\nrng = "test"\n[budget."{COLLECTION}/train"]\nepsilon = {FEW}\ndelta = {DELTA}\n')


def small_test_budget(site: Hospital) -> None:
    site.budget(FEW / 50, "test")


def strict_policy(site: Hospital) -> None:
    site.policy('[privacy]\nrng = "test"\nepsilon = 1.0\n')


def other_records(site: Hospital) -> None:
    site.data = "digits/p2c5/0"


FAULTS = {
    "budget": (small_budget, "E-BUDGET-01"),
    "test budget": (small_test_budget, "E-BUDGET-01"),
    "cap of the policy": (small_cap, "E-BUDGET-01"),
    "policy": (strict_policy, "E-POLICY-05"),
    "data": (other_records, "E-BUDGET-04"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_one_hospital_cannot_finish_is_charged_at_none(tmp_path: Path, fault: str) -> None:
    spoil, code = FAULTS[fault]
    with budgeted(tmp_path, DATA) as (world, sites):
        spoil(sites["center2"])
        started(sites)
        ended = refused(world, world.submit(RUN))
        assert ended.reason.startswith("E-RUN-36")
        assert f"center2: {code}" in ended.reason
        assert "center0" not in ended.reason
        assert "center1" not in ended.reason
        assert uncharged(sites)
        ((name, reason),) = events(world, ended.id, "refused")
        assert (name, reason.partition(":")[0]) == ("center2", code)
        own_words = reason.partition("refused: ")[
            2
        ]  # what leaves of a budget or a policy has no number of the hospital's
        assert own_words
        assert not any(c.isdigit() for c in own_words)


def test_all_who_refuse_are_named_and_the_repaired_run_finishes_when_it_is_resumed(tmp_path: Path) -> None:
    with budgeted(tmp_path, DATA) as (world, sites):
        small_budget(sites["center0"])
        strict_policy(sites["center2"])
        started(sites)
        run = world.submit(RUN)
        ended = refused(world, run)
        assert "center0: E-BUDGET-01" in ended.reason
        assert "center2: E-POLICY-05" in ended.reason
        assert "center1:" not in ended.reason
        assert uncharged(sites)
        sites["center0"].budget(100.0)
        assert world.server is not None
        world.server.runs.resume(run.id)
        ended = refused(world, run)  # asked anew: what is repaired is not named any more, what is not is
        assert "center0" not in ended.reason
        assert "center2: E-POLICY-05" in ended.reason
        assert uncharged(sites)
        sites["center2"].policy('[privacy]\nrng = "test"\n')
        world.server.runs.resume(run.id)
        world.finished(run.id, 120)
        for k, name in enumerate(MEMBERS):
            wanted = CompiledRun.of(RUN).profile.charges(k)
            for split in ("train", "test"):  # what is charged in the end is what was asked about before
                collection, exact = f"{COLLECTION}/{split}", PrivacyFilter.of(100.0, DELTA)
                charged = sites[name].ledger.history(collection)
                assert exact.used(charged) == pytest.approx(exact.used(wanted[split]), rel=1e-9)
            assert {state for _, state in sites[name].entries()} == {"SPENT"}


def test_an_absent_hospital_is_waited_for_and_named_and_nobody_is_charged_meanwhile(tmp_path: Path) -> None:
    with budgeted(tmp_path, DATA) as (world, sites):
        started(sites, "center1")
        assert world.server is not None
        until(lambda: online(world, "center0")() and online(world, "center2")(), "two hospitals", 60)
        run = world.submit(RUN)
        ((_, reason),) = heard(world, run.id, "preflight")
        assert reason.endswith("away: center1")
        assert {name for name, _ in heard(world, run.id, "ready", 2)} == {"center0", "center2"}
        assert world.run(run.id).state is RunState.WAITING
        assert not began(world, run.id)
        assert uncharged(sites)
        sites["center1"].start()
        world.finished(run.id, 120)
        assert len(heard(world, run.id, "ready", 3)) == 3


@pytest.mark.slow
def test_a_hospital_that_never_comes_is_named_at_the_deadline(tmp_path: Path) -> None:
    with budgeted(tmp_path, DATA) as (world, sites):
        started(sites, "center1")
        ended = refused(world, world.submit(replace(RUN, deadline_s=20.0)))
        assert ended.reason.startswith("E-RUN-37")
        assert "no answer yet from center1:" in ended.reason
        assert uncharged(sites)


def test_who_is_away_does_not_keep_a_refusal_from_the_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "GRACE_S", 0.5)
    with budgeted(tmp_path, DATA) as (world, sites):
        small_budget(sites["center0"])
        started(sites, "center1")
        ended = refused(world, world.submit(RUN))
        assert "center0: E-BUDGET-01" in ended.reason
        assert "no answer yet from center1" in ended.reason
        assert uncharged(sites)


@pytest.mark.slow
def test_a_coordinator_that_is_started_anew_between_answers_asks_again_and_charges_once(tmp_path: Path) -> None:
    with budgeted(tmp_path, DATA) as (world, sites):
        started(sites, "center1")
        run = world.submit(RUN)
        heard(world, run.id, "ready", 2)
        world.stop()
        assert uncharged(sites)
        world.start()
        heard(world, run.id, "ready", 4)  # those who had answered were asked again
        assert world.run(run.id).state is RunState.WAITING
        assert uncharged(sites)
        sites["center1"].start()
        world.finished(run.id, 120)
        rounds = [f"{run.id}/{t}/{kind}, seeded noise/0" for t, kind in ((0, "train"), (1, "train"), (2, "evaluate"))]
        for site in sites.values():
            assert {entry.rpartition(f"/{COLLECTION}")[0] for entry, _ in site.entries()} == set(rounds)


def test_an_abort_ends_the_wait_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with budgeted(tmp_path, DATA) as (world, sites):
        started(sites, "center1")
        run = world.submit(RUN)
        heard(world, run.id, "ready", 2)
        assert world.server is not None
        world.server.runs.abort(run.id)
        assert world.ended(run.id).state is RunState.ABORTED
        assert uncharged(sites)


def test_approval_by_hand_is_waited_for_before_anybody_is_charged(tmp_path: Path) -> None:
    with budgeted(tmp_path, DATA) as (world, sites):
        slow = sites["center1"]
        slow.policy('[privacy]\nrng = "test"\n[runs]\napprove = "by hand"\n')
        started(sites)
        run = world.submit(RUN)
        heard(world, run.id, "ready", 2)
        assert slow.service is not None
        approvals = slow.service.store.approvals
        until(lambda: approvals.waits(run.id), "the hospital to be asked", 60)
        assert not began(world, run.id)
        assert uncharged(sites)
        approvals.decide(run.id, True)
        world.finished(run.id, 120)


def budget_for(run: RunManifest, rounds: int) -> float:
    """Find a budget on the training records that so many rounds fit and one more does not."""
    each: list[Mechanism] = CompiledRun.of(run).profile.charges(2)["train"]
    per_round = len(each) // run.rounds
    for step in range(1, 2000):
        fits = [PrivacyFilter.of(step / 50, DELTA).admits((), each[: per_round * t]) for t in (rounds, rounds + 1)]
        if fits == [True, False]:
            return step / 50
    raise AssertionError("expected a budget between so many rounds and one more")


def test_a_budget_for_three_of_five_rounds_is_found_before_the_first(tmp_path: Path) -> None:
    run = replace(RUN, rounds=5)
    with budgeted(tmp_path, DATA) as (world, sites):
        sites["center2"].budget(budget_for(run, 3))
        started(sites)
        ended = refused(world, world.submit(run))
        assert "center2: E-BUDGET-01" in ended.reason
        assert uncharged(sites)
        mine = {*sites["center2"].told("refused")}  # said once for each time that it was asked
        assert len(mine) == 1
        assert f"'{COLLECTION}/train'" in mine.pop()  # the hospital's own log has the collection and the shares


def test_what_one_run_has_spent_counts_in_the_preflight_of_the_next(tmp_path: Path) -> None:
    run = private(physical_batch=16, reserve_rounds=0)
    with budgeted(tmp_path, DATA, epsilon=9.0) as (world, sites):  # a run takes 63 % of it
        started(sites)
        world.finished(world.submit(run, "one").id, 120)
        before = {name: site.entries() for name, site in sites.items()}
        ended = refused(world, world.submit(run, "two"))
        assert all(f"{name}: E-BUDGET-01" in ended.reason for name in MEMBERS)
        assert {name: site.entries() for name, site in sites.items()} == before
