"""Which certificate of a name is in force: not a revoked one, and not one whose successor is in use."""

from __future__ import annotations

from sqlalchemy import Connection, Integer, Table, func, literal_column, select

from coordinator.storage.schema import revocations

GRACE_S = 30.0
"""For so long after its successor was first used a certificate still counts: calls that were under way may end."""
CLOCK_SKEW_S = 3600.0
"""A certificate that was issued later than this from now is from a clock that was wrong, and succeeds to nothing."""


def why_revoked(db: Connection, serial: str) -> str | None:
    return db.scalar(select(revocations.c.reason).where(revocations.c.serial == serial))


def renewed_at(db: Connection, table: Table, serial: str, name: str, now: float) -> float | None:
    """Return since when a later certificate of this name is in use; None when none is, or not for long enough.

    table: `certificates` or `leads`.
    """
    # SQLite numbers rows in the order of their making; two certificates may be of one second.
    number = literal_column(f"{table.name}.rowid", Integer)
    mine = table.alias("mine")
    own = select(literal_column("mine.rowid", Integer)).select_from(mine).where(mine.c.serial == serial)
    later = (
        table.c.name == name,
        table.c.first_used.is_not(None),
        table.c.issued <= now + CLOCK_SKEW_S,
        number > own.scalar_subquery(),
    )
    since = db.scalar(select(func.min(table.c.first_used)).where(*later))
    return since if since is not None and not 0 <= now - since < GRACE_S else None
