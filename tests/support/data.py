"""Files of data made here: images in each source's layout, DICOM with a patient's name in every tag that has room for
one, and tables of patients with a schema beside them."""

from __future__ import annotations

import csv
import json
import os
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid
from scipy.io import savemat

from fl_core.datasets import ANY, DataRequest, load
from fl_core.errors import DataError


def real_data(name: str) -> Path | None:
    """Find a folder or file of real images, or None: users bring their own copies, the project ships none."""
    given = os.environ.get("CONSILIUM_TEST_DATA")
    roots = [Path(given)] if given else [Path(__file__).resolve().parents[3] / "shared" / "data"]
    return next((root / name for root in roots if (root / name).exists()), None)


ISIC_HEADER = (
    "image",
    "MEL",
    "NV",
    "BCC",
    "AK",
    "BKL",
    "DF",
    "VASC",
    "SCC",
    "UNK",
    "target",
    "center",
    "fold",
    "fold2",
)


def write_image(path: Path, shade: int = 100, size: tuple[int, int] = (20, 16)) -> Path:
    """Write an image of random pixels around one shade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(shade).integers(-20, 20, (size[1], size[0], 3))
    Image.fromarray(np.clip(noise + shade, 0, 255).astype(np.uint8)).save(path)
    return path


def truncate(path: Path) -> None:
    """Cut off the last part of a file, as a copy that was interrupted does."""
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) * 2 // 3])


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


def isic_row(name: str, target: int, center: int, fold: str) -> list[object]:
    """Write a row as FLamby does."""
    hot = [1.0 if c == target else 0.0 for c in range(9)]
    return [name, *hot, target, center, fold, f"{fold}_{center}"]


def write_isic(root: Path, rows: Sequence[Sequence[object]], *, images: bool = True) -> Path:
    """Write a folder in FLamby's layout with a small image per row."""
    folder = root / "isic2019"
    (folder / "ISIC_2019_Training_Input_preprocessed").mkdir(parents=True, exist_ok=True)
    write_csv(folder / "train_test_split", ISIC_HEADER, rows)
    for k, row in enumerate(rows if images else []):
        write_image(folder / "ISIC_2019_Training_Input_preprocessed" / f"{row[0]}.jpg", 20 * int(str(row[10])) + 30 + k)
    return folder


def images(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape)).astype(np.uint8)


def write_idx(folder: Path, prefixes: tuple[str, str], x: np.ndarray, y: np.ndarray) -> None:
    """The format of MNIST and its relatives: big-endian magic number, sizes, bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    images_name, labels_name = prefixes
    (folder / images_name).write_bytes(struct.pack(">4i", 2051, *x.shape) + x.tobytes())
    (folder / labels_name).write_bytes(struct.pack(">2i", 2049, len(y)) + y.astype(np.uint8).tobytes())


def write_mnist(root: Path, folder: str, x: np.ndarray, y: np.ndarray, n_train: int) -> None:
    for name, part in (("train", slice(0, n_train)), ("t10k", slice(n_train, None))):
        write_idx(root / folder / "raw", (f"{name}-images-idx3-ubyte", f"{name}-labels-idx1-ubyte"), x[part], y[part])


def write_emnist(root: Path, x: np.ndarray, y: np.ndarray, n_train: int) -> None:
    for name, part in (("train", slice(0, n_train)), ("test", slice(n_train, None))):
        stem = f"emnist-letters-{name}"
        write_idx(root / "EMNIST" / "raw", (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"), x[part], y[part])


def write_svhn(root: Path, x: np.ndarray, y: np.ndarray, n_train: int) -> None:
    """MATLAB files: X (H, W, C, N), y (N, 1) in 1..10, where 10 stands for the digit 0."""
    root.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", slice(0, n_train)), ("test", slice(n_train, None))):
        labels = np.where(y[part] == 0, 10, y[part]).astype(np.uint8).reshape(-1, 1)
        savemat(root / f"{name}_32x32.mat", {"X": x[part].transpose(2, 3, 1, 0), "y": labels})


def write_cifar(root: Path, x: np.ndarray, y: np.ndarray, n_train: int, *, fine: bool) -> None:
    """Python pickles with rows of 3,072 bytes; CIFAR10 in five batches, CIFAR100 in one."""
    folder = root / ("cifar-100-python" if fine else "cifar-10-batches-py")
    folder.mkdir(parents=True, exist_ok=True)
    key = "fine_labels" if fine else "labels"
    parts = np.array_split(np.arange(n_train), 1 if fine else 5)
    names = ["train"] if fine else [f"data_batch_{k}" for k in range(1, 6)]
    rest = np.arange(n_train, len(y))
    for name, part in (*zip(names, parts, strict=True), ("test" if fine else "test_batch", rest)):
        row = {"data": x[part].reshape(len(part), -1), key: [int(v) for v in y[part]]}
        (folder / name).write_bytes(pickle.dumps(row))
    meta = {"fine_label_names": [str(c) for c in range(100)]} if fine else {"label_names": [str(c) for c in range(10)]}
    (folder / ("meta" if fine else "batches.meta")).write_bytes(pickle.dumps(meta))


def write_leaf(
    folder: Path, users: dict[str, tuple[list[object], list[object]]], name: str = "all_data_0.json"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    (folder / name).write_text(json.dumps(raw))
    return folder / name


def refuse(match: str, code: str, reference: str, request: DataRequest = ANY, data_root: Path | None = None) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load(reference, request, data_root=data_root)
    assert caught.value.code == code


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
    """Write pixels (H, W) or (H, W, 3) of 8 or 16 bits. bits: stored ones   encoded: what stands there instead.

    tags: overwrite what is written; None leaves a tag out.
    """
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
        if value is None:
            delattr(found, name)
        else:
            setattr(found, name, value)
    found.save_as(path, enforce_file_format=True)
    return path


def lookup_table(first: int, entries: np.ndarray, bits: int) -> Dataset:
    """Make an item of a modality or VOI LUT sequence."""
    item = Dataset()
    item.add_new("LUTDescriptor", "SS" if first < 0 else "US", [len(entries), first, bits])
    item.add_new("LUTData", "US", [int(v) for v in entries])
    return item


SCHEMA = """
label = "diagnosis"
classes = ["benign", "malignant"]
{roles}
[columns.age]
type = "integer"
min = 0
max = 120

[columns.marker]
type = "number"
min = -1.0
max = 3.0
missing = "indicator"

[columns.sex]
type = "category"
categories = ["f", "m"]

[columns.smoker]
type = "boolean"
"""
HEADER = ("visit", "patient", "age", "marker", "sex", "smoker", "diagnosis", "split")


def rows(n: int, seed: int = 0) -> list[list[object]]:
    """Draw rows whose diagnosis follows from age and marker; two visits per patient."""
    rng = np.random.default_rng(seed)
    found: list[list[object]] = []
    for k in range(n):
        age, marker = int(rng.integers(0, 121)), round(float(rng.uniform(-1, 3)), 4)
        sick = age / 60 + marker > 2
        cell = "" if rng.random() < 0.1 else marker
        split = "train" if k // 2 % 5 else "test"
        found.append(
            [f"v{seed}-{k}", f"p{seed}-{k // 2}", age, cell, "fm"[k % 2], "yes", ("benign", "malignant")[sick], split]
        )
    return found


def write_table(
    folder: Path, body: list[list[object]], roles: str = 'split = "split"', schema: str = SCHEMA, name: str = "patients"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(schema.replace("{roles}", roles))
    return write_csv(folder / f"{name}.csv", HEADER, body)
