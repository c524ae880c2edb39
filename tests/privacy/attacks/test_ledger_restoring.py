"""What a lost ledger may have spent is charged from sealed figures that only the hospital opens; others see it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from fl_core.errors import RefusedError, StateError
from privacy.accounting.accountant import Mechanism, aggregated, epsilon_of
from privacy.ledger.account import ATTEMPTS
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.recovery import SeenHead, charge_unknown_spending
from privacy.ledger.sealed import MAX_BYTES, PAD, SpendingSummary, seal, unseal
from service_core.storage.chain import ChainHead

SKIN, LUNG = "skin/train", "lung/train"
SMALL, LARGE = Mechanism(40.0), Mechanism(9.0)


def made(folder: Path) -> Ledger:
    ledger = Ledger(folder / "ledger.db")
    for name in (SKIN, LUNG):
        ledger.register(name, "record", f"v {name}", 2, [f"{name} {i}" for i in range(2)])
        ledger.set_budget(name, 4.0, 1e-5, "dpo", "the board")
    return ledger


def spend(ledger: Ledger, t: int, mechanism: Mechanism = SMALL, name: str = SKIN) -> None:
    entry = ledger.reserve(
        name, LedgerTask(f"run {t}", f"m {t}", 0, "train", f"v {name}"), [PlannedRelease("training", mechanism)]
    )
    ledger.start(entry)
    ledger.commit(entry, "sha")


def stated(ledger: Ledger) -> SeenHead:
    return SeenHead(*ledger.statement())


def put_back(folder: Path, name: str) -> Ledger:
    shutil.copy(folder / name, folder / "ledger.db")
    return Ledger(folder / "ledger.db")


def total(history) -> dict[float, int]:
    return {m.noise: m.steps for m in history}


def test_what_was_attested_is_charged_exactly_and_what_was_not_as_the_worst_there_was(tmp_path: Path) -> None:
    """The copy has only small entries: the most expensive row that is left says nothing of what was lost."""
    ledger = made(tmp_path)
    spend(ledger, 0)
    before = stated(ledger)
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    spend(ledger, 1, LARGE)
    spend(ledger, 2)
    spend(ledger, 3, SMALL, LUNG)
    after = stated(ledger)
    lost = put_back(tmp_path, "copy.db")
    charge_unknown_spending(lost, [after, before], "dpo")
    assert total(lost.history(SKIN)) == {40.0: 2, 9.0: 1 + ATTEMPTS}
    assert total(lost.history(LUNG)) == {40.0: 1 + ATTEMPTS}
    assert Ledger(tmp_path / "ledger.db").verify(after.head) > 0
    with pytest.raises(StateError, match="E-BUDGET-11"):
        charge_unknown_spending(lost, [after, before], "dpo")


def test_a_copy_that_went_on_is_charged_for_both_ways(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    spend(ledger, 0)
    before = stated(ledger)
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    for t in (1, 2):
        spend(ledger, t)
    after = stated(ledger)
    copy = put_back(tmp_path, "copy.db")
    for t in (5, 6, 7):
        spend(copy, t)
    charge_unknown_spending(copy, [before, after], "dpo")
    assert total(copy.history(SKIN)) == {40.0: 1 + 3 + 2 + ATTEMPTS}


def test_restoring_again_and_again_is_seen_in_every_receipt(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    seen: list[SeenHead] = []
    for times in range(4):
        spend(ledger, times)
        seen.append(stated(ledger))
        assert seen[-1].restored == times
        ledger = put_back(tmp_path, "copy.db")
        charge_unknown_spending(ledger, seen, "dpo")
    assert stated(ledger).restored == 4


def test_spending_survives_any_number_of_copies_put_back(tmp_path: Path) -> None:
    """The attack: spend, attest, put the copy back, restore, and so on. The budget runs out as if nothing was lost."""
    ledger = made(tmp_path)
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    seen, spent = [stated(ledger)], list[Mechanism]()
    for t in range(40):
        try:
            spend(ledger, t, LARGE)
        except RefusedError:
            break
        spent.append(LARGE)
        seen.append(stated(ledger))
        ledger = put_back(tmp_path, "copy.db")
        charge_unknown_spending(ledger, seen, "dpo")
    else:
        raise AssertionError("the budget never ran out")
    assert epsilon_of(spent, 1e-5) <= 4.0
    assert epsilon_of(ledger.history(SKIN), 1e-5) >= epsilon_of(aggregated(spent), 1e-5)


def test_without_the_key_or_the_figures_all_of_every_budget_is_gone(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    spend(ledger, 0)
    after = stated(ledger)
    for lost in ([after], [after._replace(sealed=b"")], [SeenHead(after.head, b"\0" * 2000)]):
        for name in ("ledger.db", "ledger.key"):
            (tmp_path / name).unlink()
        anew = made(tmp_path)
        anew.register("other/test", "record", "v o", 1, ["o"])  # no budget yet: a later one must not be fresh
        found = charge_unknown_spending(anew, lost, "dpo")
        assert set(found) == {SKIN, LUNG, "other/test"}
        anew.set_budget("other/test", 4.0, 1e-5, "dpo", "later")
        for name in found:
            used = anew.status(name).used
            assert used is not None
            assert used == pytest.approx(1)


def test_a_ledger_begun_anew_under_the_old_key_owes_what_was_attested(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    spend(ledger, 0, LARGE)
    after = stated(ledger)
    (tmp_path / "ledger.db").unlink()
    anew = Ledger(tmp_path / "ledger.db")
    anew.register(LUNG, "record", f"v {LUNG}", 2, ["l"])
    anew.set_budget(LUNG, 4.0, 1e-5, "dpo", "the board")
    with pytest.raises(StateError, match=r"E-BUDGET-04.*skin/train"):
        charge_unknown_spending(anew, [after], "dpo")  # nothing is left out by not registering it
    assert anew.history(LUNG) == []
    anew = made(tmp_path)
    charge_unknown_spending(anew, [after], "dpo")
    assert total(anew.history(SKIN)) == {9.0: 1 + ATTEMPTS}


def test_figures_open_under_their_own_key_and_head_alone_and_say_nothing_else(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    spend(ledger, 0, LARGE)
    head, sealed, restored = ledger.statement()
    figures = unseal(ledger.chain.secret, head, restored, sealed)
    assert figures is not None
    assert figures.spent[SKIN] == [LARGE]
    for secret, at, text in (
        (b"\0" * 32, head, sealed),
        (ledger.chain.secret, ChainHead(head.seq + 1, head.hash), sealed),
        (ledger.chain.secret, head, sealed[:-1]),
        (ledger.chain.secret, head, b""),
        (ledger.chain.secret, head, bytes([sealed[0] ^ 1]) + sealed[1:]),
    ):
        assert unseal(secret, at, restored, text) is None
    assert unseal(ledger.chain.secret, head, restored + 1, sealed) is None
    for word in (b"skin", b"lung", b"9.0"):
        assert word not in sealed
    lengths = set()
    for t in range(1, 6):
        spend(ledger, t)
        lengths.add(len(ledger.statement()[1]))
    assert lengths == {len(sealed)}  # whole kilobytes
    assert (len(sealed) - 12 - 16) % PAD == 0
    many = {f"c{n}": [Mechanism(1 + random.random(), 0.3, 7) for _ in range(500)] for n in range(20)}
    assert seal(ledger.chain.secret, head, 0, SpendingSummary(many, {}, {})) == b""
    assert MAX_BYTES >= 1 << 16


def test_what_a_coordinator_claims_may_be_any_number(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    for seq in (2**63, 2**64 - 1, 10**30):
        assert not ledger.holds(ChainHead(seq, "ab" * 32))
        for look in (ledger.verify, ledger.require):
            with pytest.raises(StateError, match="E-BUDGET-08"):
                look(ChainHead(seq, "ab" * 32))


def test_a_ledger_that_was_edited_is_not_restored_on_top(tmp_path: Path) -> None:
    import sqlite3

    ledger = made(tmp_path)
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    spend(ledger, 0)
    after = stated(ledger)
    copy = put_back(tmp_path, "copy.db")
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute("DELETE FROM unit_digest")
    with pytest.raises(StateError, match="E-BUDGET-07"):
        charge_unknown_spending(copy, [after], "dpo")
    assert json.dumps([e[2] for e in copy.events()]).count("RESTORED") == 0
