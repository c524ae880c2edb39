"""A lead's changes to a running run: excluded silos, the quorum, and the time that a round waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.records import Steering
from coordinator.storage.schema import steering
from service_core.storage.sqlite import Database


class SteeringStore:
    """The steering of runs; runs without an intervention have the defaults."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def of(self, run_id: str) -> Steering:
        with self._db.read() as db:
            return read(db, run_id)

    def excluded(self, run_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the excluded silos by run, for runs with an intervention."""
        with self._db.read() as db:
            rows = db.execute(select(steering.c.run_id, steering.c.excluded).where(steering.c.run_id.in_(run_ids)))
            return {row.run_id: tuple(row.excluded) for row in rows}

    def exclude(self, run_id: str, silo: str, readmit: bool) -> bool:
        """Exclude a silo, or readmit it; return whether that changes anything."""
        with self._db.write() as db:
            before = read(db, run_id).excluded
            others = [name for name in before if name != silo]
            after = tuple(others if readmit else sorted([*others, silo]))
            change(db, run_id, excluded=list(after))
            return after != before

    def extend(self, run_id: str, round: int, seconds: float) -> None:
        """Add time to an open round, on top of earlier extensions."""
        with self._db.write() as db:
            now = read(db, run_id)
            change(db, run_id, extended_round=round, extended_s=now.extension(round) + seconds)

    def note_classes(self, run_id: str, holds: Mapping[str, Sequence[str]]) -> None:
        """Store the classes of silos, by their newest updates."""
        with self._db.write() as db:
            before = read(db, run_id).holds
            if any(list(before.get(name, ())) != list(classes) for name, classes in holds.items()):
                change(db, run_id, holds={**before, **{name: list(classes) for name, classes in holds.items()}})


def read(db: Connection, run_id: str) -> Steering:
    row = db.execute(select(steering).where(steering.c.run_id == run_id)).first()
    if row is None:
        return Steering(run_id)
    return Steering(**{**row._mapping, "excluded": tuple(row.excluded)})


def note_resumed(db: Connection, run_id: str, quorum: int) -> None:
    """Count a run's resumption inside an open transaction; quorum: from now on, 0 changes nothing."""
    before = read(db, run_id)
    change(db, run_id, attempt=before.attempt + 1, quorum=quorum or before.quorum)


def change(db: Connection, run_id: str, **values: object) -> None:
    """Change a run's steering inside an open transaction."""
    start = {"attempt": 0, "quorum": 0, "excluded": [], "extended_round": 0, "extended_s": 0.0, "holds": {}}
    db.execute(upsert(steering).values(run_id=run_id, **start).on_conflict_do_nothing())
    db.execute(update(steering).where(steering.c.run_id == run_id).values(**values))
