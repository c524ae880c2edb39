"""Files named by the SHA-256 of their content: manifests, bases, bundles, states; and downloads under way."""

from __future__ import annotations

import os
import re
from collections.abc import Container
from pathlib import Path

from fl_core.errors import ProtocolError, StateError
from protos import codec, keyfiles

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = ".part"


class Objects:
    """A folder of content-addressed files, open to its owner alone.

    Guarantees: a file is under its name only when all of it is on the disk; writing the same content twice is harmless.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = keyfiles.private_folder(folder)

    def path(self, digest: str) -> Path:
        """Name the file of an object; raises ProtocolError (E-WIRE-06) on what is no SHA-256 in hex."""
        if not _DIGEST.fullmatch(digest):
            raise ProtocolError("E-WIRE-06", f"expected the SHA-256 of an object in hex, found {digest[:80]!r}")
        return self.folder / digest

    def has(self, digest: str) -> bool:
        """Tell whether the whole object is here."""
        return self.path(digest).exists()

    def put(self, data: bytes) -> str:
        """Write an object (fsync, rename, fsync of the folder) and return its digest."""
        digest = codec.digest(data)
        if not self.has(digest):
            keyfiles.write_private(self.path(digest), data)
        return digest

    def sound(self, digest: str) -> Path:
        """Give the path of an object whose bytes still have their digest; raises StateError (E-STATE-63) otherwise."""
        path = self.path(digest)
        if not path.exists() or codec.file_digest(path) != digest:
            raise StateError(
                "E-STATE-63",
                f"expected {path} to hold what was written, found it {'damaged' if path.exists() else 'missing'}: "
                "check the disk, then restart `silo serve`",
            )
        return path

    def partial(self, digest: str) -> Path:
        """Name the file in which a download grows."""
        path = self.path(digest)
        return path.with_name(path.name + _PART)

    def adopt(self, digest: str) -> bool:
        """Take a complete download over; when its bytes are not those of its name, delete it and return False."""
        part = self.partial(digest)
        if codec.file_digest(part) != digest:
            part.unlink()
            return False
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(self.path(digest))
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True

    def sweep(self, keep: Container[str]) -> int:
        """Delete every object, and every download, that `keep` does not name; return the bytes freed."""
        freed = 0
        for path in self.folder.iterdir():
            if path.name.removesuffix(_PART) not in keep:
                freed += path.stat().st_size
                path.unlink()
        return freed

    def size(self) -> int:
        """Sum the bytes of all objects."""
        return sum(path.stat().st_size for path in self.folder.iterdir())
