"""The processes that use a ledger now. Each locks one byte of the ledger's folder until it ends.

An entry names its process. So a restart counts entries that a crash left open as spent, but not those of another
service on the same ledger. The name is a random number; it and the ledger's name determine the locked byte. No file is
created, so none can be deleted. All services of one ledger run on one machine.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from fl_core.errors import ConfigError

_TOKEN = re.compile(r"[0-9a-f]{32}")
_LOCK = "hhqqi4x"
"""`struct flock`: kind, whence, start, length, process."""
_TOKEN_BITS, _NAME_BITS = 42, 20
_held: dict[tuple[int, Path], tuple[str, int]] = {}


def own_token(ledger: Path) -> str:
    """Return this process's token for a ledger; the first call locks its byte."""
    here = (os.getpid(), ledger.resolve())
    if here not in _held or not os.path.samestat(os.fstat(_held[here][1]), here[1].parent.stat()):
        for process, place in [k for k in _held if k[0] != here[0]]:  # inherited from the parent by a fork
            os.close(_held.pop((process, place))[1])
        token, folder = secrets.token_hex(16), _opened(ledger)
        fcntl.fcntl(
            folder, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_RDLCK, os.SEEK_SET, _byte(ledger, token), 1, 0)
        )
        _held[here] = token, folder
    return _held[here][0]


def is_alive(ledger: Path, token: str) -> bool:
    """Return whether another process with this token is alive."""
    return bool(_TOKEN.fullmatch(token)) and _locked(ledger, _byte(ledger, token), 1)


def has_others(ledger: Path) -> bool:
    """Return whether other processes use a ledger."""
    return _locked(ledger, _byte(ledger, ""), 1 << _TOKEN_BITS)


def _locked(ledger: Path, start: int, length: int) -> bool:
    """Return whether another process has locked one of these bytes."""
    request = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    with _folder(ledger) as folder:
        answer = fcntl.fcntl(folder, fcntl.F_OFD_GETLK, request)
    return bool(struct.unpack(_LOCK, answer)[0] != fcntl.F_UNLCK)


def _byte(ledger: Path, token: str) -> int:
    """Return the offset of a token's byte, or of the ledger's first byte if the token is empty."""
    name = int.from_bytes(sha256(ledger.resolve().name.encode()).digest()) % (1 << _NAME_BITS)
    return (name << _TOKEN_BITS) + int(token or "0", 16) % (1 << _TOKEN_BITS)


@contextmanager
def _folder(ledger: Path) -> Iterator[int]:
    """Yield the descriptor with this process's lock, so that F_OFD_GETLK ignores that lock; otherwise a new one."""
    if (lock := _held.get((os.getpid(), ledger.resolve()))) is not None:
        yield lock[1]
        return
    folder = _opened(ledger)
    try:
        yield folder
    finally:
        os.close(folder)


def _opened(ledger: Path) -> int:
    """Open the ledger's folder; raises ConfigError (E-CFG-08) on a system without open file description locks."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise ConfigError(
            "E-CFG-08", f"expected Linux, whose file locks a ledger needs, found {sys.platform}: run it on Linux"
        )
    return os.open(ledger.resolve().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
