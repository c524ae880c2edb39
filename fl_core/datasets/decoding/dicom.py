"""DICOM images (PS3.3 C.11, C.7.6.3): one frame of grey or colour. No tag about a patient is ever read.

What is read are the tags of the pixels, and for a survey those of how the image was made (`described`).

Grey values of every file take the same way, so that hospitals train on the same pixels:

1. Modality LUT, or rescale slope and intercept (Hounsfield units, for instance).
2. The run's window (`data.window=[centre,width]`, linear) where it declares one; the file's own are then ignored. Else
   the file's first VOI LUT, else its first window with its function (LINEAR, LINEAR_EXACT, SIGMOID), else the whole
   range that its stored bits may have: never the range that an image happens to have.
3. MONOCHROME1 is inverted: white is bright everywhere.

Colour: RGB, YBR (converted by the standard's equations) and PALETTE COLOR; of more than 8 bits the upper ones.
Refused: several frames, and enhanced objects, whose values are described frame by frame (PS3.3 C.7.6.16); a transfer
syntax that no installed decoder reads, by its name.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fl_core.datasets.decoding.limits import MAX_BYTES, UnreadableError, require_pixels

if TYPE_CHECKING:
    from pydicom import Dataset

SUFFIXES = frozenset({".dcm", ".dicom"})
_ENHANCED = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_CHANNELS = ("Red", "Green", "Blue")
_PALETTE = tuple(f"{c}PaletteColorLookupTable{part}" for c in _CHANNELS for part in ("Descriptor", "Data"))
_TAGS = (
    *("SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData"),
    *("ModalityLUTSequence", "RescaleIntercept", "RescaleSlope"),
    *("VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *_PALETTE,
    *(f"Segmented{c}PaletteColorLookupTableData" for c in _CHANNELS),
    *_ENHANCED,
)
"""All that is read of an image; no other tag, and so nothing about a patient, is ever in memory."""
_SPACINGS = ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing")
_DESCRIPTION = ("Rows", "Columns", "BitsStored", "Manufacturer", *_SPACINGS)
"""All that a survey reads of a file."""
_GREY, _COLOUR = ("MONOCHROME1", "MONOCHROME2"), ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_PREAMBLE = 128


class Window(NamedTuple):
    """The grey values that become black to white: centre -/+ width / 2, after the modality LUT (PS3.3 C.11.2.1.2)."""

    center: float
    width: float


class _Frame(NamedTuple):
    """The tags of a file's pixels (`pydicom.Dataset`), and the stored values (H, W), or (H, W, 3) in RGB."""

    tags: Dataset
    values: NDArray[np.generic]

    def get(self, name: str, default: object = None) -> object:
        found = getattr(self.tags, name, None)
        return default if found is None else found

    def number(self, name: str, default: float) -> float:
        """Return a tag's first number."""
        found = self.get(name, default)
        first = found if isinstance(found, (int, float, str)) else next(iter(found), default)  # type: ignore[call-overload]
        if not math.isfinite(number := float(first)):
            raise UnreadableError(f"the tag {name} holds no finite number: restore the file")
        return number


def is_dicom(path: Path) -> bool:
    """Tell by the mark after the preamble, whatever the file is called; False for what cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(_PREAMBLE)
            return file.read(4) == b"DICM"
    except (OSError, ValueError):
        return False


class Description(NamedTuple):
    """What a file's header says of how an image was made; None: it does not.

    size: width and height   bits: of a stored value   spacing: mm between rows   make: the manufacturer, as stated.
    """

    size: tuple[int, int]
    bits: int
    spacing: float | None = None
    make: str | None = None


def described(path: Path) -> Description:
    """Read what a survey asks for of a header; no pixel is decoded. Raises UnreadableError as `rendered`."""
    with without_contents():
        from pydicom import dcmread

        tags = dcmread(path, specific_tags=list(_DESCRIPTION), stop_before_pixels=True)
        frame = _Frame(tags, np.zeros(0))
        size = (int(frame.number("Columns", 0)), int(frame.number("Rows", 0)))
        spacing = next((frame.number(name, 0) for name in _SPACINGS if frame.get(name) not in (None, "")), None)
        return Description(size, int(frame.number("BitsStored", 0)), spacing, str(frame.get("Manufacturer") or ""))


def rendered(path: Path, window: Window | None = None) -> NDArray[np.uint8]:
    """Return what is trained on: (H, W) or (H, W, 3); raises UnreadableError, which repeats no value of a tag."""
    with without_contents():
        frame = _read(path)
        photometric = str(frame.get("PhotometricInterpretation"))
        if photometric not in _GREY:
            return _colours(frame, photometric)
        shares = _shares(frame, window)
        return np.rint(255 * (1 - shares if photometric == "MONOCHROME1" else shares)).astype(np.uint8)


def stored(path: Path) -> tuple[NDArray[np.generic], int]:
    """Return what identifies an image: its stored values and their bits; colours as `rendered`, of 8 bits."""
    with without_contents():
        frame = _read(path)
        photometric = str(frame.get("PhotometricInterpretation"))
        if photometric not in _GREY:
            return _colours(frame, photometric), 8
        signed, bits = int(frame.number("PixelRepresentation", 0)), int(frame.number("BitsStored", 16))
        return frame.values, bits + 8 * signed if bits <= 8 else bits


@contextmanager
def without_contents(said: str = "DICOM that cannot be decoded") -> Iterator[None]:
    """Replace errors of the library, whose texts repeat what a file holds; nothing of them is kept, also as a cause.

    said: of a file that it could not use. Raises UnreadableError, and silences the library.
    """
    kind = ""
    _silence()
    try:
        yield
    except UnreadableError as error:
        kind = str(error)
    except Exception as error:  # any: files are of unknown origin, and the library raises what it meets
        kind = f"{said} ({type(error).__name__}): restore the file"
    if kind:
        raise UnreadableError(kind)


@cache
def _silence() -> None:
    """Turn off what the library says about files: its warnings and log lines repeat values of their tags."""
    from pydicom import config

    config.settings.reading_validation_mode = config.IGNORE
    for name in ("pydicom", "highdicom"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")


def _read(path: Path) -> _Frame:
    from pydicom import dcmread
    from pydicom.filereader import read_file_meta_info
    from pydicom.pixels.decoders.base import get_decoder

    if (size := path.stat().st_size) > MAX_BYTES:
        raise UnreadableError(f"{size} bytes, more than {MAX_BYTES}: make it smaller")
    syntax = read_file_meta_info(path).get("TransferSyntaxUID")
    if syntax is None or not syntax.is_transfer_syntax:
        raise UnreadableError("DICOM without a transfer syntax that is known: export it again")
    if syntax.is_deflated:  # what it inflates to is bounded by nothing
        raise UnreadableError(
            f"DICOM in the transfer syntax {syntax.name!r}, which is not read: export it uncompressed"
        )
    try:
        decoder = get_decoder(syntax)
        usable = bool(decoder.is_available)
    except NotImplementedError:  # what pydicom raises of a syntax that it knows no decoder for
        usable = False
    if not usable:
        raise UnreadableError(
            f"DICOM in the transfer syntax {syntax.name!r}, which no installed decoder reads: export it uncompressed, "
            "or install a decoder of pydicom for it"
        )
    found = _Frame(dcmread(path, specific_tags=list(_TAGS)), np.zeros(0))
    _check_form(found)
    if syntax.is_encapsulated:
        _check_encapsulated(found)
    values, _ = decoder.as_array(found.tags, index=0)
    wanted = (int(found.number("Rows", 0)), int(found.number("Columns", 0)))
    if values.shape[:2] != wanted:
        raise UnreadableError("DICOM whose pixels are not of the size that it declares: restore the file")
    return _Frame(found.tags, values)


def _check_form(frame: _Frame) -> None:
    if not hasattr(frame.tags, "PixelData"):
        raise UnreadableError("DICOM without an image (a report, a directory, or floating-point pixels): leave it out")
    if frame.number("NumberOfFrames", 1) != 1:
        raise UnreadableError("DICOM of several frames: export each frame that is an example as a file of its own")
    if any(hasattr(frame.tags, name) for name in _ENHANCED):
        raise UnreadableError("DICOM of an enhanced type, with values per frame: export it as single frames")
    require_pixels(int(frame.number("Columns", 0)), int(frame.number("Rows", 0)))
    photometric, samples = str(frame.get("PhotometricInterpretation")), frame.number("SamplesPerPixel", 1)
    known = {**dict.fromkeys((*_GREY, "PALETTE COLOR"), 1), **dict.fromkeys(_COLOUR, 3)}
    if known.get(photometric) != samples:
        raise UnreadableError(
            f"DICOM with {samples:g} samples per pixel that are not of {', '.join(known)}: convert it"
        )
    allocated, bits = frame.number("BitsAllocated", 0), frame.number("BitsStored", 0)
    if allocated not in (8, 16) or not 1 <= bits <= allocated:
        raise UnreadableError(f"DICOM of {allocated:g} bits per value, not of 8 or 16: convert it")


def _check_encapsulated(frame: _Frame) -> None:
    """Compare the size that a compressed frame says with the declared one, before anything is allocated for it."""
    from pydicom.encaps import get_frame

    raw = get_frame(frame.tags.PixelData, 0, number_of_frames=1)
    try:
        with Image.open(io.BytesIO(raw), formats=("JPEG", "JPEG2000")) as image:
            size = image.size
    except Exception:  # another compression; its decoder is given the declared size
        return
    if size != (frame.number("Columns", 0), frame.number("Rows", 0)):
        raise UnreadableError("DICOM whose pixels are not of the size that it declares: restore the file")


def _colours(frame: _Frame, photometric: str) -> NDArray[np.uint8]:
    values, bits = frame.values, int(frame.number("BitsStored", 8))
    if photometric == "PALETTE COLOR":
        from pydicom.pixels.processing import apply_color_lut

        values = apply_color_lut(values, frame.tags)[..., :3]
        bits = 8 * values.dtype.itemsize
    if frame.number("PixelRepresentation", 0) or values.ndim != 3:
        raise UnreadableError("DICOM with colours that have a sign: convert it")
    return (values.astype(np.uint16) >> (bits - 8)).astype(np.uint8) if bits > 8 else values.astype(np.uint8)


def _shares(frame: _Frame, window: Window | None) -> NDArray[np.float64]:
    """Map stored values to shares of white, in [0, 1]."""
    values, low, high = _modality(frame)
    if window is not None:
        return _windowed(values, window, "LINEAR")
    if table := _first(frame.get("VOILUTSequence")):
        found, most = _looked_up(frame, values, table)
        return found / most
    if frame.get("WindowCenter") is not None and frame.get("WindowWidth") is not None:
        own = Window(frame.number("WindowCenter", 0), frame.number("WindowWidth", 0))
        return _windowed(values, own, str(frame.get("VOILUTFunction") or "LINEAR"))
    return np.clip((values - low) / (high - low), 0, 1)


def _modality(frame: _Frame) -> tuple[NDArray[np.float64], float, float]:
    """Return the values after the modality LUT, and the least and the greatest that the stored bits could give."""
    values: NDArray[np.float64] = frame.values.astype(np.float64)
    if table := _first(frame.get("ModalityLUTSequence")):
        found, most = _looked_up(frame, values, table)
        return found, 0.0, most
    bits, signed = frame.number("BitsStored", 16), frame.number("PixelRepresentation", 0)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0.0, 2**bits - 1)
    slope, intercept = frame.number("RescaleSlope", 1), frame.number("RescaleIntercept", 0)
    if not abs(slope) > 1e-12 or not max(abs(slope), abs(intercept)) < 1e12:
        raise UnreadableError("DICOM with a rescale slope of 0, or out of all proportion: restore the file")
    ends = sorted((low * slope + intercept, high * slope + intercept))
    return values * slope + intercept, ends[0], ends[1]


def _windowed(values: NDArray[np.float64], window: Window, function: str) -> NDArray[np.float64]:
    """Apply PS3.3 C.11.2.1.2 and C.11.2.1.3, with white as 1."""
    center, width = window
    if not width >= (1 if function == "LINEAR" else 1e-12):
        raise UnreadableError("DICOM with a window whose width is too small: declare one for the run (data.window)")
    if function == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (values - center) / width, -700, 700)))
    if function == "LINEAR_EXACT":
        return np.clip((values - center) / width + 0.5, 0, 1)
    if function != "LINEAR":
        raise UnreadableError("DICOM with a VOI LUT function that the standard does not have: restore the file")
    if width == 1:
        return (values > center - 0.5).astype(np.float64)
    return np.clip((values - (center - 0.5)) / (width - 1) + 0.5, 0, 1)


def _first(sequence: object) -> Dataset | None:
    return sequence[0] if sequence else None  # type: ignore[index]


def _looked_up(frame: _Frame, values: NDArray[np.float64], table: Dataset) -> tuple[NDArray[np.float64], float]:
    """Look values up in a LUT (PS3.3 C.11.1.1); return the entries, and the greatest that an entry may be."""
    entries, first, bits = (int(n) for n in table.LUTDescriptor)
    entries = entries or 1 << 16
    raw = table.LUTData
    if isinstance(raw, bytes):
        order = "<" if frame.tags.file_meta.TransferSyntaxUID.is_little_endian else ">"
        raw = np.frombuffer(raw, f"{order}u2" if len(raw) >= 2 * entries else "u1")
    data = np.atleast_1d(np.asarray(raw, dtype=np.float64))
    if len(data) < entries or not 8 <= bits <= 16 or data[:entries].max() >= 2**bits:
        raise UnreadableError("DICOM with a lookup table that contradicts its descriptor: restore the file")
    return data[np.clip(np.rint(values) - first, 0, entries - 1).astype(np.int64)], float(2**bits - 1)
