"""DICOM files, written here by pydicom: with a patient's name in every tag that has room for one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

PATIENT = "Geheimnis^Patientin"


def write_dicom(
    path: Path,
    pixels: np.ndarray,
    *,
    bits: int = 0,
    photometric: str = "",
    syntax: str = ExplicitVRLittleEndian,
    encoded: bytes | None = None,
    **tags: object,
) -> Path:
    """Write pixels (H, W) or (H, W, 3) of 8 or 16 bits. bits: stored ones   encoded: what stands there instead."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[str(path)])
    meta.TransferSyntaxUID = syntax
    order = syntax != ExplicitVRBigEndian
    found = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128, is_little_endian=order)
    found.SOPClassUID, found.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    for name in ("PatientName", "PatientID", "ReferringPhysicianName", "InstitutionName", "OtherPatientIDs"):
        setattr(found, name, PATIENT)
    found.PatientBirthDate, found.StudyDescription, found.ImageComments = "19430112", PATIENT, PATIENT
    found.private_block(0x0099, PATIENT, create=True).add_new(0x01, "LO", PATIENT)
    item = Dataset()
    item.PatientID = PATIENT
    found.RequestAttributesSequence = [item]
    found.Rows, found.Columns = pixels.shape[:2]
    found.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    found.PhotometricInterpretation = photometric or ("RGB" if pixels.ndim == 3 else "MONOCHROME2")
    if pixels.ndim == 3:
        found.PlanarConfiguration = 0
    found.BitsAllocated = 8 * pixels.dtype.itemsize
    found.BitsStored = bits or found.BitsAllocated
    found.HighBit = found.BitsStored - 1
    found.PixelRepresentation = int(pixels.dtype.kind == "i")
    found.PixelData = pixels.tobytes() if encoded is None else encoded
    found["PixelData"].VR = "OW" if pixels.dtype.itemsize == 2 else "OB"
    found["PixelData"].is_undefined_length = encoded is not None
    for name, value in tags.items():
        setattr(found, name, value)
    found.save_as(path, enforce_file_format=True)
    return path


def lookup_table(first: int, entries: np.ndarray, bits: int) -> Dataset:
    """Make an item of a modality or VOI LUT sequence."""
    item = Dataset()
    item.add_new("LUTDescriptor", "SS" if first < 0 else "US", [len(entries), first, bits])
    item.add_new("LUTData", "US", [int(v) for v in entries])
    return item
