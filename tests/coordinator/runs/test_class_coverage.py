"""Which classes a run teaches is known before round 1, and said everywhere: over real gRPC, with real silos."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from consilium.model.model_file import load
from consilium.pages.lead.run_facts import headline
from consilium.report.lead import export
from coordinator.cli import evaluation
from coordinator.cli import runs as lead
from coordinator.config.hydra_config import compose_spec
from coordinator.lead.client import LeadClient
from coordinator.storage.records import RunState, StoredRun
from fl_core.errors import RefusedError
from fl_core.rounds.silo_round import SiloRound, run_silo_round
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.enums import TaskKind
from silo.reports.disclosure import disclosures_of
from tests.support import until
from tests.support.coordinator import World, online
from tests.support.federation import Hospital, hospitals

pytestmark = pytest.mark.integration

THREE = ("north", "east", "south")
"""Of p5c2, whose hospitals have two digits each and none that another has: four digits are at no hospital."""
WORDS = ("data=digits", "threads=1", "rounds=1", "train.epochs=1", "model=digits_linear")
FEW = ("method=fednh", *WORDS, "secagg.min_contributors=2")
"""Rows of classes that every hospital has alone: each would be left out."""
CLOSED_FORM = ("data=digits", "threads=1", "method=analytic", "model=random_features", "model.width=128")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, Hospital]]]:
    folder = tmp_path_factory.mktemp("three")
    with hospitals(folder, *THREE, data="digits/p5c2", policy="") as people:
        yield people.world, people.hospitals


def submitted(world: World, *words: str) -> StoredRun:
    return world.server.runs.submit(world.compose(compose_spec(words).to_json(), roster(world)), "{}", " ".join(words))


def roster(world: World):
    client = LeadClient.open(world.home)
    try:
        return list(client.silos().silos)
    finally:
        client.close()


def coverage(run: StoredRun) -> ClassCoverage:
    assert run.coverage is not None
    return ClassCoverage.of(run.coverage)


def told(world: World, run: StoredRun, kind: str = "classes") -> list[str]:
    return [e.text for e in world.server.store.runs.events_of(run.id, kind)]


@pytest.mark.parametrize("words", [CLOSED_FORM, ("method=fedavg", *WORDS), ("method=fednh", *WORDS)])
def test_a_masked_run_says_before_round_1_which_classes_one_hospital_has(three, words) -> None:
    world, sites = three
    run = world.finished(submitted(world, *words).id, 120)
    found = coverage(run)
    assert sorted(found.hospitals) == [0] * 4 + [1] * 6
    assert (found.masked, found.least, len(found.untaught)) == (True, 1, 4)
    (said,) = told(world, run)
    alone, nobody = said.split("\n")
    assert alone == f"{', '.join(found.alone)}: each trained at one hospital only; " + (
        "the coordinator reads this hospital's sums, but not its name"
    )
    assert nobody == f"{', '.join(found.untaught)}: at no hospital: the model cannot recognise them"
    assert not any(name in said for name in THREE)
    kinds = [e.kind for e in world.server.store.runs.events(run.id, 0)]
    assert kinds.index("classes") < kinds.index("accepted", kinds.index("census"))
    for site in sites.values():
        assert any(run.id in text and alone in text for text in site.told("census"))


def test_a_plain_run_says_the_same_from_the_answers_before_round_1(three) -> None:
    world, _ = three
    run = world.finished(submitted(world, "method=fedavg", *WORDS, "secagg=off").id, 120)
    found = coverage(run)
    assert sorted(found.hospitals) == [0] * 4 + [1] * 6
    assert (found.masked, found.partial) == (False, False)
    assert "the coordinator can read this hospital's update" in told(world, run)[0]


def test_a_run_that_would_leave_classes_out_asks_before_round_1_and_goes_on_when_the_lead_says_so(three) -> None:
    world, _ = three
    run = world.ended(submitted(world, *FEW).id, 120)
    assert (run.state, run.closed) == (RunState.PAUSED, 0)
    assert world.server.store.runs.rounds(run.id) == []
    assert world.server.store.runs.round(run.id, 0) is None
    found = coverage(run)
    assert len(found.left_out) == 6
    begin = f"E-RUN-53: every class must be at 2 hospitals or more, but these are at fewer: {found.left_out[0]}, "
    assert run.reason.startswith(begin)
    assert f"coordinator resume {run.id}" in run.reason
    assert "secagg.min_contributors=1" in run.reason
    world.server.runs.resume(run.id)
    done = world.finished(run.id, 120)
    assert coverage(done) == found
    assert len(told(world, done)) == 1


def test_after_a_restart_a_run_that_asked_still_waits_for_the_lead(three) -> None:
    world, _ = three
    run = world.ended(submitted(world, "method=fednh", *WORDS, "secagg.min_contributors=3").id, 120)
    world.server.runs.resume_all()
    assert world.run(run.id).state is RunState.PAUSED
    world.server.runs.abort(run.id)


def test_a_hospital_whose_policy_asks_for_more_refuses_before_round_1_with_both_numbers(three) -> None:
    world, sites = three
    sites["east"].policy("[secagg]\nmin_contributors = 3\n")
    try:
        run = world.ended(submitted(world, "method=fedproto", *WORDS).id, 120)
    finally:
        sites["east"].policy("")
    assert run.state is RunState.PAUSED
    assert "secagg.min_contributors of at least 3, found 1" in run.reason
    assert "start the run with secagg.min_contributors=3, or ask the hospital" in run.reason
    assert world.server.store.runs.round(run.id, 0) is None
    world.server.runs.abort(run.id)


def test_a_private_run_asks_no_record_and_says_that_it_is_not_known(three) -> None:
    world, _ = three
    words = ("method=fedavg", *WORDS, "privacy=dp_record", "privacy.rng=test")
    run = world.ended(submitted(world, *words).id, 120)  # no hospital has a ledger: it never begins
    assert run.coverage is None or not coverage(run).hospitals
    world.server.runs.abort(run.id)


def test_every_display_says_how_many_classes_were_trained_and_tested(
    three, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _ = three
    lead.run([*CLOSED_FORM], home=world.home, as_json=False)
    run = world.server.store.runs.find("latest")
    followed = " ".join(capsys.readouterr().out.split())
    over, taught = "over 6 of 10 classes", "6 of 10 classes tested, 6 of 10 trained at 1 hospital each"
    assert over in followed
    assert taught in followed
    untaught = coverage(run).untaught
    assert f"{', '.join(untaught)}: at no hospital: the model cannot recognise them" in followed
    lead.show(run.id, home=world.home)
    assert taught in " ".join(capsys.readouterr().out.split())
    client = LeadClient.open(world.home)
    try:
        info = client.show(run.id).info
    finally:
        client.close()
    head, below = headline(info, None)
    assert over in head
    assert taught in below
    export(run.id, out=tmp_path, home=world.home)
    card = " ".join((tmp_path / f"{run.id}.md").read_text().split())
    assert "The model was trained on 6 of 10 classes. It was not trained on" in card
    assert load(tmp_path / f"{run.id}.safetensors").facts.untaught == untaught
    signed = json.loads((tmp_path / f"{run.id}.card.json").read_text())["card"]
    assert {c["name"]: (c["trained_at"], c["taught"]) for c in signed["classes"]} == {
        name: (n, n > 0) for name, n in zip(coverage(run).classes, coverage(run).hospitals, strict=True)
    }
    page = " ".join((tmp_path / f"{run.id}.card.html").read_text().split())
    assert over in page
    assert "It was not trained on" in page


def test_an_evaluation_says_what_the_measured_model_was_taught(three) -> None:
    world, _ = three
    lead.run([*CLOSED_FORM, "seed=1"], home=world.home, as_json=True)
    parent = world.finished(world.server.store.runs.find("latest").id)
    evaluation.evaluate(parent.id, home=world.home)
    done = world.finished(world.server.store.runs.find("latest").id)
    assert done.parent == parent.id
    assert coverage(done).hospitals == coverage(parent).hospitals


class _AwayFromTheCensus:
    """A hospital that does every round but the census: it refuses it, or is silent until the coordinator gives up."""

    def __init__(self, silent: bool) -> None:
        self.silent, self.over, self.asked = silent, threading.Event(), 0

    def __call__(self, *task: object) -> SiloRound:
        if TaskKind.CENSUS not in task:
            return run_silo_round(*task)
        self.asked += 1
        if self.silent:
            assert self.over.wait(120)
        raise RefusedError("E-RUN-31", "the task failed at this silo")


@pytest.mark.parametrize("silent", [False, True])
def test_a_census_with_a_member_away_is_left_out_and_the_run_goes_on_and_says_not_known(
    three, capsys, round_clock, silent
) -> None:
    world, sites = three
    away = _AwayFromTheCensus(silent)
    sites["east"].stop()
    sites["east"].run_round = away
    sites["east"].start()
    until(online(world, "east"), "east")
    try:
        run = submitted(world, "method=fedavg", *WORDS, f"seed={2 + silent}", "deadline_s=20")
        if silent:
            until(lambda: away.asked, "the census at the hospital that is silent")
            round_clock.skip(20)
        until(lambda: told(world, run), "the classes", seconds=120)
        away.over.set()
        run = world.finished(run.id, 120)
    finally:
        away.over.set()
        sites["east"].stop()
        sites["east"].run_round = run_silo_round
        sites["east"].start()
        until(online(world, "east"), "east")
    assert away.asked >= 1
    assert coverage(run).hospitals == ()
    why = "not all hospitals were counted"
    unknown = f"the number of hospitals per class is unknown: {why}"
    assert told(world, run) == [unknown]
    assert world.server.store.secagg.census(run.id) is None
    assert set(world.server.store.runs.rounds(run.id)[0].record.included) == set(THREE)
    lead.show(run.id, home=world.home)
    assert unknown in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("answer", ["y\n", "n\n", None])
def test_a_run_in_a_terminal_asks_whether_to_go_on_without_classes(three, monkeypatch, capsys, answer) -> None:
    """None: nobody is at a terminal, so nobody is asked and the run waits."""
    world, _ = three

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return answer is not None

    monkeypatch.setattr(sys, "stdin", Terminal(answer or "y\n"))
    status = 0
    try:
        lead.run([*FEW], home=world.home)
    except typer.Exit as end:
        status = end.exit_code
    out, err = capsys.readouterr()
    run = world.server.store.runs.find("latest")
    asked = "Continue without these classes?" in out + err
    assert asked == (answer is not None)
    if answer == "y\n":
        assert (status, world.run(run.id).state) == (0, RunState.FINISHED)
        assert run.reason == ""
        return
    assert (status, run.state, run.closed) == (1, RunState.PAUSED, 0)
    assert f"coordinator resume {run.id}" in " ".join(out.split())
    world.server.runs.abort(run.id)


def test_hospitals_call_no_class_untaught_of_a_run_that_goes_on_from_another(three) -> None:
    """They counted this run alone; the coordinator knows the other's hospitals, too."""
    world, sites = three
    lead.run(["method=fedavg", *WORDS, "seed=9"], home=world.home, as_json=True)
    parent = world.finished(world.server.store.runs.find("latest").id)
    lead.run([], start_from=parent.id, home=world.home, as_json=True)
    run = world.finished(world.server.store.runs.find("latest").id)
    assert run.parent == parent.id
    for site in sites.values():
        kept = site.service.store.secagg.coverages()
        assert kept[parent.id] == coverage(parent)
        assert len(kept[parent.id].untaught) == 4
        assert kept[run.id].hospitals == coverage(run).hospitals
        assert (kept[run.id].partial, kept[run.id].untaught) == (True, ())
        assert not any("at no hospital" in line for line in disclosures_of(site.service.store).runs[0].classes)
