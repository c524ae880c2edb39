"""The secret under which a ledger's events are chained: a file of its own, mode 0600, to be backed up apart.

It appears whole under its name, and never changes: of two processes that make it at once, the second uses the first's.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fl_core.errors import StateError

BYTES = 32
_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class Key:
    """The secret; migrating: a ledger without a key was about to be brought under it. Its repr hides the secret."""

    secret: bytes
    migrating: bool = False

    def __repr__(self) -> str:
        return f"Key(<hidden>, migrating={self.migrating})"


def beside(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.stem}.key")


def read(file: Path) -> Key | None:
    """Read the key; None without a file. Raises StateError (E-BUDGET-14) on one that is unusable or open to others."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if file.is_symlink():
            raise _unusable(file, "a link that leads nowhere") from None
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
    return Key(secret, raw.get("migrating") is True)


def require(file: Path) -> Key:
    """Read the key of a ledger that has one; raises StateError (E-BUDGET-14) where it is missing or unusable."""
    found = read(file)
    if found is None:
        raise _unusable(file, "no file")
    return found


def obtain(file: Path, migrating: bool = False) -> Key:
    """Read the key, or make one where there is none: on the disk on return."""
    found = read(file)
    if found is None:
        with suppress(FileExistsError):  # another process was first
            _write(file, Key(secrets.token_bytes(BYTES), migrating), new=True)
        found = require(file)
    return found


def migrated(file: Path, key: Key) -> None:
    """Note that the ledger is under the key: a copy from before that is an older one from now on."""
    _write(file, Key(key.secret), new=False)


def _write(file: Path, key: Key, new: bool) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as opened:
            fields = {"key": key.secret.hex()} | ({"migrating": True} if key.migrating else {})
            opened.write(json.dumps(fields).encode())
            opened.flush()
            os.fsync(opened.fileno())
        if new:
            os.link(aside, file)
        else:
            aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unusable(file: Path, found: str) -> StateError:
    return StateError(
        "E-BUDGET-14",
        f"expected the ledger's key in {file}, for its owner alone, found {found}: restore it from its own backup; if "
        "it is lost, so is the ledger: move that away, register the data again and run silo ledger restore",
    )
