"""Reading the policy file: what others can change, or what cannot be read, allows nothing."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from fl_core.errors import RefusedError

LARGEST = 1 << 20
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def read(file: Path) -> bytes | None:
    """Read a policy file, through a link if it is one; None where there is nothing of that name.

    Raises RefusedError: E-POLICY-01 on what cannot be read, is no regular file or is larger than 1 MiB; E-POLICY-10 on
    a file that others can change: by its mode, its owner, or its folder.
    """
    found = open_file(file)
    if found is None:
        return None
    raw, facts = found
    if facts.st_mode & OTHERS:
        raise _open_to_others(f"the policy file {file} to be written by its owner alone", facts, file.resolve())
    own = (os.geteuid(), 0)
    for what, owner in ((file.resolve(), facts.st_uid), (file, os.lstat(file).st_uid)):
        if owner not in own:
            raise RefusedError(
                "E-POLICY-10",
                f"expected {what} to be owned by this user or by root, found user {owner}, who can change what it "
                f"allows: chown {own[0]} {shlex.quote(str(what))} ; {_NOTHING}",
            )
    for folder in {file.absolute().parent, file.resolve().parent}:
        about = folder.stat()
        if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
            raise _open_to_others(f"the folder {folder} of the policy file to be closed to others", about, folder)
    return raw


def open_file(file: Path) -> tuple[bytes, os.stat_result] | None:
    """Read the bytes of a policy file and its `stat`, whoever may change it; None without one.

    Raises RefusedError (E-POLICY-01). Guarantees: a pipe or a device is not waited for.
    """
    try:
        os.lstat(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise closed(f"expected to look at {file}, found {error.strerror}") from error
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        link = ", a link that leads nowhere" if file.is_symlink() and not file.exists() else ""
        raise closed(f"expected to read {file}, found {error.strerror}{link}") from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise closed(f"expected {file} to be a file, found {stat.filemode(facts.st_mode)}")
        with os.fdopen(fd, "rb", closefd=False) as source:
            raw = source.read(LARGEST + 1)
    except OSError as error:
        raise closed(f"expected to read {file}, found {error.strerror}") from error
    finally:
        os.close(fd)
    if len(raw) > LARGEST:
        raise closed(f"expected at most {LARGEST} bytes in {file}, found more")
    return raw, facts


_NOTHING = "nothing is accepted until then"


def closed(reason: str) -> RefusedError:
    return RefusedError("E-POLICY-01", f"{reason}: nothing is accepted until the policy file is repaired")


def _open_to_others(expected: str, found: os.stat_result, place: Path) -> RefusedError:
    return RefusedError(
        "E-POLICY-10",
        f"expected {expected}, found mode {stat.S_IMODE(found.st_mode):04o}: look at what it says now, then "
        f"chmod go-w {shlex.quote(str(place))} ; {_NOTHING}",
    )
