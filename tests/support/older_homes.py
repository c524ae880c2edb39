"""Homes of 0.1.0 from their dumps; `tests/data/homes/README.md` says what they hold."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

HOMES = Path(__file__).resolve().parents[1] / "data" / "homes"
AGES = ("first", "last")


def older_file(age: str, name: str, file: Path, change: str = "") -> Path:
    """Write a database from its dump, mode 0600. name: coordinator, silo or ledger   change: SQL that follows."""
    file.touch(mode=0o600)
    with closing(sqlite3.connect(file)) as db:
        db.executescript((HOMES / age / f"{name}.sql").read_text() + change)
    return file


def older_ledger(age: str, folder: Path, change: str = "") -> Path:
    """Write a ledger, with its key where it has one."""
    if (key := HOMES / age / "ledger.key").exists():
        (folder / "ledger.key").write_bytes(key.read_bytes())
        (folder / "ledger.key").chmod(0o600)
    return older_file(age, "ledger", folder / "ledger.db", change)
