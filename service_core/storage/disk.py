"""How much may be written on a disk, and what it means that it takes nothing: full, read-only or broken.

Both services leave a reserve free, and what was answered before is on the disk all the same.
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
    """Return the bytes that may still be written below a folder; negative where the reserve is used already.

    The reserve is 1 GiB, or a twentieth of a disk that is smaller than 20 GiB.
    """
    usage = shutil.disk_usage(folder)
    return usage.free - min(RESERVE_BYTES, usage.total // _RESERVE_SHARE)


def disk_error(path: Path, full: bool, cause: str) -> UnavailableError:
    """Make the error (E-STATE-63) of a write that the disk did not take: it may be tried again."""
    folder = path if path.is_dir() else path.parent
    if not full:
        return UnavailableError(
            "E-STATE-63",
            f"expected to write in {folder}, found that this cannot be ({cause}): check the disk, the folder's owner "
            "and whether it is mounted read-only; nothing that was answered is lost",
        )
    left = ""
    with suppress(OSError):
        left = f" ({shutil.disk_usage(folder).free >> 20} MiB free)"
    return UnavailableError(
        "E-STATE-63",
        f"expected room on the disk of {folder}, found it full{left}: free some there, for instance old backups, logs "
        "or exported models, but nothing inside the home; nothing that was answered is lost",
    )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise UnavailableError (E-STATE-63) in place of an OSError that says that the disk takes nothing; others stay."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_FULL, *_REFUSED):
            raise
        raise disk_error(path, error.errno in _FULL, str(error.strerror)) from error
