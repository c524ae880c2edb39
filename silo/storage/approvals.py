"""Runs that the hospital decides about by hand: which ones wait, and what was decided."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlalchemy import ColumnElement, and_, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from fl_core.errors import ConfigError
from protos.storage.sqlite import Database
from silo.storage.schema import approvals

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Approval:
    """One run under one manifest. about: what it asks for, for whoever decides; decided: None while it waits.

    request: the same as JSON (`RunRequest`), and what it would spend; empty where an earlier version was asked.
    """

    run_id: str
    manifest_digest: str
    name: str
    about: str
    asked: float
    decided: bool | None
    request: str = ""


class Approvals:
    """Decisions on the disk; a decision is for a manifest, so that a run that changes needs a new one."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def find(self, run_id: str, manifest_digest: str) -> Approval | None:
        with self._database.read() as db:
            row = db.execute(select(approvals).where(_is(run_id, manifest_digest))).first()
            return Approval(**row._mapping) if row else None

    def ask(self, run_id: str, manifest_digest: str, name: str, about: str, request: str = "") -> bool | None:
        """Return the decision about a run; one that nobody was asked about waits from now on."""
        key = {"run_id": run_id, "manifest_digest": manifest_digest}
        asked = upsert(approvals).values(**key, name=name, about=about, asked=self._clock(), request=request)
        with self._database.write() as db:
            db.execute(asked.on_conflict_do_nothing())
            return db.scalar(select(approvals.c.decided).where(_is(run_id, manifest_digest)))

    def waits(self, run_id: str) -> bool:
        waiting = and_(approvals.c.run_id == run_id, approvals.c.decided.is_(None))
        with self._database.read() as db:
            return db.execute(select(approvals).where(waiting)).first() is not None

    def decide(self, run: str, approved: bool) -> Approval:
        """Decide about a run: by its id, by its name, or the `latest` of those that wait, whatever runs are called.

        Raises ConfigError (E-RUN-10) when none like it has asked, or several have its name.
        """
        with self._database.write() as db:
            rows = [Approval(**row._mapping) for row in db.execute(select(approvals).order_by(approvals.c.asked))]
            waiting = [row for row in rows if row.decided is None]
            found = waiting[-1:] if run == LATEST else [row for row in rows if run in (row.run_id, row.name)]
            if run == LATEST and not found:
                raise ConfigError(
                    "E-RUN-10", "expected a run that waits for this hospital, found none: see silo approve"
                )
            if not found or len({row.run_id for row in found}) > 1:
                known = ", ".join(row.run_id for row in waiting) or "none"
                raise ConfigError("E-RUN-10", f"expected one of the runs that wait ({known}), found {run!r}")
            newest = replace(found[-1], decided=approved)
            this = _is(newest.run_id, newest.manifest_digest)
            db.execute(update(approvals).where(this).values(decided=approved))
            return newest

    def decide_waiting(self, run_id: str, manifest_digest: str, approved: bool) -> Approval | None:
        """Decide about a run under this manifest; None, and nothing changes, where it does not wait under it."""
        this = _is(run_id, manifest_digest)
        with self._database.write() as db:
            changed = update(approvals).where(this, approvals.c.decided.is_(None)).values(decided=approved)
            if db.execute(changed).rowcount != 1:
                return None
            return Approval(**db.execute(select(approvals).where(this)).one()._mapping)

    def all(self) -> list[Approval]:
        with self._database.read() as db:
            return [Approval(**row._mapping) for row in db.execute(select(approvals).order_by(approvals.c.asked))]


def _is(run_id: str, manifest_digest: str) -> ColumnElement[bool]:
    return and_(approvals.c.run_id == run_id, approvals.c.manifest_digest == manifest_digest)
