"""The forms that start runs: they do what the commands do, once, at the hospitals that were shown, and nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

from consilium.pages.lead.new_run import ServedData, again, command_of, words_of
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import build_manifest
from fl_core.errors import ConfigError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import write_state
from tests.consilium.pages.lead.test_pages import HOSTILE
from tests.support import until
from tests.support.audit_log import entries
from tests.support.coordinator import HELLO, Line, World, running
from tests.support.federations import NAMES
from tests.support.made_up_service import MadeUpService
from tests.support.pages import Browser, opened, shown, shown_for
from tests.support.recorded_runs import record_run

SERVED = {
    "digits": ServedData("digits", ("north", "south"), ("0", "1")),
    "folder": ServedData("folder", ("west",), ("it's (a)", "nevus")),
}


FORMS = [
    (
        {"kind": "survey", "data": "digits", "ask-images": "yes", "ask-classes": "yes"},
        ["classes", "images", "data=digits"],
    ),
    (
        {"kind": "analytic", "data": "digits", "epsilon": "8"},
        ["method=analytic", "data=digits", "privacy=dp_record", "privacy.epsilon=8"],
    ),
    (
        {
            "kind": "training",
            "data": "digits",
            "method": "fedmr",
            "rounds": "3",
            "model": "lenet",
            "more": "a=1 'b=c d'",
        },
        ["method=fedmr", "rounds=3", "data=digits", "model=lenet", "a=1", "b=c d"],
    ),
    (
        {"kind": "analytic", "data": "folder"},
        ["method=analytic", "data=folder", "data.classes=['it\\'s (a)',nevus]"],
    ),
    (
        {"kind": "analytic", "data": "folder", "classes": " nevus, mole ,"},
        ["method=analytic", "data=folder", "data.classes=[nevus,mole]"],
    ),
    ({"kind": "evaluation", "run": "a", "more": "secagg=off"}, ["secagg=off"]),
]


@pytest.mark.parametrize(("form", "words"), FORMS)
def test_a_form_becomes_the_words_of_the_command(form: dict[str, str], words: list[str]) -> None:
    assert words_of(form, SERVED) == words


def test_classes_that_hospitals_declare_are_the_classes_of_the_run() -> None:
    spec = compose_spec(words_of({"kind": "analytic", "data": "folder"}, SERVED))
    assert spec.data["classes"] == ["it's (a)", "nevus"]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "there is no kind ''"),
        ({"kind": "export"}, "there is no kind 'export'"),
        ({"kind": "survey", "data": "digits"}, "at least one question"),
        ({"kind": "analytic", "data": "cifar10"}, "there is no data 'cifar10'"),
        ({"kind": "training", "data": "digits", "method": "fedmrr", "rounds": "1"}, "did you mean 'fedmr'"),
        *(
            ({"kind": "training", "data": "digits", "method": "fedmr", "rounds": text}, "rounds: expected a number")
            for text in ("", "0", "nan", "1.5", "1e9", "-3", "x" * 99)
        ),
        *(
            ({"kind": "analytic", "data": "digits", "epsilon": text}, "epsilon: expected a number")
            for text in ("0", "nan", "inf", "-1", "a")
        ),
        ({"kind": "analytic", "data": "digits", "model": "../x"}, "expected the name of a model"),
        ({"kind": "analytic", "data": "digits", "more": "--detach"}, "settings like train.lr=0.01"),
        ({"kind": "analytic", "data": "digits", "more": "train.lr"}, "settings like train.lr=0.01"),
        ({"kind": "analytic", "data": "digits", "more": "-home=/etc"}, "settings like train.lr=0.01"),
        ({"kind": "analytic", "data": "digits", "more": "name='x"}, "an open quote"),
    ],
)
def test_what_no_form_of_ours_sends_is_refused(form: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        words_of(form, SERVED)
    assert said in str(refused.value)


def test_the_command_that_is_said_is_one_that_a_shell_takes() -> None:
    form = {"kind": "analytic", "data": "folder", "more": "'name=a b'"}
    assert command_of(form, SERVED) == (
        """coordinator run method=analytic data=folder 'data.classes=['"'"'it\\'"'"'s (a)'"'"',nevus]' 'name=a b'"""
    )


def test_what_was_typed_comes_back_and_neither_token_nor_digest() -> None:
    query = parse_qs(
        urlsplit(again({"kind": "analytic", "more": "a=b&c", "token": "t", "digest": "d", "x": "y"})).query
    )
    assert query == {"kind": ["analytic"], "more": ["a=b&c"]}


@pytest.mark.integration
@pytest.mark.fault(
    "a malicious service", "sends names with markup to the forms of the lead's page", "shown as escaped text"
)
def test_no_name_brings_markup_into_the_forms(tmp_path: Path) -> None:
    silo = pb.SiloInfo(name=HOSTILE, state="online", fingerprint=HOSTILE)
    silo.data.CopyFrom(pb.DataOffer(name=HOSTILE, classes=[HOSTILE] * 3))
    with shown(MadeUpService(pb.SiloList(silos=[silo])), tmp_path / "p") as (server, _):
        browser = opened(server)
        for path in ("/new", f"/new?kind=training&more={'%3Cscript%3Ealert(1)%22'}&rounds=%22%3E%3Cb%3E"):
            text = browser.get(path).text
            assert "<script>alert" not in text
            assert "<b>" not in text
            assert "\x1b" not in text


# ---- against a service -----------------------------------------------------------------------------------------------

DIGITS = pb.DataOffer(name="digits", classes=[*"0123456789"], nominal_size=100, holds=[*"0123456789"], masks=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patched:  # the service's own way from a configuration to a run
        patched.setattr(World, "compose", lambda _, spec, silos: build_manifest(spec, silos))
        with running(tmp_path_factory.mktemp("new") / "home", NAMES) as made:
            yield from connected(made)


def connected(made: World) -> Iterator[World]:
    hello = pb.Hello()
    hello.CopyFrom(HELLO)
    hello.data.CopyFrom(DIGITS)
    lines = [Line(made, name, hello) for name in NAMES]
    until(lambda: all("pulse" in line.kinds() for line in lines), "every session")
    yield made
    for line in lines:
        line.close()


@pytest.fixture(scope="module")
def browser(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with shown_for(world.home, tmp_path_factory.mktemp("shown") / "p") as server:
        yield opened(server)


def hidden(browser: Browser, kind: str) -> dict[str, str]:
    forms = browser.fields("/new", "/new")
    return next({k: html.unescape(v) for k, v in form.items()} for form in forms if form["kind"] == kind)


def started(world: World) -> list[str]:
    assert world.server is not None
    return [run.id for run in world.server.store.runs.all()]


CHOICES = {
    "survey": {"data": "digits", "ask-classes": "yes"},
    "analytic": {"data": "digits"},
    "training": {"data": "digits", "method": "fedavg", "rounds": "2"},
}


@pytest.mark.integration
@pytest.mark.parametrize("kind", CHOICES)
def test_a_form_starts_the_run_that_its_command_would_in_the_leads_name(
    world: World, browser: Browser, kind: str
) -> None:
    before = started(world)
    answer = browser.post("/new", {**hidden(browser, kind), **CHOICES[kind]})
    (run,) = set(started(world)) - set(before)
    assert (answer.status, answer.header("location")) == (303, f"/runs/{run}")
    assert sorted(world.run(run).members) == sorted(NAMES)
    page = html.unescape(browser.get(f"/runs/{run}").text)
    assert f"{run} was submitted. The same as a command: coordinator" in page
    said = [(entry.who, entry.what) for entry in entries(world.home) if entry.what == "Lead/Submit"]
    assert said[-1][0] == "lead://test/lead"


@pytest.mark.integration
def test_a_model_is_measured_and_a_file_is_none(world: World, browser: Browser) -> None:
    assert world.server is not None
    stored = world.server.objects.put_file(lambda file: write_state({"w": {"a": torch.zeros(2)}}, file))
    record_run(world.server.store, "measured-1", [0.1, 0.2], model=stored)
    until(lambda: "measured-1" in browser.get("/new").text, "a model to measure")
    form = hidden(browser, "evaluation")
    before = started(world)
    answer = browser.post("/new", {**form, "run": "./coordinator.sqlite"})
    assert "there is no run './coordinator.sqlite'" in html.unescape(browser.get(answer.header("location") or "").text)
    assert started(world) == before


@pytest.mark.integration
@pytest.mark.fault("a browser", "sends the form of a new run twice", "one run starts")
def test_a_form_that_is_sent_twice_starts_one_run(world: World, browser: Browser) -> None:
    form = {**hidden(browser, "analytic"), **CHOICES["analytic"]}
    before = started(world)
    first, second = browser.post("/new", form), browser.post("/new", form)
    assert first.header("location") == second.header("location")
    assert len(started(world)) == len(before) + 1


@pytest.mark.integration
@pytest.mark.fault(
    "a hospital", "joins or leaves while a lead fills in a form", "nothing starts, and the page says why"
)
def test_nothing_starts_at_hospitals_that_were_not_shown(world: World, browser: Browser) -> None:
    form, before = {**hidden(browser, "analytic"), **CHOICES["analytic"]}, started(world)
    answer = browser.post("/new", {**form, "digest": "0" * 64})
    assert answer.status == 409
    assert "Nothing was done" in answer.text
    assert started(world) == before


@pytest.mark.integration
@pytest.mark.parametrize(
    "wrong",
    [
        {"Origin": "http://evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Host": "evil.example"},
        {"Cookie": "consilium-1=x"},
    ],
)
@pytest.mark.fault("a website", "sends the lead's page a form that starts a run", "refused; nothing starts")
def test_another_site_starts_nothing(world: World, browser: Browser, wrong: dict[str, str]) -> None:
    form, before = {**hidden(browser, "analytic"), **CHOICES["analytic"]}, started(world)
    assert browser.post("/new", form, **wrong).status in (401, 403, 421)
    assert browser.post("/new", {**form, "token": "x"}).status == 403
    assert started(world) == before


@pytest.mark.integration
def test_what_is_refused_is_said_beside_the_form_which_keeps_what_was_typed(world: World, browser: Browser) -> None:
    form = {**hidden(browser, "training"), **CHOICES["training"], "rounds": "7", "more": "train.lrr=1"}
    before = started(world)
    answer = browser.post("/new", form)
    assert answer.status == 303
    page = html.unescape(browser.get((answer.header("location") or "").partition("#")[0]).text)
    assert "Nothing was started." in page
    assert "train.lr" in page
    assert 'value="7"' in page
    assert 'value="train.lrr=1"' in page
    assert started(world) == before
    odd = browser.post("/new", {**form, "request": "mine"})
    assert "reload the page" in html.unescape(browser.get((odd.header("location") or "").partition("#")[0]).text)
    assert started(world) == before


@pytest.mark.integration
def test_every_field_of_the_forms_has_a_label(browser: Browser) -> None:
    page = browser.get("/new").text
    ids = set(re.findall(r'<(?:select|input)[^>]* id="([^"]+)"', page))
    assert len(ids) > 10
    assert ids <= set(re.findall(r'<label for="([^"]+)"', page))
