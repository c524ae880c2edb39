"""Schema migration for all SQLite databases of Consilium.

To change a schema, change the tables and append a step that makes the same change to a file of the previous version.
Never edit a released step. Write it in plain SQL: the tables in the code are those of the newest version.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Sequence

from fl_core.errors import StateError

Step = Callable[[sqlite3.Connection], object]
_RETRY_S = 0.02


def user_version(db: sqlite3.Connection) -> int:
    """Return the user_version of a file; 0 in a new file."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def set_user_version(db: sqlite3.Connection, version: int) -> None:
    db.execute(f"PRAGMA user_version = {version}")


def set_journal_mode(db: sqlite3.Connection, mode: str, seconds: float) -> None:
    """Choose WAL or DELETE for a file, once no other process reads or writes it.

    seconds: how long to try again, since SQLite does not wait here for a process that also opens the file
    Raises sqlite3.OperationalError (SQLITE_BUSY).
    """
    due = time.monotonic() + seconds
    while True:
        try:
            db.execute(f"PRAGMA journal_mode = {mode}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > due:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def statements(script: str) -> list[str]:
    """Split a script into statements; triggers contain semicolons."""
    complete, pending = [], ""
    for line in script.splitlines():
        if not line.startswith("--"):
            pending += line + "\n"
            if sqlite3.complete_statement(pending):
                complete.append(pending)
                pending = ""
    return complete


def sql(script: str) -> Step:
    """Return a step that runs a script."""

    def step(db: sqlite3.Connection) -> None:
        for statement in statements(script):
            db.execute(statement)

    return step


def migrate(
    db: sqlite3.Connection,
    create: Step,
    steps: Sequence[Step],
    tables: Collection[str],
    version: Callable[[sqlite3.Connection], int] = user_version,
    set_version: Callable[[sqlite3.Connection, int], object] = set_user_version,
) -> None:
    """Migrate a file to version `1 + len(steps)`; `steps[n]` migrates version `1 + n` to the next.

    db: in autocommit mode (isolation_level=None)   create: creates the tables of the newest version in a new file
    tables: names of the tables of the newest version

    Guarantees: files of all earlier versions open. All steps are one transaction: a crash leaves the old file, and of
    two processes only one migrates. Raises StateError (E-STATE-22) on a newer version or another kind of file.
    """
    newest = 1 + len(steps)
    if version(db) == newest and set(tables) <= _tables(db):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        current = version(db)
        if current > newest:
            raise StateError(
                "E-STATE-22",
                f"{_file(db)} has version {current}, and this software reads version {newest} or older: use the "
                "newer version of this software that wrote it",
            )
        if current < 0 or (current == 0 and _tables(db)):
            raise _another_file(db, current, tables)
        if current == 0:
            create(db)
        for step in steps[current - 1 :] if current else ():
            step(db)
        if not set(tables) <= _tables(db):
            raise _another_file(db, current, tables)
        set_version(db, newest)
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _another_file(db: sqlite3.Connection, current: int, tables: Collection[str]) -> StateError:
    return StateError(
        "E-STATE-22",
        f"{_file(db)} (version {current}) is not a database with the tables {', '.join(sorted(tables))}: restore "
        "the database from a backup",
    )


def _tables(db: sqlite3.Connection) -> set[str]:
    rows = db.execute("SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'")
    return {str(name) for (name,) in rows}


def _file(db: sqlite3.Connection) -> str:
    return str(db.execute("PRAGMA database_list").fetchone()[2])
