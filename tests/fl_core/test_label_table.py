from __future__ import annotations

from pathlib import Path

import pytest

from fl_core.errors import DataError
from fl_core.label_table import LabelRow, LabelTable


def table(folder: Path, text: str) -> LabelTable:
    (folder / "labels.csv").write_text(text)
    return LabelTable.read(folder / "labels.csv", "label")


def test_the_most_exact_key_joins_and_another_names_the_patient(tmp_path: Path) -> None:
    labels = table(tmp_path, "PatientID,StudyInstanceUID,label,split\nP1,1.2,a,train\nP1,1.3,b,train\nP2,1.4,,test\n")
    assert labels.key == "StudyInstanceUID"
    assert labels.find({"StudyInstanceUID": "1.3", "PatientID": "other"}) == LabelRow("b", "P1", "train")
    assert labels.find({"StudyInstanceUID": "1.4"}) is None  # it has no label
    assert labels.find({"PatientID": "P1"}) is None
    assert (set(labels.rows), labels.met) == ({"1.2", "1.3"}, {"1.3"})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("AccessionNumber\nA1\n", "columns label"),
        ("number,label\nA1,a\n", "expected one of the columns SeriesInstanceUID"),
        ("AccessionNumber,label\nA1,a\nA1,b\n", r"1 rows with another \(A1\)"),
        ("AccessionNumber,label,PatientID\nA1,a,P\nA1,a,Q\n", r"1 rows with another \(A1\)"),
        ("AccessionNumber,label,split\nA1,a,validation\n", r"1 rows with another \(A1\)"),
        ("AccessionNumber;label\nA1;a\n", "semicolons"),
        ("AccessionNumber,label,AccessionNumber\nA1,a,A2\n", "AccessionNumber twice"),
        ("AccessionNumber,label,split,split\nA1,a,train,test\n", "split twice"),
        ("", "columns label"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused_by_its_rows(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        table(tmp_path, text)


def test_the_key_may_be_the_label(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("AccessionNumber,note,note\nA1,x,y\n")
    labels = LabelTable.read(tmp_path / "labels.csv", "AccessionNumber")
    assert labels.find({"AccessionNumber": "A1"}) == LabelRow("A1")


def test_a_row_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    assert len(table(tmp_path, "AccessionNumber,label\nA1,a\nA1,a\n").rows) == 1
