"""Tests whether processes on several machines that share a folder see the same files and locks in it."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from fl_core.errors import StateError

WAIT_S = 90.0
"""Seconds until a machine surely sees the changes of another one: NFS caches a missing name for up to 60."""
_PAUSE_S = 0.1
_KINDS: Mapping[str, Callable[[IO[str], int], object]] = {"fcntl": fcntl.lockf, "flock": fcntl.flock}
"""Locks of SQLite, and of files next to its databases."""


@contextmanager
def held_locks(folder: Path) -> Iterator[str]:
    """Lock files in a folder inside the block; yield the word in them, which `require_locks` expects."""
    word = secrets.token_hex(16)
    with ExitStack() as files:
        for name, lock in _KINDS.items():
            file = files.enter_context((folder / name).open("w"))
            file.write(word)
            file.flush()
            os.fsync(file.fileno())
            lock(file, fcntl.LOCK_EX)
        yield word


def require_locks(folder: Path, word: str) -> None:
    """Raise StateError (E-RUN-55) unless the locks of `held_locks`, perhaps on another machine, are effective here."""
    for name, lock in _KINDS.items():
        problem = f"its {name} locks do not hold between the two"
        try:
            with (folder / name).open("r+") as file:
                if file.read() == word:
                    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                else:
                    problem = "it has another folder of this name"
        except BlockingIOError:
            continue
        except OSError as error:
            problem = str(error)
        raise StateError(
            "E-RUN-55",
            f"the worker's machine must share {folder} with the service, including locks, but {problem}: put the "
            "home on a file system that all machines have, with locks (of NFS version 4, without nolock or "
            "local_lock)",
        )


def use(file: Path) -> None:
    """Mark a file as used by this process until it ends."""
    fcntl.flock(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_SH)


def require_unused(file: Path, seconds: float = WAIT_S) -> None:
    """Wait until no process uses a file; raises StateError (E-STATE-20) after this many seconds."""
    if not file.exists():
        return
    end = time.monotonic() + seconds
    with file.open("r+") as opened:
        while True:
            try:
                return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise StateError(
                        "E-STATE-20",
                        f"a worker of an earlier service still uses {file.parent}, perhaps on another machine: end "
                        "that worker",
                    ) from None
            time.sleep(_PAUSE_S)


def await_file(file: Path, seconds: float = WAIT_S) -> None:
    """Wait until a file that another machine made is visible here, for at most this many seconds."""
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        list(file.parent.iterdir())  # makes a network file system look again
        time.sleep(_PAUSE_S)
