"""Marks a folder while a command fills it, so that no process uses an incomplete folder.

The marker is the first file in the folder and the last one removed, synced both times. Every command, service and
database refuses a marked folder and names the command to run again; only that command accepts it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fl_core.errors import StateError
from service_core.storage import private_files

FILE = "unfinished.json"
_filling = set[Path]()
"""Folders that this process is filling, and so may use."""


@dataclass(frozen=True, slots=True)
class UnfinishedMarker:
    """The command that fills a folder. again: the command line to repeat   source: digest of its input, if any."""

    command: str
    again: str
    source: str = ""


def marker_of(folder: Path) -> UnfinishedMarker | None:
    """Return the marker of a folder, None without one; an unreadable marker counts."""
    try:
        return UnfinishedMarker(**json.loads((folder / FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        return UnfinishedMarker("", "the command that filled it")


def is_empty(folder: Path) -> bool:
    """Return whether a folder is empty, except for a half written marker that a crash left."""
    return {child.name for child in folder.iterdir()} <= {f".{FILE}.tmp"}


def require_finished(folder: Path) -> None:
    """Raise StateError (E-STATE-26) if a command was interrupted while it filled the folder."""
    if (left := marker_of(folder)) is not None and folder.resolve() not in _filling:
        raise _unfinished(folder, left)


@contextmanager
def filling(folder: Path, marker: UnfinishedMarker, undo: Callable[[], object] | None = None) -> Iterator[None]:
    """Fill an existing folder, or continue after an interruption.

    undo: deletes the written files; called before the block if an earlier command was interrupted, and after an error.
    Without it the block continues with the files present, and an error leaves the marker.
    Raises StateError: E-STATE-20 while another process uses the folder, E-STATE-26 if another command was interrupted,
    or the same one with another source.
    """
    with private_files.FolderLock(folder, "", "a service or another command"):
        if (left := marker_of(folder)) is not None:
            if (left.command, left.source) != (marker.command, marker.source):
                raise _unfinished(folder, left)
            if undo is not None:
                undo()
        private_files.write_private(folder / FILE, json.dumps(asdict(marker)).encode())
        private_files.sync_path(folder.parent)
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


def _unfinished(folder: Path, left: UnfinishedMarker) -> StateError:
    return StateError(
        "E-STATE-26",
        f"a command was interrupted while it filled {folder}. Nothing else can use the folder until that command "
        f"has finished. Run it again: {left.again}",
    )
