"""Runs that need the hospital's decision: those that wait, and the decisions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Delete, Select, and_, delete, func, literal_column, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from fl_core.errors import ConfigError, RefusedError
from service_core.storage.sqlite import Database
from silo.storage.schema import approvals

LATEST = "latest"
MAX_UNDECIDED = 20
"""Runs that may wait for a decision at once; the coordinator has to ask again for further ones."""


class AwaitingDecisionError(Exception):
    """The hospital has not decided about the run yet: `silo approve`."""


@dataclass(frozen=True, slots=True)
class Approval:
    """One run under one manifest. about: the request in words; decided: None while it waits.

    asked: Unix seconds   request: the request as JSON (`RunRequest`), with its cost; empty in rows of earlier versions.
    """

    run_id: str
    manifest_digest: str
    name: str
    about: str
    asked: float
    decided: bool | None
    request: str = ""


class Approvals:
    """Decisions in the database. Each is for one manifest, so a changed run needs a new decision."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def find(self, run_id: str, manifest_digest: str) -> Approval | None:
        with self._database.read() as db:
            row = db.execute(select(approvals).where(_is(run_id, manifest_digest))).first()
            return Approval(**row._mapping) if row else None

    def approved(self, manifest_digest: str) -> list[Approval]:
        """Return the approvals of runs with this manifest."""
        this = and_(approvals.c.manifest_digest == manifest_digest, approvals.c.decided.is_(True))
        with self._database.read() as db:
            return [Approval(**row._mapping) for row in db.execute(select(approvals).where(this))]

    def ask(self, run_id: str, manifest_digest: str, name: str, about: str, request: str = "") -> bool | None:
        """Return the decision about a run, None if it waits; a new run is stored as waiting.

        Raises RefusedError (E-WIRE-17) if `MAX_UNDECIDED` wait already.
        """
        key = {"run_id": run_id, "manifest_digest": manifest_digest}
        question = upsert(approvals).values(**key, name=name, about=about, asked=self._clock(), request=request)
        with self._database.write() as db:
            row = db.execute(select(approvals).where(_is(run_id, manifest_digest))).first()
            if row is not None:
                return Approval(**row._mapping).decided
            waiting = select(func.count()).select_from(approvals).where(approvals.c.decided.is_(None))
            if db.execute(waiting).scalar_one() >= MAX_UNDECIDED:
                raise RefusedError(
                    "E-WIRE-17",
                    f"{MAX_UNDECIDED} runs already wait for this hospital's decision, which is the limit: decide "
                    "about them at the hospital (silo approve), then try again",
                )
            db.execute(question)
            return None

    def waits(self, run_id: str) -> bool:
        waiting = and_(approvals.c.run_id == run_id, approvals.c.decided.is_(None))
        with self._database.read() as db:
            return db.execute(select(approvals).where(waiting)).first() is not None

    def decide(self, run: str, approved: bool) -> Approval:
        """Decide about a run by its id, name or manifest digest, or `latest` if a single one waits.

        An earlier decision can be changed. Raises ConfigError (E-RUN-10) if no run matches, if several match (names are
        not unique), or if one run waits under several manifests.
        """
        with self._database.write() as db:
            rows = [Approval(**row._mapping) for row in db.execute(_IN_ORDER)]
            waiting = [row for row in rows if row.decided is None]
            names = [row for row in rows if run in (row.run_id, row.name, row.manifest_digest)]
            matches = waiting if run == LATEST else names
            if run == LATEST and not matches:
                raise ConfigError("E-RUN-10", "no run waits for this hospital's decision: see silo approve")
            if (
                not matches
                or len({row.run_id for row in matches}) > 1
                or sum(row.decided is None for row in matches) > 1
            ):
                run_ids = ", ".join(row.run_id for row in waiting) or "none"
                raise ConfigError(
                    "E-RUN-10",
                    f"{run!r} is none or several of the runs that wait ({run_ids}): give a run's id, or its "
                    "manifest's digest (silo approve --json)",
                )
            chosen = next((row for row in matches if row.decided is None), matches[-1])
            this = _is(chosen.run_id, chosen.manifest_digest)
            db.execute(update(approvals).where(this).values(decided=approved))
            return replace(chosen, decided=approved)

    def decide_waiting(self, run_id: str, manifest_digest: str, approved: bool) -> Approval | None:
        """Decide about a waiting run under this manifest; return None and change nothing if it does not wait."""
        this = _is(run_id, manifest_digest)
        with self._database.write() as db:
            changed = update(approvals).where(this, approvals.c.decided.is_(None)).values(decided=approved)
            if db.execute(changed).rowcount != 1:
                return None
            return Approval(**db.execute(select(approvals).where(this)).one()._mapping)

    def all(self) -> list[Approval]:
        """List waiting runs, then decided ones, each in the order in which they were stored, whatever the clock."""
        with self._database.read() as db:
            stored = [Approval(**row._mapping) for row in db.execute(_IN_ORDER)]
        return sorted(stored, key=lambda row: row.decided is not None)


def forget_undecided(run_id: str) -> Delete:
    """Return the statement that deletes the waiting entries of a run, once it needs no decision."""
    return delete(approvals).where(approvals.c.run_id == run_id, approvals.c.decided.is_(None))


_IN_ORDER: Select[Any] = select(approvals).order_by(literal_column("rowid"))


def _is(run_id: str, manifest_digest: str) -> ColumnElement[bool]:
    return and_(approvals.c.run_id == run_id, approvals.c.manifest_digest == manifest_digest)
