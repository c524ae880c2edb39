"""Limits of one image file, checked before anything is decoded."""

from __future__ import annotations

from pathlib import Path

MAX_PIXELS = 1 << 26
"""Most pixels of one image, 8192 x 8192; decoding and rotating it needs half a gigabyte."""
MAX_BYTES = 1 << 29
"""Most bytes of one image file: MAX_PIXELS in colour of 16 bits, without compression."""


class UnreadableError(Exception):
    """An image file that cannot be decoded; the message says why. path: of the file, where many were asked for."""

    path: Path | None = None


def require_pixels(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise UnreadableError(f"{width} x {height} pixels: restore the file")
    if width * height > MAX_PIXELS:
        raise UnreadableError(f"{width} x {height} pixels, more than {MAX_PIXELS}: make it smaller")
