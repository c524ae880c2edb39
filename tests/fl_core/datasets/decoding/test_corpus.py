"""Files as hospitals have them: read as the standards' formulas and another reader read them, or refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import content, open_image
from tests.support.data import PATIENT
from tests.support.image_corpus import Case, cases

CASES = cases()
DCMTK = "dcmj2pnm"
ROUNDING = 3
"""Of 255: dcmtk makes 8 bits of fewer by steps, and cuts off where others round."""


def of_three(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels


def off_by(pixels: np.ndarray, expected: np.ndarray) -> float:
    assert pixels.shape == of_three(expected).shape
    return float(np.abs(pixels.astype(float) - of_three(expected)).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_becomes_the_pixels_that_the_standard_says_or_is_refused(tmp_path: Path, case: Case) -> None:
    path = tmp_path / case.name
    case.write(path)
    if isinstance(case.expected, str):
        with pytest.raises(UnreadableError, match=case.expected) as caught:
            open_image(path)
        assert PATIENT not in str(caught.value)
        return
    assert off_by(np.asarray(open_image(path)), case.expected) <= case.tolerance
    assert content(path).size == case.expected.shape[1::-1]


@pytest.mark.skipif(shutil.which(DCMTK) is None, reason=f"{DCMTK} of dcmtk is not installed")
@pytest.mark.parametrize("case", [c for c in CASES if c.dcmtk is not None], ids=lambda case: case.name)
def test_dcmtk_reads_the_same_pixels(tmp_path: Path, case: Case) -> None:
    path, out = tmp_path / case.name, tmp_path / "dcmtk.ppm"
    case.write(path)
    assert case.dcmtk is not None
    subprocess.run([DCMTK, *case.dcmtk, str(path), str(out)], check=True, capture_output=True, timeout=60)
    with Image.open(out) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert off_by(pixels, np.asarray(open_image(path))) <= ROUNDING


def test_the_corpus_is_read_rather_than_refused() -> None:
    """A gate that refuses everything keeps no promise."""
    read = [case for case in CASES if not isinstance(case.expected, str)]
    assert len(read) > 100
    assert len({case.name for case in CASES}) == len(CASES)
