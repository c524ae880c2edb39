"""What a hospital's files hold, so that data that change during a run are noticed whatever their size and date say."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from fl_core.errors import DataError
from protos.storage.digests import file_digest

_SETTLED_NS = 2_000_000_000
"""A file that was changed this short before it was read may be changed again under the same time of change."""


class _Status(NamedTuple):
    """What the system says of a file without reading it. The time of change (ctime) is one that no program can set."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> _Status:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


class _Known(NamedTuple):
    status: _Status
    digest: str
    settled: bool


class FileContents:
    """One digest of many files. Each is read once, and again when its status has changed; one thread at a time.

    Guarantees: what was edited, replaced or exchanged since is noticed, also where size and date are put back (`cp -p`,
    `rsync -t`); a file that was only touched is as before. What is not noticed is what somebody does who sets the
    machine's clock back or writes below the file system.
    """

    def __init__(self) -> None:
        self._known: dict[Path, _Known] = {}

    def digest(self, paths: Iterable[Path]) -> str:
        """Return the BLAKE3 of the files' own digests, in this order; raises DataError (E-DATA-04) on one unread."""
        self._known = {path: self._file(path) for path in paths}
        return blake3("".join(known.digest for known in self._known.values()).encode()).hexdigest()

    def _file(self, path: Path) -> _Known:
        try:
            status, known = _Status.of(path), self._known.get(path)
            if known is not None and known.settled and known.status == status:
                return known
            settled = time.time_ns() - status.changed_ns > _SETTLED_NS
            return _Known(status, file_digest(path), settled)
        except OSError as error:
            raise DataError(
                "E-DATA-04", f"expected a readable file at {path}, found: {error.strerror}. Restore the file"
            ) from error
