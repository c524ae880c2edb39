"""A hospital whose images are in a PACS, at work: its service fetches, its worker reads."""

from __future__ import annotations

import csv
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members
from fl_core.types.records import Schema
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from protos.consilium.v1 import federation_pb2 as pb
from silo.cancellation import CancelToken
from silo.pacs import mirror
from silo.pacs.mirror import Mirror
from tests.support import until
from tests.support.caged_hospitals import Serving, programmed, started_in, uploaded
from tests.support.fake_coordinator import MEMBERS, Hospital, enrolled, manifest
from tests.support.pacs import FakePacs, dicom, pacs
from tests.support.privacy import SEEDED_POLICY

pytestmark = pytest.mark.integration
CLASSES = ("a", "b")


def images_run(**more: object) -> RunManifest:
    schema, model = Schema((3, 32, 32), CLASSES), NamedOptions("simple_cnn", {})
    made = manifest(data="manifest", schema=schema, model=model, image_size=32, rounds=3, layout={}, **more)
    built = build_model("simple_cnn", {}, schema, 3)
    return replace(made, layout=derive_layout(build_method("fedavg", {}), built, schema))


def private_run() -> RunManifest:
    members = make_members(MEMBERS, 3, 1.0, [100] * 3)
    return images_run(members=members, privacy=NamedOptions("dp_record", {"rng": "test", "epsilon": 8.0}))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FakePacs]:
    with pacs() as made:
        rows = ["AccessionNumber,diagnosis"]
        for k in range(60):
            facts = {"AccessionNumber": f"A{k}", "PatientID": f"P{k}", "Modality": "CT"}
            made.add(f"1.2.{k}", f"1.2.{k}.1", f"1.2.{k}.1.7", dicom(f"1.2.{k}.1.7", seed=k, shade=k % 2 * 90), **facts)
            rows.append(f"A{k},{'ab'[k % 2]}")
        (tmp_path / "labels.csv").write_text("\n".join(rows[:-10]))
        (tmp_path / "all.csv").write_text("\n".join(rows))
        yield made


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    programmed(monkeypatch)
    monkeypatch.setattr(mirror, "AGAIN_S", 0.05)
    monkeypatch.setattr(mirror, "FRESH_S", 0.0)
    with started_in(tmp_path) as serve:
        yield serve


def reference(source: FakePacs, folder: Path) -> str:
    return f"dicomweb:{source.url}?labels={folder}/labels.csv:diagnosis"


def frozen(hospital: Hospital, run_id: str) -> int:
    """Return how many images a run has."""
    served = hospital.service._pacs
    assert served is not None
    return len(Path(served.data(run_id).removeprefix("manifest:")).read_text().splitlines()) - 1


def test_a_run_on_the_pacs_sends_what_one_on_its_export_sends(
    tmp_path: Path, source: FakePacs, serving: Serving
) -> None:
    hospital = serving(images_run(), data=reference(source, tmp_path))
    hospital.train()
    exported = tmp_path / "export"
    exported.mkdir()
    listed = Path(hospital.service._pacs.data("run-1").removeprefix("manifest:"))
    with listed.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        uid = row["path"].removesuffix(".dcm")
        data = source.studies[uid.removesuffix(".1.7")].series[uid.removesuffix(".7")].instances[uid]
        (exported / row["path"]).write_bytes(data)  # type: ignore[arg-type]
    with (exported / "images.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("path", "label", "group", "split"), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    other = serving(images_run(), data=f"manifest:{exported / 'images.csv'}")
    other.train()
    assert uploaded(hospital) == uploaded(other)
    versions = [one.service.store.run_data.find("run-1").version for one in (hospital, other)]
    assert versions[0] == versions[1]


def test_the_registration_names_the_source_of_labels_by_its_digest_and_never_tells_it(
    tmp_path: Path, source: FakePacs, serving: Serving
) -> None:
    from silo.pacs.label_query import read_query

    hospital = serving(images_run(), data=reference(source, tmp_path))

    def declared() -> str:
        return str(hospital.service._declared_data().label_source)

    assert hospital.control.last.hello.data.label_source == declared()
    assert re.fullmatch("table:[0-9a-f]{16}", declared())
    hospital.service._settings = replace(hospital.service._settings, nominal_size=100)
    assert declared() == ""  # it follows from records, and a declared size says that nothing may
    hospital.stop()
    with closing(sqlite3.connect(tmp_path / "ris.db")) as db, db:
        db.execute("CREATE TABLE reports (AccessionNumber TEXT, diagnosis TEXT)")
        db.executemany("INSERT INTO reports VALUES (?, ?)", [(f"A{k}", "ab"[k % 2]) for k in range(60)])
    query = tmp_path / "query.toml"
    query.write_text(f"url = 'sqlite:///{tmp_path}/ris.db'\nquery = 'SELECT * FROM reports'\n")
    other = serving(images_run(), tmp_path / "other", data=f"dicomweb:{source.url}?labels={query}:diagnosis")
    said = f"query:{read_query(query).digest}"
    hello = other.control.last.hello
    assert hello.data.label_source == said
    assert b"reports" not in hello.SerializeToString()
    served, home = other.service._pacs, other.service._pacs.home
    ledger = Ledger(home.ledger)
    register(ledger, datasets.load(served.data()), "own", served.label_source)
    details = [json.loads(detail) for _, subject, state, detail, _ in ledger.events() if state == "REGISTERED"]
    assert {detail["labels"] for detail in details if detail["unit"] != "hospital"} == {said}
    home.policy.write_text("[secagg]\nrequire = true\n")
    assert other.service._declared_data().label_source == ""


def test_a_run_on_a_folder_with_labels_in_a_table_is_a_run_on_images(tmp_path: Path, serving: Serving) -> None:
    rows = ["number,diagnosis,PatientID"]
    for k in range(40):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / f"{k}.dcm").write_bytes(dicom(f"1.2.{k}", seed=k, shade=k % 2 * 90))
        rows.append(f"{k},{'ab'[k % 2]},P{k}")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    hospital = serving(images_run(), data=f"folder:{tmp_path}/images?labels={tmp_path}/table.csv:diagnosis&by=number")
    hospital.train()
    assert frozen(hospital, "run-1") == 40
    assert hospital.control.last.hello.data.name == "manifest"
    assert hospital.control.last.hello.data.label_source.startswith("table:")


def test_a_run_keeps_its_images_over_a_restart_and_the_next_run_has_the_newer_ones(
    tmp_path: Path, source: FakePacs, serving: Serving
) -> None:
    hospital = serving(images_run(), data=reference(source, tmp_path))
    hospital.train()
    hospital.settle()
    assert frozen(hospital, "run-1") == 50
    (tmp_path / "labels.csv").write_text((tmp_path / "all.csv").read_text())
    hospital.stop()
    hospital.start()
    hospital.offer(1)
    hospital.sent(2)
    hospital.run_id = "run-2"
    hospital.offer()
    hospital.sent(3)
    assert (frozen(hospital, "run-1"), frozen(hospital, "run-2")) == (50, 60)
    assert not [a for a in hospital.answers() if not a.accepted]


@pytest.mark.fault(
    "a hospital's PACS", "is offline when a run begins", "the run waits, both sides say why, and nothing is charged"
)
def test_a_run_that_begins_while_the_pacs_is_away_waits_and_both_sides_say_so(
    tmp_path: Path, source: FakePacs, serving: Serving
) -> None:
    hospital = serving(images_run(), data=reference(source, tmp_path))
    source.stop()
    hospital.offer()
    until(lambda: hospital.service.pulse().activity == pb.AWAITING_IMAGES)
    pulse = hospital.service.pulse()
    assert (pulse.done, pulse.total) == (0, 0)  # how many images there are is no business of the coordinator's
    until(lambda: any("waits for the PACS" in str(n.facts.get("waits")) for n in hospital.notices))
    assert "training" not in hospital.events()
    source.start()
    hospital.sent()
    assert frozen(hospital, "run-1") == 50


def test_a_run_that_waits_for_the_pacs_ends_at_once_when_it_is_aborted(
    tmp_path: Path, source: FakePacs, serving: Serving
) -> None:
    hospital = serving(images_run(), data=reference(source, tmp_path))
    source.stop()
    hospital.offer()
    until(lambda: any(n.event == "queue" for n in hospital.notices))
    hospital.control.last.send(run_ended=pb.RunEnded(run_id="run-1", state="aborted"))
    until(lambda: "stopped" in hospital.events(), seconds=30)


@pytest.mark.fault(
    "a hospital's PACS",
    "is offline in the middle of a private round",
    "the round continues with the fetched images, charged once",
)
def test_a_private_round_while_the_pacs_is_away_is_charged_once(
    tmp_path: Path, source: FakePacs, serving: Serving
) -> None:
    home, data = enrolled(tmp_path / "home"), reference(source, tmp_path)
    home.policy.write_text(f'{SEEDED_POLICY}labels = ["a", "b"]\n')
    served = Mirror.of(home, data)
    assert served is not None
    served.refresh(CancelToken(), lambda *_: None)
    ledger = Ledger(home.ledger)
    for collection in register(ledger, datasets.load(served.data()), "own"):
        ledger.set_budget(collection, 8.0, 1e-5, "dpo", "test")
    hospital = serving(private_run(), tmp_path / "home", data=data, nominal_size=100)
    hospital.service._pacs.prepare("run-1", CancelToken(), lambda *_: None)
    source.stop()
    hospital.train()
    states = [state for collection in ledger.collections() for _, state, _ in ledger.entries(collection)]
    assert states
    assert set(states) == {"SPENT"}
    assert len(ledger.entries("own/train")) == 1
    said = str(ledger.entries("own/train")) + str(ledger.collections())
    assert "P1" not in said


def test_a_password_that_is_wrong_refuses_the_run_and_tells_the_lead_no_detail(
    tmp_path: Path, source: FakePacs, serving: Serving
) -> None:
    hospital = serving(images_run(), data=reference(source, tmp_path))
    source.user = "somebody:else"
    hospital.offer()
    answer = hospital.refused()
    assert answer.code == "E-DATA-22"
    assert "127.0.0.1" not in answer.reason
    assert any("credentials=FILE" in n.text for n in hospital.notices)


def test_the_start_does_not_wait_for_a_pacs_that_is_away(tmp_path: Path, source: FakePacs, serving: Serving) -> None:
    source.stop()
    made = Hospital(tmp_path / "late", images_run(), run_round=None, data=reference(source, tmp_path))
    try:
        made.launch()
        until(lambda: any(n.event == "queue" for n in made.notices))
        source.start()
        until(lambda: made.control.sessions)
    finally:
        made.end()
