"""A budget's filter follows from what the hospital set and what was charged first, whoever tries to change it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.errors import ConfigError, RefusedError, StateError
from privacy.accounting.accountant import AUTO, GAUSSIAN, RENYI, Mechanism, PrivacyFilter
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.recovery import SeenHead, charge_unknown_spending
from privacy.ledger.run_ledger import RunLedger
from privacy.ledger.sealed import SpendingSummary, seal, unseal
from service_core.storage.chain import ChainHead
from tests.support.privacy import DATA, TRAIN, budgeted, private

SKIN = "skin/train"
WHOLE, STEPS = Mechanism(20.0), Mechanism(20.0, 0.05, 10)


def made(folder: Path, filter: str | None = None) -> Ledger:
    ledger = Ledger(folder / "ledger.db")
    ledger.register(SKIN, "record", "v1", 2, ["a", "b"])
    ledger.set_budget(SKIN, 2.0, 1e-5, "dpo", "the board", filter)  # type: ignore[arg-type]
    return ledger


def charge(ledger: Ledger, mechanism: Mechanism, run: str = "run", cap: PrivacyFilter | None = None) -> None:
    task = LedgerTask(run, f"m {run} {mechanism}", 0, "train", "v1")
    ledger.start(ledger.reserve(SKIN, task, [PlannedRelease("release", mechanism)], cap))


def filters(ledger: Ledger) -> tuple[str, str]:
    budget = ledger.budget(SKIN)
    assert budget is not None
    return budget.filter, ledger.status(SKIN).filter


@pytest.mark.parametrize(("first", "second", "decided"), [(WHOLE, STEPS, GAUSSIAN), (STEPS, WHOLE, RENYI)])
def test_the_first_charge_decides_for_every_process_and_an_unused_one_does_not(
    tmp_path: Path, first: Mechanism, second: Mechanism, decided: str
) -> None:
    ledger, other = made(tmp_path), Ledger(tmp_path / "ledger.db")
    unused = ledger.reserve(SKIN, LedgerTask("run", "m", 0, "train", "v1"), [PlannedRelease("release", second)])
    ledger.release_unused(unused)
    charge(ledger, first, "first")
    assert filters(other) == filters(Ledger(tmp_path / "ledger.db")) == (AUTO, decided)
    if decided == RENYI:
        charge(other, second, "second")
        return
    for asked in (second, replace(second, noise=1e6, rate=1e-9, steps=1)):  # even a step that costs nothing
        with pytest.raises(RefusedError, match=r"E-BUDGET-01.*--filter renyi"):
            charge(other, asked, f"second {asked}")
    other.set_budget(SKIN, 2.0, 1e-5, "dpo", "training follows", RENYI)
    charge(other, second, "third")
    with pytest.raises(ConfigError, match=r"E-PRIV-20.*renyi"):
        other.set_budget(SKIN, 2.0, 1e-5, "dpo", "back again", GAUSSIAN)
    other.set_budget(SKIN, 3.0, 1e-5, "dpo", "a larger one")
    assert filters(other) == (RENYI, RENYI)


@pytest.mark.parametrize("detail", ['"filter": "auto"', '"filter": "none"', '"filter": null', '"filter": 1e308'])
def test_a_stored_budget_cannot_change_its_filter_without_the_key(tmp_path: Path, detail: str) -> None:
    ledger = made(tmp_path, GAUSSIAN)
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        (stored,) = db.execute("SELECT detail FROM event WHERE state='BUDGET'").fetchone()
        assert json.loads(stored)["filter"] == GAUSSIAN
        db.executescript("DROP TRIGGER event_noupd")
        db.execute("UPDATE event SET detail=? WHERE state='BUDGET'", (stored.replace('"filter": "gaussian"', detail),))
        db.commit()
    for opened in (ledger, Ledger(tmp_path / "ledger.db")):
        with pytest.raises(StateError, match="E-BUDGET-07"):
            opened.verify()


@pytest.mark.parametrize("name", ["none", "", "GAUSSIAN", 7])
def test_a_budget_with_an_unknown_filter_counts_for_nothing_even_under_the_key(tmp_path: Path, name: object) -> None:
    ledger = made(tmp_path)
    with ledger.chain.transaction() as db:
        facts = {"epsilon": 9.0, "delta": 1e-5, "order": 4.0, "filter": name, "operator": "o", "reason": "r"}
        ledger.chain.write(db, None, SKIN, "BUDGET", json.dumps(facts))
    with pytest.raises(StateError, match="E-BUDGET-07"):
        Ledger(tmp_path / "ledger.db").verify()


def test_an_unknown_filter_is_no_budget(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"E-PRIV-20.*auto, gaussian, renyi"):
        made(tmp_path, "none")


def test_a_policys_budget_is_kept_by_the_filter_of_the_ledgers(tmp_path: Path) -> None:
    """Otherwise one would admit steps and the other never, or each count another part."""
    ledger, cap = made(tmp_path, RENYI), PrivacyFilter.of(1.0, 1e-5)
    charge(ledger, WHOLE, "first", cap)
    charge(ledger, STEPS, "second", cap)
    exact, rdp = PrivacyFilter.of(1.0, 1e-5, GAUSSIAN), PrivacyFilter.of(1.0, 1e-5, RENYI)
    release = Mechanism(1.001 / exact.mu)
    assert exact.admits((), [release])
    assert not rdp.admits((), [release])
    with pytest.raises(RefusedError, match="E-BUDGET-01"):
        charge(made(tmp_path / "renyi", RENYI), release, "third", cap)
    charge(made(tmp_path / "gaussian", GAUSSIAN), release, "third", cap)


def test_a_whole_budget_is_spent_to_the_last_and_no_further_however_it_is_divided(tmp_path: Path) -> None:
    ledger, mu = made(tmp_path, GAUSSIAN), PrivacyFilter.of(2.0, 1e-5).mu
    for k, share in enumerate((0.5, 0.25, 0.125, 0.0625, 0.0625 - 1e-9)):
        charge(ledger, Mechanism(1 / (mu * share**0.5)), f"run {k}")
    status = ledger.status(SKIN)
    assert status.spent_rdp == status.spent_prv == pytest.approx(2.0, abs=1e-6)
    assert status.used == pytest.approx(1.0, abs=1e-6)
    for z in (1e4, 1 / mu, 5e-324):
        with pytest.raises(RefusedError, match="E-BUDGET-01"):
            charge(ledger, Mechanism(z), f"more {z}")


def test_an_older_copy_of_a_ledger_does_not_bring_another_filter(tmp_path: Path) -> None:
    """The first run, which trained by steps, came after the copy was made."""
    ledger = made(tmp_path)
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    charge(ledger, STEPS, "first")
    seen = [SeenHead(*ledger.statement())]
    shutil.copy(tmp_path / "copy.db", tmp_path / "ledger.db")
    back = Ledger(tmp_path / "ledger.db")
    with pytest.raises(StateError, match="E-BUDGET-08"):
        back.verify(seen[0].head)
    charge_unknown_spending(back, seen, "dpo")
    assert filters(back) == (AUTO, RENYI)


def test_sealed_figures_keep_the_filter_and_those_of_before_are_read(tmp_path: Path) -> None:
    for filter in (AUTO, GAUSSIAN, RENYI):
        figures = SpendingSummary({}, {}, {SKIN: PrivacyFilter.of(2.0, 1e-5, filter)})
        head = ChainHead(3, "ab" * 32)
        opened = unseal(b"k" * 32, head, 0, seal(b"k" * 32, head, 0, figures))
        assert opened is not None
        assert opened.budgets == figures.budgets
    assert PrivacyFilter(2.0, 1e-5, 13.0).filter == RENYI  # as ledgers and figures of 0.1.0 say it


def test_a_run_of_one_release_may_ask_for_the_whole_budget_and_a_renyi_ledger_says_what_to_do(tmp_path: Path) -> None:
    run = CompiledRun.of(private("analytic", {"release": "noisy"}, epsilon=8.0, reserve_rounds=-1))
    for filter in (AUTO, RENYI):
        ledger = budgeted(tmp_path / filter)
        ledger.set_budget(TRAIN, 8.0, 1e-5, "dpo", "all of it", filter)
        run_ledger = RunLedger(ledger, run, datasets.load(DATA))
        run_ledger.begin("run")
        if filter == AUTO:
            run_ledger.require(run.profile.charges(0))
        else:
            with pytest.raises(RefusedError, match=r"E-BUDGET-01.*--filter gaussian"):
                run_ledger.require(run.profile.charges(0))
