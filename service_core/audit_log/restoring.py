"""The audit log in a backup: copied whole while others append to it, and marked where it was put back."""

from __future__ import annotations

import fcntl
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from service_core.audit_log.log import FOLDER, AuditLog, LogFolder
from service_core.storage import private_files


def copy_log(home: Path, target: Path) -> None:
    """Copy the log of a home into another folder, as it is at one moment: whole lines, and an end that is there."""
    folder = LogFolder(home / FOLDER)
    if not folder.path.is_dir():
        return
    with folder.locked(fcntl.LOCK_SH):  # nobody appends: a millisecond
        kept = [path for path in folder.path.iterdir() if path.suffix == ".json" or path.name.startswith("torn-")]
        contents = {path.name: path.read_bytes() for path in kept if path.is_file()}
        sizes = {folder.file(number): folder.file(number).stat().st_size for number in folder.numbers()}
    place = private_files.private_folder(target / FOLDER)
    for path, size in sizes.items():
        private_files.write_private(place / path.name, _beginning(path, size))
    for name, content in contents.items():
        private_files.write_private(place / name, content)


def mark_restored(home: Path, at: float) -> int:
    """Write a line that the log was put back, and return its number. at: of the backup, in seconds since 1970.

    From there on each end of the log that is signed names that line, so that a side that holds a later one notices.
    """
    when = datetime.fromtimestamp(at, UTC)
    with closing(AuditLog(home / FOLDER)) as log:
        return log.mark_restored(f"from a backup of {when:%Y-%m-%d %H:%M:%S} UTC: what was written since then is lost")


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)
