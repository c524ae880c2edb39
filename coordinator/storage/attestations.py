"""Attestations of hospitals: the digest of their policy, and the head of their ledger with each update.

What the ledger has spent is sealed: only the hospital can read it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, delete, select
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.schema import attestations, contributions, policies
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage.sqlite import Database

_FIELDS = {
    "policy": "policy_digest",
    "seq": "ledger_seq",
    "head": "ledger_head",
    "sealed": "ledger_sealed",
    "restored": "ledger_restored",
}
"""The fields of a message, by column."""


class AttestationStore:
    """Newest policy digest of each silo, and the attestation of each update."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def of(self, contribution_id: str) -> pb.Attestation | None:
        with self._db.read() as db:
            row = db.execute(select(attestations).where(attestations.c.id == contribution_id)).first()
        return None if row is None else _message(row)

    def newest(self, silo: str) -> pb.Attestation | None:
        """Return the attestation of a silo's newest committed update."""
        committed = select(attestations).join(contributions, contributions.c.id == attestations.c.id)
        mine = committed.where(contributions.c.silo == silo, contributions.c.received.is_not(None))
        with self._db.read() as db:
            row = db.execute(mine.order_by(contributions.c.received.desc()).limit(1)).first()
        return None if row is None else _message(row)

    def newest_of_run(self, run_id: str) -> dict[str, tuple[int, pb.Attestation]]:
        """Return (round, attestation) of each silo's newest committed update of a run, by its name."""
        of_run = select(attestations, contributions.c.silo, contributions.c.round).join(
            contributions, contributions.c.id == attestations.c.id
        )
        mine = of_run.where(contributions.c.run_id == run_id, contributions.c.received.is_not(None))
        with self._db.read() as db:
            rows = db.execute(mine.order_by(contributions.c.received))
            return {row.silo: (row.round, _message(row)) for row in rows}

    def keep_policy(self, silo: str, digest: str) -> None:
        with self._db.read() as db:
            if db.scalar(select(policies.c.digest).where(policies.c.silo == silo)) == digest:
                return
        with self._db.write() as db:
            row = upsert(policies).values(silo=silo, digest=digest)
            db.execute(row.on_conflict_do_update(index_elements=["silo"], set_={"digest": digest}))

    def policies(self) -> dict[str, str]:
        """Return the digest of each silo's policy, by its name; empty when it has none."""
        with self._db.read() as db:
            return {row.silo: row.digest for row in db.execute(select(policies))}


def store_attestation(db: Connection, contribution_id: str, stated: pb.Attestation | None) -> None:
    """Store the attestation of an update, or delete an earlier one (None)."""
    if stated is None:
        db.execute(delete(attestations).where(attestations.c.id == contribution_id))
        return
    values = {column: getattr(stated, name) for column, name in _FIELDS.items()}
    row = upsert(attestations).values(id=contribution_id, **values)
    db.execute(row.on_conflict_do_update(index_elements=["id"], set_=values))


def _message(row: Row[Any]) -> pb.Attestation:
    return pb.Attestation(**{name: getattr(row, column) for column, name in _FIELDS.items()})
