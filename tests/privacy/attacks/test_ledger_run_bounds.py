"""A coordinator that asks again and again, under ids that it chooses, gets no more than one run's part."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.errors import ConfigError, RefusedError
from fl_core.rounds.run_setup import RunSetup
from privacy.accounting.accountant import Mechanism, PrivacyFilter, epsilon_of
from privacy.accounting.release_plan import HOSPITAL, Release
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import ATTEMPTS, Ledger, LedgerTask, PlannedRelease
from privacy.ledger.registration import register
from privacy.ledger.run_ledger import RunLedger
from privacy.profiles.record import release_plan
from silo.storage.home import Home
from tests.support.privacy import TRAIN, budgeted, hospital_level, private

RECORDS = datasets.load("digits/p3c4/1")


def run_ledger_of(ledger: Ledger, run, epsilon: float = 8.0, id: str = "run") -> RunLedger:
    run_ledger = RunLedger(ledger, CompiledRun.of(run), RECORDS, most=PrivacyFilter.of(epsilon, 1e-5))
    run_ledger.begin(id)
    return run_ledger


def asked(run_ledger: RunLedger, round: int, releases: list[Release]) -> str:
    """Ask for a round and do it; return the code of the refusal, or nothing."""
    try:
        run_ledger.reserve(round, True, releases)
    except RefusedError as error:
        return error.code
    run_ledger.commit("sha")
    return ""


def test_a_round_offered_again_and_again_is_charged_three_times_at_most(tmp_path: Path) -> None:
    ledger = budgeted(tmp_path, epsilon=500.0, test_epsilon=500.0)
    run = private(reserve_rounds=10, epsilon=8.0)
    round0 = release_plan(RunSetup.of(run), 1).releases(0, True)
    run_ledger = run_ledger_of(ledger, run)
    assert [asked(run_ledger, 0, round0) for _ in range(ATTEMPTS + 3)] == [""] * ATTEMPTS + ["E-BUDGET-12"] * 3
    assert sum(state == "SPENT" for _, state, _ in ledger.entries(TRAIN)) == ATTEMPTS
    assert "REFUSED" not in [
        event[2] for event in ledger.events()
    ]  # a hospital counts them, and keeps no entry of each
    other = run_ledger_of(ledger, run, id="the same manifest under another id")
    assert asked(other, 0, round0) == "E-BUDGET-12"
    assert asked(other, 1, release_plan(RunSetup.of(run), 1).releases(1, True)) == ""


def test_a_run_never_passes_its_own_epsilon_however_it_is_asked(tmp_path: Path) -> None:
    """Every round as often as attempts allow, under fresh ids of one manifest: the sum is what it announced at most."""
    ledger = budgeted(tmp_path, epsilon=500.0, test_epsilon=500.0)
    run = replace(private(epsilon=0.5, test_data="public"), rounds=4)
    plan = release_plan(RunSetup.of(run), 1)
    for attempt in range(ATTEMPTS):
        run_ledger = run_ledger_of(ledger, run, id=f"run-{attempt}")
        codes = [asked(run_ledger, t, plan.releases(t, True)) for t in range(4)]
    assert "E-BUDGET-12" in codes
    assert 0.3 < epsilon_of(ledger.history(TRAIN), 1e-5) <= 0.5


def test_a_policys_epsilon_holds_where_the_manifest_asks_for_more(tmp_path: Path) -> None:
    ledger = budgeted(tmp_path, epsilon=500.0, test_epsilon=500.0)
    run = private(epsilon=8.0, test_data="public")
    assert (
        asked(run_ledger_of(ledger, run, epsilon=0.5), 0, release_plan(RunSetup.of(run), 1).releases(0, True))
        == "E-BUDGET-12"
    )
    assert ledger.history(TRAIN) == []


def test_what_one_run_may_not_spend_is_refused_before_its_round_0(tmp_path: Path) -> None:
    """The whole run is held against the policy's bound of one run, and against what its manifest spent before."""
    ledger = budgeted(tmp_path, epsilon=500.0, test_epsilon=500.0)
    run = private(epsilon=2.0, reserve_rounds=0)
    whole = CompiledRun.of(run).profile.charges(1)
    run_ledger_of(ledger, run, epsilon=2.0).require(whole)
    with pytest.raises(RefusedError, match="E-BUDGET-12"):
        run_ledger_of(ledger, run, epsilon=0.5).require(whole)
    run_ledger = run_ledger_of(ledger, run)
    assert asked(run_ledger, 0, release_plan(RunSetup.of(run), 1).releases(0, True)) == ""
    with pytest.raises(RefusedError, match="E-BUDGET-12"):
        run_ledger_of(ledger, run, id="the same again").require(whole)
    run_ledger_of(ledger, replace(run, seed=99), id="another").require(whole)
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["SPENT"]


def test_evaluations_stay_within_what_the_preview_says_of_them(tmp_path: Path) -> None:
    ledger = budgeted(tmp_path, epsilon=500.0, test_epsilon=500.0)
    run = private(epsilon=8.0)
    look = [r for r in CompiledRun.of(run).profile.releases(1) if r.collection == "test"]
    reserve = 1
    run_ledger = run_ledger_of(ledger, run)
    codes = [asked(run_ledger, t, look[:1]) for t in range(20)]
    assert codes == [""] * (len(look) + reserve) + ["E-BUDGET-12"] * (20 - len(look) - reserve)


def test_another_run_is_another_request_that_the_data_sets_budget_bounds(tmp_path: Path) -> None:
    ledger = budgeted(tmp_path, epsilon=1.2)
    codes = []
    for seed in range(20):
        run = replace(private(epsilon=0.5, test_data="public"), seed=seed, rounds=1)
        codes.append(
            asked(run_ledger_of(ledger, run, id=f"run-{seed}"), 0, release_plan(RunSetup.of(run), 1).releases(0, True))
        )
    fit = codes.count("")
    assert 2 <= fit < 20
    assert codes == [""] * fit + ["E-BUDGET-01"] * (20 - fit)
    assert epsilon_of(ledger.history(TRAIN), 1e-5) <= 1.2


@pytest.mark.fault(
    "a crash",
    "ends a round of a private run whose budget equals its epsilon",
    "the round is repeated once; after a second crash it is refused",
)
def test_a_crash_in_the_middle_leaves_room_to_repeat_that_round_and_a_second_one_does_not(tmp_path: Path) -> None:
    """Budget and epsilon are equal. Each round is reserved; a crash is one that is never committed."""
    run = replace(private(epsilon=2.0, test_data="public", reserve_rounds=1), rounds=3)
    plan = release_plan(RunSetup.of(run), 1)
    for crashes, last in ((0, ""), (1, ""), (2, "E-BUDGET-12")):
        home = tmp_path / str(crashes)
        ledger = budgeted(home, epsilon=2.0)
        run_ledger = run_ledger_of(ledger, run, epsilon=2.0)
        for t in (0, 1):
            assert asked(run_ledger, t, plan.releases(t, True)) == ""
        for _ in range(crashes):
            run_ledger.reserve(2, True, plan.releases(2, True))
            again = Ledger(Home(home).ledger)
            again.recover()
            run_ledger = run_ledger_of(again, run, epsilon=2.0)
        code = asked(run_ledger, 2, plan.releases(2, True))
        assert code == last or (last and code == "E-BUDGET-01")
        assert epsilon_of(ledger.history(TRAIN), 1e-5) <= 2.0
    without = replace(private(epsilon=2.0, test_data="public", reserve_rounds=0), rounds=3)
    assert release_plan(RunSetup.of(without), 1).noise < plan.noise


def test_a_run_with_silo_level_privacy_is_held_to_it_for_the_hospital_and_four_times_it_for_records(
    tmp_path: Path,
) -> None:
    ledger = budgeted(tmp_path, epsilon=500.0, test_epsilon=500.0)
    register(ledger, RECORDS, "center1")
    ledger.set_budget(HOSPITAL, 500.0, 1e-5, "dpo", "test")
    run = hospital_level(epsilon=1.0)
    run_ledger = run_ledger_of(ledger, run, epsilon=1.0)
    whole, record = Release("update", HOSPITAL, Mechanism(12.0)), Release("update", "train", Mechanism(6.0))
    codes = [asked(run_ledger, t, [whole, record]) for t in range(40)]
    assert 1 < codes.index("E-BUDGET-12") < 30
    assert epsilon_of(ledger.history(HOSPITAL), 1e-5) <= 1.0
    assert asked(run_ledger, 50, [Release("update", "train", Mechanism(0.5))]) == "E-BUDGET-12"


@pytest.mark.parametrize("noise", [1e-320, 1e-200, 1e-40, 1e-7, 0.0, 1e-3])
def test_next_to_no_noise_never_fits(tmp_path: Path, noise: float) -> None:
    ledger = budgeted(tmp_path, epsilon=500.0)
    for rate in (1.0, 0.5, 1e-9):
        task = LedgerTask("run", "m", 0, f"train {rate}", ledger_version(ledger))
        if rate == 1e-9 and noise == 1e-3:
            continue  # so rare a sample is covered by its rate
        with pytest.raises(RefusedError, match="E-BUDGET-01"):
            ledger.reserve(TRAIN, task, [PlannedRelease("training", Mechanism(noise, rate))])
    assert ledger.history(TRAIN) == []


def ledger_version(ledger: Ledger) -> str:
    from privacy.ledger.registration import version

    found = version(RECORDS, "train")
    assert ledger.collection_of(found) == TRAIN
    return found


@pytest.mark.integration
@pytest.mark.parametrize("noise", [1e10, 1e38])
def test_very_much_noise_earns_no_credit(noise: float) -> None:
    """The RDP of a step is a difference of logarithms: it must not come out below nothing."""
    from privacy.accounting.accountant import ORDERS, rdp

    orders = ORDERS[::10]  # a fractional one takes the accountant a while at rate 0.5
    for rate in (1.0, 0.5, 0.01):
        found = rdp([Mechanism(noise, rate, 10**12), Mechanism(1.0)], orders)
        assert (found >= rdp([Mechanism(1.0)], orders)).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_none_are_no_budget_and_no_mechanism(tmp_path: Path, value: float) -> None:
    ledger = budgeted(tmp_path)
    before = ledger.budget(TRAIN)
    with pytest.raises(ConfigError, match="E-PRIV-20"):
        PrivacyFilter.of(value, 1e-5)
    for epsilon, delta in ((value, 1e-5), (1.0, value)):
        with pytest.raises(ConfigError, match="E-PRIV-20"):
            ledger.set_budget(TRAIN, epsilon, delta, "dpo", "a slip")
    for made in ((value, 1.0), (1.0, value)):
        with pytest.raises(ConfigError, match="E-PRIV-20"):
            Mechanism(*made)
    assert ledger.budget(TRAIN) == before
    assert ledger.verify() > 0


def test_an_epsilon_below_what_floats_tell_apart_admits_nothing() -> None:
    for epsilon in (1e-40, 1e-300, 5e-324):
        assert not PrivacyFilter.of(epsilon, 1e-5).admits((), [Mechanism(1e3)])


def test_bounds_of_a_run_are_the_smaller_of_what_it_announced_and_what_the_policy_allows() -> None:
    bounds = CompiledRun.of(private(epsilon=3.0)).profile.bounds(PrivacyFilter.of(2.0, 1e-6))
    own, policy = bounds["train"]
    assert (own.epsilon, policy.epsilon) == (3.0, 2.0)  # type: ignore[union-attr]
