"""What is read of records: headers, rows and tensors, and what of them is not stated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fl_core import datasets
from fl_core.datasets import DataRequest, TensorExamples
from fl_core.errors import ConfigError
from fl_core.survey.facts import make_of, patient_names, surveyed
from fl_core.types.survey import NOT_STATED, parse_questions
from fl_core.types.targets import one_of
from tests.support.data import PATIENT, write_dicom


def told(question: str, dataset, classes=("a", "b")) -> dict[str, float]:
    """Sum the shares of all records by cell, without empty cells."""
    asked = parse_questions(question)
    records = surveyed(asked, dataset.train, dataset.test, len(classes))
    sums = records.shares[0].sum(0).tolist()
    return {cell: n for cell, n in zip(asked[0].cells(classes), sums, strict=True) if n}


@pytest.fixture
def images(tmp_path: Path):
    """Eight images of two classes: DICOM of two makes, PNG, and one that is broken after it was listed."""
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8) * 4
    rows = ["path,label,group,split"]
    for i in range(6):
        make = "SIEMENS Healthineers" if i < 3 else "GE MEDICAL SYSTEMS"
        own = {"PixelSpacing": [0.5, 0.7]} if i % 2 else {}
        write_dicom(tmp_path / f"{i}.dcm", grey, bits=12, Manufacturer=make, PatientSex="F", PatientAge="044Y", **own)
        rows.append(f"{i}.dcm,{'ab'[i % 2]},patient{i // 2},{'train' if i < 4 else 'test'}")
    Image.new("L", (300, 200), 255).save(tmp_path / "6.png")
    Image.new("L", (30, 20)).save(tmp_path / "7.png")
    rows += ["6.png,a,patient6,train", "7.png,b,patient7,train"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    found = datasets.load(f"manifest:{tmp_path / 'list.csv'}", DataRequest(("a", "b"), 32))
    (tmp_path / "7.png").write_bytes(b"no image")
    return found


def test_headers_are_counted_and_what_cannot_be_read_is_not_stated(images):
    assert told("classes", images) == {"a": 4, "b": 4}
    assert told("images", images) == {"training": 6, "test": 2}
    assert told("patients", images) == {"1": 2, "2": 6}
    assert told("sizes:64", images) == {"0 to 64": 6, "192 to 256": 1, NOT_STATED: 1}
    assert told("bits", images) == {"1 to 8": 1, "11 to 12": 6, NOT_STATED: 1}
    assert told("makes", images) == {"Siemens": 3, "GE": 3, NOT_STATED: 2}
    assert told("spacing", images) == {"500 to 600": 3, NOT_STATED: 5}
    assert told("ages", images) == {NOT_STATED: 8}  # of files nothing about a patient is read
    assert told("sex", images) == {NOT_STATED: 8}


def test_intensities_are_shares_of_pixels_as_they_are_trained_on(images):
    found = told("intensity:128", images)
    assert found["128 to 256"] == 1  # 12 bits of at most 252, through no window, are black; the PNG is white
    assert found["0 to 128"] == 6
    assert found[NOT_STATED] == 1


def test_nothing_of_a_patient_is_read_of_a_header(tmp_path):
    from fl_core.datasets.decoding import dicom

    file = write_dicom(tmp_path / "x.dcm", np.zeros((4, 6), np.uint8), Manufacturer="Philips", PatientAge="044Y")
    assert PATIENT not in repr(dicom.described(file))
    assert dicom.described(file) == dicom.ImageDescription((6, 4), 8, None, "Philips")


TABLE = """
label = "diagnosis"
classes = ["a", "b"]
[columns.age]
type = "integer"
min = 0
max = 120
missing = "indicator"
[columns.Sex]
type = "category"
categories = ["F", "male", "other"]
[columns.marker]
type = "number"
min = 0
max = 1
missing = "indicator"
"""


def test_a_table_tells_ages_sex_and_how_much_is_missing(tmp_path):
    rows = ["age,Sex,marker,diagnosis"]
    rows += [
        f"{age},{sex},{marker},{'ab'[k % 2]}"
        for k, (age, sex, marker) in enumerate(
            [(40, "F", 0.5), (39, "male", ""), (120, "male", 0.1), ("", "other", ""), (0, "F", 1)] * 8
        )
    ]
    (tmp_path / "t.csv").write_text("\n".join(f"{row}" for row in rows))
    (tmp_path / "t.toml").write_text(TABLE)
    found = datasets.load(f"table:{tmp_path / 't.csv'}")
    assert told("ages:40", found) == {"40 to 80": 8, "0 to 40": 16, "120 or more": 8, NOT_STATED: 8}
    assert told("sex", found) == {"female": 16, "male": 16, "another": 8}
    assert told("missing", found) == {"0": 24, "1": 8, "2": 8}
    assert told("sizes", found) == {NOT_STATED: 40}


def test_tensors_that_are_no_images_state_nothing():
    flat = TensorExamples(torch.rand(5, 7), torch.zeros(5))
    wild = torch.rand(3, 1, 4, 6)
    wild[0, 0, 0, 0], wild[1, 0, 0, 0] = torch.nan, 1e38
    wild = TensorExamples(wild, torch.zeros(3))
    records = surveyed(parse_questions("sizes,intensity"), flat, wild, 2)
    assert records.shares[0][:, -1].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert records.shares[1][:, -1].tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert float(records.shares[1][-1].sum()) == pytest.approx(1, abs=16 * 2**-10)


def test_a_patient_is_a_group_across_splits_else_a_record():
    a, b = (TensorExamples(torch.rand(2, 1, 2, 2), torch.zeros(2)) for _ in range(2))
    assert len(set(patient_names((a, b)))) == 4
    a.groups, b.groups = ("x", "y"), ("y", "y")
    assert surveyed(parse_questions("classes"), a, b, 2).patients == 2


@pytest.mark.parametrize(
    ("stated", "make"),
    [
        ("SIEMENS", "Siemens"),
        ("GE MEDICAL SYSTEMS", "GE"),
        ("GE", "GE"),
        ("General Electric", "GE"),
        ("German Devices", "another"),
        ("TOSHIBA", "Canon"),
        ("FUJI PHOTO FILM", "Fujifilm"),
        ("Ours", "another"),
        (" ", None),
    ],
)
def test_makes_are_those_of_a_list(stated, make):
    assert make_of(stated) == make


def test_coarse_labels_are_in_no_cell_and_several_labels_are_not_asked_for():
    x = torch.zeros(3, 1, 8, 8)
    coarse, none = TensorExamples(x, torch.tensor([0, one_of([0, 1]), 1])), TensorExamples(x[:0], torch.zeros(0))
    assert surveyed(parse_questions("classes"), coarse, none, 2).shares[0].tolist() == [[1, 0], [0, 0], [0, 1]]
    rows = TensorExamples(x, torch.tensor([[1, 1], [0, -1], [1, 0]]))
    assert surveyed(parse_questions("images"), rows, none, 2).patients == 3
    with pytest.raises(ConfigError, match="E-CFG-08"):
        surveyed(parse_questions("classes"), rows, none, 2)
