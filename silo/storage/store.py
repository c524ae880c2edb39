"""The silo's database. Every method is one transaction, on the disk when it returns.

A task has three idempotent transitions: `stage` (the update and the next state are on disk), `deliver` (the signed
receipt is here), `close` (the state is committed or discarded, the outbox entry is gone).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Table,
    and_,
    case,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from fl_core.types.clinical import ClinicalMetrics
from fl_core.types.enums import TaskKind
from privacy.accounting.uncertainty import EvaluationNoise
from protos.wire.receipts import restore_receipt, shorten_receipt
from protos.wire.tasks import TaskKey
from service_core.storage.object_store import count_objects
from service_core.storage.sqlite import Database
from silo.admission.memory import AnswerMemory
from silo.storage import secagg_keys
from silo.storage.approvals import Approvals, forget_undecided
from silo.storage.home import OBJECTS
from silo.storage.run_data import RunDataStore
from silo.storage.schema import (
    DROP_SEALED,
    MIGRATIONS,
    SIGNER,
    bases,
    contact,
    metadata,
    run_data,
    runs,
    secagg_rounds,
    secagg_runs,
    signers,
    states,
    tasks,
    trainings,
    unprotected,
)
from silo.storage.secagg_keys import SecaggKeyStore
from silo.storage.tasks import (
    Attestation,
    LocalEvaluation,
    OutboxEntry,
    UnprotectedUpdate,
    ledger_position,
    read_attestation,
)

ASKED = "asked"
"""The state of a run that asked whether this silo is ready and has not offered a task yet."""
ENDED_RUNS = 3
BASES_PER_RUN = 2
MAX_UNTRAINED = 20
"""Runs that asked without ever training here; beyond this number the oldest are dropped."""
MAX_CLOSED = 50
"""Closed rounds without a task of this silo that are remembered per run."""
KEPT_STATES = 2
"""Committed states kept per run: a restored coordinator may be this many rounds behind."""
_PLACE: ColumnElement[int] = literal_column("rowid")
"""Orders rows by insertion, independent of clocks."""
_IS_OPEN = and_(tasks.c.closed.is_(None), tasks.c.staged.is_not(None))


@dataclass(frozen=True, slots=True)
class Contact:
    """The last session: the coordinator's address and software, start and end (Unix seconds).

    since: None if there was no session   until: None while it is open   why: it ended.
    """

    address: str
    software: str
    since: float | None
    until: float | None
    why: str


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The outcome of a task, for display. size: of its update, in bytes."""

    key: TaskKey
    evaluation: LocalEvaluation | None
    staged: float | None
    receipt: bool
    refused: str | None
    included: bool | None
    size: int = 0


@dataclass(frozen=True, slots=True)
class JoinedRun:
    """A run in this silo's database. leaves: `UpdateContents` as JSON; empty if not recorded.

    state_round: of the newest committed state; None without one   privacy: the run's guarantee, in words; empty if not
    recorded.
    """

    run_id: str
    name: str
    state: str
    reason: str
    state_round: int | None
    tasks: tuple[TaskRecord, ...]
    leaves: str = ""
    privacy: str = ""


class SiloStore:
    """The silo's database, usable from every thread, and readable by `silo status` while a service runs."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        accept_loss: bool = False,
        rehearsal: bool = False,
        wal: bool | None = None,
    ) -> None:
        """Open a home's database, as `Database`. accept_loss: continue with an incomplete one."""
        self.database = Database(
            path,
            metadata,
            MIGRATIONS,
            contents=lambda: count_objects(path.with_name(OBJECTS)),
            accept_loss=accept_loss,
            rehearsal=rehearsal,
            wal=wal,
        )
        self.approvals = Approvals(self.database, clock)
        self.secagg = SecaggKeyStore(self.database)
        self.answers = AnswerMemory(self.database, clock)
        self.run_data = RunDataStore(self.database)
        self._clock = clock

    def close_database(self) -> None:
        self.database.close()

    # ---- runs and what they need -------------------------------------------------------------------------------

    def record_run(
        self,
        run_id: str,
        name: str,
        manifest_digest: str,
        base_digest: str = "",
        leaves: str = "",
        privacy: str = "",
    ) -> int:
        """Record a run, keeping its two newest bases; return how many other runs were dropped.

        Its state is `running`, or `asked` if it has no base yet.
        """
        newest = select(bases).where(bases.c.run_id == run_id).order_by(bases.c.number.desc())
        with self.database.write() as db:
            noted = {name: text for name, text in (("leaves", leaves), ("privacy", privacy)) if text}
            values = {"name": name, "manifest_digest": manifest_digest} | noted
            last = db.execute(newest).first()
            again = values | {"state": "running" if base_digest or last else ASKED, "reason": "", "ended": None}
            row = upsert(runs).values(run_id=run_id, started=self._clock(), **again)
            db.execute(row.on_conflict_do_update(index_elements=["run_id"], set_=again))
            if base_digest and (last is None or last.digest != base_digest):
                db.execute(insert(bases).values(run_id=run_id, digest=base_digest))
                for old in db.execute(newest.offset(BASES_PER_RUN)).all():
                    db.execute(delete(bases).where(bases.c.number == old.number))
            return _drop_lapsed(db, but=run_id)

    def manifest_of(self, run_id: str) -> str | None:
        with self.database.read() as db:
            return db.scalar(select(runs.c.manifest_digest).where(runs.c.run_id == run_id)) or None

    def state_of(self, run_id: str) -> str:
        """Return a run's state: asked, running, or how it ended; empty if the run is unknown."""
        with self.database.read() as db:
            return db.scalar(select(runs.c.state).where(runs.c.run_id == run_id)) or ""

    def committed(self, run_id: str, before: int | None = None) -> tuple[str, int] | None:
        """Return the digest and round of a run's newest silo state; None before the first commit.

        before: only states of earlier rounds than this.
        """
        wanted = select(states.c.digest, states.c.round).where(states.c.run_id == run_id)
        if before is not None:
            wanted = wanted.where(states.c.round < before)
        with self.database.read() as db:
            row = db.execute(wanted.order_by(states.c.round.desc())).first()
            return None if row is None else (row.digest, row.round)

    def end_run(self, run_id: str, state: str, reason: str) -> bool:
        """Record a run's end; return whether the run is known here.

        Unless the run is finished, its open tasks are closed as not included. Guarantees: all keys of a masked run are
        deleted.
        """
        with self.database.write() as db:
            now = self._clock()
            ended = {"state": state, "reason": reason, "ended": func.coalesce(runs.c.ended, now)}
            # No row: a run of other silos, or one that ended before this silo had a task in it.
            is_known = db.execute(update(runs).where(runs.c.run_id == run_id).values(ended)).rowcount > 0
            db.execute(delete(trainings).where(trainings.c.run_id == run_id))
            if state != "finished":  # the coordinator closes each round of a finished run itself
                still_open = update(tasks).where(_IS_OPEN, tasks.c.run_id == run_id)
                db.execute(still_open.values(closed=now, included=False))
            db.execute(forget_undecided(run_id))
            masked = secagg_keys.end_run(db, run_id)
        if masked:
            self.database.checkpoint(whole=True)
        return is_known

    # ---- tasks -------------------------------------------------------------------------------------------------

    def stage(self, entry: OutboxEntry, evaluation: LocalEvaluation) -> None:
        """Enter a finished update into the outbox, all or nothing; raises as `secagg_keys.enter_update`."""
        values = {
            "manifest_digest": entry.manifest_digest,
            "base_digest": entry.base_digest,
            "contribution_id": entry.contribution_id,
            "object_digest": entry.object_digest,
            "size": entry.size,
            "state_digest": entry.state_digest,
            "mirrored": entry.mirrored,
            "attested": json.dumps(entry.attested.signed),
            "sealed": bytes.fromhex(entry.attested.sealed) or None,
            "coordinator": entry.coordinator,
            "evaluation": json.dumps(asdict(evaluation)),
            "staged": self._clock(),
            "receipt": None,
            "refused": None,
        }
        with self.database.write() as db:
            secagg_keys.enter_update(db, entry)
            _put(db, tasks, _primary(entry.key), values, where=tasks.c.closed.is_(None))
            db.exec_driver_sql(DROP_SEALED)

    def note_unprotected(self, key: TaskKey, object_digest: str, fingerprint: str, splits: Iterable[str]) -> None:
        """Add an update to the list of unprotected ones; repeated calls add it once."""
        values = {"fingerprint": fingerprint, "splits": ",".join(splits)}
        with self.database.write() as db:
            _put(db, unprotected, {**_primary(key), "object_digest": object_digest}, values)

    def unprotected(self) -> list[UnprotectedUpdate]:
        with self.database.read() as db:
            return [
                UnprotectedUpdate(
                    row.run_id, row.fingerprint, None if row.splits is None else tuple(row.splits.split(","))
                )
                for row in db.execute(select(unprotected))
            ]

    def begin_training(self, key: TaskKey, attempt: int) -> None:
        """Record that a task is in progress. attempt: how often the lead resumed the run; a new one resets kills."""
        values = {"attempt": attempt, "under_way": True}
        begun = upsert(trainings).values(**_primary(key), **values)
        forgiven = {"kills": case((trainings.c.attempt < attempt, 0), else_=trainings.c.kills)}
        with self.database.write() as db:
            db.execute(begun.on_conflict_do_update(index_elements=["run_id", "round", "kind"], set_=values | forgiven))

    def end_trainings(self) -> None:
        """Record that no task is in progress, after the task is done or failed, or the service was stopped."""
        with self.database.read() as db:
            if db.execute(select(trainings).where(trainings.c.under_way)).first() is None:
                return
        with self.database.write() as db:
            db.execute(delete(trainings).where(trainings.c.under_way, trainings.c.kills == 0))
            db.execute(update(trainings).where(trainings.c.under_way).values(under_way=False))

    def count_kills(self) -> list[tuple[TaskKey, int]]:
        """Add a kill to each task that was in progress when the previous service ended; return these with all kills."""
        interrupted = trainings.c.under_way
        with self.database.write() as db:
            killed = db.execute(select(trainings).where(interrupted)).all()
            if killed:
                db.execute(update(trainings).where(interrupted).values(under_way=False, kills=trainings.c.kills + 1))
        return [(_key(row), row.kills + 1) for row in killed]

    def kills(self, run_id: str, attempt: int = 0) -> int:
        """Return the most kills during any one task of a run since resumption `attempt`."""
        mine = trainings.c.run_id == run_id, trainings.c.attempt >= attempt
        with self.database.read() as db:
            return db.scalar(select(func.max(trainings.c.kills)).where(*mine)) or 0

    def deliver(self, key: TaskKey, receipt: bytes) -> None:
        """Store the receipt of an update; if its round was reopened, the update returns to the outbox.

        Only the parts that the task's row lacks are stored, and each signer's certificate once; `receipts` rebuilds the
        receipts.
        """
        with self.database.write() as db:
            if (row := _task(db, key)) is None:
                return
            kept, pem = shorten_receipt(receipt, _entry(row).signed_facts())
            signer = db.exec_driver_sql(SIGNER, (pem,)).scalar_one() if pem else None
            staged = func.coalesce(tasks.c.staged, self._clock())
            values = {"receipt": kept, "signer": signer, "refused": None, "staged": staged}
            db.execute(update(tasks).where(*_this(key)).values(values))

    def refuse(self, key: TaskKey, why: str) -> None:
        """Record that the coordinator refused an update. It is not sent again; its entry stays until the close."""
        with self.database.write() as db:
            _put(db, tasks, _primary(key), {"refused": why})

    def close(self, key: TaskKey, included: bool) -> bool:
        """Close a round and commit or discard its staged state; return False if it was closed before.

        A state that the server tracks (`mirrored`) is committed only if its bundle was included; any other state is
        committed even if not. If the update was refused but another was included, or if the update is not in the
        outbox, no state is committed.

        Guarantees: a repeated close changes nothing. A state never replaces that of a later round, unless a restored
        coordinator closes the earlier round. The newest `KEPT_STATES` states stay. Nothing is written about an unknown
        run. The keys of a closed round of a masked run are deleted.
        """
        with self.database.write() as db:
            masked = secagg_keys.leave_round(db, key)
            row = _task(db, key)
            if row is not None and row.closed is not None:
                return False
            if row is None:
                if db.execute(select(runs.c.run_id).where(runs.c.run_id == key.run_id)).first() is None:
                    return True
                untrained = tasks.c.run_id == key.run_id, tasks.c.contribution_id == "", tasks.c.closed.is_not(None)
                newest = select(_PLACE).select_from(tasks).where(*untrained).order_by(_PLACE.desc())
                db.execute(delete(tasks).where(*untrained, _PLACE.not_in(newest.limit(MAX_CLOSED - 1))))
            now = self._clock()
            _put(db, tasks, _primary(key), {"closed": now, "included": included})
            if row is not None and row.state_digest is not None and _commits(row, included):
                db.execute(upsert(runs).values(run_id=key.run_id, started=now).on_conflict_do_nothing())
                _commit_state(db, key, row.state_digest, row.coordinator)
        self.database.checkpoint(whole=masked)
        return True

    def entry(self, key: TaskKey) -> OutboxEntry | None:
        """Return a task's update while its round is open here, in the outbox or not; None if closed or without one."""
        with self.database.read() as db:
            row = _task(db, key)
            return _entry(row) if row and row.closed is None and row.contribution_id else None

    def outbox(self) -> list[OutboxEntry]:
        with self.database.read() as db:
            return [_entry(row) for row in db.execute(select(tasks).where(_IS_OPEN).order_by(tasks.c.staged))]

    def closed(self, key: TaskKey) -> bool:
        with self.database.read() as db:
            row = _task(db, key)
        return row is not None and row.closed is not None

    def reopen(self, key: TaskKey, coordinator: str) -> bool:
        """Reopen a round that another incarnation of the coordinator closed; return whether it was reopened.

        Its update is no longer in the outbox; `deliver` puts it back if there is a receipt for it. States that were
        committed since then stay, since the coordinator may be restored again from a newer backup. A round of a masked
        run stays closed, since its keys are deleted.
        """
        with self.database.write() as db:
            row = _task(db, key)
            again = row is not None and row.closed is not None and row.coordinator != coordinator
            if not again or secagg_keys.is_masked(db, key.run_id):
                return False
            fresh = {"closed": None, "included": None, "staged": None, "refused": None, "coordinator": coordinator}
            _put(db, tasks, _primary(key), fresh)
            return True

    def adopt(self, entry: OutboxEntry, coordinator: str) -> OutboxEntry:
        """Assign an update to another incarnation of the coordinator; delete the earlier one's receipt and refusal."""
        with self.database.write() as db:
            _put(db, tasks, _primary(entry.key), {"refused": None, "receipt": None, "coordinator": coordinator})
        return replace(entry, refused=None, receipt=None, coordinator=coordinator)

    def missing_receipts(self) -> list[OutboxEntry]:
        lost = tasks.c.included.is_(True), tasks.c.receipt.is_(None), tasks.c.contribution_id != ""
        with self.database.read() as db:
            return [_entry(row) for row in db.execute(select(tasks).where(*lost))]

    def attested(self) -> list[Attestation]:
        """Return all attestations of this silo's updates, the newest end of the ledger first."""
        with self.database.read() as db:
            rows = db.execute(select(tasks.c.attested, tasks.c.sealed).where(tasks.c.attested != ""))
            return sorted((read_attestation(*row) for row in rows), key=ledger_position, reverse=True)

    def latest_attestation_sent(self) -> Attestation:
        return next(iter(self.attested()), Attestation())

    # ---- the rest ----------------------------------------------------------------------------------------------

    def referenced(self) -> set[str]:
        """Return the digests of all objects that are still needed.

        These are: manifests, bases and committed states of running runs; bundles and staged states of open rounds;
        manifests and committed states of the three runs that ended last.
        """
        with self.database.read() as db:
            recorded = db.execute(select(runs)).all()
            ended = sorted((r for r in recorded if r.ended is not None), key=lambda r: r.ended)
            kept = [r for r in recorded if r.ended is None] + ended[-ENDED_RUNS:]
            digests = {r.manifest_digest for r in kept if r.manifest_digest}
            of_kept = states.c.run_id.in_([r.run_id for r in kept])
            digests |= set(db.scalars(select(states.c.digest).where(of_kept)))
            digests |= set(
                db.scalars(
                    select(bases.c.digest).join(runs, runs.c.run_id == bases.c.run_id).where(runs.c.ended.is_(None))
                )
            )
            for task in db.execute(select(tasks).where(_IS_OPEN)):
                digests |= {task.object_digest} | ({task.state_digest} if task.state_digest else set())
            return digests

    def record_contact(self, address: str, software: str) -> None:
        now = {"address": address, "software": software, "since": self._clock(), "until": None, "why": ""}
        with self.database.write() as db:
            _put(db, contact, {"id": 1}, now)

    def record_departure(self, why: str) -> None:
        now = self._clock()
        row = upsert(contact).values(id=1, until=now, why=why)
        ended = {"until": func.coalesce(contact.c.until, now), "why": why}
        with self.database.write() as db:
            db.execute(row.on_conflict_do_update(index_elements=["id"], set_=ended))

    def contact(self) -> Contact | None:
        with self.database.read() as db:
            row = db.execute(select(contact).where(contact.c.id == 1)).first()
            return Contact(row.address, row.software, row.since, row.until, row.why) if row else None

    def history(self) -> list[JoinedRun]:
        with self.database.read() as db:
            of_run = select(states.c.run_id, func.max(states.c.round).label("round")).group_by(states.c.run_id)
            newest = {row.run_id: row.round for row in db.execute(of_run)}
            done = [_record(row) for row in db.execute(select(tasks).order_by(tasks.c.run_id, tasks.c.round))]
            return [
                JoinedRun(
                    r.run_id,
                    r.name,
                    r.state,
                    r.reason,
                    newest.get(r.run_id),
                    tuple(t for t in done if t.key.run_id == r.run_id),
                    r.leaves,
                    r.privacy,
                )
                for r in db.execute(select(runs).order_by(runs.c.started))
            ]

    def receipts(self) -> list[bytes]:
        """Return all receipts, byte for byte as they were signed."""
        with self.database.read() as db:
            certificates = {row.number: row.pem for row in db.execute(select(signers))}
            return [
                row.receipt
                if row.signer is None
                else restore_receipt(row.receipt, _entry(row).signed_facts(), certificates[row.signer])
                for row in db.execute(select(tasks).where(tasks.c.receipt.is_not(None)))
            ]


def _drop_lapsed(db: Connection, but: str) -> int:
    """Drop the oldest runs in which this silo did no task, beyond `MAX_UNTRAINED`; return how many."""
    trained = select(tasks.c.run_id).where(tasks.c.contribution_id != "")
    untrained = select(runs.c.run_id).where(runs.c.run_id.not_in(trained), runs.c.run_id != but)
    lapsed = list(db.scalars(untrained.order_by(_PLACE.desc()).offset(MAX_UNTRAINED - 1)))
    for table in (runs, run_data, bases, tasks, states, secagg_runs, secagg_rounds) if lapsed else ():
        db.execute(delete(table).where(table.c.run_id.in_(lapsed)))
    return len(lapsed)


def _put(
    db: Connection,
    table: Table,
    key: Mapping[str, object],
    values: Mapping[str, object],
    where: ColumnElement[bool] | None = None,
) -> None:
    row = upsert(table).values(**key, **values)
    db.execute(row.on_conflict_do_update(index_elements=list(key), set_=values, where=where))


def _commits(row: Row[Any], included: bool) -> bool:
    return row.staged is not None and (row.refused is None if included else not row.mirrored)


def _commit_state(db: Connection, key: TaskKey, digest: str, coordinator: str) -> None:
    """Commit a state; delete states of this and later rounds that another incarnation of the coordinator closed."""
    mine = states.c.run_id == key.run_id
    db.execute(delete(states).where(mine, states.c.round >= key.round, states.c.coordinator != coordinator))
    _put(db, states, {"run_id": key.run_id, "round": key.round}, {"digest": digest, "coordinator": coordinator})
    newest = select(states.c.round).where(mine).order_by(states.c.round.desc()).limit(KEPT_STATES)
    db.execute(delete(states).where(mine, states.c.round.not_in(newest)))


def _primary(key: TaskKey) -> dict[str, object]:
    return {"run_id": key.run_id, "round": key.round, "kind": key.kind.value}


def _this(key: TaskKey) -> tuple[ColumnElement[bool], ...]:
    return tuple(tasks.c[name] == value for name, value in _primary(key).items())


def _task(db: Connection, key: TaskKey) -> Row[tuple[object, ...]] | None:
    return db.execute(select(tasks).where(*_this(key))).first()


def _key(row: Row[tuple[object, ...]]) -> TaskKey:
    return TaskKey(row.run_id, row.round, TaskKind(row.kind))


def _entry(row: Row[tuple[object, ...]]) -> OutboxEntry:
    return OutboxEntry(
        _key(row),
        row.manifest_digest,
        row.base_digest,
        row.contribution_id,
        row.object_digest,
        row.size,
        row.state_digest,
        row.receipt,
        row.refused,
        row.mirrored,
        read_attestation(row.attested, row.sealed),
        row.coordinator,
        row.staged is not None,
    )


def _record(row: Row[tuple[object, ...]]) -> TaskRecord:
    raw = json.loads(row.evaluation) if row.evaluation else None
    return TaskRecord(
        key=_key(row),
        evaluation=_evaluation(raw) if raw else None,
        staged=row.staged,
        receipt=row.receipt is not None,
        refused=row.refused,
        included=row.included,
        size=row.size,
    )


def _evaluation(raw: Mapping[str, Any]) -> LocalEvaluation:
    """Read an evaluation. Early ones of 0.1.0 lack the noise: if their numbers are no counts, its scale is unknown."""
    counts = all(float(value).is_integer() for value in (*raw["correct"], *raw["examples"]))
    noise = raw.get("noise", None if counts else {"std": math.inf})
    clinical = raw.get("clinical")
    return LocalEvaluation(
        tuple(raw["classes"]),
        tuple(raw["correct"]),
        tuple(raw["examples"]),
        noise=noise and EvaluationNoise(**noise),
        clinical=clinical and ClinicalMetrics.of(clinical),
    )
