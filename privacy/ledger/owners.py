"""Which processes work on a ledger now: each holds a lock file beside it, which ends with the process.

An entry names its process, so that a restart counts as spent what a crash left open, and not what another service on
the same ledger is at. All services of one ledger run on one machine.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path

_TOKEN = re.compile(r"[0-9a-f]{32}")
_held: dict[tuple[int, Path], tuple[str, int]] = {}


def own(ledger: Path) -> str:
    """Return the name of this process at a ledger; its lock is held from the first call on."""
    here = (os.getpid(), ledger.resolve())
    if here not in _held or not _file(ledger, _held[here][0]).exists():
        for process, place in [k for k in _held if k[0] != here[0]]:  # of the parent, from before a fork
            os.close(_held.pop((process, place))[1])
        _held[here] = _locked(ledger)
    return _held[here][0]


def _locked(ledger: Path) -> tuple[str, int]:
    while True:
        token = secrets.token_hex(16)
        file = _file(ledger, token)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if file.exists():  # else somebody looked in the moment before it was locked, and cleared it away
            return token, fd
        os.close(fd)


def alive(ledger: Path, token: str) -> bool:
    """Tell whether another process holds the lock of that name; one that nobody holds is cleared away."""
    held = _held.get((os.getpid(), ledger.resolve()))
    if not _TOKEN.fullmatch(token) or (held is not None and held[0] == token):
        return False
    file = _file(ledger, token)
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        file.unlink(missing_ok=True)
        return False
    finally:
        os.close(fd)


def others(ledger: Path) -> list[str]:
    """Name the other processes that work on a ledger; those that ended are cleared away."""
    folder = _file(ledger, "any").parent
    return [f.name for f in sorted(folder.glob("*")) if alive(ledger, f.name)] if folder.is_dir() else []


def _file(ledger: Path, token: str) -> Path:
    return ledger.resolve().parent / f"{ledger.name}.processes" / token
