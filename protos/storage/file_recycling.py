"""Large files that are written over instead of being deleted and made anew.

A round deletes as many files of a model's size as the next one makes. A file that is written over in place keeps its
blocks on the disk and its pages in memory; new pages cost several times as much as the bytes that go into them, most
of all on a virtual machine, whose host has to find them. A file that grows in a spare one is longer than what has
arrived, so its length stands beside it in a small file until the writing ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path

from protos.storage.digests import write_all

LARGE = 4 << 20
"""Bytes from which a file is worth keeping."""
MOST = 1 << 30
"""Bytes of spare files that are kept at most."""
LENGTH = ".length"


class Spares:
    """A folder of files whose content nobody needs. Calls may come from several threads, and from one process only.

    Guarantees: a file that somebody reads with `open_shared` is not written over, whatever it is called by then.
    """

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        self.clear()

    def keep(self, file: Path) -> None:
        """Take a file out of use, if it is there: keep it where it is large and there is room, else delete it."""
        with self._lock, suppress(FileNotFoundError):
            size = file.stat().st_size
            if size < LARGE or size + sum(f.stat().st_size for f in self._files()) > self._most:
                file.unlink()
                return
            self._folder.mkdir(mode=0o700, exist_ok=True)
            file.replace(self._folder / secrets.token_hex(8))

    def take(self, into: Path, size: int) -> bool:
        """Move a spare file to a new place, mode 0600, and tell whether there was one.

        size: about how many bytes will be written; a small file takes none, which the next large one needs.
        """
        with self._lock:
            for file in self._files() if size >= LARGE else ():
                if _unread(file):
                    file.chmod(0o600)
                    file.replace(into)
                    return True
                file.unlink()
            return False

    def clear(self) -> None:
        """Give back the room of all of them."""
        with self._lock:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _files(self) -> list[Path]:
        return list(self._folder.iterdir()) if self._folder.exists() else []


def open_shared(path: Path) -> BufferedReader:
    """Open a file to be read; it is not written over as a spare one while it is open, or mapped into memory.

    Raises FileNotFoundError when it is not there, or no longer.
    """
    file = path.open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise FileNotFoundError(path)
    except BlockingIOError:
        file.close()
        raise FileNotFoundError(path) from None
    except BaseException:
        file.close()
        raise
    return file


def _unread(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class Growth:
    """A file that grows; `have` is how much of it has arrived."""

    def __init__(self, file: FileIO, have: int, note: FileIO | None) -> None:
        self.file, self.have, self._note = file, have, note

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of it, then note that it is there."""
        write_all(self.file, data)
        self.have += len(data)
        if self._note is not None:
            os.pwrite(self._note.fileno(), self.have.to_bytes(8, "little"), 0)
        return len(data)

    def sync(self) -> None:
        """Bring what has arrived to the disk, and its end with it."""
        self.file.truncate(self.have)
        os.fsync(self.file.fileno())


def length(file: Path) -> int:
    """Count the bytes that have arrived in a file that grows; 0 when there is none."""
    if not file.exists():
        return 0
    size, note = file.stat().st_size, _note(file)
    return min(size, int.from_bytes(note.read_bytes()[:8], "little")) if note.exists() else size


def discard(file: Path) -> None:
    """Delete a file that grew."""
    file.unlink(missing_ok=True)
    _note(file).unlink(missing_ok=True)


@contextmanager
def growing(file: Path, spares: Spares, size: int) -> Iterator[Growth]:
    """Go on with a file where its writing was cut. size: bytes in the end; 0 when unknown.

    Guarantees: however the block or the process ends, `length` counts what was written and nothing else. After a
    power cut it may count bytes that were not yet on the disk; the digest of the whole tells.
    """
    note, have = _note(file), length(file)
    if file.exists():
        os.truncate(file, have)  # a process was killed here
        note.unlink(missing_ok=True)
    else:
        note.write_bytes(bytes(8))
        if not spares.take(file, size):
            note.unlink()
    with open(os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), "r+b", buffering=0) as grown:  # noqa: PTH123
        grown.seek(have)
        noted = note.open("r+b", buffering=0) if note.exists() else None
        growth = Growth(grown, have, noted)
        try:
            yield growth
        finally:
            grown.truncate(growth.have)
            if noted is not None:
                noted.close()
            note.unlink(missing_ok=True)


def _note(file: Path) -> Path:
    return file.with_name(file.name + LENGTH)
