"""Files that arrive in pieces: resumed where writing stopped, and hashed while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from service_core.storage.digests import Hasher, write_all
from service_core.storage.disk import disk_errors


class HashingWriter:
    """Appends to a file; `size` is its length so far, with what earlier streams wrote."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self._file, self._path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self._hasher = None if self.size else Hasher()

    def write(self, data: bytes | memoryview, /) -> int:
        """Append all of it, then hash it: what is hashed is in the file.

        Raises UnavailableError (E-STATE-63) when the disk takes nothing; what was appended before stays.
        """
        with disk_errors(self._path):
            write_all(self._file, data)
        self.size += len(data)
        if self._hasher is not None:
            self._hasher.update(data)
        return len(data)

    def digest(self) -> str | None:
        """Return the digest of all bytes; None when some were written by an earlier stream: the file must be read."""
        return None if self._hasher is None else self._hasher.hexdigest()


@contextmanager
def open_partial(path: Path) -> Iterator[HashingWriter]:
    """Open a file, mode 0600, to append to it; it is made when it is not there.

    Guarantees: writing is unbuffered, so what was written is in the file however the block or the process ends. After
    a power cut it may hold other bytes; the digest of the whole tells.
    """
    with disk_errors(path):
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with FileIO(descriptor, "a") as file:
        yield HashingWriter(file, path)


def partial_size(path: Path) -> int:
    """Return the size of a partial file; 0 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
