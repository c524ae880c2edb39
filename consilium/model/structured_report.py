"""Predictions as DICOM Structured Reports (PS3.16, TID 1500), which archives and viewers store with the image.

One report per DICOM image, in the same study and for the same patient. It contains the answer as a finding, the
probability of each class as a measurement, the classes in the calibrated set, and the model's identity. Class names
come from the run, not from a terminology. So their codes are private: the class's index, in a scheme whose version is
the beginning of the model file's SHA-256.

A report repeats the patient's tags from the image (`fl_core/datasets/decoding/dicom.py` reads none of them).
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilium.model.predictor import NONE_OF_THEM, Prediction, Predictor
from fl_core.datasets.decoding.dicom import is_dicom, without_contents
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.errors import ConfigError
from fl_core.errors.extras import require
from service_core.storage.private_files import replace_file
from service_core.version import version

if TYPE_CHECKING:
    from pydicom import Dataset

SCHEME = "99CONSILIUM"
"""Coding scheme of our private codes; names that begin with 99 are private (PS3.16, section 8.2)."""
_NEEDED = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
_COPIED = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex"),
    *("StudyID", "StudyDate", "StudyTime", "AccessionNumber", "ReferringPhysicianName"),
)
"""Tags that a report repeats. They must be present but may be empty (type 2)."""
_SERIES_NUMBER = 9900
_MEANING = 64
"""Maximum length of a code's meaning, in characters."""
_DEVICES = uuid.UUID("4a0b1b5e-6f1c-5d0b-9d35-6b0d6a2b7f11")


@dataclass(slots=True)
class Reports:
    """Written files, and reasons why predictions have no report, by example. not_dicom: images that are not DICOM."""

    files: dict[str, Path] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    not_dicom: int = 0


def check(folder: Path) -> None:
    """Raise ConfigError (E-CFG-08, E-CFG-02) if reports cannot be written. Call before computing anything."""
    require("highdicom", "model", "structured reports")
    if folder.exists() and not folder.is_dir():
        raise ConfigError("E-CFG-02", f"--sr: expected a folder, found the file {folder}: choose another path")
    if not folder.exists() and not folder.parent.is_dir():
        raise ConfigError("E-CFG-02", f"--sr: there is no folder {folder.parent}: create it")


def write(folder: Path, predictor: Predictor, predictions: Sequence[Prediction]) -> Reports:
    """Write FOLDER/UID.dcm for each DICOM image that was classified. Creates the folder if needed.

    Guarantees: an image without the required tags is reported as a problem and the others still get a report; files
    have mode 0600; messages contain none of an image's tags. Raises ConfigError (E-CFG-02) if the folder cannot be
    written.
    """
    reports, series = Reports(), dict[str, str]()
    with _writable(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    for prediction in predictions:
        if prediction.problem:
            continue
        if not is_dicom(Path(prediction.name)):
            reports.not_dicom += 1
            continue
        try:
            with without_contents("tags that do not fit a report"):
                report, uid = _encoded(predictor, prediction, series, len(reports.files) + 1)
        except UnreadableError as error:
            reports.problems[prediction.name] = str(error)
            continue
        file = folder / f"{uid}.dcm"
        with _writable(folder):
            replace_file(file, report, 0o600)
        reports.files[prediction.name] = file
    return reports


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            "E-CFG-02",
            f"--sr: expected a writable folder, found {folder} ({error.strerror}): choose another folder",
        ) from error


def _image(path: Path) -> Dataset:
    from pydicom import dcmread

    dataset = dcmread(path, stop_before_pixels=True)
    lacking = [name for name in _NEEDED if not dataset.get(name)]
    if lacking:
        raise UnreadableError(
            f"expected {', '.join(_NEEDED)}, found no {lacking[0]}: export the image from its archive"
        )
    for name in _COPIED:
        if name not in dataset:
            setattr(dataset, name, None)
    return dataset


def _encoded(predictor: Predictor, prediction: Prediction, series: dict[str, str], number: int) -> tuple[bytes, str]:
    """Return a report's bytes and UID. series: UIDs of the reports' series by study; grows with new studies."""
    import highdicom as hd
    from highdicom.sr import ComprehensiveSR

    image = _image(Path(prediction.name))
    study = str(image.StudyInstanceUID)
    report = ComprehensiveSR(
        evidence=[image],
        content=_content(predictor, prediction, image),
        series_instance_uid=series.setdefault(study, str(hd.UID())),
        series_number=_SERIES_NUMBER,
        sop_instance_uid=str(hd.UID()),
        instance_number=number,
        manufacturer="Consilium",
        is_complete=True,
        series_description="Predictions of Consilium, not verified",
    )
    report.SpecificCharacterSet = "ISO_IR 192"  # UTF-8: class names need not fit the image's character set
    buffer = io.BytesIO()
    report.save_as(buffer)
    return buffer.getvalue(), str(report.SOPInstanceUID)


def _content(predictor: Predictor, prediction: Prediction, image: Dataset) -> Any:  # noqa: ANN401 - highdicom's
    from highdicom import UID, sr
    from pydicom.sr.codedict import codes

    facts, sha256 = predictor.model.facts, predictor.model.sha256
    code = {name: _private(str(place), name, sha256[:16]) for place, name in enumerate(facts.classes)}
    device = sr.DeviceObserverIdentifyingAttributes(
        uid=str(UID.from_uuid(str(uuid.uuid5(_DEVICES, sha256)))), name="Consilium", model_name=version()[:_MEANING]
    )
    chosen = [code[c] for c in prediction.set or ()] or [_private("empty", "No class")]
    evaluations = [
        sr.QualitativeEvaluation(name=_private("set", "In the set at the calibration's coverage"), value=one)
        for one in ([] if prediction.set is None else chosen)
    ]
    group = sr.MeasurementsAndQualitativeEvaluations(
        tracking_identifier=sr.TrackingIdentifier(uid=str(UID()), identifier="classification of the image"),
        finding_type=_private("none", NONE_OF_THEM) if prediction.unknown else code[prediction.answer],
        algorithm_id=sr.AlgorithmIdentification(
            name=f"Consilium, {facts.run or 'a simulation'}"[:_MEANING],
            version=f"SHA-256 {sha256}",
            family=codes.cid7162.ArtificialIntelligence,
            parameters=_reading_notes(predictor),
        ),
        measurements=[
            sr.Measurement(code[c], float(f"{p:.6g}"), codes.UCUM.NoUnits, derivation=codes.DCM.Probability)
            for c, p in zip(facts.classes, prediction.probabilities, strict=True)
        ],
        qualitative_evaluations=evaluations,
        source_images=[sr.SourceImageForMeasurementGroup(str(image.SOPClassUID), str(image.SOPInstanceUID))],
    )
    return sr.MeasurementReport(
        observation_context=sr.ObservationContext(
            observer_device_context=sr.ObserverContext(
                observer_type=codes.DCM.Device, observer_identifying_attributes=device
            )
        ),
        procedure_reported=codes.SCT.ImagingProcedure,
        imaging_measurements=[group],
    )


def _private(value: str, meaning: str, scheme_version: str | None = None) -> Any:  # noqa: ANN401 - highdicom's
    from highdicom.sr import CodedConcept

    return CodedConcept(value, SCHEME, meaning[:_MEANING], scheme_version)


def _reading_notes(predictor: Predictor) -> list[str]:
    """Return notes on how to read the numbers."""
    notes, calibration = [f"temperature {predictor.temperature:.6g}"], predictor.calibration
    if calibration is None or calibration.facts.false_flags is None:  # None only for several labels
        return [*notes, "not calibrated at this hospital"]
    return [
        *notes,
        f"sets contain the right class for {100 * calibration.facts.coverage:g} % of images like the calibration's",
        f"{NONE_OF_THEM}: reported for at most {100 * calibration.facts.false_flags:g} % of images of known classes",
    ]
