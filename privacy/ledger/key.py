"""The secret key of a ledger's hash chain: a separate file, mode 0600, to be backed up separately.

It is created atomically and never changes. If two processes create it at once, the second uses the first one's.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from fl_core.errors import StateError
from service_core.storage.private_files import sync_path

BYTES = 32
_OTHERS = 0o077


def key_path(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.stem}.key")


def read(file: Path) -> bytes | None:
    """Read the key; None without a file. Raises StateError (E-BUDGET-14) if it is unusable or open to others."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if file.is_symlink():
            raise _unusable(file, "a broken link") from None
        return None
    except OSError as error:
        raise _unusable(file, str(error.strerror)) from error
    try:
        with os.fdopen(fd, "rb") as opened:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if mode & _OTHERS:
                raise _unusable(file, f"mode {mode:04o}: others may have read it (chmod 600)")
            raw = json.loads(opened.read())
        secret = bytes.fromhex(raw["key"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unusable(file, f"something else ({type(error).__name__})") from error
    if len(secret) != BYTES:
        raise _unusable(file, f"{len(secret)} bytes")
    return secret


def require(file: Path) -> bytes:
    """Read the key; raises StateError (E-BUDGET-14) if it is missing or unusable."""
    key = read(file)
    if key is None:
        raise _unusable(file, "no file")
    return key


def obtain(file: Path) -> bytes:
    """Read the key, or create it; it is on the disk on return."""
    key = read(file)
    if key is None:
        with suppress(FileExistsError):  # another process was first
            _write(file, secrets.token_bytes(BYTES))
        key = require(file)
    return key


def _write(file: Path, secret: bytes) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as opened:
            opened.write(json.dumps({"key": secret.hex()}).encode())
            opened.flush()
            os.fsync(opened.fileno())
        os.link(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    sync_path(file.parent)


def _unusable(file: Path, problem: str) -> StateError:
    return StateError(
        "E-BUDGET-14",
        f"expected the ledger's key in {file}, readable only by its owner, found {problem}: restore it from its own "
        "backup. If it is lost, the ledger is lost too: move the ledger away, register the data again and run `silo "
        "ledger restore`, which charges what may have been spent",
    )
