"""Names of objects: BLAKE3, in hex. Imports no torch."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

from blake3 import blake3

_BLOCK = 1 << 20
Hasher = blake3
"""The hash that names objects, for data that comes in pieces."""


def digest(data: bytes | memoryview) -> str:
    """Return the BLAKE3 in hex, of 256 bits: the address of an object; ADR 0013 says why not SHA-256."""
    return Hasher(data).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file, without reading it into memory at once."""
    hasher = Hasher()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
