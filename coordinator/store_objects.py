"""Contributions, their receipts, and which objects are still needed. Every method is one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from sqlalchemy import ColumnElement, Connection, bindparam, delete, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.database import Database
from coordinator.records import Contribution, ObjectKind, RunState
from coordinator.store_runs import add_event
from coordinator.tables import contributions, objects, rounds, runs
from fl_core.errors import ProtocolError, StateError
from fl_core.kinds import TaskKind

KEEP_STATES = 2


_CONTRIBUTION = select(contributions).where(contributions.c.id == bindparam("id"))
_ROUND = (
    select(rounds, runs.c.state, runs.c.manifest_digest)
    .join(runs)
    .where(rounds.c.run_id == bindparam("run_id"), rounds.c.round == bindparam("round"))
)
"""Asked many times in a round: written once, because writing a statement takes longer than running it."""


class ObjectStore:
    """The part of the store that names objects."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    # ---- contributions ---------------------------------------------------------------------------------------------

    def contribution(self, contribution_id: str) -> Contribution | None:
        """Return an announced contribution."""
        with self._db.read() as db:
            return _contribution(db, contribution_id)

    def announce(self, wanted: Contribution) -> tuple[Contribution, bool]:
        """Note that a silo will send an object; return what is known, and whether an earlier upload must be forgotten.

        Until it is committed, an announced object may be replaced by another one (the silo lost its disk and trained
        anew). Raises ProtocolError (E-WIRE-07) when another object was committed under this id; StateError (E-RUN-06)
        when the round is not open.
        """
        with self._db.write() as db:
            known = _contribution(db, wanted.id)
            if known is not None and known.receipt is not None:
                if (known.object_digest, known.size) != (wanted.object_digest, wanted.size):
                    raise ProtocolError(
                        "E-WIRE-07",
                        f"expected the object {known.object_digest[:16]} that was taken under this contribution, found "
                        f"{wanted.object_digest[:16]}: a task has one update",
                    )
                return known, False
            _expect_open(db, wanted)
            if known is None:
                names = contributions.c.keys()
                db.execute(
                    insert(contributions).values(**{c: getattr(wanted, c) for c in names} | {"kind": wanted.kind.value})
                )
                return wanted, True
            if (known.object_digest, known.size) == (wanted.object_digest, wanted.size):
                return known, False
            changed = {"object_digest": wanted.object_digest, "size": wanted.size}
            db.execute(update(contributions).where(contributions.c.id == wanted.id).values(**changed))
            return wanted, True

    def commit(self, contribution: Contribution, received: float, receipt: bytes) -> None:
        """Take a contribution whose object is on disk: its record, its receipt, the count of bytes, the event.

        Raises StateError (E-RUN-06) when the round was closed in between.
        """
        c = contribution
        with self._db.write() as db:
            _expect_open(db, c)
            taken = {"received": received, "receipt": receipt}
            db.execute(update(contributions).where(contributions.c.id == c.id).values(**taken))
            values = {"digest": c.object_digest, "run_id": c.run_id, "kind": ObjectKind.BUNDLE.value, "round": c.round}
            db.execute(upsert(objects).values(**values, size=c.size).on_conflict_do_nothing())
            db.execute(update(runs).where(runs.c.id == c.run_id).values(bytes_up=runs.c.bytes_up + c.size))
            add_event(db, self._clock(), c.run_id, "arrived", c.round, c.silo, f"{c.size} bytes")

    def is_wanted(self, contribution_id: str) -> bool:
        """Tell whether an upload under way still belongs to an open round of a run that goes on."""
        with self._db.read() as db:
            found = _contribution(db, contribution_id)
            if found is None or found.receipt is not None:
                return False
            try:
                _expect_open(db, found)
            except StateError:
                return False
            return True

    # ---- who may read what -----------------------------------------------------------------------------------------

    def readable(self, digest: str, silo: str | None) -> str | None:
        """Return the run to which an object belongs, or None when there is no such object for this caller.

        silo: a member may read manifests and bases of its own runs; None (a lead) may read everything.
        """
        query = select(objects.c.run_id, objects.c.kind, runs.c.members).join(runs).where(objects.c.digest == digest)
        with self._db.read() as db:
            for row in db.execute(query.order_by(runs.c.created.desc())):
                open_to_silos = row.kind in (ObjectKind.MANIFEST.value, ObjectKind.BASE.value)
                if silo is None or (open_to_silos and silo in row.members):
                    return str(row.run_id)
        return None

    def named(self) -> set[str]:
        """Return the digests of all objects that something still needs."""
        with self._db.read() as db:
            return set(db.scalars(select(objects.c.digest)))

    # ---- what is no longer needed ----------------------------------------------------------------------------------

    def collect(self, run_id: str, release: Callable[[str], None]) -> None:
        """Forget the objects of a run that nothing needs any more, and `release` those that no run needs.

        Bundles and bases go when their round is closed or their run is over (a failed one may be resumed and keeps
        them); of the server states the newest two stay, of a run that is over the newest one. Receipts stay for ever.
        """
        with self._db.write() as db:
            run = db.execute(select(runs).where(runs.c.id == run_id)).one()
            over = run.state in (RunState.FINISHED.value, RunState.ABORTED.value)
            closed = set(db.scalars(select(rounds.c.round).where(rounds.c.run_id == run_id, rounds.c.is_open == 0)))
            mine = db.execute(select(objects).where(objects.c.run_id == run_id).order_by(objects.c.round.desc())).all()
            states = [row for row in mine if row.kind == ObjectKind.STATE.value]
            gone = states[1 if over else KEEP_STATES :]
            passing = (ObjectKind.BASE.value, ObjectKind.BUNDLE.value)
            gone += [row for row in mine if row.kind in passing and (over or row.round in closed)]
            for row in gone:
                this = (objects.c.digest == row.digest, objects.c.kind == row.kind, objects.c.round == row.round)
                db.execute(delete(objects).where(objects.c.run_id == run_id, *this))
            digests = {row.digest for row in gone}
            needed = _still_named(db, digests)
        for digest in sorted(digests - needed):
            release(digest)


def _still_named(db: Connection, digests: Collection[str]) -> set[str]:
    named: ColumnElement[bool] = objects.c.digest.in_(digests)
    return set(db.scalars(select(objects.c.digest).where(named)))


def _contribution(db: Connection, contribution_id: str) -> Contribution | None:
    row = db.execute(_CONTRIBUTION, {"id": contribution_id}).first()
    return None if row is None else Contribution(**{**row._mapping, "kind": TaskKind(row.kind)})


def _expect_open(db: Connection, c: Contribution) -> None:
    """Raise StateError (E-RUN-06) unless the round is open and asked this silo; E-WIRE-12 on another kind or base."""
    row = db.execute(_ROUND, {"run_id": c.run_id, "round": c.round}).first()
    # The open round of a failed run still takes updates: they are there when the run is resumed.
    over = (RunState.FINISHED.value, RunState.ABORTED.value)
    what = None
    if row is None:
        what = "none of this number"
    elif row.state in over:
        what = f"one of a run that is {row.state}"
    elif not row.is_open:
        what = "a closed one"
    elif c.silo not in row.cohort:
        what = "one that did not ask this silo"
    if row is None or what is not None:
        raise StateError(
            "E-RUN-06", f"expected an open round, found {what} ({c.run_id}, round {c.round}): discard this update"
        )
    if (row.kind, row.base_digest, row.manifest_digest) != (c.kind.value, c.base_digest, c.manifest_digest):
        raise ProtocolError(
            "E-WIRE-12",
            f"expected an update of round {c.round} for the manifest {row.manifest_digest[:16]} and the base "
            f"{row.base_digest[:16]}, found {c.manifest_digest[:16]} and {c.base_digest[:16]} ({c.kind.value})",
        )
