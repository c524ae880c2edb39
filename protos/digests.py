"""Names of objects and of contributions: SHA-256 in hex. Without torch, for whoever only moves bytes."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path


def digest(data: bytes | memoryview) -> str:
    """Return the SHA-256 in hex: the address of an object."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex, without reading it into memory at once."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def seal(path: Path) -> str:
    """Bring a file to the disk (fsync) and return its SHA-256 in hex; both at once, since each waits for another part.

    Raises OSError as fsync does.
    """
    failed: list[OSError] = []

    def sync() -> None:
        try:
            with path.open("rb") as f:
                os.fsync(f.fileno())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=sync, name="fsync")
    thread.start()
    try:
        found = file_digest(path)
    finally:
        thread.join()
    if failed:
        raise failed[0]
    return found


def contribution_id(run_id: str, round: int, kind: str, silo: str, base_digest: str) -> str:
    """Return H(run, round, kind, silo, base model): the name of the one update that a silo may send for a task."""
    raw = json.dumps([run_id, round, kind, silo, base_digest], separators=(",", ":"))
    return hashlib.sha256(b"contribution|" + raw.encode()).hexdigest()
