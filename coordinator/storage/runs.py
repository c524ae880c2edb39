"""Runs, their rounds and events."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from sqlalchemy import (
    Connection,
    Row,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.records import LIVE, EvaluationSummary, EventRow, ObjectKind, RoundRow, RunState, StoredRun
from coordinator.storage.schema import declared_sizes, events, objects, rounds, row_values, runs, secagg_seals
from coordinator.storage.steering import note_resumed
from fl_core.errors import ConfigError, StateError
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.enums import TaskKind
from fl_core.types.records import NO_BOUND, RoundRecord
from service_core.console import pluralize
from service_core.storage.sqlite import Database

log = logging.getLogger(__name__)
_LEVELS = {"refused": logging.WARNING, "lost": logging.WARNING}
"""Log levels of events; all others are informational."""


WITHDRAWN = "withdrawn"
"""The kind of event that records a silo's withdrawal from a run."""
FETCHED = "fetched"
"""The kind of event that records that a lead has read a run's state, as an export does."""
_EVENT_CHARS = 4000
"""Length limit of one event: it is stored for good, and sent to every watching lead."""
_COUNTS = select(runs.c.state, func.count().label("number")).group_by(runs.c.state)


class RunStore:
    """Runs with their rounds and events."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def add(
        self,
        run: StoredRun,
        manifest_size: int,
        sizes: Mapping[str, tuple[float, float]] | None = None,
        start: tuple[str, int] | None = None,
        weights: tuple[str, int] | None = None,
        other: tuple[str, int] | None = None,
    ) -> StoredRun:
        """Add a waiting run or return that of its request id; raises ConfigError (E-CFG-02) if the two differ.

        sizes: its silos' declared training and test examples, 0 if not declared.
        start: the server state (digest, size) of a run whose manifest names its start
        weights: the object that silos fill the model with before round 0
        other: the object of a second model to evaluate, needed until the closing evaluation is closed.
        """
        with self._db.write() as db:
            existing = _of_request(db, run.request_id)
            if existing is not None:
                if existing.spec != run.spec or existing.parent != run.parent:
                    raise ConfigError(
                        "E-CFG-02",
                        f"the request {run.request_id!r} was used for {existing.id} with another configuration: use a "
                        "new request id for a new run",
                    )
                return existing
            while db.execute(select(runs.c.id).where(runs.c.id == run.id)).first():
                run = replace(run, id=f"{run.id[:-5]}-{secrets.token_hex(2)}")
            values = row_values(runs, run) | {"state": run.state.value, "created": self._clock()}
            if start is not None:
                values["state_object"] = start[0]
            db.execute(insert(runs).values(values))
            note_object(db, run.manifest_digest, run.id, ObjectKind.MANIFEST, 0, manifest_size)
            if start is not None:
                note_object(db, start[0], run.id, ObjectKind.STATE, 0, start[1])
            if weights is not None:
                note_object(db, weights[0], run.id, ObjectKind.WEIGHTS, 0, weights[1])
            if other is not None:
                note_object(db, other[0], run.id, ObjectKind.BASE, run.rounds, other[1])
            text = f"{run.kind.length(run.rounds)}, {run.method} with {pluralize(len(run.members), 'silo')}"
            self._event(db, run.id, "submitted", text=f"{text}, from {run.parent}" if run.parent else text)
            for name, (train, test) in (sizes or {}).items():
                db.execute(insert(declared_sizes).values(run_id=run.id, silo=name, train=train, test=test))
            return _run(db, run.id)

    def declared_sizes(self, run_id: str) -> list[tuple[str, float, float]]:
        """Return (silo, training examples, test examples) as declared when the run was submitted."""
        with self._db.read() as db:
            rows = db.execute(select(declared_sizes).where(declared_sizes.c.run_id == run_id))
            return [(row.silo, row.train, row.test) for row in rows]

    def of_request(self, request_id: str) -> StoredRun | None:
        with self._db.read() as db:
            return _of_request(db, request_id)

    def get(self, run_id: str) -> StoredRun:
        """Return a run by its id; raises ConfigError (E-RUN-10) if there is none."""
        with self._db.read() as db:
            return _run(db, run_id)

    def find(self, query: str) -> StoredRun:
        """Return the newest run with this id or name, or the `latest` of all; raises ConfigError (E-RUN-10)."""
        newest = runs.c.created.desc(), runs.c.id
        with self._db.read() as db:
            by_id = select(runs).where(runs.c.id == query)
            wide = select(runs) if query == "latest" else select(runs).where(runs.c.name == query)
            row = db.execute(by_id).first() or db.execute(wide.order_by(*newest)).first()
        if row is None:
            raise ConfigError("E-RUN-10", f"expected the id or name of a run, found {query!r}: see `coordinator runs`")
        return _to_run(row)

    def all(self) -> list[StoredRun]:
        """Return all runs, newest first."""
        with self._db.read() as db:
            return [_to_run(row) for row in db.execute(select(runs).order_by(runs.c.created.desc(), runs.c.id))]

    def page(self, after: str, size: int) -> list[StoredRun]:
        """Return up to `size` runs, newest first; after: the id of the last run before them, empty: from the newest.

        Raises ConfigError (E-RUN-10) if there is no such run.
        """
        newest = select(runs).order_by(runs.c.created.desc(), runs.c.id).limit(size)
        with self._db.read() as db:
            if after:
                last = _run(db, after)
                same_time = (runs.c.created == last.created) & (runs.c.id > last.id)
                newest = newest.where((runs.c.created < last.created) | same_time)
            return [_to_run(row) for row in db.execute(newest)]

    def newest_records(self, run_ids: Collection[str]) -> dict[str, RoundRecord]:
        """Return the record of each run's last closed round, if any, in one SQL statement."""
        closed = rounds.c.run_id.in_(run_ids), rounds.c.is_open == 0
        last = select(rounds.c.run_id, func.max(rounds.c.round)).where(*closed).group_by(rounds.c.run_id)
        newest = select(rounds.c.run_id, rounds.c.record).where(tuple_(rounds.c.run_id, rounds.c.round).in_(last))
        with self._db.read() as db:
            return {row.run_id: RoundRecord.of(row.record) for row in db.execute(newest)}

    def evaluations(self, run_ids: Collection[str]) -> dict[str, list[EvaluationSummary]]:
        """Return the measurements of each run's closed rounds, in order, in one SQL statement."""
        facts = [rounds.c.record[name].label(name) for name in EvaluationSummary._fields]
        closed = select(rounds.c.run_id, *facts).where(rounds.c.run_id.in_(run_ids), rounds.c.is_open == 0)
        evaluated: dict[str, list[EvaluationSummary]] = {run_id: [] for run_id in run_ids}
        with self._db.read() as db:
            for run_id, *lists in db.execute(closed.order_by(rounds.c.run_id, rounds.c.round)):
                evaluated[run_id].append(EvaluationSummary(*map(tuple, lists)))
        return evaluated

    def unfinished(self) -> list[StoredRun]:
        """Return the waiting and running runs, oldest first."""
        return [run for run in reversed(self.all()) if not run.state.ended]

    def counts(self) -> dict[RunState, int]:
        """Count the runs in each state."""
        with self._db.read() as db:
            numbers = {row.state: row.number for row in db.execute(_COUNTS)}
        return {state: numbers.get(state.value, 0) for state in RunState}

    def progress(self, states: Iterable[RunState], most: int) -> list[tuple[str, int, int]]:
        """Return (id, closed rounds, planned rounds) of the newest runs in these states, at most `most`."""
        condition = runs.c.state.in_([state.value for state in states])
        newest = (
            select(runs.c.id, runs.c.closed, runs.c.rounds).where(condition).order_by(runs.c.created.desc(), runs.c.id)
        )
        with self._db.read() as db:
            return [(row.id, row.closed, row.rounds) for row in db.execute(newest.limit(most))]

    def begin(self, run_id: str, state_object: str, size: int) -> StoredRun:
        """Set a run to running; a new one gets this server state. Raises StateError (E-RUN-11) if it has ended."""
        with self._db.write() as db:
            run = live_run(db, run_id)
            if run.state_object is None:
                note_object(db, state_object, run_id, ObjectKind.STATE, 0, size)
                _change_run(db, run_id, state_object=state_object)
            if run.state is not RunState.RUNNING:
                _move(db, run, RunState.RUNNING, "continued")
            return _run(db, run_id)

    def end(self, run_id: str, state: RunState, reason: str) -> StoredRun:
        """End a run; raises StateError (E-RUN-11) if its present state does not allow it."""
        with self._db.write() as db:
            self._end(db, _run(db, run_id), state, reason)
            return _run(db, run_id)

    def _end(self, db: Connection, run: StoredRun, state: RunState, reason: str = "", round: int | None = None) -> None:
        _move(db, run, state, state.value, reason=reason, ended=self._clock())
        text = f"{state.value}: {reason}" if reason else state.value
        self._event(db, run.id, "ended", run.closed if round is None else round, text=text)

    def resume(self, run_id: str, quorum: int = 0) -> StoredRun:
        """Set a paused or failed run to waiting again; quorum: from now on, 0 changes nothing.

        Raises StateError (E-RUN-11) if it is neither.
        """
        with self._db.write() as db:
            _move(db, run := _run(db, run_id), RunState.WAITING, "resumed", reason="", ended=0.0)
            note_resumed(db, run_id, quorum)
            self._event(db, run_id, "submitted", run.closed, text=f"resumed after {run.closed} closed rounds")
            return _run(db, run_id)

    def add_traffic(self, run_id: str, down: int) -> None:
        with self._db.write() as db:
            _change_run(db, run_id, bytes_down=runs.c.bytes_down + down)

    def open_round(self, run_id: str, round: int, kind: TaskKind, cohort: Sequence[str], base: str = "") -> None:
        """Open a round; one that is open stays as it is, with its received updates.

        base: the digest that its updates start from, if there is no object to send.
        """
        with self._db.write() as db:
            live_run(db, run_id)
            about = {"is_open": 1, "cohort": list(cohort), "base_digest": base, "base_size": 0}
            values = {"run_id": run_id, "round": round, "kind": kind.value, "opened": self._clock(), "closed": 0.0}
            if db.execute(upsert(rounds).values(values | about).on_conflict_do_nothing()).rowcount:
                self._event(db, run_id, "opened", round, text=f"{kind.value}: {pluralize(len(cohort), 'silo')}")

    def set_base(self, run_id: str, round: int, digest: str, size: int) -> None:
        with self._db.write() as db:
            note_object(db, digest, run_id, ObjectKind.BASE, round, size)
            _change_round(db, run_id, round, base_digest=digest, base_size=size)

    def round(self, run_id: str, round: int) -> RoundRow | None:
        with self._db.read() as db:
            row = db.execute(select(rounds).where(rounds.c.run_id == run_id, rounds.c.round == round)).first()
            return None if row is None else _to_round(row)

    def included_before(self, run_id: str, silo: str, round: int) -> int:
        """Return 1 + the last training round before this one with an update of a silo; 0 if none has."""
        earlier = select(rounds.c.round, rounds.c.record).where(
            rounds.c.run_id == run_id,
            rounds.c.round < round,
            rounds.c.is_open == 0,
            rounds.c.kind == TaskKind.TRAIN.value,
        )
        with self._db.read() as db:
            newest = db.execute(earlier.order_by(rounds.c.round.desc()))
            return next((row.round + 1 for row in newest if silo in row.record["included"]), 0)

    def rounds(self, run_id: str, newest: int | None = None) -> list[RoundRow]:
        """Return the closed rounds of a run in order. newest: return only this many, the last ones."""
        with self._db.read() as db:
            closed = (
                select(rounds)
                .where(rounds.c.run_id == run_id, rounds.c.is_open == 0)
                .order_by(rounds.c.round.desc())
                .limit(newest)
            )
            return [_to_round(row) for row in reversed(db.execute(closed).all())]

    def close_round(
        self,
        run_id: str,
        record: RoundRecord,
        state: tuple[str, int] | None,
        model_digest: str,
        replaces: str = "",
    ) -> StoredRun:
        """Store a round's result, the server state after it (digest, size) and the run's progress.

        The closing evaluation has no new state (None) and finishes the run. model_digest: empty if unknown.
        replaces: a run whose state is deleted when this one is finished, since it contains a withdrawn hospital's sums.
        Raises StateError (E-RUN-11) if the run has ended in between.
        """
        train, now = record.kind.trains, self._clock()
        with self._db.write() as db:
            run = live_run(db, run_id)
            _change_round(db, run_id, record.round, is_open=0, closed=now, record=record.to_dict())
            db.execute(
                delete(secagg_seals).where(secagg_seals.c.run_id == run_id, secagg_seals.c.round == record.round)
            )
            if record.unbounded:
                self._event(db, run_id, "warning", record.round, text=f"round {record.round + 1}: {NO_BOUND}")
            for name, why in record.cut.items():
                self._event(db, run_id, "cut", record.round, name, f"round {record.round + 1}: {name}'s {why}")
            for name, why in record.missing.items():
                if why.startswith("E-RUN-44"):  # by the round itself; refusals by or of a silo have events of their own
                    self._event(db, run_id, "refused", record.round, name, why)
            progress: dict[str, object] = {
                "accuracy": record.accuracy,
                "best_accuracy": max(run.best_accuracy, record.accuracy if record.trained else -1.0),
                "model_digest": model_digest,
            }
            if state is not None:
                note_object(db, state[0], run_id, ObjectKind.STATE, record.round + 1, state[1])
                progress["state_object"] = state[0]
            if train:
                progress["closed"] = record.round + 1
            _change_run(db, run_id, **progress)
            text = pluralize(len(record.included), "update") + (
                f", {len(record.missing)} missing" if record.missing else ""
            )
            self._event(db, run_id, "closed", record.round, text=text)
            if not train:
                self._end(db, run, RunState.FINISHED, round=record.round)
            if not train and replaces:
                text = f"its sums were taken out by {run_id}; the state that contained them is deleted here"
                self._drop_state(db, replaces, run.members[0], text)
            closed = _run(db, run_id)
        self._db.checkpoint()
        return closed

    def note_model(self, run_id: str, state_object: str, model_digest: str) -> None:
        """Store the digest of the model in a server state, unless the run has a newer state."""
        newest = (runs.c.id == run_id, runs.c.state_object == state_object)
        with self._db.write() as db:
            db.execute(update(runs).where(*newest).values(model_digest=model_digest))

    def note_facts(self, run_id: str, facts: Mapping[str, object]) -> None:
        with self._db.write() as db:
            _change_run(db, run_id, facts=facts)

    def keep_coverage(self, run_id: str, coverage: ClassCoverage, question: str = "") -> None:
        """Store the classes that a run trains, with an event. question: to the lead; it pauses the run at once.

        Raises StateError (E-RUN-11) if the run has ended.
        """
        with self._db.write() as db:
            run = live_run(db, run_id)
            _change_run(db, run_id, coverage=coverage.facts())
            if sentences := coverage.sentences():
                self._event(db, run_id, "classes", text="\n".join(sentences))
            if question:
                self._end(db, run, RunState.PAUSED, question)

    def event(self, run_id: str, kind: str, round: int = 0, silo: str = "", text: str = "") -> None:
        with self._db.write() as db:
            self._event(db, run_id, kind, round, silo, text)

    def withdraw(self, run_id: str, silo: str, text: str) -> bool:
        """Record a silo's withdrawal from a run, once; return whether it is new."""
        with self._db.write() as db:
            same = (events.c.run_id == run_id, events.c.kind == WITHDRAWN, events.c.silo == silo)
            if db.execute(select(events.c.number).where(*same)).first():
                return False
            self._event(db, run_id, WITHDRAWN, silo=silo, text=text)
            return True

    def drop_state(self, run_id: str, silo: str, text: str) -> None:
        """Delete a run's state, which contains a withdrawn silo's data."""
        with self._db.write() as db:
            self._drop_state(db, run_id, silo, text)

    def _drop_state(self, db: Connection, run_id: str, silo: str, text: str) -> None:
        _change_run(db, run_id, state_object=None)
        self._event(db, run_id, "taken out", silo=silo, text=text)

    def events_of(self, run_id: str, kind: str) -> list[EventRow]:
        """Return a run's events of one kind."""
        with self._db.read() as db:
            query = select(events).where(events.c.run_id == run_id, events.c.kind == kind).order_by(events.c.number)
            return [EventRow(**row._mapping) for row in db.execute(query)]

    def events(self, run_id: str, after: int) -> list[EventRow]:
        """Return the events of a run whose number is higher than `after`."""
        with self._db.read() as db:
            newer = select(events).where(events.c.run_id == run_id, events.c.number > after).order_by(events.c.number)
            return [EventRow(**row._mapping) for row in db.execute(newer)]

    def software(self, run_id: str) -> dict[str, str]:
        """Return the software with which each silo, and under "" the coordinator, last took part in a run."""
        noted = select(events.c.silo, events.c.text).where(events.c.run_id == run_id, events.c.kind == "software")
        with self._db.read() as db:
            return {row.silo: row.text for row in db.execute(noted.order_by(events.c.number))}

    def _event(self, db: Connection, run_id: str, kind: str, round: int = 0, silo: str = "", text: str = "") -> None:
        add_event(db, self._clock(), run_id, kind, round, silo, text)


def add_event(
    db: Connection, at: float, run_id: str, kind: str, round: int = 0, silo: str = "", text: str = ""
) -> None:
    """Add an event inside an open transaction, and write it to the log."""
    text = text[:_EVENT_CHARS]
    about = {"event": kind, "run": run_id, "round": round, "silo": silo}
    log.log(_LEVELS.get(kind, logging.INFO), "%s%s", kind, f": {text}" if text else "", extra=about)
    last = db.scalar(select(func.max(events.c.number)).where(events.c.run_id == run_id)) or 0
    values = {"at": at, "kind": kind, "round": round, "silo": silo, "text": text}
    db.execute(insert(events).values(run_id=run_id, number=last + 1, **values))


def note_object(db: Connection, digest: str, run_id: str, kind: ObjectKind, round: int, size: int) -> None:
    """Record an object's role in a run, inside an open transaction; repeated calls are harmless."""
    values = {"digest": digest, "run_id": run_id, "kind": kind.value, "round": round, "size": size}
    db.execute(upsert(objects).values(values).on_conflict_do_nothing())


def _change_run(db: Connection, run_id: str, **values: object) -> None:
    db.execute(update(runs).where(runs.c.id == run_id).values(**values))


def _change_round(db: Connection, run_id: str, round: int, **values: object) -> None:
    db.execute(update(rounds).where(rounds.c.run_id == run_id, rounds.c.round == round).values(**values))


def require_state(run: StoredRun, states: Iterable[RunState], verb: str) -> StoredRun:
    """Return a run; raises StateError (E-RUN-11) unless it is in one of these states. verb: for the message."""
    if run.state not in states:
        valid = " or ".join(state.value for state in states)
        raise StateError("E-RUN-11", f"{run.id} cannot be {verb}: it is {run.state.value}, and must be {valid}")
    return run


def _move(db: Connection, run: StoredRun, state: RunState, verb: str, **values: object) -> None:
    """Change a run's state: the only place that does. Raises as `require_state`."""
    require_state(run, state.comes_from, verb)
    _change_run(db, run.id, state=state.value, **values)


def live_run(db: Connection, run_id: str) -> StoredRun:
    """Read a run inside an open transaction; raises StateError (E-RUN-11) if it has ended."""
    return require_state(_run(db, run_id), LIVE, "continued")


def _run(db: Connection, run_id: str) -> StoredRun:
    row = db.execute(select(runs).where(runs.c.id == run_id)).first()
    if row is None:
        raise ConfigError("E-RUN-10", f"expected the id of a run, found {run_id!r}: see `coordinator runs`")
    return _to_run(row)


def _of_request(db: Connection, request_id: str) -> StoredRun | None:
    row = db.execute(select(runs).where(runs.c.request_id == request_id)).first()
    return None if row is None else _to_run(row)


def _to_run(row: Row[tuple[object, ...]]) -> StoredRun:
    raw = row._mapping
    return StoredRun(**{**raw, "state": RunState(raw["state"]), "members": tuple(raw["members"])})


def _to_round(row: Row[tuple[object, ...]]) -> RoundRow:
    raw = dict(row._mapping)
    number, kind, stored = raw.pop("round"), TaskKind(raw.pop("kind")), raw.pop("record")
    record = RoundRecord(number, kind, (), (), ()) if stored is None else RoundRecord.of(stored)
    return RoundRow(**raw | {"record": record, "is_open": bool(raw["is_open"]), "cohort": tuple(raw["cohort"])})
