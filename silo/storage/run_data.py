"""For each run, the data that it began with at this hospital, and the records that it has excluded since."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy import select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from service_core.storage.sqlite import Database
from silo.storage.schema import run_data


class FileRecord(NamedTuple):
    """A record's file when a run began. size: in bytes, -1 if it was missing."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class RunData:
    """The data that a run began with. files: records in files, by name   broken: names of excluded records."""

    version: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()


class RunDataStore:
    """The table of the data of runs, in the silo's database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, run_id: str) -> RunData | None:
        with self._database.read() as db:
            row = db.execute(select(run_data).where(run_data.c.run_id == run_id)).one_or_none()
        if row is None:
            return None
        raw = json.loads(zlib.decompress(row.files)) if row.files else {}
        files = {name: FileRecord(size, digest) for name, (size, digest) in raw.items()}
        return RunData(row.fingerprint, files, frozenset(json.loads(row.broken)))

    def begin(self, run_id: str, data: RunData) -> None:
        """Store the data that a run begins with; an existing entry is not changed."""
        files = zlib.compress(json.dumps(data.files).encode()) if data.files else None
        row = upsert(run_data).values(run_id=run_id, fingerprint=data.version, files=files)
        with self._database.write() as db:
            db.execute(row.on_conflict_do_nothing())

    def leave_out(self, run_id: str, names: Collection[str]) -> int:
        """Exclude records from a run from now on; return how many are excluded in total."""
        this = run_data.c.run_id == run_id
        with self._database.write() as db:
            excluded = json.loads(db.scalar(select(run_data.c.broken).where(this)) or "[]")
            broken = sorted({*excluded, *names})
            db.execute(update(run_data).where(this).values(broken=json.dumps(broken)))
        return len(broken)

    def broken(self) -> dict[str, tuple[str, ...]]:
        """Return the excluded records by run, for runs that have any."""
        with self._database.read() as db:
            rows = db.execute(select(run_data.c.run_id, run_data.c.broken).where(run_data.c.broken != "[]"))
            return {row.run_id: tuple(json.loads(row.broken)) for row in rows}
