"""Taking over a roster that was signed on another machine, inside a transaction of the member store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.records import Certificate
from coordinator.storage.schema import certificates, counters, revocations, rosters, silos
from fl_core.errors import RefusedError
from protos.pki.roster import Roster, SignedRoster

VERSION_OF_MEMBERSHIP = "roster"
"""The counter that grows with every change of the membership."""


def adopt(db: Connection, roster: Roster, signed: SignedRoster, held: Sequence[Certificate]) -> None:
    """Bring members, revocations and the signed roster in line with it; see `MemberStore.adopt`."""
    newest = db.execute(select(rosters).order_by(rosters.c.version.desc())).first()
    if newest is not None and (
        newest.version > roster.version or (newest.version == roster.version and newest.document != signed.document)
    ):
        raise RefusedError(
            "E-ID-14",
            f"expected a roster after version {newest.version}, found another one of version {roster.version}: "
            "take the newest (coordinator ca roster); the one in force stays",
        )
    for gone in roster.revoked:
        revoke_certificate(db, gone.serial, gone.name, gone.reason, datetime.fromisoformat(gone.at).timestamp())
    out = set(db.scalars(select(revocations.c.serial)).all())
    for member, made in zip(roster.members, held, strict=True):
        values = {c: getattr(made, c) for c in certificates.c.keys()}  # noqa: SIM118
        db.execute(upsert(certificates).values(**values).on_conflict_do_nothing())
        fresh = {
            "state": "revoked" if made.serial in out else "member",
            "serial": made.serial,
            "proofs": member.renewal_proof,
        }
        since = datetime.fromisoformat(member.since).timestamp()
        row = upsert(silos).values(name=member.name, since=since, software="", last_seen=0.0, **fresh)
        db.execute(row.on_conflict_do_update(index_elements=["name"], set_=fresh))
    names = [member.name for member in roster.members]
    db.execute(update(silos).where(silos.c.name.not_in(names)).values(state="revoked"))
    row = upsert(rosters).values(version=roster.version, document=signed.document, signature=signed.signature)
    db.execute(row.on_conflict_do_nothing())
    row = upsert(counters).values(name=VERSION_OF_MEMBERSHIP, value=roster.version)
    latest = func.max(counters.c.value, roster.version)
    db.execute(row.on_conflict_do_update(index_elements=["name"], set_={"value": latest}))


def revoke_certificate(db: Connection, serial: str, name: str, reason: str, now: float) -> bool:
    """Note a revocation; False when it was noted before."""
    row = upsert(revocations).values(serial=serial, name=name, reason=reason, at=now)
    return bool(db.execute(row.on_conflict_do_nothing()).rowcount)
