"""What a silo remembers between restarts. Every method is one transaction: done, or not begun.

What it returns from is on the disk, but for a further base of a known run: that goes there with the next one.

A task goes through three transitions, each idempotent: `stage` (the update and the next state are on disk), `deliver`
(the coordinator's signed receipt is here), `close` (the state is committed or discarded, the outbox entry is gone).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, event, func, select, update
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.orm import sessionmaker

from fl_core.types.enums import TaskKind
from privacy.reports.uncertainty import EvaluationNoise
from protos.storage.prepared_select import Lookups
from protos.wire.tasks import TaskKey
from silo.storage import queries as statements
from silo.storage.approvals import Approvals
from silo.storage.schema import begin, contact, for_notes, lock, open_database, reading, runs, tasks
from silo.storage.tasks import Attested, Entry, Evaluation, further

ENDED_RUNS = 3


@dataclass(frozen=True, slots=True)
class Contact:
    """The last session: whom, with which software, from when to when (Unix seconds; None: never, or still)."""

    address: str
    software: str
    since: float | None
    until: float | None
    why: str


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What came of a task, for people."""

    key: TaskKey
    evaluation: Evaluation | None
    staged: float | None
    receipt: bool
    refused: str | None
    included: bool | None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as this silo saw it."""

    run_id: str
    name: str
    state: str
    reason: str
    state_round: int | None
    tasks: tuple[TaskRecord, ...]


class Store:
    """The silo's database, usable from every thread, and read by `silo status` while a service runs."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._engine = open_database(path)
        self._notes = for_notes(path)
        self._begin, self._note = partial(begin, self._engine), partial(begin, self._notes)
        self._read, self._lookups = partial(reading, self._engine), Lookups(path)
        self._clock = clock
        sessions = sessionmaker(self._engine, expire_on_commit=False)
        event.listen(sessions, "after_begin", lambda _session, _transaction, connection: lock(connection))
        self.approvals = Approvals(sessions.begin, clock)

    def close_database(self) -> None:
        """Give the file back."""
        self._engine.dispose()
        self._notes.dispose()
        self._lookups.close()

    # ---- runs and what they need -------------------------------------------------------------------------------

    def note_run(self, run_id: str, name: str, manifest_digest: str, base_digest: str = "") -> None:
        """Remember a run and that a base of it is needed: the newest two are; a run that had ended is running again.

        base_digest: empty before round 0.
        A base of a known run is not on the disk at once: if a power cut takes it, it is offered and fetched again.
        """
        here = {"run_id": run_id}
        with self._note() if self.manifest_of(run_id) == manifest_digest else self._begin() as db:
            known = {"name": name, "manifest_digest": manifest_digest, "started": self._clock()}
            db.execute(statements.RUNNING, here | known)
            if base_digest and db.scalar(statements.NEWEST_BASE, here) != base_digest:
                db.execute(statements.ADD_BASE, here | {"digest": base_digest})
                db.execute(statements.DROP_BASES, here)

    def manifest_of(self, run_id: str) -> str | None:
        """Return the digest of the manifest under which this silo knows a run."""
        row = self._lookups.first(statements.RUN, run_id=run_id)
        return row.manifest_digest or None if row else None

    def committed(self, run_id: str) -> tuple[str, int] | None:
        """Return the digest of a run's silo state and the round it is from; None before the first commit."""
        row = self._lookups.first(statements.RUN, run_id=run_id)
        if row is None or row.state_digest is None or row.state_round is None:
            return None
        return row.state_digest, row.state_round

    def end_run(self, run_id: str, state: str, reason: str) -> None:
        """Note a run's end; an aborted or failed run takes its open tasks with it, unincluded."""
        with self._begin() as db:
            now = self._clock()
            ended = {"state": state, "reason": reason, "ended": func.coalesce(runs.c.ended, now)}
            # There is none of a run of others, or of one that ended before this silo had a task in it.
            db.execute(update(runs).where(runs.c.run_id == run_id).values(ended))
            if state != "finished":  # a finished run has closed all its rounds, and says so for each
                still_open = update(tasks).where(statements.IS_OPEN, tasks.c.run_id == run_id)
                db.execute(still_open.values(closed=now, included=False))

    # ---- tasks -------------------------------------------------------------------------------------------------

    def stage(self, entry: Entry, evaluation: Evaluation) -> None:
        """Take a finished update into the outbox; its files are on disk already."""
        written = {"attested": json.dumps(entry.attested), "evaluation": json.dumps(asdict(evaluation))}
        made = {name: getattr(entry, name) for name in statements.STAGED}
        with self._begin() as db:
            db.execute(statements.STAGE, {**_primary(entry.key), **made, **written, "staged": self._clock()})

    def deliver(self, key: TaskKey, receipt: bytes) -> None:
        """Keep the signed receipt of a task."""
        with self._begin() as db:
            db.execute(statements.DELIVER, {**_primary(key), "receipt": receipt, "refused": None})

    def refuse(self, key: TaskKey, why: str) -> None:
        """Note that the coordinator will not take this update: it is not sent again, and waits for the close."""
        with self._begin() as db:
            db.execute(statements.REFUSE, {**_primary(key), "refused": why})

    def close(self, key: TaskKey, included: bool) -> bool:
        """Commit or discard what was staged; return False when the round was closed before.

        A state that the server mirrors in a sum is discarded unless its bundle was included; any other is kept.
        Guarantees: a close seen twice changes nothing; a state never replaces that of a later round.
        """
        with self._begin() as db:
            row = _task(db, key)
            if row is not None and row.closed is not None:
                return False
            now = self._clock()
            db.execute(statements.CLOSE, {**_primary(key), "closed": now, "included": included})
            if row is not None and row.state_digest is not None and (included or not row.mirrored):
                state = {"state_digest": row.state_digest, "state_round": key.round}
                db.execute(statements.COMMIT, {"run_id": key.run_id, "started": now, **state})
            return True

    def entry(self, key: TaskKey) -> Entry | None:
        """Return the outbox entry of a task whose round is open."""
        row = self._lookups.first(statements.TASK_NOW, **_primary(key))
        return _entry(row) if row and row.closed is None and row.staged is not None else None

    def outbox(self) -> list[Entry]:
        """Return all outbox entries, oldest first."""
        return [_entry(row) for row in self._lookups.all(statements.OUTBOX_NOW)]

    def closed(self, key: TaskKey) -> bool:
        """Tell whether a round's close was seen."""
        row = self._lookups.first(statements.TASK_NOW, **_primary(key))
        return row is not None and row.closed is not None

    def unproven(self) -> list[Entry]:
        """Return the tasks that were included but whose receipt was lost with a connection."""
        lost = tasks.c.included.is_(True), tasks.c.receipt.is_(None), tasks.c.contribution_id != ""
        with self._read() as db:
            return [_entry(row) for row in db.execute(select(tasks).where(*lost))]

    def attested(self) -> list[Attested]:
        """Return all that went with updates of this silo, the furthest end of the ledger first."""
        with self._read() as db:
            found = db.scalars(select(tasks.c.attested).where(tasks.c.attested != ""))
            return sorted((Attested(*json.loads(row)) for row in found), key=further, reverse=True)

    def newest_attested(self) -> Attested:
        """Return the furthest end of the ledger that any update of this silo went with."""
        return next(iter(self.attested()), Attested())

    # ---- the rest ----------------------------------------------------------------------------------------------

    def referenced(self) -> set[str]:
        """Return the digests of all objects that are still needed.

        Manifest and bases of running runs, bundles and staged states of open rounds, committed states; of ended runs
        the state and manifest of the newest three, which hold the silo's personal part of the model.
        """
        with self._read() as db:
            known = db.execute(statements.RUNS).all()
            ended = sorted((r for r in known if r.ended is not None), key=lambda r: r.ended)
            kept = [r for r in known if r.ended is None] + ended[-ENDED_RUNS:]
            digests = {d for r in kept for d in (r.manifest_digest, r.state_digest) if d}
            digests |= set(db.scalars(statements.BASES_IN_USE))
            for task in db.execute(statements.OUTBOX):
                digests |= {task.object_digest} | ({task.state_digest} if task.state_digest else set())
            return digests

    def met(self, address: str, software: str) -> None:
        """Note that a session began."""
        now = {"address": address, "software": software, "since": self._clock(), "until": None, "why": ""}
        with self._begin() as db:
            db.execute(upsert(contact).values(id=1, **now).on_conflict_do_update(index_elements=["id"], set_=now))

    def parted(self, why: str) -> None:
        """Note that the session ended, or could not be opened."""
        row = upsert(contact).values(id=1, until=self._clock(), why=why)
        ended = {"until": func.coalesce(contact.c.until, row.excluded.until), "why": why}
        with self._begin() as db:
            db.execute(row.on_conflict_do_update(index_elements=["id"], set_=ended))

    def contact(self) -> Contact | None:
        """Return the last session, None before the first."""
        with self._read() as db:
            row = db.execute(select(contact).where(contact.c.id == 1)).first()
            return Contact(row.address, row.software, row.since, row.until, row.why) if row else None

    def history(self) -> list[RunRecord]:
        """Return all runs with their tasks, oldest first."""
        with self._read() as db:
            done = [_record(row) for row in db.execute(select(tasks).order_by(tasks.c.run_id, tasks.c.round))]
            return [
                RunRecord(r.run_id, r.name, r.state, r.reason, r.state_round,
                          tuple(t for t in done if t.key.run_id == r.run_id))
                for r in db.execute(select(runs).order_by(runs.c.started))
            ]  # fmt: skip

    def receipts(self) -> list[bytes]:
        """Return all receipts as they were signed."""
        with self._read() as db:
            return [row for row in db.scalars(select(tasks.c.receipt).where(tasks.c.receipt.is_not(None))) if row]


def _primary(key: TaskKey) -> dict[str, object]:
    return {"run_id": key.run_id, "round": key.round, "kind": key.kind.value}


def _task(db: Connection, key: TaskKey) -> Row[tuple[object, ...]] | None:
    return db.execute(statements.TASK, _primary(key)).first()


def _key(row: Row[tuple[object, ...]]) -> TaskKey:
    return TaskKey(row.run_id, row.round, TaskKind(row.kind))


def _entry(row: Row[tuple[object, ...]]) -> Entry:
    return Entry(
        _key(row), row.manifest_digest, row.base_digest, row.contribution_id, row.object_digest, row.size,
        row.state_digest, row.receipt, row.refused, row.mirrored,
        Attested(*json.loads(row.attested)) if row.attested else Attested(),
    )  # fmt: skip


def _record(row: Row[tuple[object, ...]]) -> TaskRecord:
    raw = json.loads(row.evaluation) if row.evaluation else None
    return TaskRecord(
        _key(row), _evaluation(raw) if raw else None, row.staged, row.receipt is not None, row.refused, row.included
    )


def _evaluation(raw: Mapping[str, Any]) -> Evaluation:
    """Read an evaluation; earlier versions wrote down no noise, and what is no count had some."""
    found = Evaluation(tuple(raw["classes"]), tuple(raw["correct"]), tuple(raw["examples"]))
    if "noise" not in raw:
        counts = all(float(v).is_integer() for v in (*found.correct, *found.examples))
        return found if counts else replace(found, noise=EvaluationNoise(math.inf))
    return replace(found, noise=raw["noise"] and EvaluationNoise(**raw["noise"]))
