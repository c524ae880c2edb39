"""Weights that leads send before they submit a run: resumable at every byte, and objects once complete."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator.storage.uploads import UploadRegistry
from fl_core.errors import ProtocolError, UnavailableError
from fl_core.rounds.manifest import MAX_WEIGHTS_BYTES
from service_core.storage import disk
from service_core.storage.object_store import ObjectStore

QUOTA_BYTES = 2 << 30
"""Quota for one lead's unfinished weights."""
UNUSED = 4
"""Objects that wait for a run to use them; the oldest make room for new ones."""
STREAMS = 2
_ANNOUNCED = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")


class WeightsUploads:
    """Uploads of weights by leads. Thread-safe, except `uploads` and `stream`, which are for the event loop only.

    Guarantees: an unused object is deleted at the next start of the service at the latest.
    """

    def __init__(self, folder: Path, objects: ObjectStore, referenced: Callable[[], set[str]]) -> None:
        """referenced: returns the digests of all objects that runs need."""
        self.uploads = UploadRegistry(folder, QUOTA_BYTES)
        self._objects = objects
        self._referenced = referenced
        self._announced: dict[tuple[str, str], int] = {}
        self._unused: list[str] = []
        self._streams = 0
        self._lock = threading.Lock()

    def open(self, lead: str, digest: str, size: int) -> int:
        """Accept an announcement and return how many bytes are here: `size` once it is an object.

        If all bytes are here without being an object (after a crash or a full disk), finish it first, and raise as
        `finish`. Raises ProtocolError (E-WIRE-06) on an invalid digest or an impossible size; UnavailableError
        (E-RUN-38) if the disk's reserve would be used.
        """
        if not _DIGEST.fullmatch(digest):
            raise ProtocolError("E-WIRE-06", f"expected a digest in lower-case hex, found {digest[:80]!r}")
        if not 0 < size <= MAX_WEIGHTS_BYTES:
            raise ProtocolError("E-WIRE-06", f"expected at most {MAX_WEIGHTS_BYTES} bytes of weights, found {size}")
        with self._lock:
            with self._objects.lock:
                if self._objects.holds(digest):
                    self.uploads.discard(lead, digest)  # this lead's part, sent before another lead finished
                    return size
            have = self.uploads.size(lead, digest)
            if have == size:
                self._finish(lead, digest, None)
                return size
            if have > size:
                self.uploads.discard(lead, digest)
                have = 0
            if self.uploads.pending(lead) - have + size > self.uploads.quota:
                for of, other in self.uploads.all():
                    if of == lead and other != digest:
                        self.uploads.discard(lead, other)
            if size - have > disk.available(self._objects.folder):
                raise UnavailableError(
                    "E-RUN-38", "the coordinator's disk has no room for these weights: try again later"
                )
            while len(self._announced) >= _ANNOUNCED:
                del self._announced[next(iter(self._announced))]
            self._announced[lead, digest] = size
            return have

    def announced(self, lead: str, digest: str) -> int:
        """Return the size of weights that a lead has opened; raises ProtocolError (E-WIRE-06) if it has not."""
        with self._lock:
            size = self._announced.get((lead, digest))
        if size is None:
            raise ProtocolError(
                "E-WIRE-06", f"expected weights that were opened, found {digest[:16]!r}: open them first"
            )
        return size

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        """Hold one of the streams for weights; raises UnavailableError (E-NET-12) if all are taken."""
        if self._streams >= STREAMS:
            raise UnavailableError("E-NET-12", f"expected at most {STREAMS} uploads of weights at once: try again")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def finish(self, lead: str, digest: str, received: str | None) -> None:
        """Turn a complete upload into an object. received: the digest of its bytes, computed here if None.

        Raises ProtocolError (E-WIRE-04) and deletes the bytes if they have another digest.
        """
        with self._lock:
            self._finish(lead, digest, received)

    def _finish(self, lead: str, digest: str, received: str | None) -> None:
        with self._objects.lock:
            if self._objects.holds(digest):  # another lead finished first
                self.uploads.discard(lead, digest)
            else:
                self._objects.commit(self.uploads.path(lead, digest), digest, received)
        self._announced.pop((lead, digest), None)
        self.uploads.forget(f"{lead}/{digest}")
        self._unused = [d for d in self._unused if d != digest] + [digest]
        if len(self._unused) <= UNUSED:
            return
        with self._objects.lock:
            needed = self._referenced()
            self._unused = [d for d in self._unused if d not in needed]
            while len(self._unused) > UNUSED:
                self._objects.remove(self._unused.pop(0))
