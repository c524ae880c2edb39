"""What pixels of each kind become, against numpy; and what has no rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_core.datasets.decoding import pixels
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import content, open_image
from tests.support.data import write_image

DEEP = np.random.default_rng(1).integers(0, 65536, (9, 7)).astype(np.uint16)
SCALED = np.rint(255 * DEEP.astype(float) / 65535).astype(np.uint8)


def grey(path: Path) -> np.ndarray:
    return np.asarray(open_image(path))[..., 0]


def refuses(path: Path, match: str) -> None:
    with pytest.raises(UnreadableError, match=match):
        open_image(path)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_are_scaled_by_their_range_and_not_clipped(tmp_path: Path, name: str) -> None:
    Image.fromarray(DEEP).save(tmp_path / name)
    assert np.array_equal(grey(tmp_path / name), SCALED)
    assert len(np.unique(SCALED)) > 30


def test_white_is_zero_is_turned_round(tmp_path: Path) -> None:
    image = Image.fromarray(DEEP)
    image.save(tmp_path / "a.tif")
    raw = bytearray((tmp_path / "a.tif").read_bytes())
    at = raw.index(bytes([0x06, 0x01, 0x03, 0x00]))  # tag 262, of type short
    raw[at + 8 : at + 10] = b"\0\0"
    (tmp_path / "b.tif").write_bytes(raw)
    assert np.array_equal(grey(tmp_path / "b.tif").astype(int), np.rint(255 * (1 - DEEP / 65535)).astype(int))


def test_whole_numbers_of_32_bits_are_read_as_16_bits_or_refused(tmp_path: Path) -> None:
    Image.fromarray(DEEP.astype(np.int32)).save(tmp_path / "a.tif")
    assert np.array_equal(grey(tmp_path / "a.tif"), SCALED)
    for wrong in (-1, 65536):
        values = DEEP.astype(np.int32)
        values[0, 0] = wrong
        Image.fromarray(values).save(tmp_path / "b.tif")
        refuses(tmp_path / "b.tif", "unsigned 16-bit integers")


def test_floating_point_is_read_from_0_to_1_or_refused(tmp_path: Path) -> None:
    shares = (DEEP / 65535).astype(np.float32)
    Image.fromarray(shares).save(tmp_path / "a.tif")
    assert np.abs(grey(tmp_path / "a.tif") - 255 * shares).max() <= 0.5 + 1e-4
    for wrong in (np.nan, np.inf, 1e38, -1e-40, 1.001):
        shares[0, 0] = wrong
        Image.fromarray(shares).save(tmp_path / "b.tif")
        refuses(tmp_path / "b.tif", "floating-point values from 0 to 1")


def test_a_file_of_several_pages_is_refused(tmp_path: Path) -> None:
    pages = [Image.fromarray(SCALED), Image.fromarray(255 - SCALED)]
    for name in ("a.tif", "a.webp", "a.png"):
        pages[0].convert("RGB").save(tmp_path / name, save_all=True, append_images=[pages[1].convert("RGB")])
        refuses(tmp_path / name, "several frames or pages")


def test_a_format_that_is_decoded_by_another_program_is_never_opened(tmp_path: Path) -> None:
    Image.fromarray(SCALED).convert("RGB").save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    refuses(tmp_path / "a.png", "not an image in a supported format")


def test_the_content_decides_and_not_the_extension(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png").rename(tmp_path / "a.jpg")
    assert open_image(tmp_path / "a.jpg").size == (20, 16)


def test_a_file_above_the_limit_of_bytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.png")
    with path.open("r+b") as file:
        file.truncate(pixels.MAX_BYTES + 1)  # sparse
    refuses(path, "bytes, more than")


def test_an_image_is_known_by_its_pixels_at_their_full_depth(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.png")
    Image.open(path).save(tmp_path / "b.bmp")
    assert content(path) == content(tmp_path / "b.bmp")
    Image.fromarray(DEEP).save(tmp_path / "c.png")
    changed = DEEP.copy()
    changed[0, 0] ^= 1  # no difference in 8 bits
    Image.fromarray(changed).save(tmp_path / "d.png")
    assert content(tmp_path / "c.png").key != content(tmp_path / "d.png").key
