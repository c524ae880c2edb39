"""Attestations of hospitals: the digest of their policy, and the end of their ledger with each update.

The ledger's spending is sealed: only the hospital can read it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.schema import contributions, policies
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage.sqlite import Database, fetch_at_once

_FIELDS = {
    "policy": "policy_digest",
    "seq": "ledger_seq",
    "head": "ledger_head",
    "restored": "ledger_restored",
    "sealed": "ledger_sealed",
}
"""The fields of a message, by column."""
_COMMITTED = contributions.c.received.is_not(None), contributions.c.policy.is_not(None)


class AttestationStore:
    """The newest policy digest of each silo, and the attestation of each update."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def of(self, contribution_id: str) -> pb.Attestation | None:
        """Return the part of an update's attestation that its receipt repeats, without the sealed figures."""
        stated = select(contributions).where(contributions.c.id == contribution_id, contributions.c.policy.is_not(None))
        with self._db.read() as db:
            row = db.execute(stated).first()
        return None if row is None else _message(row, sealed=bool(row.sealed_in_receipt))

    def newest(self, silo: str) -> pb.Attestation | None:
        """Return the attestation of a silo's newest committed update, with its sealed part."""
        mine = select(contributions).where(contributions.c.silo == silo, *_COMMITTED)
        with self._db.read() as db:
            row = db.execute(mine.order_by(contributions.c.received.desc()).limit(1)).first()
        return None if row is None else _message(row)

    def newest_of_run(self, run_id: str) -> dict[str, tuple[int, pb.Attestation]]:
        """Return (round, attestation) of each silo's newest committed update of a run, by its name."""
        mine = select(contributions).where(contributions.c.run_id == run_id, *_COMMITTED)
        with self._db.read() as db:
            rows = db.execute(mine.order_by(contributions.c.received))
            return {row.silo: (row.round, _message(row, sealed=False)) for row in rows}

    def keep_policy(self, silo: str, digest: str) -> None:
        with self._db.read() as db:
            if db.scalar(select(policies.c.digest).where(policies.c.silo == silo)) == digest:
                return
        with self._db.write() as db:
            row = upsert(policies).values(silo=silo, digest=digest)
            db.execute(row.on_conflict_do_update(index_elements=["silo"], set_={"digest": digest}))

    def policies(self) -> dict[str, str]:
        """Return the digest of each silo's policy, by its name; empty if it has none."""
        with self._db.read() as db:
            return {row["silo"]: row["digest"] for row in fetch_at_once(db, select(policies))}


def attested(stated: pb.Attestation | None, sealed: bytes = b"") -> dict[str, object]:
    """Return the columns of an update's attestation, or of its absence."""
    values = {column: None if stated is None else getattr(stated, name) for column, name in _FIELDS.items()}
    return values | {"sealed": values["sealed"] or sealed or None, "sealed_in_receipt": bool(values["sealed"])}


def drop_sealed(db: Connection, silo: str, but: str) -> None:
    """Delete the sealed figures of a silo's committed updates. but: its newest update, whose figures are still used."""
    others = contributions.c.silo == silo, contributions.c.sealed.is_not(None), contributions.c.id != but, *_COMMITTED
    db.execute(update(contributions).where(*others).values(sealed=None))


def _message(row: Row[Any], sealed: bool = True) -> pb.Attestation:
    names = {column: name for column, name in _FIELDS.items() if sealed or column != "sealed"}
    return pb.Attestation(**{name: getattr(row, column) for column, name in names.items()})
