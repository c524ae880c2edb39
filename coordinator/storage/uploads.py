"""Uploads under way: one writer each, hashed while they arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fl_core.errors import UnavailableError
from protos.storage.digests import Hasher
from protos.storage.file_recycling import Growth

_TAKEOVER_S = 10.0


@dataclass(slots=True)
class Upload:
    """The digest of an upload's first `hashed` bytes, and who writes it now."""

    hashed: int = 0
    synced: int = 0
    """Bytes that are known to be on the disk."""
    _digest: Hasher = field(default_factory=Hasher)
    writer: threading.Lock = field(default_factory=threading.Lock)
    cancel: Callable[[], object] | None = None

    def begin(self, have: int) -> None:
        """Prepare for an upload that goes on at `have`; from 0 on the digest begins anew."""
        if have == 0:
            self.hashed, self.synced, self._digest = 0, 0, Hasher()

    def result(self, size: int) -> str | None:
        """Return the digest of the whole object if all of it passed through here, else None."""
        return self._digest.hexdigest() if self.hashed == size else None

    def note(self, at: int, data: bytes | memoryview) -> None:
        """Hash what was written at an offset; bytes that do not continue what was hashed leave the rest unhashed."""
        if at == self.hashed:
            self._digest.update(data)
            self.hashed += len(data)


class Hashing:
    """A file that is hashed while it grows."""

    def __init__(self, growth: Growth, upload: Upload) -> None:
        self._growth, self._upload = growth, upload

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of it, unbuffered, then hash: what is hashed is in the file."""
        at = self._growth.have
        self._growth.write(data)
        self._upload.note(at, data)
        return len(data)


class Uploads:
    """The uploads of all silos, by contribution."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uploads: dict[str, Upload] = {}

    @contextmanager
    def writing(self, contribution: str, cancel: Callable[[], object] | None = None) -> Iterator[Upload]:
        """Be the one writer of an upload; a stream that still writes it is of a connection that was cut, and is ended.

        Raises UnavailableError (E-NET-22) when it does not end in time.
        """
        with self._lock:
            upload = self._uploads.setdefault(contribution, Upload())
            older = upload.cancel
        if older is not None:
            older()
        if not upload.writer.acquire(timeout=_TAKEOVER_S):
            raise UnavailableError("E-NET-22", "this update is being sent over another stream: try again")
        try:
            upload.cancel = cancel
            yield upload
        finally:
            upload.cancel = None
            upload.writer.release()

    def forget(self, contribution: str) -> None:
        """Drop an upload that is finished or will not be."""
        with self._lock:
            self._uploads.pop(contribution, None)
