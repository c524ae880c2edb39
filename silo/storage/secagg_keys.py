"""A silo's data of masked runs: its keys until the run ends, and the update and set of each open round.

A run is first `keyed` (private keys exist, the public ones may be sent), then `ready` (chains with all members exist,
the private key of the agreement is deleted), then `gone`. A round is masked once and confirmed once. Every method is
one transaction, on the disk when it returns. The functions on a task's row run inside that row's transaction.

Guarantees: replaced or deleted keys are also overwritten in the database's file (SQLite's secure_delete), and the
write-ahead log is emptied: at once or, if a reader blocks it, the next time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row, delete, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from fl_core.errors import StateError
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.secagg import SECRET, Secagg
from privacy.secagg.keys import OwnKeys, RunKeys
from privacy.secagg.terms import SecaggError, SecaggRun
from protos.wire.tasks import TaskKey
from service_core.storage.sqlite import Database
from silo.admission.memory import keep_to_one_set
from silo.storage.schema import secagg_rounds, secagg_runs
from silo.storage.tasks import OutboxEntry

if TYPE_CHECKING:
    from fl_core.rounds.manifest import RunManifest
    from privacy.secagg.silo_side import MaskedTaskRow

KEYED, READY, GONE = "keyed", "ready", "gone"


@dataclass(frozen=True, slots=True)
class MaskedRun:
    """The terms of a masked run from its manifest, stored beside its keys. manifest_digest: hex.

    seed, cohort: determine the members of a round.
    """

    run_id: str
    manifest_digest: str
    members: tuple[str, ...]
    rounds: int
    seed: int
    cohort: int
    ring: str
    terms: Secagg

    @property
    def run(self) -> SecaggRun:
        digest = bytes.fromhex(self.manifest_digest)
        return SecaggRun(self.run_id, digest, self.members, self.rounds, self.ring, self.terms)

    @classmethod
    def of(cls, run: SecaggRun, manifest: RunManifest) -> MaskedRun:
        digest, drawn = run.manifest_digest.hex(), (manifest.seed, manifest.cohort)
        return cls(run.run_id, digest, run.members, run.rounds, *drawn, run.ring, run.terms)

    def cohort_of(self, key: TaskKey) -> list[int]:
        """Return the positions of the members in a task's round, drawn with the manifest's seed."""
        from fl_core.rounds import sampling  # imports torch, which commands must not load

        return sampling.sample_cohort(self.seed, key.round, len(self.members), key.kind.drawn(self.cohort))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MaskedRun:
        raw: dict[str, Any] = json.loads(text)
        return cls(**{**raw, "members": tuple(raw["members"]), "terms": Secagg(**raw["terms"])})


@dataclass(frozen=True, slots=True)
class RunWithKeys:
    """A masked run with its keys. keys_object: digest of the object with all members' public keys."""

    terms: MaskedRun
    keys: RunKeys
    keys_object: str


class SecaggKeyStore:
    """The rows of masked runs, usable from every thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def state(self, run_id: str) -> str:
        """Return `keyed`, `ready` or `gone`; empty for a run that never had keys here."""
        with self._database.read() as db:
            row = _run(db, run_id)
            return "" if row is None else str(row.state)

    def runs(self) -> dict[str, MaskedRun]:
        with self._database.read() as db:
            return {row.run_id: MaskedRun.from_json(row.terms) for row in db.execute(select(secagg_runs))}

    def entry(self, run: MaskedRun, make: Callable[[], tuple[OwnKeys, bytes]]) -> bytes:
        """Return the public keys of a run as they were sent; `make` creates them at the first call.

        Raises SecaggError (E-RUN-50) if the keys are gone. Guarantees: private keys are on the disk on return.
        """
        with self._database.write() as db:
            row = _run(db, run.run_id)
            if row is None:
                private_keys, entry = make()
                values = {
                    "state": KEYED,
                    "terms": run.to_json(),
                    "entry": entry,
                    "agree": private_keys.agree,
                    "sign": private_keys.sign,
                }
                db.execute(insert(secagg_runs).values(run_id=run.run_id, keys_object="", position=0, **values))
                return entry
        if row.state == GONE:
            raise _no_keys(run.run_id)
        return bytes(row.entry)

    def own_keys(self, run_id: str) -> OwnKeys:
        """Return the private keys of a run in state `keyed`; raises SecaggError (E-RUN-50) in any other state."""
        with self._database.read() as db:
            row = _run(db, run_id)
        if row is None or row.state != KEYED:
            raise _no_keys(run_id)
        return OwnKeys(bytes(row.agree), bytes(row.sign))

    def agree(self, run_id: str, keys_object: str, keys: RunKeys) -> None:
        """Replace the agreement's private key with the keys shared with each member: the run is `ready`.

        Raises SecaggError (E-RUN-50) unless the run is `keyed`.
        """
        values = {
            "state": READY,
            "agree": None,
            "sign": keys.sign,
            "keys_object": keys_object,
            "keys_digest": keys.keys_digest,
            "place": keys.index,
            "peers": b"".join(keys.peers),
            "chains": b"".join(keys.chains),
            "position": keys.position,
        }
        with self._database.write() as db:
            _overwrite_deleted(db)
            mine = secagg_runs.c.run_id == run_id, secagg_runs.c.state == KEYED
            if not db.execute(update(secagg_runs).where(*mine).values(**values)).rowcount:
                raise _no_keys(run_id)
        self._database.checkpoint(whole=True)

    def masked_run(self, run_id: str) -> RunWithKeys:
        """Return a run with its keys; raises SecaggError (E-RUN-50) unless it is `ready`."""
        with self._database.read() as db:
            row = _run(db, run_id)
        if row is not None and row.state == KEYED:
            raise SecaggError(
                "E-RUN-50",
                f"the keys of all members of run {run_id} are not here yet: they come with its first task",
            )
        if row is None or row.state != READY:
            raise _no_keys(run_id)
        return RunWithKeys(MaskedRun.from_json(row.terms), _keys(row), row.keys_object)

    def coverages(self, run_id: str | None = None) -> dict[str, ClassCoverage]:
        """Return how many hospitals train each class, by run: for one run or all, if their census is proved.

        Version 0.1.0 stored only the counts, so its runs lack the names of classes.
        """
        wanted = select(secagg_runs.c.run_id, secagg_runs.c.holders).where(secagg_runs.c.holders.is_not(None))
        if run_id is not None:
            wanted = wanted.where(secagg_runs.c.run_id == run_id)
        with self._database.read() as db:
            kept = {row.run_id: json.loads(row.holders) for row in db.execute(wanted)}
        return {
            run: ClassCoverage(hospitals=tuple(raw)) if isinstance(raw, list) else ClassCoverage.of(raw)
            for run, raw in kept.items()
        }

    def keep_coverage(self, run_id: str, coverage: ClassCoverage) -> None:
        raw = json.dumps(coverage.facts())
        with self._database.write() as db:
            db.execute(update(secagg_runs).where(secagg_runs.c.run_id == run_id).values(holders=raw))

    def row(self, key: TaskKey) -> MaskedTaskRow | None:
        with self._database.read() as db:
            return _round(db, key)

    def confirm(self, key: TaskKey, before: MaskedTaskRow | None, row: MaskedTaskRow) -> None:
        """Store the confirmed set of a round, if the stored row is still `before`.

        Raises SecaggError (E-RUN-50) if the row has changed, the round was closed or the keys are gone, and as
        `keep_to_one_set`.
        """
        with self._database.write() as db:
            run = _run(db, key.run_id)
            if run is None or run.state != READY or _position(key) < run.position or _round(db, key) != before:
                raise SecaggError("E-RUN-50", f"{key} has changed here in the meantime: ask for its set again")
            keep_to_one_set(db, key, row.base_digest.hex(), row.inside)
            _put_round(db, key, row)

    def begin_round(self, key: TaskKey) -> None:
        """Record that a task of a round was offered: this closes all earlier rounds and deletes their keys."""
        with self._database.read() as db:
            row = _run(db, key.run_id)
            if row is None or row.state != READY or row.position >= _position(key):
                return
        with self._database.write() as db:
            _step(db, key.run_id, _position(key))
        self._database.checkpoint(whole=True)

    def forget(self) -> list[str]:
        """Delete the keys of all runs; return the runs. For a restored home, which may lack newer confirmations."""
        with self._database.write() as db:
            lost = list(db.scalars(select(secagg_runs.c.run_id).where(secagg_runs.c.state != GONE)))
            for run_id in lost:
                end_run(db, run_id)
        self._database.checkpoint(whole=bool(lost))
        return lost


# ---- inside the transactions of tasks --------------------------------------------------------------------------------


def enter_update(db: Connection, entry: OutboxEntry) -> None:
    """Record a task's update in a masked run, in the transaction of its outbox entry; do nothing in other runs.

    Raises SecaggError: E-RUN-49 if the task has an update already, E-RUN-50 if the set is confirmed, the round closed
    or the run's keys are gone.
    """
    run = _run(db, entry.key.run_id)
    if run is None:
        return
    if run.state != READY:
        raise _no_keys(entry.key.run_id)
    from privacy.secagg.silo_side import MaskedTaskRow

    before = _round(db, entry.key)
    if before is not None and before.object_digest:
        raise SecaggError(
            "E-RUN-49", f"{entry.key} has a masked update already, and may have only one: the second one is not sent"
        )
    if before is not None or _position(entry.key) < run.position:
        raise SecaggError("E-RUN-50", f"{entry.key} is sealed or closed: the update comes too late")
    base, mine = bytes.fromhex(entry.base_digest), bytes.fromhex(entry.object_digest)
    _put_round(db, entry.key, MaskedTaskRow(entry.key.kind.value, entry.key.round, base, mine))


def leave_round(db: Connection, key: TaskKey) -> bool:
    """Move the chains past a closed round, and delete its data; return whether the chains moved."""
    return _step(db, key.run_id, _position(key) + 1)


def end_run(db: Connection, run_id: str) -> bool:
    """Delete a run's keys and the data of its rounds; return whether it is masked. Its row stays, as `gone`."""
    _overwrite_deleted(db)
    secrets = dict.fromkeys(("agree", "sign", "keys_digest", "peers", "chains"))
    mine = secagg_runs.c.run_id == run_id
    masked = db.execute(update(secagg_runs).where(mine).values(state=GONE, entry=b"", **secrets)).rowcount > 0
    db.execute(delete(secagg_rounds).where(secagg_rounds.c.run_id == run_id))
    return masked


def is_masked(db: Connection, run_id: str) -> bool:
    return _run(db, run_id) is not None


def _step(db: Connection, run_id: str, position: int) -> bool:
    row = _run(db, run_id)
    if row is None or row.state != READY:
        return False
    terms, keys = MaskedRun.from_json(row.terms), _keys(row)
    if not keys.position < position <= terms.rounds + 2:  # the round is not in the run, or was passed before
        return False
    _overwrite_deleted(db)
    stepped = {"chains": b"".join(keys.at(position).chains), "position": position}
    db.execute(update(secagg_runs).where(secagg_runs.c.run_id == run_id).values(**stepped))
    past = secagg_rounds.c.run_id == run_id, secagg_rounds.c.round + 1 < position
    db.execute(delete(secagg_rounds).where(*past))
    return True


def _overwrite_deleted(db: Connection) -> None:
    db.exec_driver_sql("PRAGMA secure_delete = ON")


def _position(key: TaskKey) -> int:
    """Return the position of a task's keys in the chains, as `Round.position`."""
    return 0 if key.kind.census else key.round + 1


def _run(db: Connection, run_id: str) -> Row[Any] | None:
    return db.execute(select(secagg_runs).where(secagg_runs.c.run_id == run_id)).first()


def _keys(row: Row[Any]) -> RunKeys:
    peers, chains = _split(row.peers), _split(row.chains)
    return RunKeys(row.place, bytes(row.keys_digest), bytes(row.sign), peers, chains, row.position)


def _split(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % SECRET:
        raise StateError("E-STATE-22", f"expected keys of {SECRET} bytes, found {len(joined)} bytes: restore the home")
    return tuple(joined[at : at + SECRET] for at in range(0, len(joined), SECRET))


def _this(key: TaskKey) -> dict[str, object]:
    return {"run_id": key.run_id, "kind": key.kind.value, "round": key.round}


def _round(db: Connection, key: TaskKey) -> MaskedTaskRow | None:
    from privacy.secagg.silo_side import MaskedTaskRow

    mine = (secagg_rounds.c[name] == value for name, value in _this(key).items())
    row = db.execute(select(secagg_rounds).where(*mine)).first()
    if row is None:
        return None
    inside: Sequence[int] = json.loads(row.inside)
    digests = bytes(row.base_digest), bytes(row.object_digest), bytes(row.seal_hash)
    return MaskedTaskRow(row.kind, row.round, *digests, tuple(inside))


def _put_round(db: Connection, key: TaskKey, row: MaskedTaskRow) -> None:
    values = {
        "base_digest": row.base_digest,
        "object_digest": row.object_digest,
        "seal_hash": row.seal_hash,
        "inside": json.dumps(row.inside),
    }
    written = upsert(secagg_rounds).values(**_this(key), **values)
    db.execute(written.on_conflict_do_update(index_elements=["run_id", "kind", "round"], set_=values))


def _no_keys(run_id: str) -> SecaggError:
    return SecaggError(
        "E-RUN-50",
        f"this hospital has no keys of run {run_id}: the run has ended here, or the hospital's service was restored "
        "from a backup or set up again. It can take part in the next run; ask the lead for one from the last model",
    )
