"""The lead's page over HTTP: what it shows, what its buttons do, and what no name makes of it."""

from __future__ import annotations

import html
import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from consilium.pages.lead import service_watch
from coordinator.lead.surveys import answers_of
from coordinator.storage.records import RunState
from fl_core.errors import UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import write_state
from tests.coordinator.lead import test_surveys
from tests.support import until
from tests.support.audit_log import entries
from tests.support.coordinator import World, running
from tests.support.federations import NAMES, manifest
from tests.support.made_up_service import MadeUpService
from tests.support.pages import Browser, opened, shown, shown_for
from tests.support.recorded_runs import SPEC, detail, measured, record_run

pytestmark = pytest.mark.integration

HOSTILE = "\x1b]0;x\x07\u202e</td><script>alert(1)</script>\u2066 =cmd|' \x00$\\frac{" + "y" * 3000


def hostile_detail(run_id: str) -> pb.RunDetail:
    """Everything that others write into a run is hostile, its id too."""
    rounds = measured([0.1, 0.2, 0.3])
    for r in rounds:
        r.noise.CopyFrom(pb.Noise(std=2.0, draws=1))
        r.included.append(HOSTILE)
        r.missing["south" + HOSTILE] = HOSTILE
        r.cut["east" + HOSTILE] = HOSTILE
        r.arrivals.append(pb.Arrival(silo=HOSTILE, bytes=3, at_unix=r.opened_unix + 1))
        r.by_hospital.append(pb.HospitalResult(silo=HOSTILE, correct=r.correct, examples=r.examples))
    spec = {**SPEC, "data": {"name": HOSTILE}, HOSTILE: HOSTILE}
    made = detail(run_id, rounds, spec, reason=HOSTILE, data=HOSTILE, model_object="a", model_digest=HOSTILE)
    made.info.name, made.info.method, made.info.state = HOSTILE, HOSTILE, "paused"
    made.info.excluded.append(HOSTILE)
    made.aggregator = HOSTILE
    classes = [HOSTILE, "b", "c", "d"]
    made.manifest_json = json.dumps({"schema": {"classes": classes}, "members": [{"name": HOSTILE}, {"name": "north"}]})
    awaited = pb.AwaitedSilo(name="west" + HOSTILE, left_s=5, classes=[HOSTILE])
    made.info.waiting.CopyFrom(pb.Waiting(round=2, there=1, needed=2, silos=[awaited], opened_unix=1.0))
    stated = pb.Attestation(policy_digest=HOSTILE, ledger_seq=2**63, ledger_head=HOSTILE)
    made.declarations.append(pb.Declaration(silo=HOSTILE, stated=stated))
    return made


@pytest.fixture(scope="module")
def lied_to(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    silo = pb.SiloInfo(name=HOSTILE, state="online", fingerprint=HOSTILE, software=HOSTILE, alarm=HOSTILE)
    silo.run_id = silo.policy_digest = HOSTILE
    silo.data.CopyFrom(pb.DataOffer(name=HOSTILE, classes=[HOSTILE] * 20))
    silos = pb.SiloList(silos=[silo], invitations=[pb.InvitationInfo(name=HOSTILE, expires_unix=9e9)])
    events = [pb.Event(number=k, kind="refused", round=2, silo=HOSTILE, text=HOSTILE) for k in range(1, 60)]
    service = MadeUpService(silos, [hostile_detail("run-1"), hostile_detail("run-2"), hostile_detail(HOSTILE)], events)
    with shown(service, tmp_path_factory.mktemp("lied") / "p") as (server, _):
        yield opened(server)


@pytest.mark.fault("a malicious service", "sends names with markup to the lead's page", "shown as escaped text")
@pytest.mark.parametrize(
    "path", ["/", "/runs/run-1", "/compare?a=run-1&b=run-2", "/compare", "/runs/" + "%3Cscript%3E"]
)
def test_no_name_brings_markup_or_an_invisible_character_into_a_page(lied_to: Browser, path: str) -> None:
    answer = lied_to.get(path)
    assert answer.status == (404 if "%3C" in path else 200)
    assert "<script>alert" not in answer.text
    for mark in ("\x1b", "\x07", "\x00", "\u202e", "\u2066"):
        assert mark not in answer.text
    if answer.status == 200:
        assert "&lt;script&gt;alert(1)" in answer.text
    assert len(answer.body) < 1_500_000


def test_hospitals_that_let_it_be_shown_stand_in_a_table_of_their_own(lied_to: Browser) -> None:
    page = lied_to.get("/runs/run-1").text
    assert "Results of the hospitals that allow it" in page
    assert "Cannot rank: 1 hospital with at least 10 test images" in page


def test_a_private_run_says_what_noise_keeps_from_being_measured(lied_to: Browser) -> None:
    assert "confusion matrix and calibration are not measured" in lied_to.get("/runs/run-1").text


def test_rounds_come_as_a_table_whose_texts_no_spreadsheet_computes(lied_to: Browser) -> None:
    answer = lied_to.get("/files/run-1/rounds.csv")
    assert answer.status == 200
    assert answer.header("content-disposition") == 'attachment; filename="run-1.csv"'
    lines = answer.text.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("round,kind,balanced_accuracy,balanced_accuracy low,balanced_accuracy high,accuracy,")
    assert not re.search(r"(^|,)\"?[=+@]", answer.text)


@pytest.mark.parametrize(
    "path",
    [
        "/files/run-1/model.safetensors",  # with a digest that is none
        "/files/nothing/rounds.csv",
        "/files/run-1/../../etc/passwd",
        "/files/run-1/%2e%2e%2fcoordinator.sqlite",
        "/files/run-1",
        "/files/run-1/card.md/x",
    ],
)
def test_only_files_of_known_runs_can_be_had(lied_to: Browser, path: str) -> None:
    assert lied_to.get(path).status in (404, 409)


def test_the_overview_says_of_how_many_classes_a_model_was_taught_and_tested(tmp_path: Path) -> None:
    made = detail("run-1", measured([0.1, 0.2]))
    made.info.coverage.CopyFrom(
        pb.ClassCoverage(classes=[*"abcd"], hospitals=[1, 3, 2, 0], least=1, tested=[5, 0, 9, 0])
    )
    with shown(MadeUpService(details=[made]), tmp_path / "p") as (server, _):
        assert "2 of 4 classes tested, 3 of 4 trained at 1 to 3 hospitals each" in opened(server).get().text


def test_the_service_away_the_page_says_since_when_and_shows_its_last_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_watch, "REFRESH_S", 0.0)
    service = MadeUpService(pb.SiloList(silos=[pb.SiloInfo(name="north", state="online")]))
    service.details = [detail("run-1", measured([0.1, 0.2]))]
    service.details[0].info.state = "paused"
    with shown(service, tmp_path / "p") as (server, _):
        browser = opened(server)
        assert "north" in browser.get().text
        assert "run-1" in browser.get("/runs/run-1").text
        service.error = UnavailableError("E-NET-01", "nobody listens there")
        for path, fact in (("/", "north"), ("/runs/run-1", "20.00 %")):
            text = browser.get(path).text
            assert "The coordinator has not answered since" in text
            assert re.search(r"You see its answers of <time datetime=\"\d{4}-", text)
            assert "nobody listens there" in text
            assert fact in text
        (form,) = browser.fields("/abort", "/runs/run-1")
        answer = browser.post("/abort", form)
        assert answer.status == 409
        assert "The coordinator does not answer, so nothing was done." in answer.text
        service.error = None
        assert "has not answered" not in browser.get().text


def test_a_page_can_be_opened_before_the_service_runs(tmp_path: Path) -> None:
    service = MadeUpService(error=UnavailableError("E-NET-01", "start it (coordinator serve)"))
    with shown(service, tmp_path / "p") as (server, _):
        text = opened(server).get().text
        assert "The coordinator does not answer" in text
        assert "coordinator serve" in text


# ---- against a service -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("page") / "home", NAMES) as made:
        assert made.server is not None
        record_run(made.server.store, "run-a", [0.1, 0.2, 0.3])
        record_run(made.server.store, "run-b", [0.1, 0.4, 0.5], spec={**SPEC, "train": {"lr": 0.5}})
        yield made


@pytest.fixture(scope="module")
def browser(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with shown_for(world.home, tmp_path_factory.mktemp("shown") / "p") as server:
        yield opened(server)


def failed(world: World, run_id: str) -> str:
    assert world.server is not None
    agreed = manifest(rounds=3)
    record_run(world.server.store, run_id, [0.1, 0.2], agreed=agreed, finished=False, reason="E-RUN-01: few are here")
    return run_id


def forms(browser: Browser, action: str, run: str) -> list[dict[str, str]]:
    browser.get("/")  # what was ordered a moment ago is asked for again
    return [{k: html.unescape(v) for k, v in form.items()} for form in browser.fields(action, f"/runs/{run}")]


def test_the_page_shows_what_the_service_says(world: World, browser: Browser) -> None:
    home = browser.get().text
    for words in ("run-a", "run-b", "north", "50.00 %", "lead (you)", "the authority"):
        assert words in home
    run = browser.get("/runs/run-b").text
    for words in ("Finished: balanced accuracy 50.00 %", "train.lr", "Round by round", '<svg role="img"', "3 of 3"):
        assert words in run
    compared = html.unescape(browser.get("/compare?a=run-a&b=run-b").text)
    assert "B ends" in compared
    assert "train.lr" in compared
    assert browser.get("/compare?a=run-a&b=nothing").status == 404
    assert "Choose runs to compare" in browser.get("/compare?a=run-a").text


def test_a_button_does_what_the_command_does_and_is_in_the_audit_log_as_the_lead(
    world: World, browser: Browser
) -> None:
    assert world.server is not None
    run = failed(world, "run-failed")
    (form,) = forms(browser, "/abort", run)
    answer = browser.post("/abort", form)
    assert (answer.status, answer.header("location")) == (303, f"/runs/{run}")
    assert world.run(run).state is RunState.ABORTED
    assert f"{run} is aborted" in browser.get(f"/runs/{run}").text
    said = [(entry.who, entry.about) for entry in entries(world.home) if entry.what == "Lead/Abort"]
    assert ("lead://test/lead", f"run_id={run}") in said


@pytest.mark.fault(
    "a coordinator's disk",
    "is full when a button of the lead's page is pressed",
    "nothing happens, and the page names the disk as the cause",
)
def test_on_the_services_full_disk_the_page_is_shown_and_a_button_orders_nothing_and_says_why(
    world: World, browser: Browser
) -> None:
    run = failed(world, "run-on-a-full-disk")
    (form,) = forms(browser, "/abort", run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))  # no file grows: what is written gets EFBIG
    try:
        answer = browser.post("/abort", form)
        shown = browser.get().text
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answer.status == 409
    assert "E-STATE-63" in answer.text
    assert run in shown
    assert world.run(run).state is RunState.FAILED
    (form,) = forms(browser, "/abort", run)
    assert browser.post("/abort", form).status == 303
    assert world.run(run).state is RunState.ABORTED


def test_a_button_does_nothing_once_the_run_is_another_than_was_shown(world: World, browser: Browser) -> None:
    assert world.server is not None
    run = failed(world, "run-changed")
    (form,) = forms(browser, "/resume", run)
    world.server.store.runs.end(run, RunState.ABORTED, "by another lead")
    answer = browser.post("/resume", form)
    assert answer.status == 409
    assert "Nothing was done" in answer.text
    assert world.run(run).state is RunState.ABORTED


def test_a_hospital_is_excluded_and_asked_again(world: World, browser: Browser) -> None:
    run = failed(world, "run-steered")
    form = next(f for f in forms(browser, "/exclude", run) if f["silo"] == "south")
    assert browser.post("/exclude", form).status == 303
    again = next(f for f in forms(browser, "/exclude", run) if f["silo"] == "south")
    assert again["readmit"] == "yes"
    assert browser.post("/exclude", {**form, "silo": "north"}).status == 409  # shown before south was excluded
    assert browser.post("/exclude", again).status == 303


@pytest.mark.parametrize("hours", ["", "nan", "inf", "-1", "0", "1e300", "x", "9" * 30])
def test_hours_that_are_none_are_refused(world: World, browser: Browser, hours: str) -> None:
    run = "run-hours"
    if run not in browser.get().text:
        failed(world, run)
    (form,) = forms(browser, "/resume", run)
    answer = browser.post("/extend", {**form, "hours": hours})
    assert answer.status == 409
    assert "E-CFG-02" in answer.text


@pytest.mark.parametrize("wrong", [{"token": "x"}, {"digest": "x"}, {"run": "nothing"}, {"run": "run-a"}])
def test_a_form_of_another_page_or_run_orders_nothing(world: World, browser: Browser, wrong: dict[str, str]) -> None:
    run = "run-kept"
    if run not in browser.get().text:
        failed(world, run)
    (form,) = forms(browser, "/abort", run)
    assert browser.post("/abort", {**form, **wrong}).status in (403, 409)
    assert world.run(run).state is RunState.FAILED


@pytest.mark.fault("a website", "sends the lead's page a form that ends a run", "refused; nothing happens")
def test_a_page_of_another_site_orders_nothing(world: World, browser: Browser) -> None:
    run = "run-kept"
    if run not in browser.get().text:
        failed(world, run)
    (form,) = forms(browser, "/abort", run)
    assert browser.post("/abort", form, Origin="http://evil.example").status == 403
    assert browser.post("/abort", form, Sec_Fetch_Site="cross-site").status == 403
    assert world.run(run).state is RunState.FAILED


def test_the_answers_to_a_survey_are_those_of_the_command_and_none_that_is_held_back_is_a_number(
    world: World, browser: Browser
) -> None:
    assert world.server is not None
    agreed = test_surveys.manifest()
    told = test_surveys.state(images={3: 0.0}, patients={3: 0.0}, held={3: 3.0})
    stored = world.server.objects.put_file(lambda file: write_state(told, file))
    record_run(world.server.store, "run-asked", [0.0, 0.0], agreed=agreed, model=stored)
    pages: list[str] = []

    def answered() -> bool:
        pages.append(browser.get("/runs/run-asked").text)
        return "Reading the answers" not in pages[-1]

    until(answered, seconds=60)
    (shown,) = re.findall(r'<section class="card" id="answers".*?</section>', pages[-1], re.DOTALL)
    for part in answers_of(agreed, told).parts():
        if isinstance(part, str):
            assert html.escape(part) in shown
            continue
        assert f"<h3>{part.title}</h3>" in shown
        for name, *cells in part.rows:
            row = re.search(rf"<th[^>]*>{re.escape(name)}</th>(.*?)</tr>", shown[shown.index(f"<h3>{part.title}") :])
            assert row
            assert re.findall(r"<td[^>]*>(.*?)</td>", row[1]) == cells
    assert re.search(r"<th[^>]*>3</th><td[^>]*>-</td><td[^>]*>-</td><td[^>]*>3 of 3</td>", shown)
    assert "How good the model is" not in pages[-1]


def test_a_survey_that_cannot_be_read_says_why(world: World, browser: Browser) -> None:
    assert world.server is not None
    record_run(world.server.store, "run-unread", [0.0, 0.0], agreed=test_surveys.manifest())
    until(lambda: "E-STATE-63: " in browser.get("/runs/run-unread").text, "why not", 60)
