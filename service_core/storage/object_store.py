"""The object store of both services: files named by their BLAKE3, and partial files.

A partial file is resumed where writing stopped, and hashed while it is written.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import RLock

from fl_core.errors import ProtocolError, StateError
from service_core.storage.digests import Hasher, file_digest, write_all
from service_core.storage.digests import digest as digest_of
from service_core.storage.disk import disk_errors
from service_core.storage.private_files import sync_path


class HashingWriter:
    """Appends to a file; `size` is its length, including what earlier streams wrote."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self._file, self._path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self._hasher = None if self.size else Hasher()

    def write(self, data: bytes | memoryview, /) -> int:
        """Append data, then hash it, so that all hashed bytes are in the file.

        Raises UnavailableError (E-STATE-63) if the disk is full; earlier bytes stay.
        """
        with disk_errors(self._path):
            write_all(self._file, data)
        self.size += len(data)
        if self._hasher is not None:
            self._hasher.update(data)
        return len(data)

    def digest(self) -> str | None:
        """Return the digest of all bytes; None if an earlier stream wrote some: then read the file."""
        return None if self._hasher is None else self._hasher.hexdigest()


@contextmanager
def open_partial(path: Path) -> Iterator[HashingWriter]:
    """Open a file for appending, mode 0600; it is created if needed.

    Guarantees: writing is unbuffered, so written bytes survive a crash of the process. After a power cut the file may
    have other bytes, which the digest reveals.
    """
    with disk_errors(path):
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with FileIO(descriptor, "a") as file:
        yield HashingWriter(file, path)


def partial_size(path: Path) -> int:
    """Return the size of a partial file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


_DIGEST = re.compile(r"[0-9a-f]{64}")
_PARTIAL = ".part"


class ObjectStore:
    """A folder of objects, for several threads of one process.

    Guarantees: a file gets its name only when it is complete and has that digest; storing the same bytes twice is
    harmless. Objects stored with `sync` survive a power cut. `holds` and `verified` detect damage: they hash a file
    unless this process has hashed it since its last change.
    """

    def __init__(self, folder: Path, sharded: bool = False) -> None:
        """Open or create the folder. sharded: use subfolders named by the first two digits."""
        self.folder = folder
        self.lock = RLock()
        """For callers that create or remove an object together with its record."""
        self._sharded = sharded
        self._verified: dict[str, tuple[int, ...]] = {}
        for part in (folder, *(folder / f"{i:02x}" for i in range(256 if sharded else 0))):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_path(folder)

    def has(self, digest: str) -> bool:
        """Return whether an object exists; its content is not checked."""
        return self._file(digest).exists()

    def path(self, digest: str) -> Path:
        """Return the file of an object; raises StateError (E-STATE-22) if it is missing."""
        if not (file := self._file(digest)).exists():
            raise StateError("E-STATE-22", f"the object {digest[:16]} is missing in {self.folder}: restore the folder")
        return file

    def verified(self, digest: str) -> Path:
        """Return the file of an object; raises StateError (E-STATE-63) unless it has its digest."""
        file = self._file(digest)
        if not self._matches(file, digest):
            raise StateError(
                "E-STATE-63",
                f"{file} is {'damaged' if file.exists() else 'missing'}: check the disk, and restore the file from "
                "a backup",
            )
        return file

    def holds(self, digest: str) -> bool:
        """Return whether an object exists with its digest; a damaged file is deleted."""
        file = self._file(digest)
        if self._matches(file, digest):
            return True
        file.unlink(missing_ok=True)
        return False

    def put(self, data: bytes) -> str:
        """Store an object and return its digest; on the disk on return. Raises as `sync`."""

        def write(file: Path) -> tuple[str, int]:
            with open_partial(file) as writer:
                writer.write(data)
            return digest_of(data), len(data)

        return self.put_file(write)[0]

    def put_file(self, write: Callable[[Path], tuple[str, int]], sync: bool = True) -> tuple[str, int]:
        """Store the file that `write` writes; return its digest and size, as `write` does. sync: as `commit`."""
        file = self.folder / f".{secrets.token_hex(8)}{_PARTIAL}"
        try:
            with disk_errors(self.folder):
                digest, size = write(file)
            self.commit(file, digest, digest, sync)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return digest, size

    def partial(self, digest: str) -> Path:
        """Return the path of this object's unfinished download."""
        file = self._file(digest)
        return file.with_name(file.name + _PARTIAL)

    def commit(self, partial: Path, digest: str, actual: str | None = None, sync: bool = True) -> Path:
        """Turn a complete file into an object and return its path.

        actual: the digest of the file's bytes, computed here if it is None   sync: whether the object is on the disk on
        return; otherwise call `sync`
        Raises ProtocolError (E-WIRE-04) and deletes the file if it has another digest.
        """
        actual = file_digest(partial) if actual is None else actual
        if actual != digest:
            partial.unlink()
            raise ProtocolError(
                "E-WIRE-04",
                f"expected an object of digest {digest[:16]}, found {actual[:16]}: it was damaged or changed. Send "
                "it again",
            )
        file = self._file(digest)
        if self.holds(digest):
            partial.unlink()
        else:
            with disk_errors(self.folder):
                if sync:
                    sync_path(partial)  # before the rename
                partial.replace(file)
            self._verified[digest] = _fingerprint(file)
        if sync:
            self.sync(digest)
        return file

    def sync(self, *digests: str) -> None:
        """Sync objects and their folders; raises UnavailableError (E-STATE-63) if the disk is full."""
        files = [self._file(digest) for digest in digests]
        with disk_errors(self.folder):
            for file in files:
                sync_path(file)
            for folder in {file.parent for file in files}:
                sync_path(folder)

    def remove(self, digest: str) -> None:
        """Delete an object if it exists; open readers can read on."""
        self._file(digest).unlink(missing_ok=True)
        self._verified.pop(digest, None)

    def sweep(self, keep: Container[str]) -> int:
        """Delete all files not in `keep`; return the bytes freed. Do not call it during writes."""
        freed = 0
        for file in [file for file in self.folder.rglob("*") if file.is_file()]:
            if file.name.removesuffix(_PARTIAL) not in keep:
                freed += file.stat().st_size
                file.unlink()
                self._verified.pop(file.name, None)
        return freed

    def _file(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ProtocolError("E-WIRE-06", f"expected the digest of an object in hex, found {digest[:80]!r}")
        return self.folder / digest[:2] / digest if self._sharded else self.folder / digest

    def _matches(self, file: Path, digest: str) -> bool:
        """Return whether a file has this digest; it is hashed again only after a change."""
        if not file.exists():
            return False
        fingerprint = _fingerprint(file)
        if self._verified.get(digest) != fingerprint:
            if file_digest(file) != digest:
                return False
            self._verified[digest] = fingerprint
        return True


def count_objects(folder: Path) -> int:
    """Count the objects in a folder; 0 if there is no folder."""
    return sum(1 for file in folder.rglob("*") if _DIGEST.fullmatch(file.name))


def _fingerprint(file: Path) -> tuple[int, ...]:
    """Return file attributes, at least one of which changes with every write."""
    now = file.stat()
    return now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
