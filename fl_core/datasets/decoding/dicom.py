"""DICOM images (PS3.3 C.11, C.7.6.3): one frame of grey or colour. No tag about a patient is ever read.

Only the tags of the pixels are read and, for a survey, those about the acquisition (`described`).

Of each value the stored bits count, wherever HighBit puts them: the others may hold an overlay, or anything.

Grey values of every file take the same way, so that hospitals train on the same pixels:

1. Modality LUT, or rescale slope and intercept (Hounsfield units, for instance).
2. The run's window (`data.window=[centre,width]`, linear) where it declares one; the file's own are then ignored. Else
   the file's first VOI LUT, else its first window with its function (LINEAR, LINEAR_EXACT, SIGMOID), else the whole
   range that its stored bits may have: never the range that an image happens to have.
3. MONOCHROME1 is inverted: white is bright everywhere.

Colour: RGB, YBR (converted by the standard's equations) and PALETTE COLOR; of more than 8 bits the upper ones.
Refused: several frames, and enhanced objects, whose values are described frame by frame (PS3.3 C.7.6.16); a transfer
syntax that no installed decoder reads, by its name; tags that contradict each other or what was decoded.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fl_core.datasets.decoding.limits import MAX_BYTES, UnreadableError, require_pixels

if TYPE_CHECKING:
    from pydicom import Dataset
    from pydicom.uid import UID

SUFFIXES = frozenset({".dcm", ".dicom"})
_ENHANCED = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_CHANNELS = ("Red", "Green", "Blue")
_PALETTE = tuple(f"{c}PaletteColorLookupTable{part}" for c in _CHANNELS for part in ("Descriptor", "Data"))
_REQUIRED = (
    *("SamplesPerPixel", "PhotometricInterpretation", "Rows", "Columns"),
    *("BitsAllocated", "BitsStored", "PixelRepresentation"),
)
_TAGS = (
    *("SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData"),
    *("ModalityLUTSequence", "RescaleIntercept", "RescaleSlope"),
    *("VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction", "PresentationLUTShape"),
    *_PALETTE,
    *(f"Segmented{c}PaletteColorLookupTableData" for c in _CHANNELS),
    *_ENHANCED,
)
"""The tags that are read for an image. No other tag, and so nothing about a patient, is ever in memory."""
_SPACINGS = ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing")
_DESCRIPTION = ("Rows", "Columns", "BitsStored", "Manufacturer", "PixelAspectRatio", *_SPACINGS)
"""The tags that a survey reads."""
_GREY, _YBR, _YBR_OF_JPEG2000 = ("MONOCHROME1", "MONOCHROME2"), ("YBR_FULL", "YBR_FULL_422"), ("YBR_ICT", "YBR_RCT")
_PREAMBLE = 128
_JPEG2000 = frozenset(f"1.2.840.10008.1.2.4.{n}" for n in (90, 91, 201, 202, 203))
_RLE = "1.2.840.10008.1.2.5"
_LOSSY = frozenset(f"1.2.840.10008.1.2.4.{n}" for n in (50, 51, 81, 91, 203))
_ANOTHER_SIZE = "DICOM pixel data does not match the declared size: restore the file"
_EXPORT = "export it uncompressed, or install a decoder of pydicom for it"


class Window(NamedTuple):
    """The grey values that become black to white: centre -/+ width / 2, after the modality LUT (PS3.3 C.11.2.1.2)."""

    center: float
    width: float


class _Frame(NamedTuple):
    """The tags of a file's pixels (`pydicom.Dataset`), and the stored values (H, W), or (H, W, 3) in RGB."""

    tags: Dataset
    values: NDArray[np.integer]

    def get(self, name: str, default: object = None) -> object:
        value = getattr(self.tags, name, None)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """Return a tag's first number."""
        value = self.get(name, default)
        first = value if isinstance(value, (int, float, str)) else next(iter(value), default)  # type: ignore[call-overload]
        if not math.isfinite(number := float(first)):
            raise UnreadableError(f"the attribute {name} is not a finite number: restore the file")
        return number

    @property
    def bits(self) -> int:
        """Number of bits of a stored value."""
        return int(self.number("BitsStored", 0))

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest possible stored value."""
        half = 1 << self.bits - 1
        return (-half, half - 1) if self.number("PixelRepresentation", 0) else (0, 2 * half - 1)


def is_dicom(path: Path) -> bool:
    """Tell whether a file is DICOM by the mark after the preamble, not by its name; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(_PREAMBLE)
            return file.read(4) == b"DICM"
    except (OSError, ValueError):
        return False


def lacks_preamble(path: Path) -> bool:
    """Tell whether a file begins with a tag of DICOM (PS3.5 section 7.1), as old scanners write."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except (OSError, ValueError):
        return False
    group, element, kind = start[:2], start[2:4], start[4:6]  # the type of the value, or half of its length
    short = start[5:8] == b"\0\0\0"
    return len(start) == 8 and group in (b"\2\0", b"\x08\0") and element[1] == 0 and (kind.isupper() or short)


class ImageDescription(NamedTuple):
    """Facts in a file's header about the acquisition of an image; None: not stated.

    size: width and height   bits: of a stored value   spacing: mm between rows   make: the manufacturer, as stated
    square: the pixels are as high as wide, or the header does not say
    """

    size: tuple[int, int]
    bits: int
    spacing: float | None = None
    make: str | None = None
    square: bool = True


def described(path: Path) -> ImageDescription:
    """Read a header for a survey, without decoding pixels; raises UnreadableError as `rendered`."""
    with without_contents():
        from pydicom import dcmread

        tags = dcmread(path, specific_tags=list(_DESCRIPTION), stop_before_pixels=True)
        frame = _Frame(tags, np.zeros(0, int))
        size = (int(frame.number("Columns", 0)), int(frame.number("Rows", 0)))
        spacing = next((frame.number(name, 0) for name in _SPACINGS if frame.get(name) not in (None, "")), None)
        sides = [np.asarray(frame.get(name) or 1, dtype=float) for name in ("PixelAspectRatio", *_SPACINGS)]
        square = all(pair.max() <= 1.01 * pair.min() for pair in sides)
        return ImageDescription(size, frame.bits, spacing, str(frame.get("Manufacturer") or ""), square)


def rendered(path: Path, window: Window | None = None) -> NDArray[np.uint8]:
    """Return the pixels for training, (H, W) or (H, W, 3); raises UnreadableError, which contains no value of a tag."""
    with without_contents():
        frame = _read(path)
        photometric = str(frame.get("PhotometricInterpretation"))
        if photometric not in _GREY:
            return _colours(frame, photometric)
        shares = _shares(frame, window)
        return np.rint(255 * (1 - shares if photometric == "MONOCHROME1" else shares)).astype(np.uint8)


def stored(path: Path) -> tuple[NDArray[np.integer], int]:
    """Return the stored values that identify an image, and their number of bits; colours as `rendered`, of 8 bits."""
    with without_contents():
        frame = _read(path)
        photometric = str(frame.get("PhotometricInterpretation"))
        if photometric not in _GREY:
            return _colours(frame, photometric), 8
        signed = int(frame.number("PixelRepresentation", 0))
        return frame.values, frame.bits + 8 * signed if frame.bits <= 8 else frame.bits


@contextmanager
def without_contents(message: str = "DICOM that cannot be decoded") -> Iterator[None]:
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
        kind = f"{message} ({type(error).__name__}): restore the file"
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
        raise UnreadableError("DICOM with an unknown transfer syntax: export it again")
    if syntax.is_deflated:  # what it inflates to is bounded by nothing
        raise UnreadableError(
            f"DICOM in the transfer syntax {syntax.name!r}, which is not supported: export it uncompressed"
        )
    try:
        decoder = get_decoder(syntax)
        usable = bool(decoder.is_available)
    except NotImplementedError:  # what pydicom raises of a syntax that it knows no decoder for
        usable = False
    if not usable:
        raise UnreadableError(f"no installed decoder reads the DICOM transfer syntax {syntax.name!r}: {_EXPORT}")
    declared = _Frame(dcmread(path, specific_tags=list(_TAGS)), np.zeros(0, int))
    _check_form(declared, syntax)
    options: Any = {"correct_unused_bits": False}
    if syntax.is_encapsulated:
        options |= _check_encapsulated(declared, syntax)
    try:
        values, _ = decoder.as_array(declared.tags, index=0, **options)
    except RuntimeError:  # what pydicom raises when every plugin has failed
        values = np.zeros((0, 0))
    if not values.size:
        raise UnreadableError(f"DICOM in the transfer syntax {syntax.name!r} that cannot be decoded: {_EXPORT}")
    if values.shape[:2] != (declared.number("Rows", 0), declared.number("Columns", 0)):
        raise UnreadableError(_ANOTHER_SIZE)
    return _Frame(declared.tags, _stored_bits(declared, values, syntax in _LOSSY))


def _stored_bits(frame: _Frame, values: NDArray[np.integer], lossy: bool) -> NDArray[np.integer]:
    """Return the numbers in the stored bits, with their sign (PS3.5 8.1.1).

    Values of a lossy compression run a little over the ends of their range, and become the ends.
    """
    allocated, high = 8 * values.dtype.itemsize, int(frame.number("HighBit", frame.bits - 1))
    if lossy and high + 1 == frame.bits < allocated:
        ends = frame.limits
        within: NDArray[np.integer] = np.clip(values, *ends)
        if np.abs(values.astype(np.int32) - within).max() > (ends[1] - ends[0]) / 16:
            raise UnreadableError("lossy DICOM with unused bits set: export it uncompressed")
        return within
    numbers: NDArray[np.integer] = values << (allocated - 1 - high) >> (allocated - frame.bits)
    return numbers


def _check_form(frame: _Frame, syntax: UID) -> None:
    if not hasattr(frame.tags, "PixelData"):
        raise UnreadableError("DICOM without an image (a report, a directory, or floating-point pixels): leave it out")
    if frame.number("NumberOfFrames", 1) != 1:
        raise UnreadableError("DICOM with several frames: export each frame that is an example as a separate file")
    if any(hasattr(frame.tags, name) for name in _ENHANCED):
        raise UnreadableError("Enhanced DICOM object with per-frame attributes: export it as single-frame files")
    if missing := [name for name in _REQUIRED if frame.get(name) in (None, "")]:
        raise UnreadableError(f"DICOM without the attribute {missing[0]}: export it again")
    require_pixels(int(frame.number("Columns", 0)), int(frame.number("Rows", 0)))
    photometric, samples = str(frame.get("PhotometricInterpretation")), frame.number("SamplesPerPixel", 1)
    colours = ("RGB", *_YBR, *_YBR_OF_JPEG2000)
    channels_of = {**dict.fromkeys((*_GREY, "PALETTE COLOR"), 1), **dict.fromkeys(colours, 3)}
    if channels_of.get(photometric) != samples:
        raise UnreadableError(
            f"DICOM with {samples:g} samples per pixel, supported are {', '.join(channels_of)}: convert it"
        )
    allocated, bits = frame.number("BitsAllocated", 0), frame.number("BitsStored", 0)
    if allocated not in (8, 16):
        raise UnreadableError(f"DICOM with {allocated:g} bits per value, supported are 8 and 16: convert it")
    if not 1 <= bits <= frame.number("HighBit", bits - 1) + 1 <= allocated:
        raise UnreadableError(
            "DICOM attributes BitsStored, HighBit and BitsAllocated contradict each other: restore the file"
        )
    native_422 = photometric == "YBR_FULL_422" and not syntax.is_encapsulated
    if (
        (photometric in _YBR_OF_JPEG2000 and syntax not in _JPEG2000)
        or (photometric in _YBR and (allocated, bits) != (8, 8))
        or (native_422 and (frame.number("PlanarConfiguration", 0) or frame.number("Columns", 0) % 2))
    ):
        raise UnreadableError(f"DICOM with invalid {photometric} colour data: convert it to RGB")
    if (photometric, frame.get("PresentationLUTShape")) in (("MONOCHROME1", "IDENTITY"), ("MONOCHROME2", "INVERSE")):
        raise UnreadableError(
            "DICOM attributes PresentationLUTShape and PhotometricInterpretation contradict each other: restore the "
            "file"
        )


def _check_encapsulated(frame: _Frame, syntax: UID) -> dict[str, int]:
    """Compare what a compressed frame says with the tags, before anything is allocated for it.

    Return options for pydicom's decoder, which believes the tags about what Pillow has changed.
    """
    from pydicom.encaps import get_frame
    from pydicom.pixels.utils import get_j2k_parameters

    raw = get_frame(frame.tags.PixelData, 0, number_of_frames=1)
    codestream, signed = get_j2k_parameters(raw), bool(frame.number("PixelRepresentation", 0))  # {} of others
    high, another_sign = frame.number("HighBit", 0), codestream.get("is_signed", signed) != signed
    too_shallow = high >= max(frame.bits, codestream.get("precision", 0)) and syntax != _RLE
    if too_shallow or (another_sign and (not signed or syntax in _LOSSY)):
        raise UnreadableError(
            "compressed DICOM pixel data contradict the attributes (depth or sign): export it uncompressed"
        )
    try:
        with Image.open(io.BytesIO(raw), formats=("JPEG", "JPEG2000")) as image:
            size, marks = image.size, image.info
    except Exception:  # another compression; its decoder is given the declared size
        return {}
    if size != (frame.number("Columns", 0), frame.number("Rows", 0)):
        raise UnreadableError(_ANOTHER_SIZE)
    if frame.number("SamplesPerPixel", 1) == 1:
        return {}
    transform = marks.get("adobe_transform", 1 if "jfif" in marks else None)
    if transform is not None and (transform == 1) != (frame.get("PhotometricInterpretation") in _YBR):
        raise UnreadableError(
            "JPEG colours in the DICOM file differ from PhotometricInterpretation: correct the attribute"
        )
    as_rgb = "adobe_transform" not in marks  # by Adobe's mark Pillow converts to RGB itself
    return {"planar_configuration": 0, "as_rgb": as_rgb}


def _colours(frame: _Frame, photometric: str) -> NDArray[np.uint8]:
    values, bits = frame.values, frame.bits
    if photometric == "PALETTE COLOR":
        channels = [_looked_up(frame, values, frame.limits, *_palette(frame, name)) for name in _CHANNELS]
        return np.stack([v // ((most + 1) / 256) for v, most in channels], -1).astype(np.uint8)
    if frame.number("PixelRepresentation", 0) or values.ndim != 3:
        raise UnreadableError("DICOM with signed colour values: convert it")
    eight = values >> (bits - 8) if bits >= 8 else np.rint(values * (255 / (2**bits - 1)))
    return eight.astype(np.uint8)


def _palette(frame: _Frame, channel: str) -> tuple[Sequence[int], object]:
    """Return a channel's descriptor and its entries."""
    table = f"{channel}PaletteColorLookupTable"
    descriptor: Sequence[int] = frame.tags[f"{table}Descriptor"].value
    data, segments = frame.get(f"{table}Data"), frame.get(f"Segmented{table}Data")
    return descriptor, data if segments is None else _expanded(_words(frame, segments), descriptor)


def _expanded(words: NDArray[np.uint16], descriptor: Sequence[int]) -> list[int]:
    """Return the entries of a segmented palette (PS3.3 C.7.9.2) of discrete and linear segments."""
    numbers = (words if descriptor[2] > 8 else words.view(np.uint8)).tolist()
    entries: list[int] = []
    at = 0
    while len(entries) < (descriptor[0] & 0xFFFF or 1 << 16):
        kind, n = numbers[at : at + 2]
        if kind == 0:
            entries += numbers[at + 2 : at + 2 + n]
            at += 2 + n
        elif kind == 1 and entries:
            entries += np.rint(np.linspace(entries[-1], numbers[at + 2], n + 1))[1:].astype(int).tolist()
            at += 3
        else:
            raise UnreadableError("DICOM with an invalid palette (segments out of range): convert it to RGB")
    return entries


def _shares(frame: _Frame, window: Window | None) -> NDArray[np.float64]:
    """Map stored values to shares of white, in [0, 1]."""
    values, low, high = _modality(frame)
    if window is not None:
        return _windowed(values, window, "LINEAR")
    if table := _first(frame.get("VOILUTSequence")):
        mapped, most = _looked_up(frame, values, (low, high), table.LUTDescriptor, table.LUTData)
        return mapped / most
    if frame.get("WindowCenter") is not None and frame.get("WindowWidth") is not None:
        file_window = Window(frame.number("WindowCenter", 0), frame.number("WindowWidth", 0))
        return _windowed(values, file_window, str(frame.get("VOILUTFunction") or "LINEAR"))
    return np.clip((values - low) / (high - low), 0, 1)


def _modality(frame: _Frame) -> tuple[NDArray[np.float64], float, float]:
    """Return the values after the modality LUT, and the least and the greatest that the stored bits could give."""
    values: NDArray[np.float64] = frame.values.astype(np.float64)
    if table := _first(frame.get("ModalityLUTSequence")):
        mapped, most = _looked_up(frame, values, frame.limits, table.LUTDescriptor, table.LUTData)
        return mapped, 0.0, most
    low, high = frame.limits
    slope, intercept = frame.number("RescaleSlope", 1), frame.number("RescaleIntercept", 0)
    if not abs(slope) > 1e-12 or not max(abs(slope), abs(intercept)) < 1e12:
        raise UnreadableError("DICOM with an invalid rescale slope: restore the file")
    ends = sorted((low * slope + intercept, high * slope + intercept))
    return values * slope + intercept, ends[0], ends[1]


def _windowed(values: NDArray[np.float64], window: Window, function: str) -> NDArray[np.float64]:
    """Apply PS3.3 C.11.2.1.2 and C.11.2.1.3, with white as 1."""
    center, width = window
    if not width >= (1 if function == "LINEAR" else 1e-12):
        raise UnreadableError("DICOM with a window that is too narrow: set data.window for the run")
    if function == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (values - center) / width, -700, 700)))
    if function == "LINEAR_EXACT":
        return np.clip((values - center) / width + 0.5, 0, 1)
    if function != "LINEAR":
        raise UnreadableError("DICOM with an unknown VOI LUT function: restore the file")
    if width == 1:
        return (values > center - 0.5).astype(np.float64)
    return np.clip((values - (center - 0.5)) / (width - 1) + 0.5, 0, 1)


def _first(sequence: object) -> Dataset | None:
    return sequence[0] if sequence else None  # type: ignore[index]


def _looked_up(
    frame: _Frame, values: NDArray[Any], limits: tuple[float, float], descriptor: Sequence[int], data: object
) -> tuple[NDArray[np.float64], float]:
    """Look values up in a LUT (PS3.3 C.11.1.1); return the entries, and the greatest that an entry may be.

    limits: of the values. The first value of the table has their sign, whatever the type of its tag (C.11.2.1.1).
    """
    entries, first, bits = (int(n) & 0xFFFF for n in descriptor)
    entries, words = entries or 1 << 16, _words(frame, data)
    if first >> 15 and limits[0] < 0:
        first -= 1 << 16
    if bits <= 8 and len(words) < entries:
        table: NDArray[Any] = words.view(np.uint8)  # two in a word, the lower byte first
    else:
        table = words & 0xFF if bits <= 8 and (words >> 8 == words & 0xFF).all() else words  # twice in a word, or once
    if len(table) < entries or not 8 <= bits <= 16 or table[:entries].max() >= 2**bits:
        raise UnreadableError("DICOM with a lookup table that contradicts its descriptor: restore the file")
    if first > limits[1] or first + entries <= limits[0]:
        raise UnreadableError("DICOM with a lookup table that covers none of its values: restore the file")
    places = np.clip(np.rint(values.astype(np.float64)) - first, 0, entries - 1).astype(np.int64)
    return table[places].astype(np.float64), 2.0**bits - 1


def _words(frame: _Frame, data: object) -> NDArray[np.uint16]:
    """Return the words of a lookup table, which pydicom leaves as bytes or makes numbers, by the type of their tag."""
    if isinstance(data, bytes):
        order = "<" if frame.tags.file_meta.TransferSyntaxUID.is_little_endian else ">"
        return np.frombuffer(data, f"{order}u2").astype("<u2")
    return (np.atleast_1d(np.asarray(data, dtype=np.int64)) & 0xFFFF).astype("<u2")
