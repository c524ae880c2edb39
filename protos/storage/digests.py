"""Names of objects: BLAKE3, in hex. Without torch, for whoever only moves bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

WRITE_BEHIND = 4 << 20
"""Bytes after which `write_behind` is worth its call."""
_BLOCK = 1 << 20
Hasher = blake3
"""What names objects, fed piece by piece."""


def digest(data: bytes | memoryview) -> str:
    """Return the BLAKE3 in hex, of 256 bits: the address of an object; ADR 0013 says why not SHA-256."""
    return Hasher(data).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file, without reading it into memory at once."""
    with path.open("rb") as f:
        return begun(f).hexdigest()


def begun(file: BinaryIO) -> Hasher:
    """Return a digest that has seen a file from where it stands to its end, to go on with."""
    found = Hasher()
    while block := file.read(_BLOCK):
        found.update(block)
    return found


def write_sealed(path: Path, pieces: Iterable[memoryview], sync: bool = True) -> tuple[str, int]:
    """Write a file, mode 0600, bring it to the disk (fsync), and return its digest and its size.

    sync: False leaves the last step, and the wait for it, to the caller; nothing is on its way to the disk then.

    Blocks are hashed by the thread that writes them, while they are in its cache. A file that is there already is
    written over in place, which takes no new room, and is as long as what was written. Raises OSError as write and
    fsync do.
    """
    found, size, behind = Hasher(), 0, 0
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for piece in pieces:
            for at in range(0, len(piece), _BLOCK):
                block = piece[at : at + _BLOCK]
                write_all(file, block)
                found.update(block)
                size += len(block)
                if sync and size - behind >= WRITE_BEHIND:
                    write_behind(file, behind, size - behind)
                    behind = size
        file.truncate(size)
        if sync:
            os.fsync(descriptor)
    return found.hexdigest(), size


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of it to an unbuffered file."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def write_behind(file: FileIO, start: int, length: int) -> None:
    """Let the system begin to write a range to the disk, without waiting: the final fsync then finds little to do.

    On Linux that is what this advice does to pages that are not on the disk yet; elsewhere it does nothing.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)
