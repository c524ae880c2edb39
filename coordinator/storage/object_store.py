"""Objects as files: named by their digest, written aside, and there either whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import RLock

from coordinator.storage.chunk_cache import Packed
from fl_core.errors import ProtocolError, StateError
from fl_core.types.values import State
from protos.storage.file_recycling import LENGTH, Growth, Spares, discard, growing, length
from protos.storage.private_files import sync_folder, write_private
from protos.wire import codec
from protos.wire.bundle_file import FileBundle

QUOTA_BYTES = 8 << 30
"""Default room for one silo's unfinished uploads."""
_GONE = ".gone"


class Blobs:
    """A content-addressed folder: `objects/ab/abcd...` and, for uploads that are under way, `partial/<silo>/<id>`.

    Guarantees: an object under its digest is whole and on the disk; adopting the same bytes twice is harmless.
    """

    def __init__(self, folder: Path, quota: int = QUOTA_BYTES) -> None:
        self._objects, self._partials, self._aside = folder / "objects", folder / "partial", folder / "aside"
        self.quota = quota
        self.spares = Spares(folder / "spare")
        self.packed = Packed()
        self.guard = RLock()
        """Held while an object and its record are made or removed together, so that neither is without the other."""
        shutil.rmtree(self._aside, ignore_errors=True)  # what a crash left half-written
        for part in (self._partials, self._aside, *(self._objects / f"{i:02x}" for i in range(256))):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(self._objects)

    def path(self, digest: str) -> Path:
        """Name the file of an object that is here; raises StateError (E-STATE-21) when it is not."""
        if not (file := self._file(digest)).exists():
            raise StateError(
                "E-STATE-21", f"expected the object {digest[:16]} in {self._objects}, found none: restore the folder"
            )
        return file

    def has(self, digest: str) -> bool:
        """Tell whether an object is here."""
        return self._file(digest).exists()

    def put_bytes(self, data: bytes) -> str:
        """Store an object and return its digest; on disk on return."""
        digest = codec.digest(data)
        if not self.has(digest):
            write_private(self._file(digest), data)
        return digest

    def put_state(self, state: State) -> tuple[str, int]:
        """Store a state and return its digest and size in bytes; on disk on return."""
        aside = self._aside / secrets.token_hex(8)
        found, size = codec.write_state(state, aside)
        if self.has(found):
            self.spares.keep(aside)
        else:
            self._place(aside, found)
        return found, size

    def partial(self, silo: str, contribution: str) -> Path:
        """Name the file into which an upload grows; it need not exist yet."""
        folder = self._partials / silo
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / contribution

    def have(self, silo: str, contribution: str) -> int:
        """Count the bytes of an upload that are here."""
        return length(self._partials / silo / contribution)

    def growing(self, silo: str, contribution: str, size: int) -> AbstractContextManager[Growth]:
        """Go on with an upload, see `protos.storage.file_recycling.growing`. size: of the whole."""
        return growing(self.partial(silo, contribution), self.spares, size)

    def pending(self, silo: str) -> int:
        """Count the bytes of all unfinished uploads of a silo."""
        folder = self._partials / silo
        return sum(length(f) for f in _growing_in(folder)) if folder.exists() else 0

    def bundle(self, digest: str) -> FileBundle:
        """Open an update; raises StateError as `path`, ProtocolError as `FileBundle`."""
        return FileBundle(self.path(digest))

    def adopt(self, partial: Path, digest: str, found: str | None = None, synced: bool = False) -> Path:
        """Turn a finished upload into an object.

        found: its digest where the receiver computed it on the way, else the file is read once more; synced: all of
        the file is on the disk already.
        Raises ProtocolError (E-WIRE-04) and forgets the upload when the bytes are not those of `digest`.
        """
        found = codec.file_digest(partial) if found is None else found
        if found != digest:
            partial.unlink()
            raise ProtocolError(
                "E-WIRE-04",
                f"expected an object of digest {digest[:16]}, found {found[:16]}: it was damaged or changed; "
                "open the contribution and send all of it again",
            )
        if self.has(digest):  # of another silo: the same numbers
            self.spares.keep(partial)
            return self._file(digest)
        if not synced:
            with partial.open("rb") as f:
                os.fsync(f.fileno())
        return self._place(partial, digest)

    def discard(self, silo: str, contribution: str) -> None:
        """Forget an unfinished upload."""
        discard(self._partials / silo / contribution)

    def remove(self, digest: str) -> None:
        """Take an object away; the caller holds `guard`, has removed its last record, and calls `empty` later."""
        self.packed.forget(digest)
        with suppress(FileNotFoundError):
            self._file(digest).replace(self._aside / f"{secrets.token_hex(8)}{_GONE}")

    def empty(self) -> None:
        """Set objects that were removed aside to be written over, or give back their room; needs no lock."""
        for file in self._aside.glob(f"*{_GONE}"):
            self.spares.keep(file)

    def sweep(self, keep: Container[str]) -> None:
        """Delete every object that `keep` does not name: what a crash left without a record."""
        for file in list(self._objects.glob("??/*")):
            if file.name not in keep:
                file.unlink()

    def uploads(self) -> Iterator[tuple[str, str]]:
        """List the unfinished uploads as (silo, contribution)."""
        for folder in self._partials.iterdir():
            for file in _growing_in(folder):
                yield folder.name, file.name

    def _file(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ProtocolError("E-WIRE-15", f"expected a digest in lower-case hex, found {digest[:80]!r}")
        return self._objects / digest[:2] / digest

    def _place(self, aside: Path, digest: str) -> Path:
        file = self._file(digest)
        aside.replace(file)
        sync_folder(file.parent)
        return file


def _growing_in(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix != LENGTH]
