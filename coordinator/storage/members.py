"""The members: silos, leads, their certificates, invitations, revocations, and the signed rosters."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Integer, Table, delete, func, insert, literal_column, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.records import DataOffer, InvitationRow, IssuedCertificate, Lead, MembershipStatus, Silo
from coordinator.storage.schema import (
    alarms,
    certificates,
    counters,
    invitations,
    leads,
    revocations,
    rosters,
    row_values,
    silos,
)
from fl_core.errors import RefusedError
from service_core.pki.identity import PeerCertificate
from service_core.pki.roster import Revocation, Roster, SignedRoster
from service_core.storage.sqlite import Database, fetch_at_once

GRACE_S = 30.0
"""How long a certificate is still valid after its successor's first use, so that running calls can end."""
CLOCK_SKEW_S = 3600.0
"""A certificate issued this far in the future comes from a wrong clock, and does not count as a successor."""
_ISO = "%Y-%m-%dT%H:%M:%S+00:00"
_ALARM_EVERY_S = 60.0
_KEPT_ROSTERS = 8
_VERSION_COUNTER = "roster"
"""The counter that grows with every change of the membership."""


class MemberStore:
    """Silos, leads, certificates, invitations, revocations and rosters."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock
        self.leads = LeadStore(database, clock)

    def why_revoked(self, serial: str) -> str | None:
        """Return why a certificate, of any role, was revoked; None if it was not."""
        with self._db.read() as db:
            return why_revoked(db, serial)

    def membership_status(self, name: str, serial: str) -> MembershipStatus:
        """Return whether a certificate is revoked or renewed, and whether it belongs to a member of this name.

        Records the first use of a certificate in force. If it came by an invitation, all older certificates of that
        name are revoked: their key is lost. If it is a renewal, they end after a grace period.
        """
        with self._db.read() as db:
            reason = why_revoked(db, serial)
            mine = (certificates.c.serial == serial, certificates.c.name == name, silos.c.state == "member")
            row = db.execute(
                select(certificates.c.first_used, certificates.c.enrolled)
                .join(silos, silos.c.name == certificates.c.name)
                .where(*mine)
            ).first()
            renewed = None if row is None else renewed_at(db, certificates, serial, name, self._clock())
        if reason is not None or row is None:
            return MembershipStatus(reason, member=False)
        if renewed is not None:
            return MembershipStatus(None, member=True, renewed_at=renewed)
        if row.first_used is None:
            self._first_use(serial, name, bool(row.enrolled))
        return MembershipStatus(None, member=True)

    def in_force(self) -> Set[tuple[str, str]]:
        """Return names and serials of silos' certificates that are certainly in force; check all others one by one.

        A certificate whose successor is in use is left out, also within its grace period.
        """
        with self._db.read() as db:
            revoked = set(db.scalars(select(revocations.c.serial)))
            rows = db.execute(
                select(certificates.c.name, certificates.c.serial, certificates.c.first_used)
                .join(silos, silos.c.name == certificates.c.name)
                .where(silos.c.state == "member")
                .order_by(literal_column("certificates.rowid", Integer).desc())
            ).all()
        certified, superseded = set[tuple[str, str]](), set[str]()
        for row in rows:  # the newest first
            if row.name not in superseded and row.serial not in revoked:
                certified.add((row.name, row.serial))
            if row.first_used is not None:
                superseded.add(row.name)
        return certified

    def _first_use(self, serial: str, name: str, enrolled: bool) -> None:
        now = self._clock()
        with self._db.write() as db:
            db.execute(update(certificates).where(certificates.c.serial == serial).values(first_used=now))
            if not enrolled:
                return
            # SQLite numbers rows in order of insertion; two certificates may be of one second.
            rowid = select(literal_column("rowid", Integer)).select_from(certificates)
            mine = rowid.where(certificates.c.serial == serial).scalar_subquery()
            before = literal_column("certificates.rowid") < mine
            older = select(certificates.c.serial).where(certificates.c.name == name, before)
            reason = "replaced by a new enrolment"
            gone = [_revoke_certificate(db, s, name, reason, now) for s in db.scalars(older).all()]
            if any(gone):
                _bump(db)
            db.execute(delete(alarms).where(alarms.c.name == name))  # the hospital recovered its identity

    def is_invited(self, serial: str) -> bool:
        """Return whether an invitation is neither withdrawn nor expired; a used one counts, for its own key."""
        with self._db.read() as db:
            row = db.execute(select(invitations).where(invitations.c.serial == serial)).first()
            return row is not None and row.withdrawn is None and row.expires > self._clock()

    def is_member(self, name: str) -> bool:
        """Return whether a silo is enrolled and not revoked."""
        with self._db.read() as db:
            return db.scalar(select(silos.c.state).where(silos.c.name == name)) == "member"

    def member_names(self) -> Set[str]:
        """Return the silos that are enrolled and not revoked."""
        with self._db.read() as db:
            return set(db.scalars(select(silos.c.name).where(silos.c.state == "member")))

    # ---- alarms about identities ---------------------------------------------------------------------------------

    def raise_alarm(self, name: str, text: str) -> None:
        """Store an alarm for the lead, until that hospital enrols again; at most one per minute and name."""
        now = self._clock()
        with self._db.read() as db:
            last = db.scalar(select(alarms.c.at).where(alarms.c.name == name))
        if last is None or not 0 <= now - last < _ALARM_EVERY_S:
            with self._db.write() as db:
                row = upsert(alarms).values(name=name, at=now, text=text)
                db.execute(row.on_conflict_do_update(index_elements=["name"], set_={"at": now, "text": text}))

    def alarm(self, name: str) -> str:
        """Return a silo's alarm for the lead; empty if there is none."""
        with self._db.read() as db:
            return db.scalar(select(alarms.c.text).where(alarms.c.name == name)) or ""

    def alarms(self) -> dict[str, str]:
        """Return the alarms for the lead, by name."""
        with self._db.read() as db:
            return {row.name: row.text for row in db.execute(select(alarms.c.name, alarms.c.text))}

    # ---- silos -----------------------------------------------------------------------------------------------------

    def silo(self, name: str) -> Silo | None:
        with self._db.read() as db:
            return _silo(db, name, self._clock())

    def validation_only(self) -> Set[str]:
        """Return the silos that only evaluate models, by their invitation or their own declaration."""
        return {silo.name for silo in self.silos() if silo.validation_only or silo.data.validation_only}

    def silos(self) -> list[Silo]:
        """Return all silos, including revoked ones, by name."""
        with self._db.read() as db:
            now = self._clock()
            listed = [_to_silo(row, now) for row in fetch_at_once(db, _SILOS)]
        return sorted(listed, key=lambda silo: silo.name)

    def introduce(self, name: str, software: str, data: DataOffer) -> None:
        """Store a silo's declarations at the start of a session; unchanged ones are not written again."""
        silo = self.silo(name)
        if silo is not None and (silo.software, silo.data) == (software, data) and silo.last_seen:
            return
        with self._db.write() as db:
            values = {"software": software, "data": asdict(data), "last_seen": self._clock()}
            db.execute(update(silos).where(silos.c.name == name).values(**values))

    def mark_connected(self, names: Collection[str]) -> None:
        """Record that silos were connected until now."""
        with self._db.write() as db:
            db.execute(update(silos).where(silos.c.name.in_(names)).values(last_seen=self._clock()))

    def invite(self, invitation: InvitationRow) -> None:
        """Record an invitation; an older open one for the same name is withdrawn."""
        with self._db.write() as db:
            older = (
                invitations.c.name == invitation.name,
                invitations.c.used.is_(None),
                invitations.c.withdrawn.is_(None),
            )
            db.execute(update(invitations).where(*older).values(withdrawn=self._clock()))
            db.execute(insert(invitations).values(row_values(invitations, invitation)))

    def invitations(self) -> list[InvitationRow]:
        """Return the invitations that can still be used, soonest to expire first."""
        now = self._clock()
        is_open = (invitations.c.used.is_(None), invitations.c.withdrawn.is_(None), invitations.c.expires > now)
        with self._db.read() as db:
            rows = db.execute(select(invitations).where(*is_open).order_by(invitations.c.expires))
            return [InvitationRow(**row._mapping) for row in rows]

    def enrol(
        self,
        invitation: str,
        name: str,
        fingerprint: str,
        sign: Callable[[], IssuedCertificate],
        proofs: tuple[tuple[str, str], ...] = (),
    ) -> IssuedCertificate:
        """Use up an invitation for a key and return the certificate that `sign` makes for it.

        proofs: the chain by which other silos accept the new key if a member joins again.
        Guarantees: the same key gets the same certificate until its first use; of two keys that race for one invitation
        one gets a certificate.
        Raises RefusedError: E-ID-24 if the invitation was used up, E-ID-13 if it is unknown, withdrawn or expired.
        """
        now = self._clock()
        with self._db.write() as db:
            row = db.execute(select(invitations).where(invitations.c.serial == invitation)).first()
            if row is None or row.name != name or row.withdrawn is not None or row.expires <= now:
                raise RefusedError(
                    "E-ID-13",
                    f"there is no valid invitation for {name!r}: ask the lead for a new one",
                )
            if row.used is not None:
                certificate = db.execute(select(certificates).where(certificates.c.serial == row.certificate)).first()
                if row.fingerprint != fingerprint or certificate is None or certificate.first_used is not None:
                    raise RefusedError(
                        "E-ID-24",
                        f"the invitation for {name!r} was used already: if that was not this hospital, tell the lead "
                        "at once (coordinator revoke); otherwise ask for a new one",
                    )
                if certificate.issued <= now + CLOCK_SKEW_S:  # otherwise a clock was ahead: not valid for a long time
                    return IssuedCertificate(**certificate._mapping)
            made = sign()
            used = {"used": now, "fingerprint": fingerprint, "certificate": made.serial}
            db.execute(update(invitations).where(invitations.c.serial == invitation).values(**used))
            _certify(db, made, proofs, now)
            db.execute(update(silos).where(silos.c.name == name).values(validation_only=row.validation_only))
            return made

    def renew(self, made: IssuedCertificate, proofs: tuple[tuple[str, str], ...]) -> None:
        """Record a renewed certificate; older ones of the silo stay in force until its first use."""
        with self._db.write() as db:
            _certify(db, made, proofs, self._clock())

    def certificates_of(self, name: str) -> list[IssuedCertificate]:
        """Return all certificates of a silo."""
        with self._db.read() as db:
            return [
                IssuedCertificate(**row._mapping)
                for row in db.execute(select(certificates).where(certificates.c.name == name))
            ]

    def revoke(self, name: str, reason: str) -> bool:
        """Revoke a silo with its certificates and withdraw its open invitations; False if there is neither."""
        now = self._clock()
        still_open = (invitations.c.name == name, invitations.c.used.is_(None), invitations.c.withdrawn.is_(None))
        with self._db.write() as db:
            withdrawn = db.execute(update(invitations).where(*still_open).values(withdrawn=now)).rowcount
            if _silo(db, name, now) is None:
                return withdrawn > 0
            for serial in db.scalars(select(certificates.c.serial).where(certificates.c.name == name)).all():
                _revoke_certificate(db, serial, name, reason, now)
            db.execute(update(silos).where(silos.c.name == name).values(state="revoked"))
            _bump(db)
            return True

    def adopt(self, roster: Roster, signed: SignedRoster, issued: Sequence[IssuedCertificate]) -> None:
        """Store a roster that was signed on another machine. issued: the certificates of its members.

        A member whose certificate was revoked here stays revoked, and a silo that is not in the roster is revoked.
        Raises RefusedError (E-ID-14) if a later roster, or another of this version, is known.
        """
        with self._db.write() as db:
            newest = db.execute(select(rosters).order_by(rosters.c.version.desc())).first()
            same = newest is not None and (newest.version, newest.document) == (roster.version, signed.document)
            if newest is not None and newest.version >= roster.version and not same:
                raise RefusedError(
                    "E-ID-14",
                    f"the current roster has version {newest.version}, and this one has version {roster.version}: "
                    "use the newest (coordinator ca roster). The current one stays",
                )
            for gone in roster.revoked:
                at = datetime.fromisoformat(gone.at).timestamp()
                _revoke_certificate(db, gone.serial, gone.name, gone.reason, at)
            out = set(db.scalars(select(revocations.c.serial)).all())
            for member, made in zip(roster.members, issued, strict=True):
                db.execute(upsert(certificates).values(row_values(certificates, made)).on_conflict_do_nothing())
                state = "revoked" if made.serial in out else "member"
                since = datetime.fromisoformat(member.since).timestamp()
                _set_certificate(db, made, state, member.renewal_proof, since)
            names = [member.name for member in roster.members]
            db.execute(update(silos).where(silos.c.name.not_in(names)).values(state="revoked"))
            row = upsert(rosters).values(version=roster.version, document=signed.document, signature=signed.signature)
            db.execute(row.on_conflict_do_nothing())
            row = upsert(counters).values(name=_VERSION_COUNTER, value=roster.version)
            latest = func.max(counters.c.value, roster.version)
            db.execute(row.on_conflict_do_update(index_elements=["name"], set_={"value": latest}))

    def membership(self) -> tuple[int, list[Silo], list[Revocation]]:
        """Return the version of the membership, the silos in force and everything revoked, from one moment."""
        with self._db.read() as db:
            listed = [_to_silo(row, self._clock()) for row in fetch_at_once(db, _SILOS.order_by(silos.c.name))]
            gone = [
                Revocation(r.name, r.serial, r.reason, time.strftime(_ISO, time.gmtime(r.at)))
                for r in db.execute(select(revocations))
            ]
            return _version(db), [s for s in listed if not s.revoked], gone

    def roster(self) -> tuple[int, SignedRoster] | None:
        """Return the newest signed roster, with its version."""
        with self._db.read() as db:
            row = db.execute(select(rosters).order_by(rosters.c.version.desc())).first()
            return None if row is None else (row.version, SignedRoster(row.document, row.signature))

    def keep_roster(self, version: int, signed: SignedRoster) -> SignedRoster:
        """Store a signed roster and return the valid one: of two documents of one version, the first."""
        with self._db.write() as db:
            values = {"version": version, "document": signed.document, "signature": signed.signature}
            db.execute(upsert(rosters).values(**values).on_conflict_do_nothing())
            # Each roster lists all members: keeping all rosters would take space with the square of their number.
            db.execute(delete(rosters).where(rosters.c.version <= version - _KEPT_ROSTERS))
            row = db.execute(select(rosters).where(rosters.c.version == version)).one()
            return SignedRoster(row.document, row.signature)

    def version(self) -> int:
        """Return the version of the membership, which grows with every change."""
        with self._db.read() as db:
            return _version(db)


_SILOS = select(silos, *(c.label(f"certificate_{c.name}") for c in certificates.c)).join(
    certificates, certificates.c.serial == silos.c.serial
)


def why_revoked(db: Connection, serial: str) -> str | None:
    return db.scalar(select(revocations.c.reason).where(revocations.c.serial == serial))


def renewed_at(db: Connection, table: Table, serial: str, name: str, now: float) -> float | None:
    """Return since when a later certificate of this name is in use; None if none is, or for less than `GRACE_S`.

    table: `certificates` or `leads`.
    """
    # SQLite numbers rows in order of insertion; two certificates may be of one second.
    number = literal_column(f"{table.name}.rowid", Integer)
    mine = table.alias("mine")
    this_row = select(literal_column("mine.rowid", Integer)).select_from(mine).where(mine.c.serial == serial)
    later = (
        table.c.name == name,
        table.c.first_used.is_not(None),
        table.c.issued <= now + CLOCK_SKEW_S,
        number > this_row.scalar_subquery(),
    )
    since = db.scalar(select(func.min(table.c.first_used)).where(*later))
    return since if since is not None and not 0 <= now - since < GRACE_S else None


def _revoke_certificate(db: Connection, serial: str, name: str, reason: str, now: float) -> bool:
    """Record a revocation; False if it was recorded before."""
    row = upsert(revocations).values(serial=serial, name=name, reason=reason, at=now)
    return bool(db.execute(row.on_conflict_do_nothing()).rowcount)


def _silo(db: Connection, name: str, now: float) -> Silo | None:
    row = db.execute(_SILOS.where(silos.c.name == name)).mappings().first()
    return None if row is None else _to_silo(row, now)


def _to_silo(row: Mapping[Any, Any], now: float) -> Silo:
    """Read a silo; one last seen in the future, by a wrong clock, counts as never seen."""
    raw = row["data"]
    lists = ("shape", "classes", "holds", "metrics")  # the first rows of 0.1.0 lack the last two
    data = DataOffer(**raw | {name: tuple(raw.get(name, ())) for name in lists}) if raw else DataOffer()
    certificate = IssuedCertificate(**{c.name: row[f"certificate_{c.name}"] for c in certificates.c})
    proofs = tuple((previous, signature) for previous, signature in row["proofs"])
    facts = {name: row[name] for name in ("name", "since", "software", "last_seen")}
    if facts["last_seen"] > now + CLOCK_SKEW_S:
        facts["last_seen"] = 0.0
    facts["validation_only"] = bool(row["validation_only"])
    return Silo(revoked=row["state"] == "revoked", certificate=certificate, proofs=proofs, data=data, **facts)


def _certify(db: Connection, made: IssuedCertificate, proofs: tuple[tuple[str, str], ...], now: float) -> None:
    db.execute(insert(certificates).values(row_values(certificates, made)))
    _set_certificate(db, made, "member", proofs, now)
    _bump(db)


def _set_certificate(
    db: Connection, made: IssuedCertificate, state: str, proofs: Sequence[object], since: float
) -> None:
    """Give a silo its newest certificate, and add the silo if it is new. since: when a new silo joined."""
    changed = {"state": state, "serial": made.serial, "proofs": proofs}
    row = upsert(silos).values(name=made.name, since=since, software="", last_seen=0.0, **changed)
    db.execute(row.on_conflict_do_update(index_elements=["name"], set_=changed))


def _version(db: Connection) -> int:
    return db.scalar(select(counters.c.value).where(counters.c.name == _VERSION_COUNTER)) or 0


def _bump(db: Connection) -> None:
    row = upsert(counters).values(name=_VERSION_COUNTER, value=1)
    db.execute(row.on_conflict_do_update(index_elements=["name"], set_={"value": counters.c.value + 1}))


# ---- leads -----------------------------------------------------------------------------------------------------------


UNLISTED_BEFORE = "leads_unlisted_before"
"""When a database got its list of leads; before that, a certificate of the authority was enough."""


class LeadStore:
    """The leads of the consortium, including revoked ones."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def status(self, peer: PeerCertificate) -> MembershipStatus:
        """Return whether a lead's certificate is revoked, renewed, or in force; records its first use.

        A lead from before the list is added at its first call, unless its name is listed with another certificate.
        """
        name, now = peer.identity.name, self._clock()
        with self._db.read() as db:
            reason = why_revoked(db, peer.serial)
            row = db.execute(select(leads.c.first_used).where(leads.c.serial == peer.serial)).first()
            listed = db.execute(select(leads.c.serial).where(leads.c.name == name)).first() is not None
            unlisted_before = db.scalar(select(counters.c.value).where(counters.c.name == UNLISTED_BEFORE))
            renewed = None if row is None else renewed_at(db, leads, peer.serial, name, now)
        if reason is not None or renewed is not None:
            return MembershipStatus(reason, member=row is not None, renewed_at=renewed)
        if row is None:
            if listed or unlisted_before is None or peer.not_before.timestamp() > unlisted_before:
                return MembershipStatus(None, member=False)
            self.add(Lead.of(peer))
        if row is None or row.first_used is None:
            with self._db.write() as db:
                db.execute(update(leads).where(leads.c.serial == peer.serial).values(first_used=now))
        return MembershipStatus(None, member=True)

    def all(self) -> list[Lead]:
        """Return every certificate of the leads, by name, the oldest of a name first."""
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
        """List a certificate; one that is listed already is unchanged."""
        values = {c: getattr(lead, c) for c in leads.c.keys() if c != "number"}  # noqa: SIM118
        with self._db.write() as db:
            if db.execute(select(leads.c.serial).where(leads.c.serial == lead.serial)).first() is None:
                db.execute(insert(leads).values(**values))

    def revoke(self, name: str, reason: str) -> bool:
        """Revoke all certificates of a lead; False if none of this name is in force."""
        if not self.is_lead(name):
            return False
        now = self._clock()
        with self._db.write() as db:
            for serial in db.scalars(select(leads.c.serial).where(leads.c.name == name)).all():
                row = upsert(revocations).values(serial=serial, name=name, reason=reason, at=now)
                db.execute(row.on_conflict_do_nothing())
        return True
