"""Names of objects: BLAKE3, in hex. Imports no torch."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

from blake3 import blake3

_BLOCK = 1 << 20
Hasher = blake3
"""Incremental form of `digest`."""


def digest(data: bytes | memoryview) -> str:
    """Return the 256-bit BLAKE3 in hex: the name of an object (why not SHA-256: ADR 0013)."""
    return Hasher(data).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file, read in blocks."""
    hasher = Hasher()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
