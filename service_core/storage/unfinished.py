"""A folder that a command fills is marked until it is whole, so that nobody uses half of it.

The marker is the first file of the folder and the last one that goes, on the disk each time. Every command, service
and database refuses a marked folder and names the command that goes on; only that one, said again, passes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fl_core.errors import StateError
from service_core.storage import private_files

FILE = "unfinished.json"
_filling = set[Path]()
"""Folders that this process fills: what it opens in them is not refused."""


@dataclass(frozen=True, slots=True)
class Marker:
    """Which command fills a folder. again: as a person says it   source: digest of what it brings in, if anything."""

    command: str
    again: str
    source: str = ""


def marker_of(folder: Path) -> Marker | None:
    """Return what fills a folder or was interrupted there, None where nothing was; a marker of no sense is one, too."""
    try:
        return Marker(**json.loads((folder / FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        return Marker("", "the command that filled it")


def is_empty(folder: Path) -> bool:
    """Tell whether a folder holds nothing, but for a marker that a crash left half written."""
    return {child.name for child in folder.iterdir()} <= {f".{FILE}.tmp"}


def require_finished(folder: Path) -> None:
    """Raise StateError (E-STATE-26) where a command was interrupted while it filled a folder."""
    if (left := marker_of(folder)) is not None and folder.resolve() not in _filling:
        raise _unfinished(folder, left)


@contextmanager
def filling(folder: Path, marker: Marker, undo: Callable[[], object] | None = None) -> Iterator[None]:
    """Fill a folder that is there; a second time, where that was interrupted.

    undo: takes back what was made so far: before the block where an earlier one was interrupted, and after an error.
    Without it the block goes on with what is there, and an error leaves the marker.
    Raises StateError: E-STATE-20 while another process fills or uses the folder, E-STATE-26 where another command was
    interrupted, or the same one with another source.
    """
    with _alone(folder):
        if (left := marker_of(folder)) is not None:
            if (left.command, left.source) != (marker.command, marker.source):
                raise _unfinished(folder, left)
            if undo is not None:
                undo()
        private_files.write_private(folder / FILE, json.dumps(asdict(marker)).encode())
        private_files.sync_folder(folder.parent)
        _filling.add(folder.resolve())
        try:
            yield
        except BaseException:
            if undo is not None:
                undo()
                private_files.remove(folder / FILE)
            raise
        finally:
            _filling.discard(folder.resolve())
        private_files.remove(folder / FILE)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder as `FolderLock` does, without a file of its own in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                "E-STATE-20",
                f"expected {folder} to be free, found a service or another command at work in it: wait until that one "
                "is done, or name another folder",
            ) from None
        yield
    finally:
        os.close(descriptor)


def _unfinished(folder: Path, left: Marker) -> StateError:
    return StateError(
        "E-STATE-26",
        f"expected {folder} to be whole, found that a command was interrupted while it filled it. Nothing else uses it "
        f"before that one is done: say it again: {left.again}",
    )
