"""Read text from any editor or system."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import IO

INVISIBLE = "\ufeff\u200b\u2060"
"""Marks without width that editors and mail programs add."""
_OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def composed(text: str) -> str:
    """Normalise a name to Unicode NFC, since macOS writes it in NFD, which looks the same."""
    return unicodedata.normalize("NFC", text)


def decoded(raw: bytes) -> str:
    """Decode UTF-8, with or without a byte-order mark; raises ValueError with the likely encoding otherwise."""
    with _named_encoding():
        return _decoder(BytesIO(raw), None).read()


def read_text(file: Path, most: int | None = None) -> str:
    """Read a whole file; raises OSError, and ValueError as `decoded` or on more than `most` bytes."""
    with file.open("rb") as stream:
        raw = stream.read() if most is None else stream.read(most + 1)
    if most is not None and len(raw) > most:
        raise ValueError(f"more than {most} bytes")
    return decoded(raw)


@contextmanager
def opened(file: Path) -> Iterator[IO[str]]:
    """Open a file to read it line by line, line ends unchanged; raises as `read_text`, also while it is read."""
    with _named_encoding(), file.open("rb") as stream:
        yield _decoder(stream, "")


@contextmanager
def _named_encoding() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        byte = f"the byte {error.object[error.start]:#x}"
        raise ValueError(f"{byte}, which is not UTF-8 (Windows-1252?): save it as UTF-8") from error


def _decoder(stream: IO[bytes], newline: str | None) -> TextIOWrapper:
    start = stream.read(4)
    stream.seek(0)
    if start.startswith(_OTHER_MARKS) or start[:2].count(0) == 1:
        raise ValueError("UTF-16 (Excel's Unicode text): save it as UTF-8")
    return TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)
