"""A federation from Python: what `consilium.connect` gives a lead, over real gRPC, with real silos."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from sklearn.datasets import load_digits

import consilium
from consilium import ConfigError, FederationError, Lead, Run
from consilium.lead import listing
from consilium.lead import run as run_module
from consilium.report.signed_card import SignedCard
from coordinator.cli import evaluation
from coordinator.cli import runs as commands
from coordinator.cli.survey import survey
from coordinator.lead import tables
from coordinator.lead.client import ADDRESS_FILE
from coordinator.pki.authority import Authority
from coordinator.pki.leads import Leads
from fl_core.errors import RefusedError, StateError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import certificate_fingerprint
from tests.support import until
from tests.support.audit_log import entries
from tests.support.coordinator import World
from tests.support.federation import hospitals

pytestmark = pytest.mark.integration

THREE = ("north", "east", "south")
POLICY = '[evaluation]\nsend = "clinical"\nby_hospital = true\n[survey]\nallow = ["classes", "patients"]\n'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with hospitals(tmp_path_factory.mktemp("three")) as people:
        people.join(*THREE, data="digits/p3c4", policy=POLICY)
        yield people.world


@pytest.fixture(scope="module")
def lead(world: World) -> Iterator[Lead]:
    with consilium.connect(world.home) as connected:
        yield connected


@pytest.fixture(scope="module")
def run(lead: Lead) -> Run:
    """A run with the defaults of a real one."""
    return lead.run(method="analytic", data="digits").watch(quiet=True)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_from_python_is_that_of_the_command_with_its_digest_and_manifest(
    world: World, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.run(["method=analytic", "data=digits"], home=world.home, as_json=True)
    command = said(capsys)
    assert run.state == "finished"
    assert (run.digest, run.manifest.digest()) == (command["model_digest"], command["manifest_digest"])
    assert run.summary["global_accuracy"] == command["global_accuracy"] > 0.9


def test_keys_with_dots_nested_keys_and_lists_are_those_of_the_command(
    world: World, lead: Lead, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["method=fedgela", "data=digits", "model=digits_linear", "rounds=1", "train.epochs=1", "train.lr=0.5"]
    commands.run([*words, "silos=[north,east]", "threads=1"], home=world.home, as_json=True)
    same = {"rounds": 1, "train__epochs": 1, "train": {"lr": 0.5}, "silos": ["north", "east"], "threads": 1}
    made = lead.run("fedgela", data="digits", model="digits_linear", **same).watch(quiet=True)
    assert made.manifest.digest() == said(capsys)["manifest_digest"]
    assert [member.name for member in made.manifest.members] == ["east", "north"]


def test_the_audit_log_has_the_line_that_the_command_leaves(world: World, lead: Lead) -> None:
    def submitted() -> list[tuple[str, ...]]:
        lines = [one for one in entries(world.home) if one.what == "Lead/Submit"]
        return [(one.who, one.about.partition("=")[0], one.outcome, one.code) for one in lines]

    before = len(submitted())
    lead.run(method="analytic", data="digits").watch(quiet=True)
    commands.run(["method=analytic", "data=digits"], home=world.home, as_json=True)
    python, command = submitted()[before:]
    assert python == command == ("lead://test/lead", "request_id", "allowed", "")


def test_hospitals_are_objects_a_table_and_a_frame(lead: Lead) -> None:
    listed = lead.hospitals()
    assert sorted(hospital.name for hospital in listed) == sorted(THREE)
    assert all(hospital.online and hospital.data == "digits" for hospital in listed)
    assert all(name in repr(listed) and name in listed._repr_html_() for name in THREE)
    assert sorted(listed.to_frame().name) == sorted(THREE)
    assert set(listed.to_frame().state) == {"online"}


def test_runs_are_found_by_id_by_latest_and_in_a_list(lead: Lead, run: Run) -> None:
    assert lead.get(run.id).id == lead[run.id].id == run.id
    newest = lead["latest"]
    listed = lead.runs()
    assert listed[0].id == newest.id
    assert run.id in [one.id for one in listed]
    assert run.id in listed.to_frame().run.tolist()
    assert f"{run.id}: analytic, finished, 1 of 1 round" in repr(run)
    with pytest.raises(ConfigError, match="E-RUN-10"):
        lead.get("none-such")


def test_the_frame_is_that_of_a_simulation_with_the_same_measures(run: Run) -> None:
    frame, simulated = run.frame, consilium.simulate("analytic", "digits", "p3c4", seed=0)
    assert isinstance(frame, pd.DataFrame)
    assert frame.columns.tolist() == simulated.frame.columns.tolist()
    assert run.digest == simulated.digest
    shared = ["round", "measure", "class"]
    both = frame.merge(simulated.frame, on=shared, suffixes=("", " simulated"))
    last = both[both["round"] == 1]
    assert set(last.measure) >= {"accuracy", "balanced_accuracy", "class_accuracy", "macro_auc"}
    assert last.value.tolist() == pytest.approx(last["value simulated"].tolist(), nan_ok=True)


def test_without_pandas_the_frame_is_a_list_of_the_same_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run.frame.astype(object).where(run.frame.notna(), None).to_dict("records")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    assert run.frame == rows


def test_watching_shows_each_round_and_returns_the_run_when_it_ends(
    lead: Lead, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.watch() is run
    out = capsys.readouterr().out
    assert "closed" in out
    assert "finished" in out


def test_an_interrupt_leaves_the_run_going_and_says_how_to_come_back(
    lead: Lead, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "show_events", interrupted)
    with pytest.raises(KeyboardInterrupt, match=rf"lead\['{run.id}'\]\.watch\(\)"):
        run.watch()
    assert run.state == "finished"  # nothing was aborted


def test_a_run_is_aborted_and_says_so(lead: Lead) -> None:
    made = lead.run("fedgela", data="digits", model="digits_linear", rounds=500, threads=1)
    assert made.abort().state == "aborted"
    assert made.watch(quiet=True) is made


def test_a_lead_steers_a_run_and_withdraws_a_hospital_as_by_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hospitals(tmp_path) as people, consilium.connect(people.world.home) as lead:
        people.join(*THREE, data="digits/p3c4")
        home = people.world.home
        run = lead.run("fedavg", data="digits", model="digits_linear", rounds=500, threads=1, secagg="off", quorum=2)
        until(lambda: run.summary["closed"], "a round with an update of each")
        people.leave("south")
        until(lambda: "south" in str(run.summary["waiting"]) and "north" not in str(run.summary["waiting"]), "south")
        assert run.extend(1.5) is run
        commands.extend(run.id, 1.5, home=home, as_json=True)
        assert run.exclude("south") is run
        assert run.summary["excluded"] == said(capsys)["excluded"] + ["south"] == ["south"]
        commands.exclude(run.id, "south", readmit=True, home=home, as_json=True)
        assert run.summary["excluded"] == said(capsys)["excluded"] == []
        run.exclude("south")
        for wrong, code in ((lambda: run.exclude("nobody"), "E-RUN-05"), (lambda: run.extend(-1), "E-CFG-02")):
            with pytest.raises(FederationError) as caught:
                wrong()
            assert caught.value.code == code
        run.abort()
        for preview in (True, False):
            listed = lead.withdraw("north", preview=preview)
            commands.withdraw("north", preview=preview, home=home, as_json=True)
            (python,), (command,) = listed, json.loads(capsys.readouterr().out)
            assert {name for name in command if command[name] != python[name]} <= {"at", "statement", "signature"}
            assert listed.to_frame().run.tolist() == [run.id]
            assert f"{run.id} (aborted): updates of north" in repr(listed)
            assert "to train it again: coordinator run" in listed._repr_html_()
        with pytest.raises(ConfigError, match="E-RUN-05"):
            lead.withdraw("nobody")
        for call in ("Lead/Extend", "Lead/Exclude", "Lead/Withdraw"):
            lines = {(one.who, one.outcome) for one in entries(home) if one.what == call}
            assert ("lead://test/lead", "allowed") in lines
            assert {who for who, _ in lines} == {"lead://test/lead"}


def test_the_model_the_exported_file_and_the_command_answer_alike(
    lead: Lead, run: Run, world: World, tmp_path: Path
) -> None:
    files = run.export(tmp_path / "models", licence="Apache-2.0", intended_use="a test")
    model, loaded = run.model(), consilium.load(files.model)
    assert model.predictor.model.sha256 == loaded.predictor.model.sha256
    digits = load_digits()
    images = (digits.images[:200, None] / 16).astype("float32")
    assert (model.predict_proba(images) == loaded.predict_proba(images)).all()
    assert (model.predict(images).astype(int) == digits.target[:200]).mean() > 0.9
    signed = SignedCard.read(files.signed_card)
    card, _ = signed.verify(certificate_fingerprint(Authority.open(lead.home).ca_pem))
    assert card.licence == "Apache-2.0"
    assert files.card.read_text().startswith("---\nlicense: apache-2.0\n")
    assert card.files[files.model.name] == loaded.predictor.model.sha256
    assert run.card().facts.results == card.results
    assert run.id in str(run.card())
    (line,) = [one for one in entries(world.home) if one.what == "command export"]
    assert line.who.endswith(", Python")
    assert run.id in line.about


def test_an_evaluation_is_that_of_the_command(
    lead: Lead, run: Run, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = lead.evaluate(run, on=["north", "east"], by_hospital=True).watch(quiet=True)
    evaluation.evaluate(run.id, on="north,east", by_hospital=True, home=world.home, as_json=True)
    command = said(capsys)
    assert measured.manifest.digest() == command["manifest_digest"]
    assert set(measured.summary["round"][0]["by_hospital"]["hospitals"]) == {"north", "east"}
    assert measured.frame.query("measure == 'accuracy'").value.tolist() == [command["global_accuracy"]]


def test_a_survey_is_that_of_the_command_and_shows_as_tables(
    lead: Lead, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = lead.survey("classes", data="digits", secagg="off")
    survey(of=asked.run.id, home=world.home, as_json=True)
    command = said(capsys)
    assert json.loads(json.dumps(asked.answers.as_json())) == {k: command[k] for k in asked.answers.as_json()}
    assert asked.answers.hospitals == 3
    frame = asked.to_frame()
    assert frame.cell.tolist() == [str(k) for k in range(10)]
    assert "3 hospitals answered" in repr(asked)
    assert "<table>" in asked._repr_html_()
    assert lead.survey(of=asked.run).answers == asked.answers
    with pytest.raises(ConfigError, match="E-CFG-01: there is no question 'colour'"):
        lead.survey("colour", data="digits")


@pytest.mark.parametrize(
    ("keys", "code", "says"),
    [
        ({"learning_rate": 0.1}, "E-CFG-01", "train__lr"),
        ({"lr": 0.1}, "E-CFG-01", "train__lr"),
        ({"method": "fedmrr"}, "E-CFG-01", "did you mean method=fedmr"),
        ({"rounds": -1}, "E-CFG-02", "rounds"),
        ({"model": object()}, "E-CFG-02", "model: expected a name"),
        ({"data": "folder", "data__path": "/data"}, "E-CFG-23", "silo serve --data"),
        ({"method": "analytic", "data": "cifar10"}, None, "cifar10"),
    ],
)
def test_a_wrong_run_is_refused_as_the_command_refuses_it(
    lead: Lead, keys: dict[str, object], code: str | None, says: str
) -> None:
    before = len(lead.runs())
    with pytest.raises(FederationError, match=says) as caught:
        lead.run(**keys)
    assert code in (None, caught.value.code)
    assert len(lead.runs()) == before


# ---- who may not, and what is not there ------------------------------------------------------------------------------


def test_without_a_consortium_or_a_service_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"E-STATE-43.*coordinator init"):
        consilium.connect(tmp_path / "nothing")
    Authority.create(tmp_path / "home", "skin", ["127.0.0.1:8443"]).issue_lead("lead")
    with pytest.raises(UnavailableError, match=r"E-NET-01.*coordinator serve"):
        consilium.connect(tmp_path / "home")


def test_a_service_that_has_ended_is_said_to_be_away(world: World, tmp_path: Path) -> None:
    home = tmp_path / "home"
    Authority.create(home, "skin", ["127.0.0.1:8443"]).issue_lead("lead")
    about = json.loads((world.home / ADDRESS_FILE).read_text())
    (home / ADDRESS_FILE).write_text(json.dumps(about | {"port": 1}))
    with pytest.raises(FederationError, match=r"E-TLS-01.*coordinator serve"):
        consilium.connect(home)


def test_the_home_of_another_consortium_is_not_let_in(world: World, tmp_path: Path) -> None:
    home = tmp_path / "other"
    Authority.create(home, "other", ["127.0.0.1:8443"]).issue_lead("lead")
    shutil.copy(world.home / ADDRESS_FILE, home)
    with pytest.raises(FederationError, match="E-TLS-"):
        consilium.connect(home)


def test_a_lead_without_a_certificate_is_refused_and_a_revoked_one_too(world: World) -> None:
    with pytest.raises(ConfigError, match="E-ID-11"):
        consilium.connect(world.home, lead="nobody")
    assert world.server is not None
    leads = Leads(world.home, world.server.store)
    leads.add("anna")
    with consilium.connect(world.home, lead="anna") as anna:
        assert anna.identity.name == "anna"
        leads.revoke("anna", "has left")
        with pytest.raises(RefusedError, match="E-ID-12"):
            anna.run("analytic", data="digits")


def test_after_close_every_question_says_to_connect_again(world: World) -> None:
    lead = consilium.connect(world.home)
    lead.close()
    lead.close()
    for ask in (lead.hospitals, lead.runs, lead.get, lambda: lead.run("analytic", data="digits")):
        with pytest.raises(UnavailableError, match=r"consilium\.connect"):
            ask()
    assert "closed" in repr(lead)


def test_markup_in_what_others_say_is_escaped_in_notebooks() -> None:
    bad = "<script>alert(1)</script>"
    info = pb.RunInfo(run_id=bad, state=bad, method=bad, data=bad, reason=f"{bad}\n\x1b[31m", accuracy=-1)
    made = Run(None, info)  # type: ignore[arg-type]
    assert "<script" not in made._repr_html_()
    assert "\x1b" not in made._repr_html_() + repr(made)
    silo = pb.SiloInfo(name=bad, state=bad, software=bad)
    shown = listing.Listing([silo], [tables.silos_table([silo])], [])
    assert "<script" not in shown._repr_html_()
    assert "&lt;script&gt;" in shown._repr_html_()
