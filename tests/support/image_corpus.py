"""Image files as hospitals have them, with the pixels that the standards say they are.

The expected pixels are made here, from numbers and by the formulas of DICOM PS3.3 and PS3.5, TIFF 6 and PNG; the code
under test has no part in them. `python -m tests.support.image_corpus FOLDER` writes all files.
"""

from __future__ import annotations

import io
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels.encoders import JPEGLSLosslessEncoder, JPEGLSNearLosslessEncoder, RLELosslessEncoder
from pydicom.pixels.encoders.base import Encoder
from pydicom.uid import (
    JPEG2000,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    JPEGLSNearLossless,
    RLELossless,
)

from tests.support.data import write_dicom

Pixels = NDArray[np.generic]
HEIGHT, WIDTH = 22, 36
_MESH = np.mgrid[0:HEIGHT, 0:WIDTH] / np.array([HEIGHT - 1, WIDTH - 1]).reshape(2, 1, 1)
OVERLAY = np.where(_MESH[1] > _MESH[0], 1 << 15, 0).astype(np.uint16)
"""What older scanners put into the bits above the stored ones."""


def ramp(top: int) -> NDArray[np.int64]:
    """Make a gradient from 0 to `top`, another in each direction."""
    return np.rint((0.3 * _MESH[0] + 0.7 * _MESH[1]) * top).astype(np.int64)


def rgb(top: int = 255) -> NDArray[np.int64]:
    return np.stack([ramp(top), np.flipud(ramp(top)), top - ramp(top) // 2], -1)


def scaled(values: Pixels, low: float, high: float) -> Pixels:
    """Return 255 where values reach `high`, and 0 at `low` and below."""
    return np.rint(255 * np.clip((values.astype(float) - low) / (high - low), 0, 1))


class Case(NamedTuple):
    """One file. expected: its pixels (H, W) or (H, W, 3), or why it is refused (a regular expression).

    tolerance: of 255, for compression with loss and for another reader's rounding   dcmtk: arguments with which
    `dcmj2pnm` reads the same; None where it is no second reader of this
    """

    name: str
    write: Callable[[Path], object]
    expected: Pixels | str
    tolerance: float = 0.5
    dcmtk: tuple[str, ...] | None = None


R, WIDE = ramp(4095), ramp(65535)
GREY = scaled(R, 0, 4095)
TWELVE: dict[str, object] = {"bits": 12}


def _dicom(
    name: str,
    pixels: Pixels,
    expected: Pixels | str,
    *,
    dcmtk: tuple[str, ...] | None = (),
    tolerance: float = 0.5,
    **tags: object,
) -> Case:
    return Case(f"{name}.dcm", lambda path: write_dicom(path, pixels, **tags), expected, tolerance, dcmtk)


def _lut(
    first: int, bits: int, data: Sequence[int] | Pixels | bytes, vr: str = "US", entries: int | None = None
) -> list[Dataset]:
    """Make a sequence of one lookup table; data in words, or bytes as they are."""
    item = Dataset()
    count = len(data) if entries is None else entries
    item.add_new("LUTDescriptor", vr, [count, first, bits])
    item.add_new("LUTData", "OW", data if isinstance(data, bytes) else np.asarray(data).astype("<u2").tobytes())
    return [item]


def _palette(bits: int, tables: Pixels, first: int = 0, *, packed: bool = False, order: str = "<") -> dict[str, object]:
    """Make the tags of a palette (3, n)."""
    tags: dict[str, object] = {"photometric": "PALETTE COLOR"}
    for name, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        words = table.astype(np.uint8).view("<u2") if packed else table
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [table.size & 0xFFFF, first, bits]
        tags[f"{name}PaletteColorLookupTableData"] = words.astype(f"{order}u2").tobytes()
    return tags


def _segmented(bits: int, segments: Sequence[Sequence[int]], entries: int) -> dict[str, object]:
    tags: dict[str, object] = {"photometric": "PALETTE COLOR"}
    for name, numbers in zip(("Red", "Green", "Blue"), segments, strict=True):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [entries, 0, bits]
        tags[f"Segmented{name}PaletteColorLookupTableData"] = np.array(numbers, "<u2" if bits > 8 else "u1").tobytes()
    return tags


def grey_dicom() -> Iterator[Case]:
    u16, low12 = R.astype(np.uint16), R - 2048
    yield _dicom("grey-12", u16, GREY, **TWELVE)
    yield _dicom("grey-12-implicit", u16, GREY, syntax=ImplicitVRLittleEndian, **TWELVE)
    swapped = u16.astype(">u2").tobytes()
    yield _dicom("grey-12-big-endian", u16, GREY, syntax=ExplicitVRBigEndian, PixelData=swapped, **TWELVE)
    yield _dicom("grey-12-inverted", u16, 255 - GREY, photometric="MONOCHROME1", tolerance=1, **TWELVE)
    yield _dicom("grey-16", WIDE.astype(np.uint16), scaled(WIDE, 0, 65535))
    yield _dicom("grey-8", ramp(255).astype(np.uint8), ramp(255))
    yield _dicom("grey-8-odd", ramp(255)[:5, :7].astype(np.uint8), ramp(255)[:5, :7])
    yield _dicom("grey-6-of-8", ramp(63).astype(np.uint8), scaled(ramp(63), 0, 63), bits=6)
    yield _dicom("grey-6-of-8-at-the-top", (ramp(63) << 2).astype(np.uint8), scaled(ramp(63), 0, 63), bits=6, HighBit=7)
    yield _dicom("grey-1-of-8", ramp(1).astype(np.uint8), 255 * ramp(1), bits=1, dcmtk=None)
    yield _dicom("signed-12", low12.astype(np.int16), GREY, **TWELVE)
    yield _dicom("signed-12-not-extended", (low12 & 0xFFF).astype(np.int16), GREY, **TWELVE)
    yield _dicom(
        "signed-12-overlay", (low12 & 0xFFF | OVERLAY).astype(np.uint16), GREY, PixelRepresentation=1, **TWELVE
    )
    yield _dicom("signed-8", (ramp(255) - 128).astype(np.int8), ramp(255))
    yield _dicom("overlay", R.astype(np.uint16) | OVERLAY, GREY, **TWELVE)
    yield _dicom("high-bit-15", u16 << 4, GREY, HighBit=15, **TWELVE)
    yield _dicom("high-bit-13-rest-set", u16 << 2 | 0xC003, GREY, HighBit=13, **TWELVE)
    left = (low12.astype(np.int16) << 4).astype(np.int16)
    yield _dicom("signed-high-bit-15", left, GREY, HighBit=15, **TWELVE)
    for name, tags, why in (
        ("bits-stored-missing", {"BitsStored": None}, "without the attribute BitsStored"),
        ("bits-stored-17", {"BitsStored": 17}, "contradict each other"),
        ("high-bit-16", {"HighBit": 16}, "contradict each other"),
        ("high-bit-below", {"HighBit": 3}, "contradict each other"),
        ("sign-missing", {"PixelRepresentation": None}, "without the attribute PixelRepresentation"),
        ("bits-allocated-32", {"BitsAllocated": 32}, "32 bits per value"),
        (
            "white-at-both-ends",
            {"PresentationLUTShape": "INVERSE"},
            "PresentationLUTShape and PhotometricInterpretation contradict each other",
        ),
    ):
        yield _dicom(name, u16, why, dcmtk=None, **{**TWELVE, **tags})


def rescaled_dicom() -> Iterator[Case]:
    u16 = R.astype(np.uint16)
    hu = R - 1024.0
    ct: dict[str, object] = {"RescaleSlope": "1", "RescaleIntercept": "-1024", **TWELVE}
    yield _dicom("slope-negative", u16, 255 - GREY, RescaleSlope="-2", RescaleIntercept="100", tolerance=1, **TWELVE)
    yield _dicom("slope-small", u16, GREY, RescaleSlope="1.25E-05", RescaleIntercept="-3e-2", dcmtk=None, **TWELVE)
    yield _dicom("slope-large", u16, GREY, RescaleSlope="250000", RescaleIntercept="0", **TWELVE)
    yield _dicom("slope-alone", u16, GREY, RescaleSlope="0.5", dcmtk=None, **TWELVE)
    for slope in ("0", "1e300", "-1e-300"):
        yield _dicom(
            f"slope-{slope}", u16, "rescale slope", RescaleSlope=slope, RescaleIntercept=0, dcmtk=None, **TWELVE
        )
    window = partial(_dicom, dcmtk=("+Wi", "1"), tolerance=1.5)
    linear = np.clip((hu - 39.5) / 399 + 0.5, 0, 1) * 255
    yield window("window", u16, linear, WindowCenter="40", WindowWidth="400", **ct)
    yield window("window-first", u16, linear, WindowCenter=["40", "9"], WindowWidth=["400", "1"], **ct)
    yield window(
        "window-inverted", u16, 255 - linear, photometric="MONOCHROME1", WindowCenter="40", WindowWidth="400", **ct
    )
    signed = (R - 1024).astype(np.int16)
    yield window("window-signed", signed, linear, WindowCenter="40", WindowWidth="400", bits=16)
    exact = np.clip((hu - 40) / 400 + 0.5, 0, 1) * 255
    yield window("window-exact", u16, exact, WindowCenter="40", WindowWidth="400", VOILUTFunction="LINEAR_EXACT", **ct)
    sigmoid = 255 / (1 + np.exp(-4 * (hu - 40) / 400))
    yield window("window-sigmoid", u16, sigmoid, WindowCenter="40", WindowWidth="400", VOILUTFunction="SIGMOID", **ct)


def looked_up_dicom() -> Iterator[Case]:
    u16 = R.astype(np.uint16)
    ct: dict[str, object] = {"RescaleSlope": "1", "RescaleIntercept": "-1024", **TWELVE}
    square = np.arange(4096) ** 2 // 4096
    seen = scaled(square[R], 0, 4095)
    voi = partial(_dicom, dcmtk=("+Wl", "1"), tolerance=1)
    implicit = ImplicitVRLittleEndian
    yield voi("voi-lut", u16, seen, VOILUTSequence=_lut(0, 12, square), **TWELVE)
    yield voi("voi-lut-negative", u16, seen, VOILUTSequence=_lut(-1024, 12, square, "SS"), **ct)
    yield voi(
        "voi-lut-negative-implicit", u16, seen, syntax=implicit, VOILUTSequence=_lut(-1024, 12, square, "SS"), **ct
    )
    yield voi("voi-lut-negative-as-unsigned", u16, seen, VOILUTSequence=_lut(64512, 12, square), **ct)
    high = (R + 40000).astype(np.uint16)
    yield voi("voi-lut-from-40000", high, seen, syntax=implicit, VOILUTSequence=_lut(40000, 12, square))
    yield voi("voi-lut-of-65536", u16, seen, VOILUTSequence=_lut(0, 12, np.resize(square, 65536), entries=0), **TWELVE)
    signed, many = (R - 2048).astype(np.int16), np.resize(square, 40000)
    yield voi("voi-lut-of-40000", signed, seen, syntax=implicit, VOILUTSequence=_lut(-2048, 12, many, "SS"), **TWELVE)
    eight = square // 16
    yield voi("voi-lut-8-bits-in-words", u16, eight[R], VOILUTSequence=_lut(0, 8, eight), **TWELVE)
    packed = eight.astype(np.uint8).tobytes()
    yield voi("voi-lut-8-bits-packed", u16, eight[R], VOILUTSequence=_lut(0, 8, packed, entries=4096), **TWELVE)
    yield _dicom(
        "modality-lut", (R - 2048).astype(np.int16), seen, ModalityLUTSequence=_lut(-2048, 12, square, "SS"), **TWELVE
    )
    yield _dicom(
        "modality-lut-implicit",
        (R - 2048).astype(np.int16),
        seen,
        syntax=implicit,
        ModalityLUTSequence=_lut(-2048, 12, square, "SS"),
        **TWELVE,
    )
    both = scaled(square[square[R]], 0, 4095)
    tables = {"ModalityLUTSequence": _lut(0, 12, square), "VOILUTSequence": _lut(0, 12, square)}
    yield voi("modality-and-voi-lut", u16, both, **tables, **TWELVE)
    for name, sequence, why in (
        ("lut-too-short", _lut(0, 12, square[:9], entries=4096), "contradicts its descriptor"),
        ("lut-too-wide", _lut(0, 10, square), "contradicts its descriptor"),
        ("lut-of-other-values", _lut(5000, 12, square), "covers none of its values"),
    ):
        yield _dicom(name, u16, why, dcmtk=None, VOILUTSequence=sequence, **TWELVE)


def colour_dicom() -> Iterator[Case]:
    index, colours = ramp(255).astype(np.uint8), rgb().astype(np.uint8)
    tables = np.stack([np.arange(256), 255 - np.arange(256), np.arange(256) ** 2 // 256])
    shown = np.moveaxis(tables[:, index], 0, -1)
    yield _dicom("palette-16", index, shown, **_palette(16, tables * 257))
    yield _dicom("palette-8-in-words", index, shown, **_palette(8, tables))
    yield _dicom("palette-8-twice-in-words", index, shown, **_palette(8, tables * 257))
    yield _dicom("palette-8-packed", index, shown, **_palette(8, tables, packed=True))
    later = np.moveaxis(tables[:, np.maximum(index, 10)], 0, -1)
    yield _dicom("palette-from-10", index, later, **_palette(16, tables[:, 10:] * 257, 10))
    big = {"syntax": ExplicitVRBigEndian, "dcmtk": None}
    yield _dicom("palette-8-packed-big-endian", index, shown, **big, **_palette(8, tables, packed=True, order=">"))
    wide = np.stack([np.arange(65536), 65535 - np.arange(65536), np.arange(65536) // 2])
    yield _dicom(
        "palette-of-65536", WIDE.astype(np.uint16), np.moveaxis(wide[:, WIDE] >> 8, 0, -1), **_palette(16, wide)
    )
    parts = [[0, 1, 0, 1, 255, 65280], [0, 2, 9, 513, 1, 254, 65279], [0, 1, 65535, 1, 255, 255]]
    lines = [np.linspace(0, 65280, 256), np.r_[9, np.linspace(513, 65279, 255)], np.linspace(65535, 255, 256)]
    seen = np.moveaxis(np.floor(np.rint(np.stack(lines)) / 256)[:, index], 0, -1)
    yield _dicom("palette-segmented-16", index, seen, dcmtk=None, **_segmented(16, parts, 256))
    parts = [[0, 1, 0, 1, 255, 255], [0, 1, 255, 1, 255, 0], [0, 4, 7, 7, 7, 7, 1, 252, 7, 0]]
    lines = [np.arange(256), 255 - np.arange(256), np.full(256, 7)]
    seen = np.moveaxis(np.stack(lines)[:, index], 0, -1)
    yield _dicom("palette-segmented-8", index, seen, dcmtk=None, **_segmented(8, parts, 256))
    jump = [[0, 1, 0, 2, 1, 0, 0, 0]] * 3
    yield _dicom("palette-segmented-indirect", index, "segments out of range", dcmtk=None, **_segmented(16, jump, 256))

    yield _dicom("rgb", colours, colours)
    planes = colours.transpose(2, 0, 1).tobytes()
    yield _dicom("rgb-planes", colours, colours, PlanarConfiguration=1, PixelData=planes)
    yield _dicom("rgb-16", (rgb() * 256 + 77).astype(np.uint16), rgb(), tolerance=1)
    dirty = (rgb(4095) | OVERLAY[..., None]).astype(np.uint16)
    yield _dicom("rgb-12-of-16-overlay", dirty, rgb(4095) >> 4, tolerance=1, **TWELVE)
    yield _dicom(
        "rgb-12-of-16-at-the-top", (rgb(4095) << 4).astype(np.uint16), rgb(4095) >> 4, HighBit=15, tolerance=1, **TWELVE
    )
    yield _dicom("rgb-5-of-8", rgb(31).astype(np.uint8), scaled(rgb(31), 0, 31), bits=5, tolerance=1)
    ybr = _ybr(colours)
    yield _dicom("ybr-full", ybr, colours, photometric="YBR_FULL", tolerance=2)
    planes = ybr.transpose(2, 0, 1).tobytes()
    yield _dicom(
        "ybr-full-planes", ybr, colours, photometric="YBR_FULL", PlanarConfiguration=1, PixelData=planes, tolerance=2
    )
    pairs = np.repeat(colours[:, ::2], 2, axis=1)
    quads = _ybr(pairs)
    quads = np.stack([quads[:, ::2, 0], quads[:, 1::2, 0], quads[:, ::2, 1], quads[:, ::2, 2]], -1)
    halves: dict[str, object] = {"photometric": "YBR_FULL_422", "PixelData": quads.astype(np.uint8).tobytes()}
    yield _dicom("ybr-full-422", colours, pairs, tolerance=2, **halves)
    why = "colour data: convert it to RGB"
    yield _dicom("ybr-full-422-planes", colours, why, dcmtk=None, PlanarConfiguration=1, **halves)
    yield _dicom("ybr-rct-uncompressed", colours, why, dcmtk=None, photometric="YBR_RCT")
    yield _dicom("ybr-full-16", colours.astype(np.uint16), why, dcmtk=None, photometric="YBR_FULL")


def _ybr(colours: Pixels) -> Pixels:
    """PS3.3 C.7.6.3.1.2."""
    matrix = np.array([[0.299, 0.587, 0.114], [-0.1687, -0.3313, 0.5], [0.5, -0.4187, -0.0813]])
    return np.clip(np.rint(colours @ matrix.T + [0, 128, 128]), 0, 255).astype(np.uint8)


def _jpeg2000(pixels: Pixels, **options: object) -> bytes:
    """Compress as a raw codestream, without loss unless a quality is given."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG2000", no_jp2=True, irreversible="quality_layers" in options, **options)
    return out.getvalue()


_SMALL = np.arange(64).reshape(8, 8) * 65
_SMALL_OF_12_BITS = bytes.fromhex(
    "ff4fff5100290000000000080000000800000000000000000000000800000008000000000000000000010b0101ff52000c00000001000004040001"
    "ff5c00044060ff90000a0000000000660001ff93dfe154122c42a79795b1430ed6283fdee829c548b8345612e1790e9891854f43d1987e129bce3b"
    "c379bd7149c6853782625615b739ce75ea4a400cc02800074465d523cc53860b5c67daeb29ab84eb8070d86c361b0d86c3ffd9"
)
"""`_SMALL` as JPEG 2000 of 12 bits, which Pillow does not write; by OpenJPEG's opj_compress, without loss."""


def _with_sign(codestream: bytes) -> bytes:
    """Declare signed values: those less half of the range, which an encoder of unsigned ones has subtracted."""
    at = codestream.index(b"\xff\x51") + 40
    return codestream[:at] + bytes([codestream[at] | 0x80]) + codestream[at + 1 :]


def _jpeg(pixels: Pixels, marker: bytes | None = None, **options: object) -> bytes:
    """Compress as JPEG. marker: what stands in the place of JFIF's; empty: nothing."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=100, **options)
    raw = out.getvalue()
    if marker is None:
        return raw
    (length,) = struct.unpack(">H", raw[4:6])
    return raw[:2] + marker + raw[4 + length :]


def _adobe(transform: int) -> bytes:
    return b"\xff\xee" + struct.pack(">H5sHHHB", 14, b"Adobe", 100, 0, 0, transform)


def compressed_dicom() -> Iterator[Case]:
    def coded(name: str, shape: Pixels, frame: bytes, expected: Pixels | str, syntax: str, **more: object) -> Case:
        return _dicom(name, shape, expected, syntax=syntax, encoded=encapsulate([frame]), **more)

    u16, colours = R.astype(np.uint16), rgb().astype(np.uint8)
    dirty = (R - 2048 & 0xFFF | OVERLAY).astype(np.uint16)

    def packed(encoder: Encoder, pixels: Pixels, **options: object) -> bytes:
        colour = {"samples_per_pixel": 3, "photometric_interpretation": "RGB", "planar_configuration": 0}
        bits = 8 * pixels.dtype.itemsize
        return encoder.encode(
            pixels.tobytes(),
            rows=HEIGHT,
            columns=WIDTH,
            bits_allocated=bits,
            bits_stored=bits,
            pixel_representation=0,
            number_of_frames=1,
            **(colour if pixels.ndim == 3 else {"samples_per_pixel": 1, "photometric_interpretation": "MONOCHROME2"}),
            **options,
        )

    rle = partial(packed, RLELosslessEncoder)
    yield coded("rle-signed-overlay", dirty, rle(dirty), GREY, RLELossless, PixelRepresentation=1, **TWELVE)
    yield coded("rle-high-bit-15", u16, rle(u16 << 4), GREY, RLELossless, HighBit=15, **TWELVE)
    yield coded("rle-rgb", colours, rle(colours), colours, RLELossless)
    yield coded("rle-ybr-full", colours, rle(_ybr(colours)), colours, RLELossless, photometric="YBR_FULL", tolerance=2)

    why = "(depth or sign)"
    if JPEGLSLosslessEncoder.is_available:  # with pyjpegls
        jls = partial(packed, JPEGLSLosslessEncoder)
        jpegls = partial(coded, syntax=JPEGLSLossless, dcmtk=None)
        yield jpegls("jpegls-signed-overlay", dirty, jls(dirty), GREY, PixelRepresentation=1, **TWELVE)
        yield jpegls("jpegls-rgb", colours, jls(colours), colours)
        yield jpegls("jpegls-said-planar", colours, jls(colours), colours, PlanarConfiguration=1)
        yield jpegls("jpegls-high-bit-15", u16, jls(u16 << 4), why, HighBit=15, **TWELVE)
        near = packed(JPEGLSNearLosslessEncoder, u16, jls_error=3)
        yield coded("jpegls-near", u16, near, GREY, JPEGLSNearLossless, dcmtk=None, tolerance=1, **TWELVE)

    lossless = partial(coded, syntax=JPEG2000Lossless, dcmtk=None)
    over = u16 | OVERLAY
    yield lossless("jpeg2000-16", WIDE.astype(np.uint16), _jpeg2000(WIDE.astype(np.uint16)), scaled(WIDE, 0, 65535))
    yield lossless("jpeg2000-overlay", u16, _jpeg2000(over), GREY, **TWELVE)
    yield lossless("jpeg2000-high-bit-15", u16, _jpeg2000(u16 << 4), GREY, HighBit=15, **TWELVE)
    yield lossless("jpeg2000-8", colours[..., 0], _jpeg2000(colours[..., 0]), colours[..., 0])
    signed = _with_sign(_jpeg2000(WIDE.astype(np.uint16)))
    yield lossless("jpeg2000-signed", (WIDE - 32768).astype(np.int16), signed, scaled(WIDE, 0, 65535))
    yield lossless("jpeg2000-signed-alone", WIDE.astype(np.uint16), signed, why)
    small, twelve = _SMALL.astype(np.uint16), _SMALL_OF_12_BITS
    below = (_SMALL - 2048).astype(np.int16)
    yield lossless("jpeg2000-12", small, twelve, scaled(_SMALL, 0, 4095), **TWELVE)
    yield lossless("jpeg2000-12-of-16", small, twelve, scaled(_SMALL, 0, 65535))
    yield lossless("jpeg2000-12-signed", below, _with_sign(twelve), scaled(_SMALL, 0, 4095), **TWELVE)
    yield lossless("jpeg2000-12-signed-alone", small, _with_sign(twelve), why, **TWELVE)
    yield lossless("jpeg2000-12-high-bit-15", small, twelve, why, HighBit=15, **TWELVE)
    unsigned = _jpeg2000((R - 2048 & 0xFFF).astype(np.uint16))
    yield lossless("jpeg2000-sign-lost", (R - 2048).astype(np.int16), unsigned, GREY, **TWELVE)
    eight = _jpeg2000(colours[..., 0])
    yield lossless("jpeg2000-8-for-high-bit-15", u16, eight, why, HighBit=15, **TWELVE)
    yield lossless("jpeg2000-rct", colours, _jpeg2000(colours, mct=1), colours, photometric="YBR_RCT")
    yield lossless("jpeg2000-rgb", colours, _jpeg2000(colours, mct=0), colours)
    ybr = _jpeg2000(_ybr(colours), mct=0)
    yield lossless("jpeg2000-ybr-full", colours, ybr, colours, photometric="YBR_FULL", tolerance=2)
    lossy = partial(coded, syntax=JPEG2000, dcmtk=None)
    edges = np.where(R > 2000, 4095, 0).astype(np.uint16)
    yield lossy(
        "jpeg2000-lossy-edges",
        edges,
        _jpeg2000(edges, quality_mode="dB", quality_layers=[80]),
        edges // 4095 * 255,
        tolerance=12,
        **TWELVE,
    )
    spoilt = _jpeg2000(over, quality_mode="dB", quality_layers=[70])
    yield lossy("jpeg2000-lossy-overlay", u16, spoilt, "unused bits set", **TWELVE)

    jpeg = partial(coded, syntax=JPEGBaseline8Bit, tolerance=4)
    grey = ramp(255).astype(np.uint8)
    ybr_422: dict[str, object] = {"photometric": "YBR_FULL_422"}
    yield jpeg("jpeg-grey", grey, _jpeg(grey), grey)
    yield jpeg("jpeg-422", colours, _jpeg(colours, subsampling="4:2:2"), colours, **{**ybr_422, "tolerance": 6})
    yield jpeg("jpeg-no-marker", colours, _jpeg(colours, b"", subsampling="4:4:4"), colours, **ybr_422)
    yield jpeg("jpeg-adobe", colours, _jpeg(colours, _adobe(1), subsampling="4:4:4"), colours, **ybr_422)
    plain = _jpeg(colours, _adobe(0), subsampling="4:4:4", keep_rgb=True)
    yield jpeg("jpeg-adobe-rgb", colours, plain, colours)
    yield jpeg(
        "jpeg-said-planar", colours, _jpeg(colours, subsampling="4:4:4"), colours, PlanarConfiguration=1, **ybr_422
    )
    why = "JPEG colours in the DICOM file differ from PhotometricInterpretation"
    yield jpeg("jpeg-said-rgb", colours, _jpeg(colours), why, dcmtk=None)
    yield jpeg("jpeg-adobe-rgb-said-ybr", colours, plain, why, dcmtk=None, **ybr_422)
    yield jpeg("jpeg-adobe-said-rgb", colours, _jpeg(colours, _adobe(1)), why, dcmtk=None)


def turned(pixels: Pixels, orientation: int) -> Pixels:
    """Turn pixels upright that are stored in one of the eight orientations of TIFF and EXIF."""
    swapped = np.swapaxes(pixels, 0, 1)
    return {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: swapped,
        6: swapped[:, ::-1],
        7: swapped[::-1, ::-1],
        8: swapped[::-1],
    }[orientation]


def write_tiff(
    path: Path,
    pixels: Pixels,
    *,
    order: str = "<",
    photometric: int | None = None,
    orientation: int = 1,
    deflated: bool = False,
    rows: int = 5,
    kind: int = 0,
    planes: bool = False,
    tile: int = 0,
    palette: Sequence[int] = (),
) -> None:
    """Write strips of `rows` rows each. kind: TIFF's sample format, 0 to leave it out

    planes: channel by channel   tile: the side of tiles instead of strips
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = pixels.shape[:2]
    samples = pixels.shape[2] if pixels.ndim == 3 else 1
    photometric = (2 if samples >= 3 else 1) if photometric is None else photometric
    layers = np.moveaxis(pixels, 2, 0) if planes else [pixels]
    parts = [layer[k : k + rows] for layer in layers for k in range(0, height, rows)]
    if tile:
        room = [(0, -height % tile), (0, -width % tile), (0, 0)][: pixels.ndim]
        corners = [(y, x) for y in range(0, height, tile) for x in range(0, width, tile)]
        parts = [np.pad(pixels, room)[y : y + tile, x : x + tile] for y, x in corners]
    strips = [part.astype(pixels.dtype.newbyteorder(order)).tobytes() for part in parts]
    strips = [zlib.compress(strip) for strip in strips] if deflated else strips
    tags: dict[int, tuple[str, list[int]]] = {
        256: ("I", [width]),
        257: ("I", [height]),
        258: ("H", [8 * pixels.dtype.itemsize] * samples),
        259: ("H", [8 if deflated else 1]),
        262: ("H", [photometric]),
        273: ("I", []),
        274: ("H", [orientation]),
        277: ("H", [samples]),
        278: ("I", [rows]),
        279: ("I", [len(s) for s in strips]),
    }
    if palette:
        tags[320] = ("H", list(palette))
    if tile:
        tags[324], tags[325] = tags.pop(273), tags.pop(279)
        tags.pop(278)
        tags[322] = tags[323] = ("I", [tile])
    if planes:
        tags[284] = ("H", [2])
    if kind:
        tags[339] = ("H", [kind] * samples)
    heap = 8 + 2 + 12 * len(tags) + 4
    places, at = [], heap + sum(len(v) * 4 for _, v in tags.values()) + 4 * len(strips)
    for strip in strips:
        places.append(at)
        at += len(strip)
    tags[324 if tile else 273] = ("I", places)
    entries, extra = b"", b""
    for tag, (letter, values) in sorted(tags.items()):
        raw = struct.pack(f"{order}{len(values)}{letter}", *values)
        if len(raw) > 4:
            field, extra = struct.pack(f"{order}I", heap + len(extra)), extra + raw
        else:
            field = raw.ljust(4, b"\0")
        entries += struct.pack(f"{order}HHI", tag, 3 if letter == "H" else 4, len(values)) + field
    start = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 8)
    header = start + struct.pack(f"{order}H", len(tags)) + entries + b"\0" * 4 + extra
    path.write_bytes(header.ljust(places[0], b"\0") + b"".join(strips))


def tiff() -> Iterator[Case]:
    eight, sixteen = ramp(255).astype(np.uint8), WIDE.astype(np.uint16)
    colours = rgb().astype(np.uint8)
    kinds: tuple[tuple[str, Pixels, Pixels], ...] = (
        ("grey-8", eight, eight),
        ("grey-16", sixteen, scaled(WIDE, 0, 65535)),
        ("rgb-8", colours, colours),
        ("rgb-16", rgb(65535).astype(np.uint16), rgb(65535) >> 8),
    )
    for name, pixels, shown in kinds:
        for orientation in range(1, 9) if pixels.ndim == 2 else (1, 6, 7):
            write = partial(write_tiff, pixels=pixels, orientation=orientation)
            yield Case(f"{name}-turned-{orientation}.tif", write, turned(shown, orientation))
        packed = partial(write_tiff, pixels=pixels, orientation=5, deflated=True)
        yield Case(f"{name}-deflated-turned-5.tif", packed, turned(shown, 5))
        whole = partial(write_tiff, pixels=pixels, orientation=8, order=">", rows=HEIGHT)
        yield Case(f"{name}-big-endian-turned-8.tif", whole, turned(shown, 8))
    for name, pixels, shown in kinds:
        tiles = partial(write_tiff, pixels=pixels, tile=16, orientation=6)
        yield Case(f"{name}-tiles-turned-6.tif", tiles, turned(shown, 6))
        tiles = partial(write_tiff, pixels=pixels, tile=16, orientation=7, deflated=True)
        yield Case(f"{name}-tiles-deflated-turned-7.tif", tiles, turned(shown, 7))
    planes = partial(write_tiff, pixels=colours, planes=True, orientation=6)
    yield Case("rgb-8-planes-turned-6.tif", planes, turned(colours, 6))
    planes = partial(write_tiff, pixels=rgb(65535).astype(np.uint16), planes=True)
    yield Case("rgb-16-planes.tif", planes, "more than 8 bits stored channel by channel")
    yield Case("grey-8-white-is-zero.tif", partial(write_tiff, pixels=eight, photometric=0), 255 - eight)
    yield Case(
        "grey-16-white-is-zero.tif",
        partial(write_tiff, pixels=sixteen, photometric=0, orientation=6),
        turned(scaled(65535 - WIDE, 0, 65535), 6),
    )
    table = np.stack([np.arange(256), 255 - np.arange(256), np.arange(256) // 2])
    palette = [int(v) for v in table.ravel() * 257]
    coloured = partial(write_tiff, pixels=eight, photometric=3, orientation=6, palette=palette)
    yield Case("palette-turned-6.tif", coloured, turned(table.T[eight], 6))
    black = partial(write_tiff, pixels=eight, photometric=3, palette=[int(v) for v in table.ravel()])
    yield Case("palette-of-8-bits.tif", black, "a palette of 8 bits")
    shares = (WIDE / 65535).astype(np.float32)
    yield Case("grey-float.tif", partial(write_tiff, pixels=shares, kind=3), scaled(WIDE, 0, 65535))
    below = (ramp(255) - 128).astype(np.int8)
    yield Case("grey-signed-8.tif", partial(write_tiff, pixels=below, kind=2), "signed values of 8 bits")
    below16 = (WIDE - 32768).astype(np.int16)
    yield Case("grey-signed-16.tif", partial(write_tiff, pixels=below16, kind=2), "unsigned 16-bit integers")


_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def write_png(path: Path, pixels: Pixels, depth: int, colour: int, palette: bytes = b"") -> None:
    """Write whole numbers (H, W, channels) of `depth` bits, without a filter."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = pixels.reshape(pixels.shape[0], -1)
    if depth < 8:
        bits = (numbers[..., None] >> np.arange(depth)[::-1] & 1).reshape(len(numbers), -1).astype(np.uint8)
        rows = [np.packbits(row).tobytes() for row in bits]
    else:
        rows = [row.astype(">u2" if depth == 16 else "u1").tobytes() for row in numbers]
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = chunk(b"IHDR", head) + (chunk(b"PLTE", palette) if palette else b"") + chunk(b"IDAT", body)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks + chunk(b"IEND", b""))


def png_and_jpeg() -> Iterator[Case]:
    for depth in (1, 2, 4, 8, 16):
        top = 2**depth - 1
        write = partial(write_png, pixels=ramp(top), depth=depth, colour=0)
        yield Case(f"grey-{depth}.png", write, scaled(ramp(top), 0, top))
    clear = np.full((HEIGHT, WIDTH, 1), 65535)
    alpha = np.concatenate([WIDE[..., None], clear], 2)
    yield Case("grey-16-alpha.png", partial(write_png, pixels=alpha, depth=16, colour=4), WIDE >> 8)
    deep = rgb(65535)
    yield Case("rgb-16.png", partial(write_png, pixels=deep, depth=16, colour=2), deep >> 8)
    four = np.concatenate([deep, clear // 3], 2)
    yield Case("rgb-16-alpha.png", partial(write_png, pixels=four, depth=16, colour=6), deep >> 8)
    table = np.stack([np.arange(256), 255 - np.arange(256), np.arange(256) // 2], -1).astype(np.uint8)
    write = partial(write_png, pixels=ramp(255), depth=8, colour=3, palette=table.tobytes())
    yield Case("palette.png", write, table[ramp(255)])

    colours = rgb().astype(np.uint8)
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation

        def jpeg(path: Path, exif: Image.Exif = exif) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(colours).save(path, quality=100, subsampling="4:4:4", exif=exif)

        yield Case(f"rgb-turned-{orientation}.jpg", jpeg, turned(colours, orientation), 4)


def cases() -> list[Case]:
    makers = (grey_dicom, rescaled_dicom, looked_up_dicom, colour_dicom, compressed_dicom, tiff, png_and_jpeg)
    return [case for maker in makers for case in maker()]


if __name__ == "__main__":
    for made in cases():
        made.write(Path(sys.argv[1]) / made.name)
