"""Structured reports of predictions, read back with pydicom and by highdicom's own parser of the template."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydicom import Dataset, dcmread
from pydicom.uid import generate_uid

from consilium.model import structured_report
from consilium.model.commands import ModelArguments
from consilium.model.inputs import from_paths
from consilium.model.predictor import Prediction, Predictor
from fl_core.datasets.image_loader import ImageLoader
from fl_core.errors import ConfigError
from tests.support.data import write_dicom
from tests.support.exported import TAUGHT, Exported

SET = "In the set at the calibration's coverage"
STUDIES = generate_uid(), generate_uid()


@pytest.fixture(scope="module")
def predictor(made: Exported) -> Predictor:
    return Predictor(ModelArguments(made.model).load())


def image(path: Path, made: Exported, study: str = STUDIES[0], **tags: object) -> Path:
    pixels = np.asarray(Image.open(next((made.images / "new/3").iterdir())))
    tags = {"SpecificCharacterSet": "ISO_IR 100", "PatientName": "Müller^Jörg", **tags}
    return write_dicom(path, pixels, StudyInstanceUID=study, SeriesInstanceUID=generate_uid(), **tags)  # type: ignore[arg-type]


def predictions(predictor: Predictor, *paths: Path) -> list[Prediction]:
    return predictor.predictions(from_paths(paths, predictor.model.facts, ImageLoader(cache_bytes=0)))


def items(report: Dataset, name: str) -> list[Dataset]:
    """Find the content items of a name at any depth."""
    found = []
    for item in report.get("ContentSequence", ()):
        if item.ConceptNameCodeSequence[0].CodeMeaning == name:
            found.append(item)
        found += items(item, name)
    return found


@pytest.mark.integration
def test_a_report_says_what_the_prediction_says_of_the_images_patient(
    made: Exported, predictor: Predictor, tmp_path: Path
) -> None:
    source = image(tmp_path / "a.dcm", made)
    (found,) = predictions(predictor, source)
    found = replace(found, set=("3", "8"))
    reports = structured_report.write(tmp_path / "sr", predictor, [found])
    assert (reports.problems, reports.not_dicom) == ({}, 0)
    file = reports.files[str(source)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    report, of = dcmread(file), dcmread(source)
    assert file.stem == report.SOPInstanceUID
    assert (report.Modality, report.VerificationFlag) == ("SR", "UNVERIFIED")
    for tag in ("StudyInstanceUID", "PatientID", "PatientName", "PatientBirthDate"):
        assert report[tag].value == of[tag].value, tag
    assert report.SeriesInstanceUID != of.SeriesInstanceUID

    (finding,) = items(report, "Finding")
    answer = finding.ConceptCodeSequence[0]
    assert (answer.CodeMeaning, answer.CodingSchemeDesignator) == (found.answer, "99CONSILIUM")
    assert (answer.CodeValue, answer.CodingSchemeVersion) == (
        str(TAUGHT.index(found.answer)),
        predictor.model.sha256[:16],
    )
    numbers = {c: float(items(report, c)[0].MeasuredValueSequence[0].NumericValue) for c in TAUGHT}
    assert list(numbers.values()) == pytest.approx(found.probabilities, rel=1e-5)
    chosen = items(report, SET)
    assert [item.ConceptCodeSequence[0].CodeMeaning for item in chosen] == ["3", "8"]
    bare = structured_report.write(tmp_path / "bare", predictor, [replace(found, set=None)])
    assert not items(dcmread(bare.files[str(source)]), SET)  # without a calibration nothing is said of a set
    assert items(report, "Algorithm Version")[0].TextValue == f"SHA-256 {predictor.model.sha256}"
    (seen,) = items(report, "Source of Measurement")
    assert seen.ReferencedSOPSequence[0].ReferencedSOPInstanceUID == of.SOPInstanceUID


def test_highdicom_reads_a_report_as_the_template_has_it(made: Exported, predictor: Predictor, tmp_path: Path) -> None:
    from highdicom.sr import srread

    source = image(tmp_path / "a.dcm", made)
    reports = structured_report.write(tmp_path / "sr", predictor, predictions(predictor, source))
    content: Any = srread(reports.files[str(source)]).content
    (group,) = content.get_image_measurement_groups()
    assert len(group.get_measurements()) == len(TAUGHT)
    assert group.finding_type.meaning == predictions(predictor, source)[0].answer


@pytest.mark.parametrize(("chosen", "unknown"), [((), None), (("3",), True)])
def test_an_empty_set_and_none_of_the_classes_are_said(
    made: Exported, predictor: Predictor, tmp_path: Path, chosen: tuple[str, ...], unknown: bool | None
) -> None:
    source = image(tmp_path / "a.dcm", made)
    (found,) = predictions(predictor, source)
    told = replace(found, set=chosen, unknown=unknown)
    report = dcmread(structured_report.write(tmp_path / "sr", predictor, [told]).files[str(source)])
    finding = items(report, "Finding")[0].ConceptCodeSequence[0].CodeMeaning
    assert finding == ("none of the classes" if unknown else found.answer)
    said = [item.ConceptCodeSequence[0].CodeMeaning for item in items(report, SET)]
    assert said == (list(chosen) or ["No class"])


def test_studies_have_series_of_their_own(made: Exported, predictor: Predictor, tmp_path: Path) -> None:
    paths = [image(tmp_path / f"{k}.dcm", made, STUDIES[k > 1]) for k in range(3)]
    found = structured_report.write(tmp_path / "sr", predictor, predictions(predictor, *paths))
    a, b, c = (dcmread(found.files[str(path)]) for path in paths)
    assert a.SeriesInstanceUID == b.SeriesInstanceUID != c.SeriesInstanceUID
    assert len({a.SOPInstanceUID, b.SOPInstanceUID, c.SOPInstanceUID}) == 3


def test_names_of_any_script_are_kept(made: Exported, predictor: Predictor, tmp_path: Path) -> None:
    names = ("黒色腫", *TAUGHT[1:])
    model = replace(predictor.model, facts=replace(predictor.model.facts, classes=names))
    source = image(tmp_path / "a.dcm", made)
    (found,) = predictions(Predictor(model), source)
    report = dcmread(structured_report.write(tmp_path / "sr", Predictor(model), [found]).files[str(source)])
    assert len(items(report, "黒色腫")) == 1
    assert report.PatientName == "Müller^Jörg"


def test_an_image_that_names_no_study_is_told_without_its_tags_and_the_others_have_reports(
    made: Exported, predictor: Predictor, tmp_path: Path
) -> None:
    good = image(tmp_path / "a.dcm", made)
    lacking = image(tmp_path / "b.dcm", made, study="")
    odd = image(tmp_path / "c.dcm", made, StudyDate="Müller")
    plain = tmp_path / "d.png"
    Image.open(next((made.images / "new/3").iterdir())).save(plain)
    broken = tmp_path / "e.png"
    broken.write_bytes(b"none")
    found = structured_report.write(
        tmp_path / "sr", predictor, predictions(predictor, good, lacking, odd, plain, broken)
    )
    assert str(good) in found.files
    assert found.not_dicom == 1
    assert "found no StudyInstanceUID" in found.problems[str(lacking)]
    assert set(found.files) | set(found.problems) == {str(good), str(lacking), str(odd)}
    assert "Müller" not in "".join(found.problems.values())


def test_a_folder_that_cannot_be_written_is_named(made: Exported, predictor: Predictor, tmp_path: Path) -> None:
    found = predictions(predictor, image(tmp_path / "a.dcm", made))
    (tmp_path / "sr").touch()
    with pytest.raises(ConfigError, match="expected a writable folder"):
        structured_report.write(tmp_path / "sr", predictor, found)


def test_what_cannot_be_written_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="found the file"):
        structured_report.check(tmp_path / "file")
    with pytest.raises(ConfigError, match="create it"):
        structured_report.check(tmp_path / "no/sr")
    monkeypatch.setitem(__import__("sys").modules, "highdicom", None)
    with pytest.raises(ConfigError, match=r"pip install 'consilium-fl\[model\]'"):
        structured_report.check(tmp_path / "sr")
