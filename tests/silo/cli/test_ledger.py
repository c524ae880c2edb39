"""`silo ledger`, `silo policy`, `silo approve`: what they print, what they change, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from privacy.accounting.accountant import Mechanism, epsilon_of
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.registration import version
from privacy.policy import Policy
from silo.cli.main import run
from silo.storage.home import Home
from silo.storage.store import SiloStore
from silo.storage.tasks import Attestation
from tests.support.fake_coordinator import enrolled, manifest
from tests.support.hospital import took_part
from tests.support.privacy import DATA, TEST, TRAIN, budgeted

ROUND = [PlannedRelease("training", Mechanism(2.85, 0.032, 31))]


def answer(capsys, *words):
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, code, status, *words):
    assert run(list(words)) == status
    err = capsys.readouterr().err
    assert err.startswith(f"{code}: ")
    assert err.count("\n") == 1
    return err


def spend(ledger: Ledger, round: int, state: str = "SPENT") -> str:
    from fl_core import datasets

    task = LedgerTask("run", "digest", round, "train", version(datasets.load(DATA), "train"))
    entry = ledger.reserve(TRAIN, task, ROUND)
    if state == "SPENT":
        ledger.start(entry)
        ledger.commit(entry, "sha")
    return entry


def test_a_home_without_a_ledger_shows_what_left_it_without_noise(capsys, tmp_path):
    home = ["--home", str(tmp_path / "home")]
    for updates in (0, 2):
        if updates:
            took_part(enrolled(tmp_path / "home"), manifest(), "fedavg-digits-plain", rounds=updates)
        counted = answer(capsys, "ledger", "show", *home)
        assert counted["collections"] == []
        assert counted["unprotected"]["updates"] == updates
        assert run(["ledger", "show", *home]) == 0
        out = capsys.readouterr().out
        assert "silo ledger register --data REF" in out
        assert ("this home: 2 updates left without noise, in 1 run" in out) is bool(updates)
    assert not Home(tmp_path / "home").ledger.exists()
    fails(capsys, "E-BUDGET-04", 1, "ledger", "verify", *home)


def test_a_hospital_registers_gives_a_budget_and_sees_both(capsys, tmp_path):
    home = ["--home", str(tmp_path / "home")]
    named = answer(capsys, "ledger", "register", "--data", DATA, "--name", "center1", *home)
    assert named == {"collections": {TRAIN: True, TEST: True, "hospital": True}}
    assert set(
        answer(capsys, "ledger", "register", "--data", DATA, "--name", "center1", *home)["collections"].values()
    ) == {False}
    fails(capsys, "E-BUDGET-04", 1, "ledger", "register", "--data", "digits/iid-1/0", "--name", "other", *home)
    amount = ["--epsilon", "2", "--delta", "1e-5", "--reason", "the board"]
    assert answer(capsys, "ledger", "budget", "set", "center1", *amount, *home)["collections"] == [TEST, TRAIN]
    fails(capsys, "E-BUDGET-04", 1, "ledger", "budget", "set", "centre1", *amount, *home)
    fails(
        capsys,
        "E-PRIV-20",
        2,
        "ledger",
        "budget",
        "set",
        TRAIN,
        *home,
        "--epsilon",
        "2",
        "--delta",
        "1",
        "--reason",
        "x",
    )
    spend(Ledger(tmp_path / "home/ledger.db"), 0)
    shown = answer(capsys, "ledger", "show", *home)
    by_name = {c["collection"]: c for c in shown["collections"]}
    assert by_name[TEST]["epsilon"] == 0
    assert by_name[TEST]["entries"] == []
    assert by_name[TRAIN]["epsilon"] == epsilon_of([ROUND[0].mechanism], 1e-5)
    assert by_name[TRAIN]["epsilon_replace_one"]["epsilon"] == 2 * by_name[TRAIN]["epsilon"]
    assert by_name[TRAIN]["budget"] == {"epsilon": 2.0, "delta": 1e-5, "filter": "renyi"}
    (entry,) = by_name[TRAIN]["entries"]
    assert entry["releases"] == [{"purpose": "training", "noise": 2.85, "rate": 0.032, "steps": 31}]
    assert run(["ledger", "show", "--entries", *home]) == 0
    printed = capsys.readouterr().out
    assert entry["entry"] in printed
    assert "epsilon 2 at 1e-05" in printed
    assert printed.startswith("Of the budgets of 2 collections at most ")
    assert f"% is spent ({TRAIN})" in printed
    heads = [line.split() for line in printed.splitlines()]
    assert ["collection", "unit", "budget", "filter", "counted"] in [head[:5] for head in heads]
    assert ["entry", "state", "for", "noise", "rate", "steps"] in heads
    assert answer(capsys, "ledger", "verify", *home)["events"] == shown["events"]


def test_what_never_started_is_given_back_but_not_under_a_running_service(capsys, tmp_path):
    ledger = budgeted(tmp_path / "home")
    home = ["--home", str(tmp_path / "home")]
    entry = spend(ledger, 0, "INTENT")
    with Home(tmp_path / "home").locked():
        fails(capsys, "E-STATE-20", 1, "ledger", "release", entry, *home)
    assert answer(capsys, "ledger", "release", entry, *home) == {"released": entry}
    assert ledger.history(TRAIN) == []
    fails(capsys, "E-BUDGET-12", 1, "ledger", "release", entry, *home)


def test_an_older_ledger_goes_on_only_at_the_price_of_what_it_may_have_forgotten(capsys, tmp_path):
    ledger = budgeted(tmp_path / "home")
    place, home = Home(tmp_path / "home"), ["--home", str(tmp_path / "home")]
    spend(ledger, 0)
    backup = place.ledger.read_bytes()
    for t in range(1, 4):
        spend(ledger, t)
    head, sealed, restored = ledger.statement()
    place.attested.write_text(json.dumps(Attestation("", head.seq, head.hash, sealed.hex(), restored)))
    fails(capsys, "E-BUDGET-11", 1, "ledger", "restore", "--acknowledge-spend", *home)
    place.ledger.write_bytes(backup)
    fails(capsys, "E-BUDGET-08", 1, "ledger", "verify", *home)
    fails(capsys, "E-BUDGET-11", 2, "ledger", "restore", *home)
    found = answer(capsys, "ledger", "restore", "--acknowledge-spend", *home)
    assert found == {"charged": {TRAIN: "what was attested, and 3 times its most expensive entry"}}
    restored = Ledger(place.ledger)
    assert restored.history(TRAIN)[0].steps == 31 * (1 + 4 + 3)  # no attested head is in the copy: all of it again
    assert restored.status(TEST).used == 0
    answer(capsys, "ledger", "verify", *home)
    fails(capsys, "E-BUDGET-11", 1, "ledger", "restore", "--acknowledge-spend", *home)


def test_without_figures_every_collection_loses_its_budget(capsys, tmp_path):
    ledger = budgeted(tmp_path / "home")
    place, home = Home(tmp_path / "home"), ["--home", str(tmp_path / "home")]
    backup = place.ledger.read_bytes()
    spend(ledger, 0)
    place.attested.write_text(json.dumps(Attestation("", ledger.head().seq, ledger.head().hash)))
    place.ledger.write_bytes(backup)
    found = answer(capsys, "ledger", "restore", "--acknowledge-spend", *home)["charged"]
    assert found == dict.fromkeys((TEST, TRAIN, "hospital"), "its whole budget")
    for name in (TRAIN, TEST):
        assert Ledger(place.ledger).status(name).used == pytest.approx(1)


def test_the_ledgers_place_is_a_setting_that_every_command_honours(capsys, tmp_path, monkeypatch):
    first, second, shared = tmp_path / "home", tmp_path / "second", tmp_path / "shared" / "ledger.db"
    budgeted(first)
    one, two = ["--home", str(first)], ["--home", str(second)]
    assert answer(capsys, "ledger", "place", *one)["ledger"] == str(first / "ledger.db")
    fails(capsys, "E-BUDGET-11", 1, "ledger", "place", str(shared), *one)  # its spending would be forgotten
    shared.parent.mkdir()
    for name in ("ledger.db", "ledger.key"):
        (first / name).rename(shared.parent / name)
    for home in (one, two):
        placed = answer(capsys, "ledger", "place", str(shared), *home)
        assert placed == {"ledger": str(shared), "key": str(shared.with_suffix(".key"))}
    spend(Ledger(shared), 0)
    shown = [answer(capsys, "ledger", "show", *home)["collections"] for home in (one, two)]
    assert shown[0] == shown[1]
    assert {c["collection"]: len(c["entries"]) for c in shown[0]}[TRAIN] == 1
    assert not (second / "ledger.db").exists()
    apart = tmp_path / "stick" / "key"
    apart.parent.mkdir()
    shared.with_suffix(".key").rename(apart)
    fails(capsys, "E-BUDGET-14", 1, "ledger", "verify", *one)
    answer(capsys, "ledger", "place", "--key", str(apart), *one)
    answer(capsys, "ledger", "verify", *one)
    monkeypatch.setenv("CONSILIUM_SILO_LEDGER_KEY", str(apart))
    monkeypatch.setenv("CONSILIUM_SILO_LEDGER", str(shared))
    answer(capsys, "ledger", "verify", "--home", str(Home(tmp_path / "third").make().path))
    monkeypatch.undo()
    (second / "ledger.json").write_text("{")
    fails(capsys, "E-BUDGET-11", 1, "ledger", "show", *two)


def test_a_lost_ledger_without_collections_cannot_be_restored_to_a_fresh_budget(capsys, tmp_path):
    place = Home(tmp_path / "home").make()
    place.attested.write_text(json.dumps(Attestation("", 12, "ab" * 32)))
    home = ["--home", str(place.path)]
    fails(capsys, "E-BUDGET-04", 1, "ledger", "restore", "--acknowledge-spend", *home)


def test_the_policy_is_shown_with_its_digest_and_checked_before_it_closes_the_hospital(capsys, tmp_path):
    place = Home(tmp_path / "home").make()
    home = ["--home", str(place.path)]
    assert answer(capsys, "policy", "show", *home)["privacy"]["rng"] == "secure"
    place.policy.write_text(
        "[runs]\nmethods = ['fedmr']\napprove = 'by hand'\n[budget.'center1/train']\nepsilon = 2\ndelta = 1e-5\n"
    )
    shown = answer(capsys, "policy", "show", *home)
    assert shown["runs"]["methods"] == ["fedmr"]
    assert shown["budgets"] == {"center1/train": [2.0, 1e-5]}
    assert answer(capsys, "policy", "check", *home) == {
        "file": str(place.policy),
        "digest": shown["digest"],
        "sound": True,
    }
    assert run(["policy", "show", *home]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["runs.leads"] == "any"
    assert said["prototypes.hidden"] == "none"
    draft = tmp_path / "draft.toml"
    for text in (
        "[runs]\nmethod = ['fedmr']\n",
        "[runs]\nmethods = 'fedmr'\n",
        "[privacy]\nrng = 'sure'\n",
        "[privacy]\nepsilon = -1\n",
        "[budget.a]\nepsilon = 1\n",
        "runs = 1\n",
        "x = = 1",
        "budget = 3\n",
    ):
        draft.write_text(text)
        fails(capsys, "E-POLICY-01", 1, "policy", "check", str(draft))


def test_a_hospital_approves_and_denies_by_id_or_name(capsys, tmp_path):
    place = enrolled(tmp_path / "home")
    home = ["--home", str(place.path)]
    store = SiloStore(place.database)
    assert run(["approve", *home]) == 0
    assert "No run waits for a decision" in capsys.readouterr().out
    assert store.approvals.ask("run-1", "a" * 64, "skin", "fedmr") is None
    assert [r["decided"] for r in answer(capsys, "approve", *home)["runs"]] == ["waits"]
    fails(capsys, "E-RUN-10", 2, "approve", "nobody", *home)
    assert answer(capsys, "approve", "skin", *home)["runs"][0]["decided"] == "approved"
    assert store.approvals.ask("run-1", "a" * 64, "skin", "fedmr") is True
    assert store.approvals.ask("run-1", "b" * 64, "skin", "fedmr") is None  # another manifest asks again
    assert answer(capsys, "approve", "run-1", "--deny", *home)["runs"][0]["decided"] == "denied"
    assert store.approvals.ask("run-1", "b" * 64, "skin", "fedmr") is False
    store.close_database()


def test_latest_is_the_only_run_that_waits_and_none_where_several_could_be_meant(capsys, tmp_path):
    """A coordinator that asks a moment before the operator types would choose what is approved."""
    place = enrolled(tmp_path / "home")
    home = ["--home", str(place.path)]
    assert "no run waits" in fails(capsys, "E-RUN-10", 2, "approve", "latest", *home)
    store = SiloStore(place.database)
    store.approvals.ask("run-1", "a" * 64, "skin", "fedmr")
    assert answer(capsys, "approve", "latest", *home)["runs"][0]["run"] == "run-1"
    store.approvals.ask("run-2", "b" * 64, "latest", "fedavg")  # a lead's choice of name
    store.approvals.ask("run-3", "c" * 64, "bone", "fedavg")
    assert "run-2, run-3" in fails(capsys, "E-RUN-10", 2, "approve", "latest", *home)
    assert answer(capsys, "approve", "bone", "--deny", *home)["runs"][0]["run"] == "run-3"
    assert answer(capsys, "approve", "latest", *home)["runs"][0]["run"] == "run-2"
    assert "no run waits" in fails(
        capsys, "E-RUN-10", 2, "approve", "latest", *home
    )  # and nothing that was decided changes
    found = {r["run"]: r["decided"] for r in answer(capsys, "approve", *home)["runs"]}
    assert found == {"run-1": "approved", "run-2": "approved", "run-3": "denied"}
    store.close_database()


def test_a_question_that_takes_the_id_or_the_name_of_another_is_not_approved_in_its_place(capsys, tmp_path):
    place = enrolled(tmp_path / "home")
    home = ["--home", str(place.path)]
    store = SiloStore(place.database)
    store.approvals.ask("run-1", "a" * 64, "skin", "fedmr")
    store.approvals.ask("run-1", "b" * 64, "skin", "the same run with another manifest")
    fails(capsys, "E-RUN-10", 2, "approve", "run-1", *home)
    store.approvals.ask("run-2", "c" * 64, "run-1", "fedavg")
    fails(capsys, "E-RUN-10", 2, "approve", "skin", *home)
    assert answer(capsys, "approve", "a" * 64, *home)["runs"][0]["about"] == "fedmr"
    assert {a.manifest_digest[0]: a.decided for a in store.approvals.all()} == {"a": True, "b": None, "c": None}
    store.close_database()


def test_the_commands_and_the_policy_of_the_budget_page_work_as_written(capsys, tmp_path):
    text = (Path(__file__).resolve().parents[3] / "docs/privacy/budget.md").read_text()
    place = enrolled(tmp_path / "home")
    (policy,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    place.policy.write_text(policy)
    lines = [
        line
        for block in re.findall(r'```sh { data-test="budget" }\n(.*?)```', text, re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(lines) == 8
    for line in lines:
        name, *words = shlex.split(line)
        assert name == "silo"
        assert run([*words, "--home", str(place.path)]) == 0, line
    assert "epsilon 8 at 1e-05" in capsys.readouterr().out
    written = Policy.parse(policy.encode())
    assert replace(written, digest="", budgets={}) == replace(Policy.parse(b""), digest="")
    assert written.budgets == {"skin/train": (4.0, 1e-5)}
