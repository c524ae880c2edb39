"""What a silo remembers between restarts. Every method is one transaction: done and on disk, or not begun.

A task goes through three transitions, each idempotent: `stage` (the update and the next state are on disk), `deliver`
(the coordinator's signed receipt is here), `close` (the state is committed or discarded, the outbox entry is gone).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from fl_core.kinds import TaskKind
from silo.approvals import Approvals
from silo.tables import BaseRow, ContactRow, RunRow, TaskRow, open_database
from silo.tasks import Attested, Entry, Evaluation, TaskKey

BASES_PER_RUN = 2
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
        self._begin = sessionmaker(self._engine, expire_on_commit=False).begin
        self._clock = clock
        self.approvals = Approvals(self._begin, clock)

    def close_database(self) -> None:
        """Give the file back."""
        self._engine.dispose()

    # ---- runs and what they need -------------------------------------------------------------------------------

    def note_run(self, run_id: str, name: str, manifest_digest: str) -> None:
        """Remember a run; one that had ended is running again."""
        with self._begin() as db:
            row = _run(db, run_id, self._clock())
            row.name, row.manifest_digest, row.state, row.reason, row.ended = name, manifest_digest, "running", "", None

    def note_base(self, run_id: str, digest: str) -> None:
        """Remember that a base is needed; the newest two of a run are."""
        with self._begin() as db:
            rows = list(db.scalars(select(BaseRow).where(BaseRow.run_id == run_id).order_by(BaseRow.number)))
            if rows and rows[-1].digest == digest:
                return
            db.add(BaseRow(run_id=run_id, digest=digest))
            for row in rows[: max(0, len(rows) - BASES_PER_RUN + 1)]:
                db.delete(row)

    def manifest_of(self, run_id: str) -> str | None:
        """Return the digest of the manifest under which this silo knows a run."""
        with self._begin() as db:
            row = db.get(RunRow, run_id)
            return row.manifest_digest or None if row else None

    def committed(self, run_id: str) -> tuple[str, int] | None:
        """Return the digest of a run's silo state and the round it is from; None before the first commit."""
        with self._begin() as db:
            row = db.get(RunRow, run_id)
            if row is None or row.state_digest is None or row.state_round is None:
                return None
            return row.state_digest, row.state_round

    def end_run(self, run_id: str, state: str, reason: str) -> None:
        """Note a run's end; an aborted or failed run takes its open tasks with it, unincluded."""
        with self._begin() as db:
            row = db.get(RunRow, run_id)
            if row is not None:  # else a run of others, or one that ended before this silo had a task in it
                row.state, row.reason, row.ended = state, reason, row.ended or self._clock()
            if state != "finished":  # a finished run has closed all its rounds, and says so for each
                for task in _open(db, run_id):
                    task.closed, task.included = self._clock(), False

    # ---- tasks -------------------------------------------------------------------------------------------------

    def stage(self, entry: Entry, evaluation: Evaluation) -> None:
        """Take a finished update into the outbox; its files are on disk already."""
        with self._begin() as db:
            row = _task(db, entry.key)
            if row.closed is not None:
                return
            for name in ("manifest_digest", "base_digest", "contribution_id", "object_digest", "size", "state_digest",
                         "mirrored"):  # fmt: skip
                setattr(row, name, getattr(entry, name))
            row.attested = json.dumps(entry.attested)
            row.evaluation, row.staged = json.dumps(asdict(evaluation)), self._clock()
            row.receipt = row.refused = None

    def deliver(self, key: TaskKey, receipt: bytes) -> None:
        """Keep the signed receipt of a task."""
        with self._begin() as db:
            row = _task(db, key)
            row.receipt, row.refused = receipt, None

    def refuse(self, key: TaskKey, why: str) -> None:
        """Note that the coordinator will not take this update: it is not sent again, and waits for the close."""
        with self._begin() as db:
            _task(db, key).refused = why

    def close(self, key: TaskKey, included: bool) -> bool:
        """Commit or discard what was staged; return False when the round was closed before.

        A state that the server mirrors in a sum is discarded unless its bundle was included; any other is kept.
        Guarantees: a close seen twice changes nothing; a state never replaces that of a later round.
        """
        with self._begin() as db:
            row = _task(db, key)
            if row.closed is not None:
                return False
            row.closed, row.included = self._clock(), included
            if row.state_digest is not None and (included or not row.mirrored):
                run = _run(db, key.run_id, self._clock())
                if run.state_round is None or run.state_round < key.round:
                    run.state_digest, run.state_round = row.state_digest, key.round
            return True

    def entry(self, key: TaskKey) -> Entry | None:
        """Return the outbox entry of a task whose round is open."""
        with self._begin() as db:
            row = db.get(TaskRow, _primary(key))
            return _entry(row) if row and row.closed is None and row.staged is not None else None

    def outbox(self) -> list[Entry]:
        """Return all outbox entries, oldest first."""
        with self._begin() as db:
            return [_entry(row) for row in _open(db)]

    def closed(self, key: TaskKey) -> bool:
        """Tell whether a round's close was seen."""
        with self._begin() as db:
            row = db.get(TaskRow, _primary(key))
            return row is not None and row.closed is not None

    def unproven(self) -> list[Entry]:
        """Return the tasks that were included but whose receipt was lost with a connection."""
        with self._begin() as db:
            lost = TaskRow.included.is_(True), TaskRow.receipt.is_(None), TaskRow.contribution_id != ""
            return [_entry(row) for row in db.scalars(select(TaskRow).where(*lost))]

    def newest_attested(self) -> Attested:
        """Return the furthest end of the ledger that any update of this silo went with."""
        with self._begin() as db:
            found = db.scalars(select(TaskRow.attested).where(TaskRow.attested != ""))
            return max((Attested(*json.loads(row)) for row in found), key=lambda a: a.seq, default=Attested())

    # ---- the rest ----------------------------------------------------------------------------------------------

    def referenced(self) -> set[str]:
        """Return the digests of all objects that are still needed.

        Manifest and bases of running runs, bundles and staged states of open rounds, committed states; of ended runs
        the state and manifest of the newest three, which hold the silo's personal part of the model.
        """
        with self._begin() as db:
            runs = list(db.scalars(select(RunRow)))
            ended = sorted((r for r in runs if r.ended is not None), key=lambda r: r.ended or 0.0)
            kept = [r for r in runs if r.ended is None] + ended[-ENDED_RUNS:]
            alive = {r.run_id for r in runs if r.ended is None}
            digests = {d for r in kept for d in (r.manifest_digest, r.state_digest) if d}
            digests |= {b.digest for b in db.scalars(select(BaseRow)) if b.run_id in alive}
            for task in _open(db):
                digests |= {task.object_digest} | ({task.state_digest} if task.state_digest else set())
            return digests

    def met(self, address: str, software: str) -> None:
        """Note that a session began."""
        with self._begin() as db:
            db.merge(ContactRow(id=1, address=address, software=software, since=self._clock(), until=None, why=""))

    def parted(self, why: str) -> None:
        """Note that the session ended, or could not be opened."""
        with self._begin() as db:
            row = db.get(ContactRow, 1) or ContactRow(id=1, address="", software="", since=None)
            row.until, row.why = row.until or self._clock(), why
            db.add(row)

    def contact(self) -> Contact | None:
        """Return the last session, None before the first."""
        with self._begin() as db:
            row = db.get(ContactRow, 1)
            return Contact(row.address, row.software, row.since, row.until, row.why) if row else None

    def history(self) -> list[RunRecord]:
        """Return all runs with their tasks, oldest first."""
        with self._begin() as db:
            tasks = [_record(row) for row in db.scalars(select(TaskRow).order_by(TaskRow.run_id, TaskRow.round))]
            return [
                RunRecord(r.run_id, r.name, r.state, r.reason, r.state_round,
                          tuple(t for t in tasks if t.key.run_id == r.run_id))
                for r in db.scalars(select(RunRow).order_by(RunRow.started))
            ]  # fmt: skip

    def receipts(self) -> list[bytes]:
        """Return all receipts as they were signed."""
        with self._begin() as db:
            return [row for row in db.scalars(select(TaskRow.receipt).where(TaskRow.receipt.is_not(None))) if row]


def _primary(key: TaskKey) -> tuple[str, int, str]:
    return key.run_id, key.round, key.kind.value


def _run(db: Session, run_id: str, now: float) -> RunRow:
    row = db.get(RunRow, run_id)
    if row is None:
        db.add(row := RunRow(run_id=run_id, name="", manifest_digest="", state="running", reason="", started=now))
    return row


def _task(db: Session, key: TaskKey) -> TaskRow:
    row = db.get(TaskRow, _primary(key))
    if row is None:
        db.add(row := TaskRow(run_id=key.run_id, round=key.round, kind=key.kind.value))
    return row


def _open(db: Session, run_id: str | None = None) -> list[TaskRow]:
    query = select(TaskRow).where(TaskRow.closed.is_(None), TaskRow.staged.is_not(None)).order_by(TaskRow.staged)
    return list(db.scalars(query if run_id is None else query.where(TaskRow.run_id == run_id)))


def _key(row: TaskRow) -> TaskKey:
    return TaskKey(row.run_id, row.round, TaskKind(row.kind))


def _entry(row: TaskRow) -> Entry:
    return Entry(
        _key(row), row.manifest_digest, row.base_digest, row.contribution_id, row.object_digest, row.size,
        row.state_digest, row.receipt, row.refused, row.mirrored,
        Attested(*json.loads(row.attested)) if row.attested else Attested(),
    )  # fmt: skip


def _record(row: TaskRow) -> TaskRecord:
    raw = json.loads(row.evaluation) if row.evaluation else None
    found = Evaluation(*(tuple(raw[k]) for k in ("classes", "correct", "examples"))) if raw else None
    return TaskRecord(_key(row), found, row.staged, row.receipt is not None, row.refused, row.included)
