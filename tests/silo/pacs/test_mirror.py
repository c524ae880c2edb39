from __future__ import annotations

import csv
import datetime
import errno
import io
import ipaddress
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fl_core import datasets
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import open_image
from fl_core.errors import ConfigError, DataError, FederationError, StateError, UnavailableError
from fl_core.label_table import LabelTable
from silo.cancellation import CancelledError, CancelToken
from silo.events import SiloEvent
from silo.pacs import dicomweb, mirror
from silo.pacs.mirror import Listed, Mirror
from silo.storage.home import Home
from silo.training.data_source import DataSource
from tests.support import until
from tests.support.pacs import FakePacs, dicom, pacs, send, send_object


def decoded_here(folder: Path, names: Any, caged: bool, stop: CancelToken) -> Iterator[tuple[str, str]]:
    """Decode without the seconds that a process takes; the process itself has a test below."""
    for name in names:
        try:
            open_image(folder / name)
            yield name, ""
        except UnreadableError as error:
            yield name, str(error)


@dataclass
class Bench:
    pacs: FakePacs
    folder: Path
    told: list[SiloEvent] = field(default_factory=list)
    rows: list[str] = field(default_factory=lambda: ["AccessionNumber,diagnosis"])

    def study(self, k: int, series: int = 1, label: str = "", **facts: str) -> None:
        known = {"AccessionNumber": f"A{k}", "PatientID": f"P{k}", "Modality": "CT"}
        for j in range(series):
            self.pacs.add(f"1.2.{k}", f"1.2.{k}.{j}", f"1.2.{k}.{j}.7", SeriesNumber=str(j), **{**known, **facts})
        self.rows.append(f"A{k},{label or 'ab'[k % 2]}")

    def mirror(self, patient: bool = False, **options: object) -> Mirror:
        (self.folder / "labels.csv").write_text("\n".join(self.rows))
        words = {"labels": f"{self.folder}/labels.csv:diagnosis", **options}
        reference = f"dicomweb:{self.pacs.url}?" + "&".join(f"{name}={value}" for name, value in words.items())
        made = Mirror.of(Home(self.folder / "home").make(), reference, emit=self.told.append, patient=patient)
        assert made is not None
        return made

    def listed(self, **options: object) -> Listed:
        return look(self.mirror(**options))

    def names(self, of: Mirror) -> list[str]:
        return [row["path"] for row in rows_of(of)]


def look(of: Mirror) -> Listed:
    return of.refresh(CancelToken(), lambda *_: None)


def rows_of(of: Mirror, run_id: str = "") -> list[dict[str, str]]:
    with Path(of.data(run_id).removeprefix("manifest:")).open(newline="") as file:
        return list(csv.DictReader(file))


def left_out(found: Listed) -> dict[str, tuple[str, str]]:
    with found.file.open(newline="") as file:
        return {row["name"]: (row["kind"], row["reason"]) for row in csv.DictReader(file)}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(mirror, "inspected", decoded_here)
    monkeypatch.setattr(mirror, "AGAIN_S", 0.01)
    with pacs() as made:
        yield Bench(made, tmp_path)


# ---- the list --------------------------------------------------------------------------------------------------------


def test_a_run_on_the_pacs_has_the_digest_of_one_on_its_export(bench: Bench, tmp_path: Path) -> None:
    for k in range(30):
        bench.study(k, series=1 + k % 3)
    served = bench.mirror()
    look(served)
    exported = tmp_path / "export"
    exported.mkdir()
    for study in bench.pacs.studies.values():
        for series in study.series.values():
            for uid, data in series.instances.items():
                (exported / f"{uid}.dcm").write_bytes(data)  # type: ignore[arg-type]
    rows = rows_of(served)
    with (exported / "images.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("path", "label", "group", "split"), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    versions = []
    for reference in (served.data(), f"manifest:{exported / 'images.csv'}"):
        source = DataSource(reference)
        source.load()
        versions.append(source.version())
    assert versions[0] == versions[1]
    assert len(rows) == sum(1 + k % 3 for k in range(30))


def test_what_is_fetched_is_for_its_owner_alone(bench: Bench) -> None:
    bench.study(1)
    look(served := bench.mirror())
    modes = {stat.S_IMODE(path.stat().st_mode) for path in served.folder.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(served.folder.stat().st_mode) == 0o700


def test_studies_are_chosen_by_modality_date_description_and_accession(bench: Bench, tmp_path: Path) -> None:
    bench.pacs.ignores_filters = True  # what a PACS returns beside what was asked for is not taken
    for k in range(8):
        day = f"202401{k + 1:02d}"
        bench.study(k, Modality="CT" if k % 2 else "MR", StudyDate=day, StudyDescription=f"Head {k % 2}")
    (tmp_path / "numbers").write_text("A1\nA5\n\n")
    assert bench.listed(modality="CT").images == 4
    assert bench.listed(modality="CT,MR").images == 8
    assert bench.listed(date="20240103-20240104").images == 2
    assert bench.listed(date="20240107-").images == 2
    assert bench.listed(date="20240107").images == 1
    assert bench.listed(description="head 1*").images == 4
    assert bench.listed(accession="A3").images == 1
    assert bench.listed(accessions=tmp_path / "numbers").images == 2


def test_of_several_series_a_declared_rule_takes_one(bench: Bench) -> None:
    bench.study(1)
    bench.pacs.add("1.2.1", "1.2.1.8", "1.2.1.8.1", SeriesNumber="0", SeriesDescription="Scout")
    bench.pacs.add("1.2.1", "1.2.1.9", "1.2.1.9.1", SeriesNumber="12", SeriesDescription="Lung thin")
    bench.pacs.add("1.2.1", "1.2.1.9", "1.2.1.9.2")
    first = bench.mirror(series="first")
    look(first)
    assert bench.names(first) == ["1.2.1.0.7.dcm"]
    largest = bench.mirror(series="largest")
    look(largest)
    assert bench.names(largest) == ["1.2.1.9.1.dcm", "1.2.1.9.2.dcm"]
    named = bench.mirror(series="description:lung*")
    look(named)
    assert bench.names(named) == bench.names(largest)
    assert bench.listed().images == 4


def test_joins_of_labels_are_counted_both_ways(bench: Bench) -> None:
    for k in range(4):
        bench.study(k)
    bench.rows.remove("A2,a")
    bench.rows += ["A77,a", "A78,b"]
    found = bench.listed()
    assert (found.images, found.unlabelled, found.unmet) == (3, 1, 2)
    assert "without a label, and not fetched: 1" in bench.told[-1].text
    assert "labels without an image: 2" in bench.told[-1].text
    assert not [path for path in bench.pacs.asked if path.startswith("/dicom-web/studies/1.2.2/")]


@pytest.mark.parametrize("key", ["StudyInstanceUID", "SeriesInstanceUID", "PatientID"])
def test_labels_are_joined_by_study_series_or_patient(bench: Bench, key: str) -> None:
    bench.study(1, series=2)
    bench.study(2)
    value = {"StudyInstanceUID": "1.2.1", "SeriesInstanceUID": "1.2.1.0", "PatientID": "P1"}[key]
    bench.rows = [f"{key},diagnosis", f"{value},a"]
    found = bench.listed()
    assert found.images == (1 if key == "SeriesInstanceUID" else 2)


def test_patients_come_from_the_table_else_from_the_tag_else_a_study_is_one(bench: Bench) -> None:
    bench.study(1)
    bench.study(2)
    del bench.pacs.studies["1.2.2"].facts["PatientID"]
    look(tagged := bench.mirror())
    assert [row["group"] for row in rows_of(tagged)] == ["P1", "study:1.2.2"]
    assert "1" in bench.told[-1].text.rpartition("counts as a patient: ")[2]
    bench.rows = ["AccessionNumber,PatientID,diagnosis", "A1,X,a", "A2,X,b"]
    look(named := bench.mirror())
    assert [row["group"] for row in rows_of(named)] == ["X", "X"]


def test_a_patient_stays_in_its_split_when_others_come(bench: Bench) -> None:
    for k in range(20):
        bench.study(k)
    look(served := bench.mirror())
    before = {row["path"]: row["split"] for row in rows_of(served)}
    for k in range(20, 60):
        bench.study(k)
    look(served := bench.mirror())
    after = {row["path"]: row["split"] for row in rows_of(served)}
    assert before.items() <= after.items()
    assert 4 < list(after.values()).count("test") < 24


def test_a_run_keeps_its_list_and_what_comes_later_is_the_next_runs(bench: Bench) -> None:
    bench.study(1)
    bench.study(2)
    served = bench.mirror()
    served.prepare("run-1", CancelToken(), lambda *_: None)
    began = served.data("run-1")
    bench.study(3)
    again = bench.mirror()  # the service was restarted
    again.prepare("run-1", CancelToken(), lambda *_: None)
    again.prepare("run-2", CancelToken(), lambda *_: None)
    assert again.data("run-1") == began
    assert len(rows_of(again, "run-1")) == 2
    assert len(rows_of(again, "run-2")) == 3
    assert [row["digest"] for row in rows_of(again, "run-1")] == [row["digest"] for row in rows_of(again, "run-2")][:2]


def test_images_that_no_list_has_are_removed_once_their_run_is_over(bench: Bench) -> None:
    bench.study(1)
    bench.study(2)
    served = bench.mirror()
    served.prepare("run-1", CancelToken(), lambda *_: None)
    del bench.pacs.studies["1.2.2"]
    served.refresh(CancelToken(), lambda *_: None, lambda run: True)
    assert (served.folder / "1.2.2.0.7.dcm").exists()
    served.refresh(CancelToken(), lambda *_: None, lambda run: False)
    assert not (served.folder / "1.2.2.0.7.dcm").exists()
    assert (served.folder / "1.2.1.0.7.dcm").exists()
    assert len(list(served.folder.glob("images-*.csv"))) == 1


def test_a_lost_file_of_a_run_is_fetched_again_and_another_object_is_no_substitute(bench: Bench) -> None:
    bench.study(1)
    bench.study(2)
    served = bench.mirror()
    served.prepare("run-1", CancelToken(), lambda *_: None)
    lost = [served.folder / f"1.2.{k}.0.7.dcm" for k in (1, 2)]
    for path in lost:
        path.unlink()
    bench.pacs.studies["1.2.2"].series["1.2.2.0"].instances["1.2.2.0.7"] = dicom("1.2.2.0.7", seed=99)
    served.prepare("run-1", CancelToken(), lambda *_: None)
    assert [path.exists() for path in lost] == [True, False]


def test_other_data_remove_the_images(bench: Bench) -> None:
    bench.study(1)
    look(served := bench.mirror())
    mirror.forget(served.home, but=served)
    assert served.listed
    mirror.forget(served.home, but=None)
    assert not served.folder.exists()


def test_images_fetched_once_are_not_fetched_again(bench: Bench) -> None:
    for k in range(5):
        bench.study(k)
    look(served := bench.mirror())
    look(bench.mirror())
    assert sum(path.endswith(".7") for path in bench.pacs.asked) == 5
    assert served.data() == bench.mirror().data()


def test_the_dictionary_of_labels_beside_the_table_holds(bench: Bench, tmp_path: Path) -> None:
    for k in range(24):
        bench.study(k)
    (tmp_path / "labels.toml").write_text('[labels]\na = "nevus"\nb = "melanoma"\n')
    look(served := bench.mirror())
    assert datasets.load(served.data()).schema.classes == ("melanoma", "nevus")


# ---- what a PACS does ------------------------------------------------------------------------------------------------


def test_empty_studies_missing_tags_and_broken_objects_are_named_left_out_and_counted(bench: Bench) -> None:
    for k in range(12):
        bench.study(k)
    bench.pacs.studies["1.2.0"].series.clear()
    bench.pacs.studies["1.2.1"].series["1.2.1.0"].instances.clear()
    for tag in ("PatientID",):
        del bench.pacs.studies["1.2.2"].facts[tag]
    del bench.pacs.studies["1.2.2"].series["1.2.2.0"].facts["Modality"]
    held = bench.pacs.studies
    held["1.2.3"].series["1.2.3.0"].instances["1.2.3.0.7"] = dicom("1.2.3.0.7", without="BitsStored")
    held["1.2.4"].series["1.2.4.0"].instances["1.2.4.0.7"] = dicom("1.2.4.0.7", without="PixelData")
    held["1.2.5"].series["1.2.5.0"].instances["1.2.5.0.7"] = b"\0" * 500
    held["1.2.6"].series["1.2.6.0"].instances["1.2.6.0.7"] = lambda request: send(request, 404)
    held["1.2.7"].series["1.2.7.0"].instances["1.2.7.0.7"] = lambda request: send(request, 500)
    found = bench.listed(modality="CT")
    assert found.images == 12 - 7
    assert found.left_out == {
        "studies without an image": 2,
        "objects that cannot be read": 3,
        "objects that the PACS lists but does not send": 2,
    }
    named = left_out(found)
    assert named["1.2.3.0.7"][1] == "DICOM without the attribute BitsStored: export it again"
    assert named["1.2.6.0.7"][1].endswith("(HTTP 404)")
    assert {"1.2.0", "1.2.1"} <= set(named)


def test_a_study_without_any_tag_but_its_numbers_is_read(bench: Bench) -> None:
    bench.study(1)
    study = bench.pacs.studies["1.2.1"]
    study.facts = {"StudyInstanceUID": "1.2.1"}
    study.series["1.2.1.0"].facts = {"SeriesInstanceUID": "1.2.1.0"}
    bench.rows = ["StudyInstanceUID,diagnosis", "1.2.1,a"]
    assert bench.listed(modality="CT", date="20240101", description="x", series="first").images == 1


def test_a_study_that_vanishes_while_it_is_listed_is_left_out(bench: Bench) -> None:
    bench.study(1)
    bench.study(2)
    bench.pacs.before = lambda request: "/studies/1.2.2/" in request.path and not send(request, 404)
    found = bench.listed()
    assert (found.images, found.left_out) == (1, {"studies that the PACS lists but does not send": 1})


def test_nothing_left_is_an_error_that_says_what_was_left_out(bench: Bench) -> None:
    bench.study(1)
    bench.pacs.studies["1.2.1"].series.clear()
    with pytest.raises(DataError, match=r"E-DATA-02.*1 studies without an image"):
        bench.listed()
    assert not bench.mirror().listed


def test_while_the_pacs_is_away_a_run_waits_and_says_for_what(bench: Bench) -> None:
    for k in range(3):
        bench.study(k)
    served = bench.mirror(patient=True)
    bench.pacs.stop()
    done = threading.Thread(target=served.prepare, args=("run-1", CancelToken(), lambda *_: None))
    done.start()
    until(lambda: any(e.event == "queue" for e in bench.told), seconds=30)
    assert "waits for the PACS" in str(bench.told[0].facts["waits"])
    assert bench.told[0].facts["code"] == "E-DATA-21"
    bench.pacs.start()
    done.join(60)
    assert len(rows_of(served, "run-1")) == 3
    assert [e.facts["waits"] for e in bench.told if e.event == "queue"][-1] == ""


def test_while_the_database_of_labels_is_away_a_run_waits_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.study(0)
    read, tries = mirror.read_labels, iter(range(9))

    def away(*words: Any) -> LabelTable:
        if next(tries) < 2:
            raise UnavailableError("E-DATA-21", "expected an answer of the database at db, found: none")
        return read(*words)

    monkeypatch.setattr(mirror, "read_labels", away)
    assert look(bench.mirror(patient=True)).images == 1
    waits = [str(e.facts["waits"]) for e in bench.told if e.event == "queue"]
    assert len(waits) == 2
    assert waits[0].startswith("waits for the database of labels: expected an answer of the database at db")
    assert waits[1] == ""


def test_a_pacs_that_dies_in_the_middle_of_the_list_and_of_an_object_loses_nothing(bench: Bench) -> None:
    for k in range(12):
        bench.study(k, series=2)
    bench.pacs.most = 3
    fail = iter(range(10**6))

    def every_fifth(request: Any) -> bool:
        if next(fail) % 5:
            return False
        if "/instances/" in request.path:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/dicom\r\nContent-Length: 9999\r\n\r\n"
            request.wfile.write(head + b"half")
        request.close_connection = True
        return True

    bench.pacs.before = every_fifth
    served = bench.mirror(patient=True)
    found = look(served)
    assert (found.images, found.left_out) == (24, {})


def test_a_pacs_that_is_busy_is_asked_again_also_by_a_command(bench: Bench) -> None:
    for k in range(3):
        bench.study(k)
    number, busy = iter(range(10**6)), (408, 429)

    def seldom(request: Any) -> bool:
        turn = next(number)
        return turn % 5 < 4 and not send(request, busy[turn % 2])  # more often than one object is asked for

    bench.pacs.before = seldom
    found = bench.listed()
    assert (found.images, found.left_out) == (3, {})


def hangs_up(request: Any) -> bool:
    request.close_connection = True
    return True


@pytest.mark.fault(
    "a hospital's PACS",
    "answers with an error for one object, series or study again and again",
    "only this one is left out and listed, after three tries",
)
@pytest.mark.parametrize("patient", [True, False])
def test_what_alone_gets_an_error_is_left_out_and_holds_up_nothing_else(bench: Bench, patient: bool) -> None:
    for k in range(6):
        bench.study(k, series=2)
    wrong = {
        "/studies/1.2.1/series": "studies that the PACS lists but does not send",
        "/series/1.2.2.1/instances": "series that the PACS lists but does not send",
        "/instances/1.2.3.0.7": "objects that the PACS lists but does not send",
        "/instances/1.2.4.1.7": "objects that the PACS lists but does not send",
    }

    def before(request: Any) -> bool:
        place = request.path.partition("?")[0]
        if not place.endswith(tuple(wrong)):
            return False
        return hangs_up(request) if "1.2.3" in place else not send(request, 503)

    bench.pacs.before = before
    found = look(bench.mirror(patient=patient))
    assert found.images == 12 - 2 - 1 - 2
    named = left_out(found)
    assert {name: named[name][0] for name in ("1.2.1", "1.2.2.1", "1.2.3.0.7", "1.2.4.1.7")} == dict(
        zip(("1.2.1", "1.2.2.1", "1.2.3.0.7", "1.2.4.1.7"), wrong.values(), strict=True)
    )
    assert "asked 3 times" in named["1.2.4.1.7"][1]
    for place in wrong:
        asked = [path for path in bench.pacs.asked if path.partition("?")[0].endswith(place)]
        assert mirror.TRIES <= len(asked) <= 2 * mirror.TRIES  # a connection that was hung up is opened once more
    assert not [e for e in bench.told if e.event == "queue"]


@pytest.mark.parametrize("away", [True, False])
def test_the_time_for_a_list_counts_only_while_the_pacs_answers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    for k in range(4):
        bench.study(k)
    clock, number = [0.0], iter(range(10**6))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return clock[0]

    monkeypatch.setattr(dicomweb, "time", Clock)

    def hours_later(request: Any) -> bool:
        if next(number) in (2, 3):  # twice: a connection that was hung up is opened once more
            clock[0] += 7 * 3600
            return away and hangs_up(request)
        return False

    bench.pacs.before = hours_later
    served = bench.mirror(patient=True)
    if away:
        assert look(served).images == 4
    else:
        with pytest.raises(ConfigError, match=r"E-DATA-22.*more than 6 hours"):
            look(served)


def test_a_pacs_that_never_ends_its_greeting_is_cut_off_when_the_service_stops(bench: Bench) -> None:
    bench.study(1)
    served, stop, ended = bench.mirror(patient=True), CancelToken(), list[BaseException]()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"dicomweb:https://127.0.0.1:{silent.getsockname()[1]}/?labels={bench.folder}/labels.csv:diagnosis"
        other = Mirror.of(served.home, address)
        assert other is not None

        def run() -> None:
            try:
                other.refresh(stop, lambda *_: None)
            except CancelledError as error:
                ended.append(error)

        looking = threading.Thread(target=run)
        looking.start()
        accepted, _ = silent.accept()
        with accepted:
            assert accepted.recv(1)  # the greeting of TLS has begun
            stop.cancel("the service is stopped")
            looking.join(20)
    assert len(ended) == 1


def test_a_run_that_waits_for_a_pacs_can_be_given_up(bench: Bench) -> None:
    bench.pacs.stop()
    stop, ended = CancelToken(), list[BaseException]()

    def wait() -> None:
        try:
            bench.mirror(patient=True).prepare("run-1", stop, lambda *_: None)
        except CancelledError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: bench.told, seconds=30)
    stop.cancel("the run was aborted")
    waiting.join(20)
    assert len(ended) == 1


def test_a_command_does_not_wait_for_a_pacs_that_is_away(bench: Bench) -> None:
    bench.pacs.stop()
    with pytest.raises(UnavailableError, match=r"E-DATA-21.*refused"):
        bench.listed()


def test_a_full_disk_is_said_as_such_and_no_pacs_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.study(1)

    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    served = bench.mirror(patient=True)
    monkeypatch.setattr(mirror, "_private", lambda path: Full())
    with pytest.raises(UnavailableError, match="E-STATE-63"):
        look(served)
    assert bench.told == []


def test_the_newest_list_is_that_of_the_last_look_whatever_the_clock_says(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.study(1)
    look(served := bench.mirror())
    bench.study(2)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    look(served := bench.mirror())
    assert len(rows_of(served)) == 2
    del bench.pacs.studies["1.2.2"]
    look(served := bench.mirror())
    assert len(rows_of(served)) == 1


def test_images_that_were_removed_by_hand_are_fetched_again_at_the_start(bench: Bench) -> None:
    bench.study(1)
    look(bench.mirror())
    (bench.mirror().folder / "1.2.1.0.7.dcm").unlink()
    bench.mirror().prepare("", CancelToken(), lambda *_: None)
    assert (bench.mirror().folder / "1.2.1.0.7.dcm").exists()
    assert bench.pacs.asked[-1].endswith("/instances/1.2.1.0.7")


@pytest.mark.fault(
    "a hospital's PACS",
    "is offline at a start, and images of the newest list are lost",
    "the service starts and says so; a run fetches them",
)
def test_a_start_waits_for_no_pacs_where_there_is_a_list(bench: Bench) -> None:
    bench.study(1)
    look(bench.mirror())
    served = bench.mirror(patient=True)
    lost = served.folder / "1.2.1.0.7.dcm"
    lost.unlink()
    bench.pacs.stop()
    served.prepare("", CancelToken(), lambda *_: None)
    assert not lost.exists()
    assert [e.event for e in bench.told if "fetched when a run needs them" in e.text] == ["pacs"]
    bench.pacs.start()
    served._looked = time.monotonic()  # a run that begins before the list is old
    served.prepare("run-1", CancelToken(), lambda *_: None)
    assert lost.exists()


def test_files_of_others_beside_the_images_end_nothing(bench: Bench) -> None:
    bench.study(1)
    look(served := bench.mirror())
    (served.home.pacs / "notes.txt").write_text("mine")
    (served.home.pacs / "export").mkdir()
    (served.folder / "notes.txt").write_text("mine")
    (served.home.pacs / "lost").symlink_to("nowhere")
    look(served)
    mirror.forget(served.home, but=None)
    assert sorted(path.name for path in served.home.pacs.iterdir()) == ["export", "lost", "notes.txt"]


def test_images_and_lists_are_on_the_disk_before_they_have_their_names(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.study(1)
    served, steps, replace = bench.mirror(), list[str](), Path.replace
    monkeypatch.setattr(mirror, "sync_path", lambda path: steps.append(f"sync {path.name}"))
    monkeypatch.setattr(Path, "replace", lambda self, to: (steps.append(f"name {to.name}"), replace(self, to))[1])
    look(served)
    place, listed = served.folder.name, Path(served.data()).name
    image = "1.2.1.0.7.dcm"
    assert steps[:3] == [f"sync .{image}.part", f"name {image}", f"sync {place}"]
    assert steps[3:] == ["sync .list.part", f"name {listed}", f"sync {place}"]


def test_images_are_decoded_in_a_cage_unless_somebody_says_otherwise(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.study(1)
    caged = list[bool]()
    monkeypatch.setattr(
        mirror, "inspected", lambda folder, names, must, stop: (caged.append(must), ((n, "") for n in names))[1]
    )
    look(bench.mirror())
    assert caged == [True]


# ---- a hostile PACS --------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "a hospital's PACS", "redirects to another server", "refused with E-DATA-22; the password is not sent"
)
def test_a_redirect_is_refused_and_the_password_goes_nowhere_else(bench: Bench, tmp_path: Path) -> None:
    bench.study(1)
    password = _password(tmp_path)
    with pacs() as other:
        bench.pacs.before = lambda request: not send(request, 302, Location=other.url)
        with pytest.raises(ConfigError, match=r"E-DATA-22.*redirects to 127\.0\.0\.1"):
            bench.listed(credentials=password)
        assert other.asked == []
    for place in ("https://[::1", "", "\x1b[31m//x", "https://" + "a" * 5000):
        bench.pacs.before = lambda request, place=place: not send(request, 307, Location=place)
        with pytest.raises(ConfigError, match=r"E-DATA-22.*redirects") as refused:
            bench.listed()
        assert "\x1b" not in str(refused.value)


@pytest.mark.fault(
    "a hospital's PACS",
    "lists identifiers that are paths",
    "left out and listed; no file or request is derived from them",
)
def test_numbers_that_are_paths_reach_no_file_and_no_request(bench: Bench, tmp_path: Path) -> None:
    bench.study(1)
    evil = ["../../../../evil", "/etc/passwd", "..", "", "1.2.x", "1" * 65, "1.2\n3"]
    for uid in evil:
        bench.pacs.studies["1.2.1"].series["1.2.1.0"].instances[uid] = dicom("1.2.9")
        bench.pacs.add(uid, uid, "1.3.1", AccessionNumber="A1")
        bench.pacs.add("1.2.1", uid, "1.3.2")
    before = sorted(path for path in tmp_path.rglob("*") if "home" not in path.parts)
    found = bench.listed()
    assert found.images == 1
    assert found.left_out["objects without a valid number"] >= 4
    assert [p for p in bench.pacs.asked if "evil" in p or "passwd" in p] == []
    after = sorted(path for path in tmp_path.rglob("*") if "home" not in path.parts)
    assert [path for path in after if path not in before] == [tmp_path / "labels.csv"]


def test_what_is_listed_twice_is_taken_once(bench: Bench) -> None:
    bench.study(1, series=2)
    bench.pacs.add("1.2.1", "1.2.1.1", "1.2.1.0.7")
    found = bench.listed()
    assert (found.images, found.left_out) == (2, {"objects listed twice": 1})


def test_a_page_that_comes_for_ever_is_read_once(bench: Bench) -> None:
    for k in range(150):
        bench.study(k)
    bench.pacs._page = lambda request, rows, query: send(  # type: ignore[method-assign]
        request,
        200,
        json.dumps([{"0020000D": {"Value": [f"1.2.{k}"]}} for k in range(150)]).encode(),
        "application/dicom+json",
    )
    with pytest.raises(DataError, match="E-DATA-02"):
        bench.listed()
    assert len(bench.pacs.asked) == 2


@pytest.mark.fault("a hospital's PACS", "lists endless results", "refused with E-DATA-22 after a million results")
def test_results_without_end_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dicomweb, "MAX_RESULTS", 2000)
    count = iter(range(10**9))
    bench.pacs._page = lambda request, rows, query: send(  # type: ignore[method-assign]
        request,
        200,
        json.dumps([{"0020000D": {"Value": [f"1.2.{next(count)}"]}} for _ in range(200)]).encode(),
        "application/dicom+json",
    )
    with pytest.raises(ConfigError, match=r"E-DATA-22.*more than 2000 results"):
        bench.listed()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'[1, null, "x", {}, {"0020000D": 7}, {"0020000D": {"Value": [{}]}}]',
    ],
)
def test_an_answer_of_any_bytes_is_no_crash(bench: Bench, body: bytes) -> None:
    bench.study(1)
    bench.pacs.before = lambda request: not send(request, 200, body, "application/dicom+json")
    with pytest.raises((ConfigError, DataError)):
        bench.listed()


def _endless(request: Any, start: bytes, block: bytes = b"x" * 65536) -> None:
    request.wfile.write(start)
    while True:
        request.wfile.write(block)


@pytest.mark.fault(
    "a hospital's PACS",
    "sends an endless answer, or more than requested",
    "cut off: an object is left out and listed, a list is refused",
)
@pytest.mark.parametrize("level", ["list", "object", "multipart", "zipped"])
def test_an_answer_without_end_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(dicomweb, "PAGE_BYTES", 1 << 20)
    monkeypatch.setattr(dicomweb, "OBJECT_BYTES", 1 << 20)
    bench.study(1)
    bench.study(2)
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: "
    if level == "list":
        bench.pacs.before = lambda request: _endless(request, head + b"application/dicom+json\r\n\r\n[") is None
        with pytest.raises(ConfigError, match=r"E-DATA-22.*more than 1 MiB"):
            bench.listed()
        return
    starts = {
        "object": head + b"application/dicom\r\n\r\n",
        "multipart": head + b'multipart/related; boundary="b"\r\n\r\n--b\r\n\r\n',
        "zipped": head + b"application/dicom\r\nContent-Encoding: gzip\r\n\r\n",
    }
    held = bench.pacs.studies["1.2.2"].series["1.2.2.0"].instances
    held["1.2.2.0.7"] = lambda request: _endless(request, starts[level])
    found = bench.listed()
    assert (found.images, sum(found.left_out.values())) == (1, 1)
    why = left_out(found)["1.2.2.0.7"][1]
    assert why == ("compressed by HTTP, which the request did not allow" if level == "zipped" else "more than 1 MiB")


@pytest.mark.parametrize(
    "body", [b"", b"--b\r\n\r\nabc", b"--b", b"\r\n\r\n\r\n--b", b"x" * 100_000, b"--other\r\n\r\nabc\r\n--other--"]
)
def test_a_multipart_answer_that_is_none_is_left_out(bench: Bench, body: bytes) -> None:
    bench.study(1)
    bench.study(2)
    held = bench.pacs.studies["1.2.2"].series["1.2.2.0"].instances
    held["1.2.2.0.7"] = lambda request: send(request, 200, body, "multipart/related; boundary=b")
    assert (bench.listed().images, bench.listed().left_out) == (1, {"objects that the PACS lists but does not send": 1})


def test_an_answer_that_drips_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dicomweb, "RESPONSE_S", 0.5)
    bench.study(1)
    bench.study(2)

    def drip(request: Any) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/dicom\r\n\r\n")
        while True:
            request.wfile.write(b"x")
            time.sleep(0.02)

    bench.pacs.studies["1.2.2"].series["1.2.2.0"].instances["1.2.2.0.7"] = drip
    found = bench.listed()
    assert found.images == 1
    assert "cut off" in left_out(found)["1.2.2.0.7"][1]


def test_more_bytes_than_the_cache_may_have_are_refused(bench: Bench) -> None:
    for k in range(4):
        bench.study(k)
        uid = f"1.2.{k}.0.7"
        bench.pacs.studies[f"1.2.{k}"].series[f"1.2.{k}.0"].instances[uid] = dicom(uid, side=64)
    with pytest.raises(ConfigError, match=r"E-CFG-02.*limit of 5e-06 GiB"):
        bench.listed(cache=0.000005)


@pytest.mark.integration
def test_ten_thousand_objects_are_listed_in_flat_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is at its peak as large for 10,000 objects of one study as for 2,000."""
    monkeypatch.setattr(mirror, "inspected", lambda folder, names, caged, stop: ((name, "") for name in names))
    monkeypatch.setattr(mirror, "file_digest", lambda path: "d")
    small = dicom("1.2.1.0.7", side=1)

    def peak(number: int) -> int:
        bench.pacs.studies.clear()
        bench.study(number)
        series = bench.pacs.studies[f"1.2.{number}"].series[f"1.2.{number}.0"]
        series.instances = {f"1.9.{number}.{j}": small for j in range(number)}
        served = bench.mirror(accession=f"A{number}")
        monkeypatch.setattr(served.__class__, "_retrieve", lambda *_: ("d", 1))
        tracemalloc.start()
        try:
            assert look(served).images == number
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100)
    few, many = peak(2000), peak(10_000)
    assert many - few < 8 << 20


# ---- access ----------------------------------------------------------------------------------------------------------


def _password(folder: Path, mode: int = 0o600, text: str = "ward:s3cret\n") -> Path:
    file = folder / "password"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_password_is_read_from_a_file_and_said_nowhere(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    bench.study(1)
    bench.pacs.user = "ward:s3cret"
    served = bench.mirror(credentials=_password(tmp_path))
    look(served)
    bench.pacs.user = "ward:another"
    with pytest.raises(ConfigError, match=r"E-DATA-22.*credentials=FILE") as refused:
        look(served)
    said = [str(refused.value), caplog.text, served.data(), served.reference.public, *(str(e) for e in bench.told)]
    said += [path.read_bytes().decode(errors="replace") for path in served.home.path.rglob("*") if path.is_file()]
    assert not any("s3cret" in text for text in said)


def test_a_password_that_others_can_read_is_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"E-STATE-42.*others on this machine may have read the password"):
        bench.listed(credentials=_password(tmp_path, 0o644))
    with pytest.raises(ConfigError, match=r"E-CFG-02.*must contain user:password"):
        bench.listed(credentials=_password(tmp_path, text="nothing"))


def _certificate(folder: Path, days: int) -> Path:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pacs")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(7).not_valid_before(now - datetime.timedelta(days=99))
    made = made.not_valid_after(now + datetime.timedelta(days=days))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    file = folder / f"pacs{days}.pem"
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    file.write_bytes(pem + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return file


def _tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_the_hospitals_own_authority_is_trusted_and_no_other(bench: Bench, tmp_path: Path) -> None:
    with pacs(_tls(good := _certificate(tmp_path, 9))) as secure:
        of = Bench(secure, tmp_path)
        of.study(1)
        assert of.listed(ca=good).images == 1
        with pytest.raises(ConfigError, match=r"E-DATA-22.*cannot be trusted.*ca=FILE"):
            of.listed()
    with (
        pacs(_tls(expired := _certificate(tmp_path, -1))) as secure,
        pytest.raises(ConfigError, match=r"E-DATA-22.*expired.*Renew it"),
    ):
        Bench(secure, tmp_path).listed(ca=expired)


def test_a_certificate_is_asked_of_a_port_without_tls(bench: Bench, tmp_path: Path) -> None:
    bench.rows = ["AccessionNumber,diagnosis", "A1,a"]
    served = bench.mirror()
    plain = bench.pacs.url.replace("http:", "https:")
    other = Mirror.of(served.home, f"dicomweb:{plain}?labels={tmp_path}/labels.csv:diagnosis", patient=False)
    assert other is not None
    with pytest.raises((ConfigError, UnavailableError), match=r"E-DATA-2"):
        look(other)


# ---- the two processes -----------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_the_process_with_the_network_decodes_no_pixel_and_parses_no_object(bench: Bench, tmp_path: Path) -> None:
    for k in range(3):
        bench.study(k)
    bench.pacs.studies["1.2.2"].series["1.2.2.0"].instances["1.2.2.0.7"] = b"broken"
    bench.mirror()
    code = f"""
    import sys
    from pathlib import Path
    from silo.cancellation import CancelToken
    from silo.pacs.mirror import Mirror
    from silo.storage.home import Home
    mirror = Mirror.of(Home(Path({str(tmp_path / "other")!r})).make(),
                       "dicomweb:{bench.pacs.url}?labels={tmp_path}/labels.csv:diagnosis")
    found = mirror.refresh(CancelToken(), lambda *_: None)
    print(found.images, dict(found.left_out))
    loaded = {{name.partition(".")[0] for name in sys.modules}}
    print(sorted(loaded & {{"torch", "PIL", "pydicom", "numpy"}}), "fl_core.datasets" in sys.modules)
    """
    lines = [line[4:] for line in code.splitlines()]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "2 {'objects that cannot be read': 1}"
    assert done.stdout.splitlines()[1] == "[] False"


def test_every_failure_says_what_to_do(bench: Bench) -> None:
    """Each error of the PACS has an entry that `explain` shows."""
    from fl_core.errors.catalogue import EXPLANATIONS

    for code in ("E-DATA-21", "E-DATA-22"):
        assert len(EXPLANATIONS[code]) >= 3
    bench.pacs.before = lambda request: not send(request, 403)
    with pytest.raises(FederationError, match="ask the administrators of the PACS"):
        bench.listed()


def test_an_object_sent_without_its_multipart_envelope_is_taken(bench: Bench) -> None:
    bench.study(1)
    held = bench.pacs.studies["1.2.1"].series["1.2.1.0"].instances
    data = held["1.2.1.0.7"]
    held["1.2.1.0.7"] = lambda request: send(request, 200, data, "application/dicom")  # type: ignore[arg-type]
    look(served := bench.mirror())
    assert (served.folder / "1.2.1.0.7.dcm").read_bytes() == data
    held["1.2.1.0.7"] = lambda request: send_object(request, data)  # type: ignore[arg-type]
    (served.folder / "1.2.1.0.7.dcm").unlink()
    look(bench.mirror())
    assert (served.folder / "1.2.1.0.7.dcm").read_bytes() == data
