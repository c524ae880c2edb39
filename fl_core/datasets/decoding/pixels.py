"""Pixels of an image file. They depend only on the file's content, not on its name or on other files.

| pixels of the file                    | become                                                                       |
|---------------------------------------|------------------------------------------------------------------------------|
| 8 bits: grey, RGB, palette, CMYK, ... | RGB; an alpha channel is left out                                            |
| grey of 9 to 16 bits (PNG, TIFF)      | 255 v / (2^bits - 1), rounded: the range of the type, not of the image       |
| 16 bits: colour, or grey with alpha   | the upper byte of each channel                                               |
| grey of 32 bits, whole numbers        | as 16 bits if all are in 0 to 65535, else refused: no range was declared     |
| grey of 32 bits, floating point       | 255 v if all are in 0 to 1, else refused                                     |
| DICOM                                 | see `dicom`                                                                  |

TIFF's "white is zero" is turned round. A file of several frames or pages is refused; of a camera's JPEG with previews
(MPO) the first picture is the picture.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from fl_core.datasets.decoding import dicom
from fl_core.datasets.decoding.dicom import ImageDescription, Window
from fl_core.datasets.decoding.limits import MAX_BYTES, MAX_PIXELS, UnreadableError, require_pixels

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", *dicom.SUFFIXES})
_FORMATS = ("BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "TIFF", "WEBP")
"""The allowed decoders. Others, such as PostScript's, would start a program."""
_EIGHT_BIT = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
_DEEP = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I", "F"})
_BITS, _PHOTOMETRIC, _PLANES, _PALETTE, _SAMPLE_FORMAT, _WHITE_IS_ZERO = 258, 262, 284, 320, 339, 0
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, RuntimeError)
"""Pillow's errors on broken files and on files that are no images: SyntaxError on PNG chunks, ValueError on headers."""


class ImageContent(NamedTuple):
    """The identity of an image, independent of its file. depth: significant bits of a value; 8 or more.

    key: digest of the stored numbers, upright: of RGB, or of the grey values if they have more than 8 bits. So a DICOM
    file with another window, or its export to a PNG of 16 bits, is the same image.
    """

    key: str
    size: tuple[int, int]
    depth: int


def open_image(path: Path, window: Window | None = None) -> Image.Image:
    """Decode a file to the last byte, turned upright, in RGB of 8 bits. window: of DICOM's grey values, see `dicom`.

    Raises UnreadableError on what no decoder reads to the end, and on pixels without a rule. One of more than
    MAX_PIXELS pixels is not decoded.
    """
    if dicom.is_dicom(path):
        return Image.fromarray(dicom.rendered(path, window)).convert("RGB")
    with _decoded(path) as (image, _):
        return _upright_rgb(image)


def rgb_of(image: Image.Image) -> Image.Image:
    """Convert an image in memory to the result of `open_image` for a file with these pixels.

    Raises UnreadableError as for a file.
    """
    try:
        require_pixels(image.width, image.height)
        if image.mode not in _EIGHT_BIT | _DEEP:
            raise UnreadableError(f"pixels of mode {image.mode} are not supported: convert the image")
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise UnreadableError("several frames or pages: extract one of them")
        image.load()
        return _upright_rgb(image)
    except (*_BROKEN, MemoryError, Image.DecompressionBombError) as error:
        raise UnreadableError(str(error) or type(error).__name__) from error


def _upright_rgb(image: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(image)
    return upright.convert("RGB") if image.mode in _EIGHT_BIT else _grey(upright, image)


def described(path: Path) -> ImageDescription:
    """Read the facts in an image's header, without decoding pixels; raises UnreadableError."""
    if dicom.is_dicom(path):
        return dicom.described(path)
    with _opened(path) as file:
        return ImageDescription((file.width, file.height), _depth(file))


def content(path: Path) -> ImageContent:
    """Identify an image by its pixels; raises UnreadableError as `open_image`."""
    if dicom.is_dicom(path):
        values, depth = dicom.stored(path)
        if depth > 8:
            return _content("values", (values.shape[1], values.shape[0]), values.astype("<i4").tobytes(), depth)
        image = Image.fromarray(values.astype(np.uint8)).convert("RGB")
        return _content("image", image.size, image.tobytes(), 8)
    with _decoded(path) as (image, depth):
        upright = ImageOps.exif_transpose(image)
        if image.mode in _EIGHT_BIT:
            return _content("image", upright.size, upright.convert("RGB").tobytes(), depth)
        values = np.asarray(upright)
        return _content("values", upright.size, values.astype("<f4" if image.mode == "F" else "<i4").tobytes(), 16)


def _content(kind: str, size: tuple[int, int], numbers: bytes, depth: int) -> ImageContent:
    return ImageContent(hashlib.sha256(f"{kind} {size} ".encode() + numbers).hexdigest(), size, depth)


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile.ImageFile]:
    """Open a file without a path: where Pillow has one it maps TIFF into memory, and shears images that are turned."""
    with _readable(path), path.open("rb") as stream, Image.open(stream, formats=_FORMATS) as file:
        yield file


@contextmanager
def _decoded(path: Path) -> Iterator[tuple[Image.Image, int]]:
    """Check what a file's header says, and decode it; errors inside become UnreadableError as well.

    Return the image, and the bits of a value in the file, since Pillow's mode shows only the remaining ones.
    """
    with _opened(path) as file:
        depth, tags = _depth(file), getattr(file, "tag_v2", {})
        if file.mode not in _EIGHT_BIT | _DEEP:
            raise UnreadableError(f"pixels of mode {file.mode} are not supported: convert the file")
        if depth == 8 and 2 in tags.get(_SAMPLE_FORMAT, ()):  # Pillow forgets the sign
            raise UnreadableError("signed values of 8 bits are not supported: convert the file")
        if max(tags.get(_PALETTE, (65535,))) < 256:
            raise UnreadableError("a palette of 8 bits instead of 16, which makes the image black: convert the file")
        if depth > 8 and tags.get(_PLANES) == 2:  # Pillow takes the bytes of one value for two
            raise UnreadableError("values of more than 8 bits stored channel by channel: store them pixel by pixel")
        require_pixels(file.width, file.height)
        if file.format != "MPO" and _has_second_frame(file):
            raise UnreadableError("several frames or pages: store each in a separate file")
        file.load()
        yield file, depth


def _depth(file: ImageFile.ImageFile) -> int:
    """Return 8, 16 or 32, of a file whose pixels are not decoded yet: then it still has their raw mode."""
    if file.mode not in _EIGHT_BIT:
        return 16 if "16" in file.mode else 32
    deep_png = file.format == "PNG" and any(";16" in str(tile.args) for tile in file.tile)
    return 16 if deep_png or max(getattr(file, "tag_v2", {}).get(_BITS, (8,))) > 8 else 8


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert errors of reading a file to UnreadableError."""
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UnreadableError(f"{size} bytes, more than {MAX_BYTES}: make it smaller")
        yield
    except UnreadableError:
        raise
    except (*_BROKEN, MemoryError, Image.DecompressionBombError) as error:
        if isinstance(error, Image.DecompressionBombError):
            raise UnreadableError(f"more than {MAX_PIXELS} pixels: make it smaller") from error
        if isinstance(error, UnidentifiedImageError):
            bare = "DICOM without preamble and meta header (PS3.10): store it as a DICOM file"
            other = "not an image in a supported format (judged by its content, not its name)"
            raise UnreadableError(bare if dicom.lacks_preamble(path) else other) from error
        raise UnreadableError(str(error).replace(str(path), path.name) or type(error).__name__) from error


def _has_second_frame(file: Image.Image) -> bool:
    try:
        file.seek(1)
    except EOFError:
        return False
    return True


def _grey(upright: Image.Image, file: Image.Image) -> Image.Image:
    tags = getattr(file, "tag_v2", {})
    values: NDArray[np.float64] = np.asarray(upright).astype(np.float64)
    if file.mode == "F":
        low, high, wanted = 0.0, 1.0, "floating-point values from 0 to 1"
    else:
        bits = int(tags.get(_BITS, (16,))[0]) if file.mode != "I" else 16
        low, high, wanted = 0.0, float(2 ** min(bits, 16) - 1), "unsigned 16-bit integers"
    if not (values.min() >= low and values.max() <= high):  # NaN is in no range
        raise UnreadableError(f"expected {wanted}, found other values, whose range is unknown: convert the file")
    shares = values / high
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        shares = 1 - shares
    return Image.fromarray(np.rint(255 * shares).astype(np.uint8)).convert("RGB")
