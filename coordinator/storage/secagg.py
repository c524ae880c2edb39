"""Masked runs: the object with all members' keys, and the fixed set of each round that is not closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from sqlalchemy import Connection, delete, func, insert, select
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.records import ObjectKind
from coordinator.storage.runs import add_event, live_run, note_object
from coordinator.storage.schema import contributions, counters, objects, rounds, runs, secagg_seals
from fl_core.errors import StateError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey
from service_core.storage.sqlite import Database

_MOST_ANSWERS = 1 << 53
"""Upper limit of a silo's stated number of answers."""


class MaskedRunStore:
    """Keys and sets of masked runs.

    Guarantees: a run has one object of keys and a round has one set; neither ever changes.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def note_answers(self, silo: str, number: int) -> int:
        """Store the number of answers in masked runs that a silo states; return the highest number before this one."""
        name = f"masked answers {silo}"
        with self._db.read() as db:
            before = db.scalar(select(counters.c.value).where(counters.c.name == name)) or 0
        if number > before:
            with self._db.write() as db:
                raised = {"value": func.max(counters.c.value, min(number, _MOST_ANSWERS))}
                row = upsert(counters).values(name=name, value=min(number, _MOST_ANSWERS))
                db.execute(row.on_conflict_do_update(index_elements=["name"], set_=raised))
        return before

    def keys(self, run_id: str) -> str | None:
        """Return the digest of the object with all members' keys; None before it is stored."""
        with self._db.read() as db:
            return _object(db, run_id, ObjectKind.KEYS)

    def census(self, run_id: str) -> str | None:
        """Return the digest of the object that proves the number of hospitals per class; None before it is stored."""
        with self._db.read() as db:
            return _object(db, run_id, ObjectKind.CENSUS)

    def keep_census(self, run_id: str, digest: str, size: int, text: str) -> None:
        """Store the object that proves a run's census, and delete the census task; text: of the event.

        Raises StateError (E-RUN-11) if the run has ended.
        """
        with self._db.write() as db:
            live_run(db, run_id)
            note_object(db, digest, run_id, ObjectKind.CENSUS, 0, size)
            _delete_census(db, run_id)
            add_event(db, self._clock(), run_id, "census", text=text)

    def drop_census(self, run_id: str) -> None:
        """Delete an unfinished census, whose sum was not opened."""
        with self._db.write() as db:
            _delete_census(db, run_id)

    def keep_keys(self, run_id: str, digest: str, size: int, text: str) -> str:
        """Store the object with all members' keys, unless there is one; return the stored one. text: of the event.

        Raises StateError (E-RUN-11) if the run has ended.
        """
        with self._db.write() as db:
            live_run(db, run_id)
            if (stored := _object(db, run_id, ObjectKind.KEYS)) is not None:
                return stored
            note_object(db, digest, run_id, ObjectKind.KEYS, 0, size)
            add_event(db, self._clock(), run_id, "keys", text=text)
            return digest

    def seal(self, run_id: str, round: int, kind: TaskKind) -> pb.SecaggSeal | None:
        """Return the set of a round; None if it is not fixed, or the round closed."""
        with self._db.read() as db:
            return sealed(db, run_id, round, kind)

    def updates(self, run_id: str, round: int, kind: TaskKind) -> Mapping[str, str] | None:
        """Return the digests of the updates in a round's set, by silo; None if it is not fixed, or the round closed."""
        with self._db.read() as db:
            return sealed_updates(db, run_id, round, kind)

    def keep_seal(self, seal: pb.SecaggSeal, kind: TaskKind, text: str) -> pb.SecaggSeal:
        """Store the set of an open round, unless there is one; return the stored one. text: of the event.

        From then on no other update of the round is taken. Raises StateError: E-RUN-11 if the run has ended, E-RUN-50
        if the round is not open.
        """
        with self._db.write() as db:
            live_run(db, seal.run_id)
            if (stored := sealed(db, seal.run_id, seal.round, kind)) is not None:
                return stored
            this = (rounds.c.run_id == seal.run_id, rounds.c.round == seal.round, rounds.c.kind == kind.value)
            if not db.scalar(select(rounds.c.is_open).where(*this)):
                raise StateError("E-RUN-50", f"round {seal.round + 1} of {seal.run_id} is already closed")
            raw = seal.SerializeToString(deterministic=True)
            values = {"run_id": seal.run_id, "round": seal.round, "kind": kind.value, "seal": raw}
            db.execute(insert(secagg_seals).values(values))
            add_event(db, self._clock(), seal.run_id, "sealed", seal.round, text=text)
            return seal


def sealed(db: Connection, run_id: str, round: int, kind: TaskKind) -> pb.SecaggSeal | None:
    """Read the set of a round inside an open transaction."""
    this = (secagg_seals.c.run_id == run_id, secagg_seals.c.round == round, secagg_seals.c.kind == kind.value)
    raw = db.scalar(select(secagg_seals.c.seal).where(*this))
    return None if raw is None else pb.SecaggSeal.FromString(raw)


def sealed_updates(db: Connection, run_id: str, round: int, kind: TaskKind) -> Mapping[str, str] | None:
    """Return the digests of the updates in a round's set, by silo, in an open transaction; None if it is not fixed."""
    seal = sealed(db, run_id, round, kind)
    if seal is None:
        return None
    members = db.scalar(select(runs.c.members).where(runs.c.id == run_id)) or []
    return {members[update.index]: update.object_digest for update in seal.updates}


def _delete_census(db: Connection, run_id: str) -> None:
    census = TaskKey.census(run_id).kind.value
    for table in (rounds, contributions, secagg_seals):
        db.execute(delete(table).where(table.c.run_id == run_id, table.c.kind == census))


def _object(db: Connection, run_id: str, kind: ObjectKind) -> str | None:
    named = select(objects.c.digest).where(objects.c.run_id == run_id, objects.c.kind == kind.value)
    return db.scalar(named)
