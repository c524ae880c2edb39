"""What a deep check says of images that are read, but hardly as they were meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_core.datasets import DataRequest, check
from fl_core.datasets.decoding.pixels import content, described, open_image
from tests.support.data import write_dicom, write_image
from tests.support.image_corpus import ramp, rgb, write_png, write_tiff

CLASSES = DataRequest(("a", "b"))
SPLITS = [(split, label) for split in ("train", "test") for label in "ab"]
OPAQUE = np.full((*ramp(1).shape, 1), 65535)


def notes(root: Path) -> str:
    report = check(f"folder:{root}", CLASSES, deep=True)
    assert not report.problems
    return " | ".join(report.notes)


def write_twelve_bits(path: Path, kind: str, shift: int, factor: int = 1) -> None:
    """Write values of 12 bits, each image another, into channels of 16 bits."""
    colours, grey = (np.roll(values, shift, axis=1) * factor for values in (rgb(4095), ramp(4095)))
    if kind == "grey with alpha":
        write_png(path, np.concatenate([grey[..., None], OPAQUE], 2), 16, 4)
    elif kind == "colour":
        write_png(path, colours, 16, 2)
    elif kind == "colour with alpha":
        write_png(path, np.concatenate([colours, OPAQUE], 2), 16, 6)
    else:
        write_tiff(path, colours.astype(np.uint16))


@pytest.mark.parametrize("kind", ["grey with alpha", "colour", "colour with alpha", "tiff"])
def test_values_of_12_bits_in_16_are_noted_as_next_to_black_in_every_form(tmp_path: Path, kind: str) -> None:
    for k, (split, label) in enumerate(SPLITS):
        write_twelve_bits(tmp_path / "dark" / split / label / "1.png", kind, 5 * k)
        write_twelve_bits(tmp_path / "full" / split / label / "1.png", kind, 5 * k, 16)
    file = tmp_path / "dark/train/a/1.png"
    assert np.asarray(open_image(file)).max() <= 16
    assert content(file).depth == described(file).bits == 16
    assert "almost black images, which use at most a sixteenth of their value range: 4 (" in notes(tmp_path / "dark")
    assert "black" not in notes(tmp_path / "full")


@pytest.mark.parametrize("tags", [{"PixelAspectRatio": ["2", "1"]}, {"PixelSpacing": ["0.5", "0.25"]}])
def test_pixels_that_are_not_square_are_noted(tmp_path: Path, tags: dict[str, object]) -> None:
    for k, (split, label) in enumerate(SPLITS):
        pixels = np.roll(ramp(255), k, axis=1).astype(np.uint8)
        write_dicom(tmp_path / split / label / "square.dcm", pixels, PixelAspectRatio=["3", "3"])
        write_dicom(tmp_path / split / label / "oblong.dcm", 255 - pixels, **tags)
    said = notes(tmp_path)
    assert "images with non-square pixels, which are read as if they were square: 4 (" in said
    assert "/oblong.dcm" in said
    assert "/square.dcm" not in said


def test_a_label_space_of_one_class_is_a_problem_beside_the_others(tmp_path: Path) -> None:
    for split, label in SPLITS:
        write_image(tmp_path / split / label / "1.png", 90 + len(split + label))
    report = check(f"folder:{tmp_path}", DataRequest(("a",)), deep=True)
    assert [problem.code for problem in report.problems[:2]] == ["E-CFG-23", "E-DATA-05"]
    assert "at least two different names" in report.problems[0].what
