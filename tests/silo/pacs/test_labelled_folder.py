"""Folders of images whose labels come from a table or a query: listed in the home, by the code that lists a PACS."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_core import datasets
from fl_core.errors import ConfigError, DataError
from silo.cancellation import CancelToken
from silo.cli.main import program
from silo.pacs import mirror
from silo.pacs.mirror import Listed, Mirror
from silo.pacs.reference import FolderReference, parse
from silo.storage.home import Home
from silo.training.data_source import DataSource
from tests.support.data import write_image


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 24 images, two in a subfolder for each number; it is listed here, in place of the process for it."""
    for k in range(12):
        for j in range(2):
            (place := tmp_path / "images" / f"A{k}").mkdir(parents=True, exist_ok=True)
            write_image(place / f"scan{k}-{j}.png", 10 * k + 5 * j, (16, 16))
    (tmp_path / "images" / "notes.txt").write_text("no image")

    def listed(folder: Path, caged: bool, stop: CancelToken) -> Iterator[tuple[str, str]]:
        yield from ((str(path.relative_to(folder)), "") for path in sorted(folder.rglob("*.png")))

    monkeypatch.setattr(mirror, "listed_images", listed)
    return tmp_path / "images"


def served(folder: Path, text: str, options: str = "") -> Mirror:
    (folder / "labels.csv").write_text(text)
    return of(folder, f"folder:{folder}/images?labels={folder}/labels.csv:diagnosis{options}")


def of(folder: Path, reference: str) -> Mirror:
    made = Mirror.of(Home(folder / "home").make(), reference, patient=False)
    assert made is not None
    return made


def look(of: Mirror) -> Listed:
    return of.refresh(CancelToken(), lambda *_: None)


def rows_of(of: Mirror, run: str = "") -> Mapping[str, Mapping[str, str]]:
    with Path(of.data(run).removeprefix("manifest:")).open(newline="") as file:
        return {row["path"]: row for row in csv.DictReader(file)}


def numbers(count: int = 12) -> str:
    return "number,diagnosis,PatientID\n" + "".join(f"A{k},{'ab'[k % 2]},P{k // 2}\n" for k in range(count))


def test_a_folder_by_number_is_the_list_that_somebody_would_write(images: Path, tmp_path: Path) -> None:
    made = served(tmp_path, numbers(), "&by=number")
    found = look(made)
    assert (found.images, found.studies, found.unlabelled, found.unmet, found.nameless) == (24, 24, 0, 0, 0)
    rows = rows_of(made)
    assert (rows["A3/scan3-1.png"]["label"], rows["A3/scan3-1.png"]["group"]) == ("b", "P1")
    with (images / "by-hand.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("path", "label", "group", "split"), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows.values())
    versions = []
    for reference in (made.data(), f"manifest:{images}/by-hand.csv"):
        source = DataSource(reference)
        source.load()
        versions.append(source.version())
    assert versions[0] == versions[1]
    assert datasets.check(made.data()).groups == 6


@pytest.mark.parametrize("name", ["A{k}/scan{k}-0.png", "scan{k}-0.png", "scan{k}-0"])
def test_a_row_names_an_image_by_its_path_its_file_or_its_stem(images: Path, tmp_path: Path, name: str) -> None:
    text = "file,diagnosis\n" + "".join(f"{name.format(k=k)},{'ab'[k % 2]}\n" for k in range(12)) + "scan99,a\n"
    found = look(made := served(tmp_path, text))
    assert (found.images, found.unlabelled, found.unmet, found.nameless) == (12, 12, 1, 12)
    assert list(rows_of(made)) == sorted(f"A{k}/scan{k}-0.png" for k in range(12))
    assert "12 images of 24 in the folder listed" in found.sentence()
    assert "not listed: 12; labels without an image: 1" in found.sentence()


def test_a_name_that_several_images_have_labels_none_of_them(images: Path, tmp_path: Path) -> None:
    for k in (1, 2):
        write_image(images / f"A{k}" / "same.png", 40 * k, (16, 16))
    text = "file,diagnosis\nsame.png,a\nscan3-0.png,b\n"
    found = look(served(tmp_path, text))
    assert (found.images, found.left_out) == (1, {"images with the same name as another": 2})
    assert "A1/same.png" in found.file.read_text()
    found = look(made := served(tmp_path, text.replace("same.png", "A1/same.png")))
    assert (found.images, rows_of(made)["A1/same.png"]["label"]) == (2, "a")


def test_labels_by_a_query_are_those_of_the_run_that_began_with_them(images: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ris.db")) as db, db:
        db.execute("CREATE TABLE reports (number TEXT, diagnosis TEXT)")
        db.executemany("INSERT INTO reports VALUES (?, ?)", [(f"A{k}", "ab"[k % 2]) for k in range(6)])
    (tmp_path / "query.toml").write_text(f"url = 'sqlite:///{tmp_path}/ris.db'\nquery = 'SELECT * FROM reports'\n")
    made = of(tmp_path, f"folder:{images}?labels={tmp_path}/query.toml:diagnosis&by=number")
    made.prepare("run-1", CancelToken(), lambda *_: None)
    with closing(sqlite3.connect(tmp_path / "ris.db")) as db, db:
        db.executemany("INSERT INTO reports VALUES (?, ?)", [(f"A{k}", "ab"[k % 2]) for k in range(6, 12)])
    look(made)
    made.prepare("run-2", CancelToken(), lambda *_: None)
    assert (len(rows_of(made, "run-1")), len(rows_of(made, "run-2"))) == (12, 24)
    assert made.label_source.startswith("query:")
    made.refresh(CancelToken(), lambda *_: None, lambda run: False)
    names = {path.suffix for path in made.folder.glob("images-*")}
    assert (names, len(list(made.folder.glob("images-*")))) == ({".csv", ".toml"}, 2)
    assert len(list(images.rglob("*.png"))) == 24  # nothing of the hospital's is removed
    mirror.forget(made.home, but=None)
    assert len(list(images.rglob("*.png"))) == 24


def test_a_folder_without_a_label_or_that_is_none_is_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"E-DATA-02.*not listed: 24"):
        look(served(tmp_path, "file,diagnosis\nx,a\n"))
    with pytest.raises(DataError, match="expected one of the columns number"):
        look(served(tmp_path, "file,diagnosis\nx,a\n", "&by=number"))
    with pytest.raises(DataError, match="there is no folder of images"):
        look(of(tmp_path, f"folder:{tmp_path}/nowhere?labels={tmp_path}/labels.csv:diagnosis"))


def test_a_reference_is_read_and_a_folder_of_that_name_stays_one(tmp_path: Path) -> None:
    assert parse(f"folder:{tmp_path}") is None
    assert parse("digits/hospital2") is None
    assert parse("folder:images?labels=/l.csv:d&by=n") == FolderReference(
        str(Path("images").absolute()), "/l.csv:d", "n"
    )
    (tmp_path / "x?labels=l.csv:d").mkdir()
    assert parse(f"folder:{tmp_path}/x?labels=l.csv:d") is None
    for wrong, said in (("labels=l.csv", "labels=FILE:COLUMN"), ("labels=l.csv:d&bye=n", "did you mean 'by'")):
        with pytest.raises(ConfigError, match=said):
            parse(f"folder:images?{wrong}")


@pytest.mark.integration
def test_the_commands_list_check_and_register_it(tmp_path: Path) -> None:
    for k in range(30):
        (tmp_path / "images").mkdir(exist_ok=True)
        write_image(tmp_path / "images" / f"{k}.png", 8 * k, (16, 16))
    (tmp_path / "images" / "away.png").symlink_to("nowhere")
    rows = "".join(f"{k},{'ab'[k % 2]}\n" for k in range(30))
    (tmp_path / "labels.csv").write_text(f"file,diagnosis\n{rows}")
    reference = f"folder:{tmp_path}/images?labels={tmp_path}/labels.csv:diagnosis"

    def call(*words: str, status: int = 0) -> str:
        result = CliRunner().invoke(program().build([words[0]]), [*words, "--home", str(tmp_path / "home"), "--json"])
        assert result.exit_code == status, (result.output, result.exception)
        return f"{result.output}{result.exception or ''}"

    assert "silo data fetch" in call("data", "check", reference, status=1)
    found = json.loads(call("data", "fetch", reference))
    assert (found["images"], found["left_out"]) == (30, {"files that cannot be read": 1})
    assert json.loads(call("data", "check", reference))["groups"] == 30
    assert (
        f"folder:{tmp_path}/images/train" in json.loads(call("ledger", "register", "--data", reference))["collections"]
    )
