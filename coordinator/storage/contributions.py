"""Contributions, their receipts, and which objects are still needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, fields

from sqlalchemy import Connection, and_, delete, insert, select, update

from coordinator.storage.attestations import attested, drop_sealed
from coordinator.storage.records import Contribution, ObjectKind, RunState
from coordinator.storage.runs import FETCHED, add_event, note_object
from coordinator.storage.schema import contributions, objects, rounds, runs, secagg_seals
from coordinator.storage.secagg import sealed_updates
from fl_core.errors import ProtocolError, StateError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage.sqlite import Database

KEEP_STATES = 2
_OVER = (RunState.FINISHED.value, RunState.ABORTED.value)
_OF_MASKED_RUN = (ObjectKind.KEYS.value, ObjectKind.CENSUS.value)
_OPEN_TO_SILOS = (ObjectKind.MANIFEST.value, ObjectKind.BASE.value, ObjectKind.WEIGHTS.value, *_OF_MASKED_RUN)
_COLUMNS = [contributions.c[column.name] for column in fields(Contribution)]
_TEMPORARY = (ObjectKind.BASE.value, ObjectKind.BUNDLE.value)


class ContributionStore:
    """Announced and committed updates, and the objects that runs still need."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def contribution(self, contribution_id: str) -> Contribution | None:
        with self._db.read() as db:
            return _contribution(db, contribution_id)

    def announce(
        self, wanted: Contribution, stated: pb.Attestation | None = None, sealed: bytes = b""
    ) -> tuple[Contribution, bool]:
        """Record that a silo will send an object; return it, and whether an earlier upload must be discarded.

        Until it is committed, an announced object may be replaced (the silo lost its disk and trained again), together
        with its attestation `stated` and the separate part `sealed`.
        Raises ProtocolError (E-WIRE-07) if another object was committed under this id; StateError (E-RUN-06) if the
        round is not open.
        """
        with self._db.write() as db:
            existing = _contribution(db, wanted.id)
            if existing is not None and existing.received is not None:
                if (existing.object_digest, existing.size) != (wanted.object_digest, wanted.size):
                    raise ProtocolError(
                        "E-WIRE-07",
                        f"expected the object {existing.object_digest[:16]} that this contribution already has, "
                        f"found {wanted.object_digest[:16]}: a task has one update",
                    )
                return existing, False
            _expect_open(db, wanted)
            if existing is None:
                values = asdict(wanted) | {"kind": wanted.kind.value} | attested(stated, sealed)
                db.execute(insert(contributions).values(values))
                return wanted, True
            _change(db, wanted.id, **attested(stated, sealed))
            if (existing.object_digest, existing.size) == (wanted.object_digest, wanted.size):
                return existing, False
            _change(db, wanted.id, object_digest=wanted.object_digest, size=wanted.size)
            return wanted, True

    def commit(self, contribution: Contribution, received: float) -> None:
        """Commit a contribution whose object is on disk; raises StateError (E-RUN-06) if its round was closed."""
        c = contribution
        with self._db.write() as db:
            _expect_open(db, c)
            _change(db, c.id, received=received)
            drop_sealed(db, c.silo, but=c.id)
            note_object(db, c.object_digest, c.run_id, ObjectKind.BUNDLE, c.round, c.size)
            db.execute(update(runs).where(runs.c.id == c.run_id).values(bytes_up=runs.c.bytes_up + c.size))
            add_event(db, self._clock(), c.run_id, "arrived", c.round, c.silo, f"{c.size} bytes")

    def reopen(self, contribution: Contribution) -> None:
        """Undo a commit whose object was lost. Its silo keeps the update until the round closes, and sends it again.

        The receipt stays true: the same object is accepted again, or another one under a new receipt.
        """
        c = contribution
        with self._db.write() as db:
            _change(db, c.id, received=None)
            db.execute(delete(objects).where(objects.c.digest == c.object_digest, objects.c.run_id == c.run_id))
            add_event(db, self._clock(), c.run_id, "lost", c.round, c.silo, "its update is damaged: requested again")

    def arrivals(self, run_id: str, round: int | None = None) -> list[Contribution]:
        """Return the committed updates of a run by arrival, of one round or of all."""
        query = select(*_COLUMNS).where(contributions.c.run_id == run_id, contributions.c.received.is_not(None))
        if round is not None:
            query = query.where(contributions.c.round == round)
        with self._db.read() as db:
            rows = db.execute(query.order_by(contributions.c.received))
            return [Contribution(**{**row._mapping, "kind": TaskKind(row.kind)}) for row in rows]

    def received(self, run_id: str, round: int) -> dict[str, float]:
        """Return the arrival times of a round's committed updates, by silo."""
        of_round = (
            contributions.c.run_id == run_id,
            contributions.c.round == round,
            contributions.c.received.is_not(None),
        )
        with self._db.read() as db:
            rows = db.execute(select(contributions.c.silo, contributions.c.received).where(*of_round))
            return {row.silo: row.received for row in rows}

    def is_open(self, contribution_id: str) -> bool:
        """Return whether an unfinished upload belongs to an open round of a run that continues."""
        with self._db.read() as db:
            row = _contribution(db, contribution_id)
            if row is None or row.received is not None:
                return False
            try:
                _expect_open(db, row)
            except (StateError, ProtocolError):  # closed, or open with another base than announced
                return False
            return True

    def readable(self, digest: str, silo: str | None) -> str | None:
        """Return the run of a readable object: for a lead (None) any, for a silo the objects that its runs send it."""
        named = select(objects.c.run_id, objects.c.kind, runs.c.members).join(runs).where(objects.c.digest == digest)
        with self._db.read() as db:
            rows = db.execute(named.order_by(runs.c.created.desc())).all()
        for row in rows:
            if silo is None or (row.kind in _OPEN_TO_SILOS and silo in row.members):
                return str(row.run_id)
        return None

    def note_fetched(self, digest: str, lead: str) -> None:
        """Record in the events of each run that a lead reads its state, as an export does."""
        with self._db.write() as db:
            named = select(objects.c.run_id).where(objects.c.digest == digest, objects.c.kind == ObjectKind.STATE.value)
            for run_id in db.scalars(named.distinct()).all():
                add_event(db, self._clock(), run_id, FETCHED, text=f"{lead} read the state {digest[:16]}")

    def referenced_digests(self) -> set[str]:
        with self._db.read() as db:
            return set(db.scalars(select(objects.c.digest)))

    def delete_unreferenced(self, run_id: str, release: Callable[[str], None]) -> None:
        """Delete records of objects that a run no longer needs, and `release` objects that no run needs.

        Bundles and bases are needed until their round is closed or their run is over (a failed one may be resumed). A
        run keeps its newest two server states. A run that is over keeps the newest one, or none if a withdrawal removed
        it; its keys, census and sets are deleted.
        """
        with self._db.write() as db:
            run = db.execute(select(runs.c.state, runs.c.state_object).where(runs.c.id == run_id)).one()
            over, kept = run.state in _OVER, KEEP_STATES
            if over:
                kept = 0 if run.state_object is None else 1
                db.execute(delete(secagg_seals).where(secagg_seals.c.run_id == run_id))
            same_round = and_(rounds.c.run_id == objects.c.run_id, rounds.c.round == objects.c.round)
            named = select(objects.c.digest, objects.c.kind, objects.c.round, rounds.c.is_open)
            of_run = named.outerjoin(rounds, same_round).where(objects.c.run_id == run_id)
            mine = db.execute(of_run.order_by(objects.c.round.desc())).all()
            states = [row for row in mine if row.kind == ObjectKind.STATE.value]
            gone = states[kept:]
            gone += [row for row in mine if row.kind in _TEMPORARY and (over or row.is_open == 0)]
            gone += [row for row in mine if row.kind in _OF_MASKED_RUN and over]
            for row in gone:
                this = (objects.c.digest == row.digest, objects.c.kind == row.kind, objects.c.round == row.round)
                db.execute(delete(objects).where(objects.c.run_id == run_id, *this))
            digests = {row.digest for row in gone}
            needed = set(db.scalars(select(objects.c.digest).where(objects.c.digest.in_(list(digests)))))
        for digest in sorted(digests - needed):
            release(digest)


def _contribution(db: Connection, contribution_id: str) -> Contribution | None:
    row = db.execute(select(*_COLUMNS).where(contributions.c.id == contribution_id)).first()
    return None if row is None else Contribution(**{**row._mapping, "kind": TaskKind(row.kind)})


def _change(db: Connection, contribution_id: str, **values: object) -> None:
    db.execute(update(contributions).where(contributions.c.id == contribution_id).values(**values))


def _expect_open(db: Connection, c: Contribution) -> None:
    """Raise StateError (E-RUN-06) unless the round is open and asked this silo; E-WIRE-12 on another kind or base.

    A round with a fixed set takes only the set's own updates, to replace lost ones.
    """
    of_run = select(rounds, runs.c.state, runs.c.manifest_digest).join(runs)
    row = db.execute(of_run.where(rounds.c.run_id == c.run_id, rounds.c.round == c.round)).first()
    # The open round of a failed run still takes updates: the run may be resumed.
    what = None
    if row is None:
        what = "none of this number"
    elif row.state in _OVER:
        what = f"one of a run that is {row.state}"
    elif not row.is_open:
        what = "a closed one"
    elif c.silo not in row.cohort:
        what = "one that did not ask this silo"
    elif (inside := sealed_updates(db, c.run_id, c.round, c.kind)) and inside.get(c.silo) != c.object_digest:
        what = "one whose aggregation set was fixed without this update"
    if row is None or what is not None:
        raise StateError(
            "E-RUN-06", f"expected an open round, found {what} ({c.run_id}, round {c.round + 1}): discard this update"
        )
    if (row.kind, row.base_digest, row.manifest_digest) != (c.kind.value, c.base_digest, c.manifest_digest):
        raise ProtocolError(
            "E-WIRE-12",
            f"expected an update of round {c.round + 1} for the manifest {row.manifest_digest[:16]} and the base "
            f"{row.base_digest[:16]}, found {c.manifest_digest[:16]} and {c.base_digest[:16]} ({c.kind.value})",
        )
