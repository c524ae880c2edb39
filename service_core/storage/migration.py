"""Schema migration of SQLite files, for all databases of Consilium.

To change a schema: change the tables, and append the step that does the same to a file of the version before. A step
that was released is never edited, and is written in plain SQL: the tables in the code are not those of its version.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Sequence

from fl_core.errors import StateError

Step = Callable[[sqlite3.Connection], object]


def user_version(db: sqlite3.Connection) -> int:
    """Return the version that SQLite keeps in the file's header; 0 in a new file."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def set_user_version(db: sqlite3.Connection, version: int) -> None:
    db.execute(f"PRAGMA user_version = {version}")


def migrate(
    db: sqlite3.Connection,
    create: Step,
    steps: Sequence[Step],
    known: Collection[str],
    version: Callable[[sqlite3.Connection], int] = user_version,
    set_version: Callable[[sqlite3.Connection, int], object] = set_user_version,
) -> None:
    """Bring a file to version `len(steps) + 1`; `steps[n]` brings one of version n + 1 to version n + 2.

    db: without a transaction (isolation_level=None)   create: makes a new file's tables, of the newest version
    known: tables that files of every version have

    Guarantees: all steps are one transaction, so a crash leaves the old file; of two processes one migrates.
    Raises StateError (E-STATE-22) on a file of a newer version, and on one of another form.
    """
    newest = len(steps) + 1
    if version(db) == newest and set(known) <= _tables(db):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        found, tables = version(db), _tables(db)
        if found > newest:
            raise StateError(
                "E-STATE-22",
                f"expected {_file(db)} of version {newest} or older, found version {found}: a newer version of this "
                "software wrote it; use that one, or a newer one still",
            )
        if not tables and found == 0:
            create(db)
        elif found < 1 or not set(known) <= tables:
            raise StateError(
                "E-STATE-22",
                f"expected a database with the tables {', '.join(sorted(known))} in {_file(db)}, found another file "
                f"(version {found}): restore the one that was there from a backup, or name another place",
            )
        else:
            for step in steps[found - 1 :]:
                step(db)
        set_version(db, newest)
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _tables(db: sqlite3.Connection) -> set[str]:
    found = db.execute("SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'")
    return {str(name) for (name,) in found}


def _file(db: sqlite3.Connection) -> str:
    return str(db.execute("PRAGMA database_list").fetchone()[2])
