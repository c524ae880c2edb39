"""Reading image files: what is decoded, cropped, augmented, kept; and the augmentation itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fl_core.datasets.augmentation import LESIONS, Augmentation, augmented
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.examples import TensorExamples, fingerprint
from fl_core.datasets.image_files import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageExamples,
    ImageTransform,
)
from fl_core.datasets.image_loader import ImageFormat, ImageLoader, square
from fl_core.errors import DataError
from tests.support.data import truncate, write_image


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [write_image(tmp_path / f"{k}.png", 20 * k + 20, (24 + k, 20)) for k in range(9)]


def examples(files: list[Path], **options: object) -> ImageExamples:
    transform = ImageTransform(16, margin=1.25, how=LESIONS)
    return ImageExamples(files, torch.arange(len(files)), transform, **options)


def test_a_batch_is_the_resized_centre_normalised(tmp_path: Path) -> None:
    """Against PIL and numpy, step by step."""
    file = write_image(tmp_path / "a.png", 90, (30, 20))
    examples = ImageExamples([file], torch.tensor([4]), ImageTransform(16, margin=1.25))
    x, y = examples.batch(torch.tensor([0]))
    square = np.asarray(Image.open(file).crop((5, 0, 25, 20)), dtype=np.float64)[2:18, 2:18] / 255
    expected = (square - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    assert np.abs(x[0].permute(1, 2, 0).numpy() - expected).max() < 1e-5
    assert y.tolist() == [4]


@pytest.mark.fault("a data set", "has an image of 100 million pixels", "refused before it is decoded")
def test_an_image_above_the_pixel_limit_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "huge.png"
    Image.new("L", (10_000, 10_000)).save(path)
    with path.open("r+b") as file:
        file.truncate(200)  # nothing but the header is there to decode
    with pytest.raises(UnreadableError, match="10000 x 10000 pixels, more than 67108864"):
        square(path, ImageFormat(16))


def test_a_large_image_is_resized(tmp_path: Path) -> None:
    path = tmp_path / "wide.png"
    Image.fromarray(np.full((40, 90, 3), 200, np.uint8)).save(path)
    assert square(path, ImageFormat(16)).shape == (16, 16, 3)
    assert (square(path, ImageFormat(16)) == 200).all()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_eight_bit_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    Image.fromarray(np.full((8, 8, 3), 255, np.uint8)).convert(mode).save(path)
    assert (square(path, ImageFormat(8)) > 250).all()


def test_a_photo_is_turned_upright(tmp_path: Path) -> None:
    image = Image.fromarray(np.zeros((8, 16, 3), np.uint8))
    image.paste((255, 255, 255), (0, 0, 8, 8))
    exif = image.getexif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees to the right
    image.save(tmp_path / "a.jpg", exif=exif, quality=100)
    assert square(tmp_path / "a.jpg", ImageFormat(8)).mean() > 100  # the middle of a 8x16 portrait, half white
    upright = square(tmp_path / "a.jpg", ImageFormat(8))
    assert upright[0].mean() > 200
    assert upright[-1].mean() < 50


def test_results_do_not_depend_on_the_number_of_threads(files: list[Path]) -> None:
    index = torch.tensor([7, 0, 3, 3, 8, 1])
    one, many = (examples(files, loader=ImageLoader(threads=n)).batch(index) for n in (1, 4))
    assert torch.equal(one[0], many[0])
    assert torch.equal(one[1], many[1])
    assert torch.equal(one[1], index)


def test_kept_images_are_the_same_and_bounded(files: list[Path]) -> None:
    bytes_each = 3 * 20 * 20
    none, some, all_ = (examples(files, loader=ImageLoader(cache_bytes=bytes_each * n, threads=1)) for n in (0, 4, 100))
    index = torch.arange(9)
    first = none.batch(index)[0]
    for e in (some, all_):
        assert torch.equal(e.batch(index)[0], first)
        assert torch.equal(e.batch(index)[0], first)
    for file in files:
        file.unlink()
    assert torch.equal(all_.batch(index)[0], first)
    assert torch.equal(some.batch(index[:4])[0], first[:4])
    with pytest.raises(DataError):
        some.batch(index)
    with pytest.raises(DataError):
        none.batch(index[:1])


def test_augmentation_is_decided_by_its_generator(files: list[Path]) -> None:
    index = torch.arange(9)
    a, b = examples(files, loader=ImageLoader(cache_bytes=0, threads=1)), examples(files)
    one, again, other = (e.batch(index, torch.Generator().manual_seed(s))[0] for e, s in ((a, 5), (b, 5), (a, 6)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, a.batch(index)[0])
    assert torch.isfinite(one).all()


def test_an_empty_batch_keeps_its_shape(files: list[Path]) -> None:
    for generator in (None, torch.Generator()):
        x, y = examples(files).batch(torch.zeros(0, dtype=torch.int64), generator)
        assert x.shape == (0, 3, 16, 16)
        assert y.shape == (0,)


@pytest.mark.parametrize("fault", ["truncated", "no image", "empty", "missing", "png chunk"])
def test_an_unreadable_image_names_itself(tmp_path: Path, fault: str) -> None:
    good, bad = write_image(tmp_path / "good.jpg"), tmp_path / "bad.jpg"
    if fault == "truncated":
        truncate(write_image(bad, size=(64, 64)))
    elif fault == "no image":
        bad.write_text("<html>")
    elif fault == "empty":
        bad.write_bytes(b"")
    elif fault == "png chunk":
        bad = write_image(tmp_path / "bad.png", size=(64, 64))
        raw = bytearray(bad.read_bytes())
        at = raw.index(b"IDAT")
        raw[at + 20] ^= 255
        bad.write_bytes(bytes(raw))
    examples = ImageExamples([good, bad], torch.tensor([0, 1]), ImageTransform(8))
    assert examples.batch(torch.tensor([0]))[0].shape == (1, 3, 8, 8)
    with pytest.raises(DataError, match=bad.name) as caught:
        examples.batch(torch.tensor([0, 1]))
    assert caught.value.code == "E-DATA-04"


def test_lengths_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 labels and 1 paths"):
        ImageExamples([tmp_path / "a.png"], torch.tensor([0, 1]), ImageTransform(8))
    with pytest.raises(ValueError, match="3 examples, 2 labels"):
        TensorExamples(torch.zeros(3, 1, 8, 8), torch.zeros(2))
    with pytest.raises(ValueError, match="1 groups"):
        TensorExamples(torch.zeros(2, 1, 8, 8), torch.zeros(2), ("a",))


def test_bounds_of_zero_change_nothing() -> None:
    x = torch.rand(5, 3, 9, 9)
    assert torch.equal(augmented(x, Augmentation(), torch.Generator()), x)


def test_mirroring_flips_about_half_of_the_images_exactly() -> None:
    x = torch.rand(200, 1, 4, 4)
    out = augmented(x, Augmentation(mirror=True), torch.Generator().manual_seed(0))
    flipped = [torch.equal(a, b.flip(-1)) for a, b in zip(out, x, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(out, x, strict=True)]
    assert all(a != b for a, b in zip(flipped, same, strict=True))
    assert 70 < sum(flipped) < 130


def test_moving_stays_within_its_bounds() -> None:
    """A quarter of the side at most: a dot in the middle of 16 pixels moves by at most 4, and its light is kept."""
    x = torch.zeros(100, 1, 16, 16)
    x[:, :, 7:9, 7:9] = 1
    out = augmented(x, Augmentation(shift=0.25), torch.Generator().manual_seed(0))
    assert torch.allclose(out.sum((1, 2, 3)), torch.full((100,), 4.0), atol=1e-3)
    at = torch.arange(16.0)
    row = (out.sum((1, 3)) * at).sum(1) / out.sum((1, 2, 3)) - 7.5
    assert row.abs().max() <= 4.001
    assert row.std() > 1.5


def test_rotation_keeps_the_centre_and_the_bound() -> None:
    x = torch.zeros(50, 1, 17, 17)
    x[:, :, 8, 8] = 1
    out = augmented(x, Augmentation(rotate=50.0), torch.Generator().manual_seed(0))
    assert torch.allclose(out[:, 0, 8, 8], torch.ones(50), atol=1e-4)
    x = torch.zeros(50, 1, 17, 17)
    x[:, :, 8, 12] = 1  # 4 pixels to the right of the centre
    out = augmented(x, Augmentation(rotate=50.0), torch.Generator().manual_seed(0)).clamp(0)
    at = torch.arange(17.0) - 8
    mass = out.sum((1, 2, 3))
    angle = torch.rad2deg(torch.atan2((out.sum((1, 3)) * at).sum(1) / mass, (out.sum((1, 2)) * at).sum(1) / mass))
    assert angle.abs().max() <= 52
    assert angle.std() > 20


def test_brightness_and_contrast_stay_in_range() -> None:
    x = torch.rand(50, 3, 6, 6)
    how = Augmentation(brightness=0.15, contrast=0.1)
    out = augmented(x, how, torch.Generator().manual_seed(0))
    assert torch.equal(out, out.clamp(0, 1))
    shift = out.mean((1, 2, 3)) - x.mean((1, 2, 3))
    assert 0.05 < shift.abs().max() <= 0.15 + 1e-6


def test_fingerprints_frame_their_fields() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint(["a"], ["b"]) != fingerprint(["a", "b"])
    assert fingerprint("a", "b") == fingerprint("a", "b")
    assert len(fingerprint("a")) == 64
