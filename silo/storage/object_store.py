"""Files named by the digest of their content: manifests, bases, bundles, states; and downloads under way."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fl_core.errors import ProtocolError, StateError
from protos.storage import private_files as keyfiles
from protos.storage.digests import Hasher, begun
from protos.storage.file_recycling import LENGTH, Growth, Spares, growing, length
from protos.wire import codec

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = ".part"


@dataclass(frozen=True, slots=True)
class Growing:
    """A download that grows, hashed while it does; what was here before is hashed first."""

    growth: Growth
    digest: Hasher

    def write(self, data: bytes | memoryview, /) -> int:
        """Append all of it."""
        self.growth.write(data)
        self.digest.update(data)
        return len(data)


class Objects:
    """A folder of content-addressed files, open to its owner alone.

    Guarantees: what `put` or `seal` have returned from is on the disk; what was downloaded has had its digest, and is
    hashed again before another process trusts it; writing the same content twice is harmless.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = keyfiles.private_folder(folder)
        self.spares = Spares(folder.with_name(f"{folder.name}.spare"))
        self._sound: dict[str, tuple[int, int, int]] = {}

    def path(self, digest: str) -> Path:
        """Name the file of an object; raises ProtocolError (E-WIRE-06) on what is no digest in hex."""
        if not _DIGEST.fullmatch(digest):
            raise ProtocolError("E-WIRE-06", f"expected the digest of an object in hex, found {digest[:80]!r}")
        return self.folder / digest

    def has(self, digest: str) -> bool:
        """Tell whether there is an object of this name."""
        return self.path(digest).exists()

    def holds(self, digest: str) -> bool:
        """Tell whether the object is here with its digest; what is here with another one is deleted."""
        path = self.path(digest)
        if self._right(path, digest):
            return True
        path.unlink(missing_ok=True)
        return False

    def put(self, data: bytes) -> str:
        """Write an object (fsync, rename, fsync of the folder) and return its digest."""
        digest = codec.digest(data)
        keyfiles.write_private(self.path(digest), data)
        return digest

    def put_file(self, write: Callable[[Path], tuple[str, int]]) -> tuple[str, int]:
        """Keep the object that `write` writes in a file of ours; return digest and size, as it does.

        It is not yet on the disk for certain: `seal` brings it there.
        """
        aside = self.folder / f".{secrets.token_hex(8)}{_PART}"
        digest, size = write(aside)
        if self.holds(digest):
            self.spares.keep(aside)
            return digest, size
        path = self.path(digest)
        aside.replace(path)
        self._sound[digest] = _looks(path)
        return digest, size

    def seal(self, *digests: str) -> None:
        """Bring objects and their names to the disk (fsync of the files, then of the folder)."""
        for digest in digests:
            with self.path(digest).open("rb") as file:
                os.fsync(file.fileno())
        keyfiles.sync_folder(self.folder)

    def sound(self, digest: str) -> Path:
        """Give the path of an object whose bytes still have their digest; raises StateError (E-STATE-63) otherwise."""
        path = self.path(digest)
        there = path.exists()
        if not self._right(path, digest):
            raise StateError(
                "E-STATE-63",
                f"expected {path} to hold what was written, found it {'damaged' if there else 'missing'}: "
                "check the disk, then restart `silo serve`",
            )
        return path

    def _right(self, path: Path, digest: str) -> bool:
        """Hash a file, but not again while nobody has written to it since this process did."""
        if not path.exists():
            return False
        looks = _looks(path)
        if self._sound.get(digest) != looks:
            if codec.file_digest(path) != digest:
                return False
            self._sound[digest] = looks
        return True

    def partial(self, digest: str) -> Path:
        """Name the file in which a download grows."""
        path = self.path(digest)
        return path.with_name(path.name + _PART)

    @contextmanager
    def growing(self, digest: str, size: int = 0) -> Iterator[Growing]:
        """Open a download where it was cut, to be appended to. size: of the whole; 0 when unknown."""
        part = self.partial(digest)
        with growing(part, self.spares, size) as growth:
            found = Hasher()
            if growth.have:
                with part.open("rb") as before:
                    found = begun(before)
            yield Growing(growth, found)

    def have(self, digest: str) -> int:
        """Count the bytes of a download that are here."""
        return length(self.partial(digest))

    def adopt(self, digest: str, found: str) -> bool:
        """Take a complete download over; when its digest is not that of its name, delete it and return False.

        found: the digest of what was received and written, see `Growing`. It is not brought to the disk at once: what
        a power cut damages is found by `holds` and fetched again.
        """
        part = self.partial(digest)
        if found != digest:
            part.unlink()
            return False
        path = self.path(digest)
        part.replace(path)
        self._sound[digest] = _looks(path)
        return True

    def sweep(self, keep: Container[str]) -> int:
        """Put every object, and every download, out of use that `keep` does not name; return the bytes freed."""
        freed = 0
        for path in self.folder.iterdir():
            if path.name.removesuffix(LENGTH).removesuffix(_PART) not in keep:
                freed += path.stat().st_size
                self.spares.keep(path)
                self._sound.pop(path.name, None)
        return freed

    def size(self) -> int:
        """Sum the bytes of all objects."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def _looks(path: Path) -> tuple[int, int, int]:
    """Say what changes when somebody writes to a file."""
    now = path.stat()
    return now.st_ino, now.st_size, now.st_mtime_ns
