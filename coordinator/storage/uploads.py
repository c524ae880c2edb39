"""Unfinished uploads: one writer each, and a quota per silo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fl_core.errors import UnavailableError
from service_core.storage.object_store import partial_size

QUOTA_BYTES = 8 << 30
"""Default quota for one silo's unfinished uploads."""
_TAKEOVER_S = 10.0


@dataclass(slots=True)
class OpenUpload:
    """An upload in progress. digest: of all its bytes, if its last stream sent them all."""

    digest: str | None = None
    writer: asyncio.Lock = field(default_factory=asyncio.Lock)
    end: Callable[[], object] | None = None
    """Ends the stream that is writing it."""


class UploadRegistry:
    """The uploads of all silos, in files `partial/<silo>/<contribution>` of a folder. quota: bytes for each silo.

    Coroutines run on the service's event loop only; all else may be called from any thread.
    """

    def __init__(self, folder: Path, quota: int = QUOTA_BYTES) -> None:
        self._folder = folder / "partial"
        self.quota = quota
        self._uploads: dict[str, OpenUpload] = {}
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, silo: str, contribution: str) -> Path:
        """Return the file of an upload, which may not exist yet; its folder is created."""
        folder = self._folder / silo
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / contribution

    def size(self, silo: str, contribution: str) -> int:
        return partial_size(self._folder / silo / contribution)

    def pending(self, silo: str) -> int:
        return sum(self.size(silo, contribution) for of, contribution in self.all() if of == silo)

    def all(self) -> list[tuple[str, str]]:
        """List the unfinished uploads as (silo, contribution)."""
        return [(file.parent.name, file.name) for file in self._folder.glob("*/*")]

    @asynccontextmanager
    async def writing(self, contribution: str, end: Callable[[], object] | None = None) -> AsyncIterator[OpenUpload]:
        """Become the only writer of an upload; ends the older one, or raises UnavailableError (E-NET-12)."""
        upload = self._uploads.setdefault(contribution, OpenUpload())
        if upload.end is not None:
            upload.end()
        try:
            async with asyncio.timeout(_TAKEOVER_S):
                await upload.writer.acquire()
        except TimeoutError:
            raise UnavailableError("E-NET-12", "this update is being sent over another stream: try again") from None
        try:
            upload.end = end
            yield upload
        finally:
            upload.end = None
            upload.writer.release()

    def discard(self, silo: str, contribution: str) -> None:
        (self._folder / silo / contribution).unlink(missing_ok=True)

    def forget(self, contribution: str) -> None:
        """Drop an upload that is finished or abandoned."""
        self._uploads.pop(contribution, None)
