"""A card from a run to the hospital's board: exported, given away, checked there, and what a liar would change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from consilium.report.card import Card
from consilium.report.lead import export
from consilium.report.signed_card import SignedCard
from coordinator.cli.main import program
from coordinator.cli.survey import survey_words
from coordinator.config.hydra_config import compose_spec
from coordinator.lead.client import LeadClient
from coordinator.pki.authority import Authority
from coordinator.pki.leads import Leads
from coordinator.storage.store import CoordinatorStore
from service_core.pki.identity import format_fingerprint
from silo.cli.main import run as silo
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.coordinator import enrolled
from tests.support.federation import hospitals

WORDS = ["method=fedmr", "data=digits", "rounds=2", "train.epochs=1", "model=digits_linear"]


def coordinator(*words: str) -> int:
    return program().run(words)


def settled(home: Path) -> bool:
    store = SiloStore(home / "silo.db")
    try:
        return all(task.included is not None for run in store.history() for task in run.tasks)
    finally:
        store.close_database()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A run of two hospitals, a survey that one of them answers, the exported model, and a member of neither."""
    folder = tmp_path_factory.mktemp("card")
    with hospitals(folder, "north", "south") as people:
        world = people.world
        policy = folder / "north" / "policy.toml"
        policy.write_text('[survey]\nallow = ["classes"]\n')
        policy.chmod(0o600)
        asked = []
        with closing(LeadClient.open(world.home)) as client:
            for words in (WORDS, survey_words(["classes", "data=digits"])):
                asked.append(client.submit(compose_spec(words).to_json(), words[0]).run_id)
                world.finished(asked[-1], 120)
        run, survey = asked
        enrolled(world, "west", folder / "west")
        told = {"intended_use": "sort digits", "licence": "CC0-1.0", "survey": survey}
        export(run, folder / "models", home=world.home, **told)
        until(lambda: all(settled(folder / name) for name in people.hospitals), "the hospitals' own records", 30)
        yield SimpleNamespace(folder=folder, home=world.home, run=run, survey=survey, models=folder / "models")


def copy(exported: SimpleNamespace, to: Path) -> Path:
    """Give the exported files to somebody; return the card among them."""
    shutil.copytree(exported.models, to)
    return to / f"{exported.run}.card.json"


def facts(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


@pytest.mark.integration
def test_a_hospital_verifies_a_card_by_its_pinned_authority_and_its_own_records(
    exported: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy(exported, tmp_path / "given")
    for given in (file, file.with_suffix(".html")):
        assert silo(["card", "verify", str(given), "--home", str(exported.folder / "north"), "--json"]) == 0
        found = facts(capsys)
        assert found["signed_by"] == "lead://test/lead"
        assert set(found["files"].values()) == {"the same"}
        assert set(found["files"]) == {f"{exported.run}.safetensors", f"{exported.run}.md"}
        assert found["own_records"]["own records"] == "2 of this hospital's updates are in the model"
        assert found["page"] == ("the same" if given.suffix == ".html" else None)
        assert (found["card"]["intended_use"], found["card"]["licence"]) == ("sort digits", "CC0-1.0")


def test_a_board_without_a_home_verifies_a_card_by_the_fingerprint_alone(
    exported: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, nowhere = copy(exported, tmp_path / "given"), str(tmp_path / "none")
    fingerprint = format_fingerprint(Authority.open(exported.home).fingerprint())
    assert silo(["card", "verify", str(file), "--home", nowhere, "--authority", fingerprint]) == 0
    said = capsys.readouterr().out
    assert said.startswith("signed by")
    assert "own records" not in said
    assert not Path(nowhere).exists()
    assert silo(["card", "verify", str(file), "--home", nowhere]) == 2  # nothing to hold it against
    assert silo(["card", "verify", str(file), "--home", nowhere, "--authority", "ab" * 32]) != 0
    assert "E-ID-10" in capsys.readouterr().err


def test_a_member_that_was_not_in_the_run_is_told_so_and_finds_no_contradiction(
    exported: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy(exported, tmp_path / "given")
    SiloStore(exported.folder / "west" / "silo.db").close_database()
    assert silo(["card", "verify", str(file), "--home", str(exported.folder / "west"), "--json"]) == 0
    assert facts(capsys)["own_records"] == {"own records": "no such run"}


@pytest.mark.fault(
    "a lead",
    "signs that a hospital sent updates of which the hospital has no record",
    "`silo card verify` reports the contradiction",
)
def test_a_lead_who_claims_other_updates_than_a_hospital_sent_is_contradicted(
    exported: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy(exported, tmp_path / "given")
    raw = dict(SignedCard.read(file).document)
    for rounds, manifest, name in ((1, "", "north"), (3, "", "north"), (2, "0" * 64, "north"), (2, "", "west")):
        lie = json.loads(json.dumps(raw))
        lie["hospitals"][0] |= {"rounds": rounds, "name": name}
        lie["run"]["manifest_digest"] = manifest or raw["run"]["manifest_digest"]
        own = Authority.open(exported.home).lead_credentials("lead")
        file.write_text(SignedCard.sign(Card.of(lie), own).to_json())
        assert silo(["card", "verify", str(file), "--home", str(exported.folder / name)]) == 1
        assert "the card differs from the records of this side" in capsys.readouterr().err


@pytest.mark.fault("an attacker", "changes the page of a card, or the model next to it", "`card verify` says which one")
def test_a_page_or_a_model_that_was_changed_is_named(
    exported: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy(exported, tmp_path / "given").with_suffix(".html")
    home = str(exported.folder / "north")
    file.write_text(file.read_text().replace("balanced accuracy", "balanced  accuracy"))
    assert silo(["card", "verify", str(file), "--home", home]) == 1
    assert "the page differs" in capsys.readouterr().err
    assert silo(["card", "write", str(file), "--home", home, "--out", str(tmp_path / "own")]) == 0
    assert silo(["card", "verify", str(tmp_path / "own" / file.name), "--home", home]) == 0
    model = file.with_name(f"{exported.run}.safetensors")
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert silo(["card", "verify", str(file.with_suffix(".json")), "--home", home]) == 1
    assert f"{model.name} is not the file that the card names" in capsys.readouterr().err


def test_documents_are_written_from_a_verified_card_and_from_no_other(
    exported: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = copy(exported, tmp_path / "given"), tmp_path / "documents"
    home = str(exported.folder / "south")
    changed = file.with_name("changed.json")
    changed.write_text(file.read_text().replace("sort digits", "sort moles"))
    assert silo(["card", "write", str(changed), "--home", home, "--out", str(out)]) != 0
    assert "E-ID-34" in capsys.readouterr().err
    assert not out.exists()
    assert silo(["card", "write", str(file), "--home", home, "--out", str(out)]) == 0
    assert {p.name.removeprefix(exported.run) for p in out.iterdir()} == {".card.html", ".dpia.md", ".annex-iv.md"}
    assert "“sort digits”" in (out / f"{exported.run}.dpia.md").read_text()
    assert (out / f"{exported.run}.card.html").read_text() == file.with_suffix(".html").read_text()


def test_a_card_repeats_what_hospitals_answered_and_what_one_held_back_is_not_zero(exported: SimpleNamespace) -> None:
    file = exported.models / f"{exported.run}.card.json"
    found = Card.of(json.loads(file.read_text())["card"])
    assert found.survey is not None
    assert (found.survey.run, found.survey.hospitals) == (exported.survey, 2)
    assert found.survey.members == ("north", "south")
    (answer,) = found.survey.answers
    assert {cell.held for cell in answer.cells} == {1}
    assert sum(cell.patients or 0 for cell in answer.cells) > 100
    page = file.with_suffix(".html").read_text()
    assert "2 of them took part in this run" in page
    assert "(withheld by 1 hospital)" in page
    assert "The coordinator does not know" not in page


def test_the_coordinator_says_whether_the_lead_is_in_force(
    exported: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy(exported, tmp_path / "given")
    assert coordinator("card", "verify", str(file), "--home", str(exported.home)) == 0
    assert capsys.readouterr().out.split()[-3:] == ["lead", "in", "force"]
    home = tmp_path / "copy"
    shutil.copytree(exported.home, home)
    with closing(CoordinatorStore(home)) as store:
        Leads(home, store).add("anna")
        own = Authority.open(home).lead_credentials("anna")
        raw = json.loads(json.dumps(SignedCard.read(file).document)) | {"written_by": "anna"}
        file.write_text(SignedCard.sign(Card.of(raw), own).to_json())
        Leads(home, store).revoke("anna", "has left")
    assert coordinator("card", "verify", str(file), "--home", str(home)) == 1
    assert "revoked: has left" in capsys.readouterr().out


def test_a_statement_that_is_no_line_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    for words in (["--intended-use", "a\nb"], ["--licence", "x" * 3000]):
        assert coordinator("export", "latest", "--home", str(tmp_path), *words) == 2
    assert list(tmp_path.iterdir()) == []
