"""Which leads there are: their certificates, in the order of their making."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.records import Lead, MembershipStatus
from coordinator.storage.schema import counters, leads, revocations
from coordinator.storage.succession import renewed_at, why_revoked
from protos.pki.identity import PeerCertificate
from protos.storage.sqlite import Database

UNLISTED_BEFORE = "leads_unlisted_before"
"""Counter that an older file has: when it was migrated. Leads that were certified before it may be in no list."""


class LeadStore:
    """The leads of the consortium, revoked ones included."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def status(self, peer: PeerCertificate) -> MembershipStatus:
        """Return whether a lead's certificate is revoked, renewed, or in force; records its first use.

        A lead of an older version's file, in no list, is listed when it first calls. One whose name is listed with
        another certificate is not in force.
        """
        name, now = peer.identity.name, self._clock()
        with self._db.read() as db:
            reason = why_revoked(db, peer.serial)
            held = db.execute(select(leads.c.first_used).where(leads.c.serial == peer.serial)).first()
            known = db.execute(select(leads.c.serial).where(leads.c.name == name)).first() is not None
            unlisted_before = db.scalar(select(counters.c.value).where(counters.c.name == UNLISTED_BEFORE))
            renewed = None if held is None else renewed_at(db, leads, peer.serial, name, now)
        if reason is not None or renewed is not None:
            return MembershipStatus(reason, member=held is not None, renewed_at=renewed)
        if held is None:
            if known or unlisted_before is None or peer.not_before.timestamp() > unlisted_before:
                return MembershipStatus(None, member=False)
            self.add(Lead.of(peer))
        if held is None or held.first_used is None:
            with self._db.write() as db:
                db.execute(update(leads).where(leads.c.serial == peer.serial).values(first_used=now))
        return MembershipStatus(None, member=True)

    def all(self) -> list[Lead]:
        """Return every certificate that a lead was given, by name, the oldest of a name first."""
        with self._db.read() as db:
            rows = db.execute(
                select(leads, revocations.c.reason.label("revoked"))
                .outerjoin(revocations, revocations.c.serial == leads.c.serial)
                .order_by(leads.c.name, leads.c.number)
            )
            return [Lead(**{k: v for k, v in row._mapping.items() if k != "number"}) for row in rows]

    def is_lead(self, name: str) -> bool:
        """Return whether a lead of this name is in force."""
        return any(lead.name == name and lead.revoked is None for lead in self.all())

    def add(self, lead: Lead) -> None:
        """List a certificate; one that is listed already stays as it is."""
        values = {c: getattr(lead, c) for c in leads.c.keys() if c != "number"}  # noqa: SIM118
        with self._db.write() as db:
            if db.execute(select(leads.c.serial).where(leads.c.serial == lead.serial)).first() is None:
                db.execute(insert(leads).values(**values))

    def revoke(self, name: str, reason: str) -> bool:
        """Revoke all certificates of a lead; False when none of this name is in force."""
        if not self.is_lead(name):
            return False
        now = self._clock()
        with self._db.write() as db:
            for serial in db.scalars(select(leads.c.serial).where(leads.c.name == name)).all():
                row = upsert(revocations).values(serial=serial, name=name, reason=reason, at=now)
                db.execute(row.on_conflict_do_nothing())
        return True
