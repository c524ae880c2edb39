"""Unfinished uploads: one writer each, and a quota per silo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fl_core.errors import UnavailableError
from protos.storage.partial_file import partial_size, remove_recycled

QUOTA_BYTES = 8 << 30
"""Default room for one silo's unfinished uploads."""
_TAKEOVER_S = 10.0


@dataclass(slots=True)
class Upload:
    """An upload under way. digest: that of all of its bytes, where its last stream brought all of them."""

    digest: str | None = None
    writer: threading.Lock = field(default_factory=threading.Lock)
    cancel: Callable[[], object] | None = None
    """Ends the stream that writes it now."""


class UploadRegistry:
    """The uploads of all silos, in files `partial/<silo>/<contribution>` of a folder. quota: bytes for each silo."""

    def __init__(self, folder: Path, quota: int = QUOTA_BYTES) -> None:
        self._folder = folder / "partial"
        self.quota = quota
        self._lock = threading.Lock()
        self._uploads: dict[str, Upload] = {}
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_recycled(self._folder, folder / "spare", folder / "aside")

    def path(self, silo: str, contribution: str) -> Path:
        """Return the file of an upload, which need not exist yet; its folder is made."""
        folder = self._folder / silo
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / contribution

    def size(self, silo: str, contribution: str) -> int:
        """Return how many bytes of an upload have arrived."""
        return partial_size(self._folder / silo / contribution)

    def pending(self, silo: str) -> int:
        return sum(self.size(silo, contribution) for of, contribution in self.all() if of == silo)

    def all(self) -> list[tuple[str, str]]:
        """List the unfinished uploads as (silo, contribution)."""
        return [(file.parent.name, file.name) for file in self._folder.glob("*/*")]

    @contextmanager
    def writing(self, contribution: str, cancel: Callable[[], object] | None = None) -> Iterator[Upload]:
        """Become the one writer of an upload. A stream that still writes it has lost its connection and is cancelled.

        Raises UnavailableError (E-NET-12) when it does not end in time.
        """
        with self._lock:
            upload = self._uploads.setdefault(contribution, Upload())
            older = upload.cancel
        if older is not None:
            older()
        if not upload.writer.acquire(timeout=_TAKEOVER_S):
            raise UnavailableError("E-NET-12", "this update is being sent over another stream: try again")
        try:
            upload.cancel = cancel
            yield upload
        finally:
            upload.cancel = None
            upload.writer.release()

    def discard(self, silo: str, contribution: str) -> None:
        """Delete the bytes of an unfinished upload."""
        (self._folder / silo / contribution).unlink(missing_ok=True)

    def forget(self, contribution: str) -> None:
        """Drop an upload that is finished or will not be."""
        with self._lock:
            self._uploads.pop(contribution, None)
