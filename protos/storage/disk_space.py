"""Room on a disk, without the reserve that both services leave free."""

from __future__ import annotations

import shutil
from pathlib import Path

RESERVE_BYTES = 1 << 30
_RESERVE_SHARE = 20


def available(folder: Path) -> int:
    """Return the bytes that may still be written below a folder; negative where the reserve is used already.

    The reserve is 1 GiB, or a twentieth of a disk that is smaller than 20 GiB.
    """
    disk = shutil.disk_usage(folder)
    return disk.free - min(RESERVE_BYTES, disk.total // _RESERVE_SHARE)
