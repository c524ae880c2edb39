"""No noisy number passes for an accuracy in what the coordinator's commands print: tables, lines, cards, JSON."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from consilium.research.simulate.results import Result
from coordinator.api.messages import run_info
from coordinator.cli import runs as lead
from coordinator.lead.as_json import round_json, run_json
from coordinator.lead.watcher import Watcher
from coordinator.runs.run_facts import DerivedFacts
from fl_core.rounds.manifest import NamedOptions
from privacy.profiles import result_noise
from tests.support.cards import markdown_of
from tests.support.fake_coordinator import MEMBERS
from tests.support.privacy import private
from tests.support.recorded_runs import PERSONAL, SUMS, machine, truthful


@pytest.mark.parametrize("case", SUMS)
def test_the_leads_commands_withhold_what_noise_hides(case: str, run, capsys: pytest.CaptureFixture[str]) -> None:
    run(*SUMS[case])
    for command in (lead.show, lead.watch):
        command()
        truthful(capsys.readouterr().out)
        command(as_json=True)
        found = machine(capsys.readouterr().out, 6)
        assert {v for _, v in found} == {None}
    for listing in (lead.runs, lead.status):
        listing()
        truthful(capsys.readouterr().out, must_say=listing is lead.runs)
        listing(as_json=True)
        machine(capsys.readouterr().out, 6 if listing is lead.runs else 0)


@pytest.mark.parametrize("case", SUMS)
def test_json_of_a_run_says_that_it_is_withheld(case: str, run) -> None:
    made = run(*SUMS[case])
    for found in (run_json(made.detail.info), round_json(made.detail.rounds[0])):
        assert found["withheld"] is True
        assert found["accuracy_low"] is found["accuracy_high"] is None
    facts = run_json(made.detail.info)
    assert facts["global_accuracy"] is facts["best_global_accuracy"] is None
    assert facts["best_withheld"] is True
    closed = round_json(made.detail.rounds[0])
    assert closed["noise_std"] == pytest.approx(20 * math.sqrt(2 * len(MEMBERS)), rel=0.01)
    assert closed["withheld_scores"] == ["pa", "pm_l", "pm_v"]
    assert (made.detail.info.accuracy, made.detail.info.best_accuracy) == (-1, -1)  # what older clients read as none
    assert not set(made.detail.rounds[0].personal) & set(PERSONAL)


@pytest.mark.integration
@pytest.mark.parametrize("case", SUMS)
def test_live_progress_withholds_what_noise_hides(case: str, run) -> None:
    for terminal in (False, True):
        out = io.StringIO()
        watcher = Watcher(Console(file=out, force_terminal=terminal, width=300, markup=False))
        for e in run(*SUMS[case]).events:
            watcher.show(e)
        Console(file=out, width=300).print(watcher._display())
        truthful(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))


@pytest.mark.parametrize("case", SUMS)
def test_a_model_card_withholds_what_noise_hides(case: str, run) -> None:
    card = markdown_of(run(*SUMS[case]).detail)
    truthful(card)
    assert "Accuracy is withheld: noise larger than signal." in card
    by_class = card.partition("## By class")[2].partition("##")[0]
    cells = [[cell.strip() for cell in row.split("|")[2:4]] for row in by_class.splitlines() if row.startswith("|")][2:]
    assert cells
    assert all(row == ["withheld", "withheld: noise larger than signal"] for row in cells)  # and no noisy counts


def test_enough_signal_is_shown_with_its_interval_everywhere(run, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(7000.0, 10_000.0, personal=False)
    lead.show()
    text = capsys.readouterr().out
    truthful(text)
    assert "70.0 % (95 %:" in " ".join(text.split())
    facts = run_json(made.detail.info)
    assert facts["withheld"] is facts["best_withheld"] is False
    assert facts["global_accuracy"] == pytest.approx(0.7)
    assert facts["accuracy_low"] < 0.7 < facts["accuracy_high"]
    assert facts["best_accuracy_low"] < facts["accuracy_low"]  # the best of three is less certain than one
    assert made.detail.info.accuracy == pytest.approx(0.7)
    simulated = Result(made.manifest, result_noise(made.manifest), made.records, "d" * 64).summary()
    assert simulated["accuracy_by_round"] == [round_json(r)["accuracy"] for r in made.detail.rounds]
    assert (simulated["accuracy_low"], simulated["accuracy_high"]) == (facts["accuracy_low"], facts["accuracy_high"])


def test_a_published_test_set_is_shown_as_it_was_counted(run, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(70.0, 100.0, private(test_data="public"), personal=False)
    assert run_json(made.detail.info)["global_accuracy"] == 0.7
    lead.show()
    assert "70.00 %" in capsys.readouterr().out
    card = markdown_of(made.detail)
    assert "Accuracy: 70.0 % (95 %: 60.0 to 78.8 %)" in card  # of 100 counted examples, not of noise
    assert "noise of differential privacy" not in card


def test_a_plain_run_that_a_silo_lies_to_shows_no_impossible_share(run, capsys: pytest.CaptureFixture[str]) -> None:
    for sums in SUMS.values():
        if sums == (0.0, 0.0):
            continue
        run(*sums, replace(private(), privacy=NamedOptions("none")), personal=False)
        lead.show()
        truthful(capsys.readouterr().out, must_say=False)
        lead.show(as_json=True)
        machine(capsys.readouterr().out, 6)


def test_a_manifest_that_nobody_can_read_lists_its_run_and_withholds_its_numbers(run) -> None:
    made = run(70.0, 100.0)
    stored = replace(made.store.runs.get("r1"), manifest='{"format": 99}')
    info = run_info(stored, made.store)
    assert run_json(info)["withheld"] is True
    assert DerivedFacts.of(stored).noise.scores == {"pa", "pm_l", "pm_v"}
