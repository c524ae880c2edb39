"""Free space on a disk, and errors of a full, read-only or broken one.

Both services leave a reserve free.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fl_core.errors import UnavailableError

RESERVE_BYTES = 1 << 30
_RESERVE_SHARE = 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)


def available(folder: Path) -> int:
    """Return the bytes available on a folder's disk, less the reserve; negative if the reserve is in use.

    The reserve is 1 GiB, or 5 % of a disk smaller than 20 GiB.
    """
    usage = shutil.disk_usage(folder)
    return usage.free - min(RESERVE_BYTES, usage.total // _RESERVE_SHARE)


def disk_error(path: Path, full: bool, cause: str) -> UnavailableError:
    """Return the error (E-STATE-63) of a failed write, which can be retried."""
    folder = path if path.is_dir() else path.parent
    if not full:
        return UnavailableError(
            "E-STATE-63",
            f"cannot write in {folder} ({cause}): check the disk, the folder's owner and whether it is mounted "
            "read-only. Nothing that was confirmed is lost",
        )
    left = ""
    with suppress(OSError):
        left = f" ({shutil.disk_usage(folder).free >> 20} MiB free)"
    return UnavailableError(
        "E-STATE-63",
        f"the disk of {folder} is full{left}: free some space, for instance old backups, logs or exported models, "
        "but nothing inside the home. Nothing that was confirmed is lost",
    )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Replace an OSError of a full or unusable disk by UnavailableError (E-STATE-63); others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_FULL, *_REFUSED):
            raise
        raise disk_error(path, error.errno in _FULL, str(error.strerror)) from error
