"""`labels.toml`: what it makes of folders, lists, DICOM and tables, and what is said of its lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fl_core.datasets import DataRequest, check, load
from fl_core.datasets.label_dictionary import read_dictionary
from fl_core.errors import ConfigError, DataError
from fl_core.types.targets import one_of
from tests.support.data import rows, write_csv, write_image, write_table

CLASSES = ("keratosis", "melanoma", "nevus")
ASKED = DataRequest(classes=CLASSES, image_size=16)
TABLE = """[labels]
naevus = "nevus"
"D22" = "nevus"          # another code system
"C43.9" = "melanoma"
benign = ["nevus", "keratosis"]
scar = []
"""


def folder(root: Path, table: str = TABLE, labels: Sequence[str] = ("naevus", "D22", "C43.9", "benign", "scar")) -> str:
    shade = 0
    for split in ("train", "test"):
        for label in labels:
            for k in range(2):
                shade += 7
                write_image(root / split / label / f"{k}.png", 20 + shade)
    (root / "labels.toml").write_text(table)
    return f"folder:{root}"


def listed(root: Path, table: str = TABLE) -> str:
    folder(root, table)
    found = [
        (f"{split}/{label}/{k}.png", label, "", split)
        for split in ("train", "test")
        for label in ("naevus", "D22", "C43.9", "benign", "scar")
        for k in range(2)
    ]
    write_csv(root / "images.csv", ("path", "label", "group", "split"), found)
    return f"manifest:{root / 'images.csv'}"


@pytest.mark.parametrize("make", [folder, listed])
def test_names_and_codes_become_the_runs_classes(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    silo = load(make(tmp_path), ASKED)
    assert sorted(silo.train.labels.tolist()) == sorted([2] * 4 + [1] * 2 + [one_of([0, 2])] * 2)
    assert sorted(silo.test.labels.tolist()) == [1, 1, 2, 2, 2, 2]  # no evaluation asks for a coarse label
    assert silo.coarse
    assert silo.schema.classes == CLASSES


def test_a_check_says_what_each_line_does(tmp_path: Path) -> None:
    report = check(folder(tmp_path), ASKED)
    assert not report.problems
    assert report.unread == {}
    notes = " | ".join(report.notes)
    for said in (
        f"labels.toml (digest {read_dictionary(tmp_path).digest}) has 5 names",
        "'D22' = nevus (line 3: 4 records)",
        "excluded by it: 'scar' (line 6: 4 records)",
        "trained as one of several classes: 'benign' = keratosis or nevus (line 5: 2 records)",
        "which no evaluation counts: 'benign' (line 5: 2 records)",
    ):
        assert said in notes


def test_lines_that_say_nothing_and_classes_that_no_run_has_are_named_with_their_lines(tmp_path: Path) -> None:
    table = TABLE.replace('"C43.9" = "melanoma"', "C43.9 = 'melanom'").replace(
        "scar = []", 'scar = ["nevus"]\nD22b = 3'
    )
    report = check(folder(tmp_path, table + 'naevus2 = "melanoma"\n'), ASKED)
    faults, strangers = report.problems
    assert faults.code == "E-DATA-07"
    assert faults.first == (
        "line 4: 'C43': a code with a dot, which needs quotes: \"C43.9\" = ...",
        "line 6: 'scar': a list of one class or of a class twice: write one class without brackets",
        "line 7: 'D22b': neither a class nor a list of classes",
    )
    assert strangers.first == ("'C43.9': 4", "'scar': 4")
    assert any("names in it that no record has: 'naevus2' (line 8)" in note for note in report.notes)
    with pytest.raises(DataError, match="E-DATA-07"):
        load(folder(tmp_path, table), ASKED)


def test_a_misspelt_class_names_the_line_and_the_one_that_was_meant(tmp_path: Path) -> None:
    report = check(folder(tmp_path, TABLE.replace('"melanoma"', '"melanom"')), ASKED)
    assert report.problems[0].first == ("'melanom': 4 (labels.toml line 4; did you mean 'melanoma'?)",)
    coarse = check(folder(tmp_path, TABLE.replace('"keratosis"]', '"keratos"]')), ASKED)
    assert coarse.problems[0].first == ("'keratos or nevus': 2 (labels.toml line 5; did you mean 'keratosis'?)",)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("labels = 3", "one table"),
        ("[labels]\na = 'b'\n[more]\nx = 1", "more next to"),
        ("", "nothing next to"),
        ("[labels]\na = 'b'\na = 'c'", "line 3"),
        ("[labels]\na = b", "line 2"),
        ("\x00", "TOML"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(DataError, match="E-DATA-07") as refused:
        load(folder(tmp_path, text), ASKED)
    assert wanted in str(refused.value)


def test_without_a_label_space_the_table_gives_one(tmp_path: Path) -> None:
    assert load(folder(tmp_path), DataRequest(image_size=16)).schema.classes == CLASSES


def test_one_image_under_two_names_of_a_class_is_stored_twice_and_in_two_classes_disputed(tmp_path: Path) -> None:
    reference = folder(tmp_path)
    for name in ("naevus", "D22"):
        write_image(tmp_path / "train" / name / "same.png", 200)
    report = check(reference, ASKED, deep=True)
    assert not report.problems
    assert any("stored more than once" in note for note in report.notes)
    write_image(tmp_path / "train" / "C43.9" / "same.png", 200)
    assert "several classes" in check(reference, ASKED, deep=True).problems[0].what


def test_a_fifth_is_held_out_of_classes_and_nothing_of_coarse_labels(tmp_path: Path) -> None:
    for label in ("naevus", "D22", "C43.9", "benign"):
        for k in range(5):
            write_image(tmp_path / label / f"{label}{k}.png", 20 + 3 * k + len(label))
    (tmp_path / "labels.toml").write_text(TABLE)
    silo = load(f"folder:{tmp_path}", ASKED)
    assert torch.bincount(silo.test.labels).tolist() == [0, 1, 2]  # of ten nevi two, whatever they are called here
    assert int((silo.train.labels < 0).sum()) == 5


def test_a_tables_rows_are_translated_too(tmp_path: Path) -> None:
    table = write_table(tmp_path, rows(60))
    plain = load(f"table:{table}")
    (tmp_path / "labels.toml").write_text('[labels]\nbenign = ["benign", "malignant"]\n')
    silo = load(f"table:{table}", DataRequest(classes=plain.schema.classes))
    benign = plain.schema.classes.index("benign")
    assert silo.train.labels.tolist() == [
        one_of([0, 1]) if label == benign else label for label in plain.train.labels.tolist()
    ]
    assert benign not in silo.test.labels.tolist()


def test_digests_follow_what_is_said_and_nothing_else(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        (tmp_path / "labels.toml").write_text(text)
        return read_dictionary(tmp_path).digest

    one = digest(TABLE)
    assert digest(TABLE.replace('["nevus", "keratosis"]', '["keratosis", "nevus"]').replace("# another", "#")) == one
    assert digest("[labels]\n" + "\n".join(sorted(TABLE.splitlines()[1:]))) == one
    assert digest(TABLE.replace("scar = []", 'scar = "nevus"')) != one
    assert digest("[labels]") == ""


def test_records_of_a_set_are_not_divided_by_class(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="E-CFG-23"):
        load(f"{folder(tmp_path)}#iid-2/0", ASKED)


def test_a_set_of_classes_beyond_the_62nd_is_refused(tmp_path: Path) -> None:
    many = [f"c{k}" for k in range(70)] + list(CLASSES)
    with pytest.raises(DataError, match="only use the first 62"):
        load(folder(tmp_path), DataRequest(classes=many, image_size=16))
