"""Who may take part: silos, their certificates, invitations, revocations, and the rosters that were signed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy import Connection, Integer, RowMapping, func, insert, literal_column, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coordinator.storage.records import Certificate, DataOffer, InvitationRow, MembershipStatus, Silo
from coordinator.storage.schema import certificates, counters, invitations, revocations, rosters, silos
from fl_core.errors import RefusedError
from protos.pki.roster import Revocation, Roster, SignedRoster
from protos.storage.sqlite import Database

_VERSION_COUNTER = "roster"
"""The counter that grows with every change of the membership."""


class MemberStore:
    """Silos, certificates, invitations, revocations and rosters."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    # ---- who is calling --------------------------------------------------------------------------------------------

    def why_revoked(self, serial: str) -> str | None:
        """Return the reason for which a certificate, of whatever role, was revoked; None when it was not."""
        with self._db.read() as db:
            return _why_revoked(db, serial)

    def membership_status(self, name: str, serial: str) -> MembershipStatus:
        """Return whether a certificate is revoked, and whether it was given to a silo of this name that is a member.

        Records that a certificate in force is in use. The first use of one that came by an invitation ends all older
        ones of that name: their key is lost.
        """
        with self._db.read() as db:
            reason = _why_revoked(db, serial)
            mine = (certificates.c.serial == serial, certificates.c.name == name, silos.c.state == "member")
            held = db.execute(
                select(certificates.c.first_used, certificates.c.enrolled)
                .join(silos, silos.c.name == certificates.c.name)
                .where(*mine)
            ).first()
        if reason is not None or held is None:
            return MembershipStatus(reason, member=False)
        if held.first_used is None:
            self._first_use(serial, name, bool(held.enrolled))
        return MembershipStatus(None, member=True)

    def _first_use(self, serial: str, name: str, enrolled: bool) -> None:
        now = self._clock()
        with self._db.write() as db:
            db.execute(update(certificates).where(certificates.c.serial == serial).values(first_used=now))
            if not enrolled:
                return
            # SQLite numbers rows in the order of their making; two certificates may be of one second.
            mine = (
                select(literal_column("rowid", Integer))
                .select_from(certificates)
                .where(certificates.c.serial == serial)
            )
            before = literal_column("certificates.rowid") < mine.scalar_subquery()
            older = select(certificates.c.serial).where(certificates.c.name == name, before)
            gone = [
                _revoke_certificate(db, s, name, "replaced by a new enrolment", now) for s in db.scalars(older).all()
            ]
            if any(gone):
                _bump(db)

    def is_invited(self, serial: str) -> bool:
        """Return whether an invitation is neither withdrawn nor expired; a used one counts, for its own key."""
        with self._db.read() as db:
            row = db.execute(select(invitations).where(invitations.c.serial == serial)).first()
            return row is not None and row.withdrawn is None and row.expires > self._clock()

    def is_member(self, name: str) -> bool:
        """Return whether a silo is enrolled and not revoked."""
        with self._db.read() as db:
            return db.scalar(select(silos.c.state).where(silos.c.name == name)) == "member"

    # ---- silos -----------------------------------------------------------------------------------------------------

    def silo(self, name: str) -> Silo | None:
        """Return a silo by name, revoked or not."""
        with self._db.read() as db:
            return _silo(db, name)

    def silos(self) -> list[Silo]:
        """Return all silos, revoked ones included, by name."""
        with self._db.read() as db:
            return [_to_silo(row._mapping) for row in db.execute(_SILOS.order_by(silos.c.name))]

    def introduce(self, name: str, software: str, data: DataOffer) -> None:
        """Store what a silo declares when a session begins."""
        offer = {"name": data.name, "shape": data.shape, "classes": data.classes, "nominal_size": data.nominal_size}
        with self._db.write() as db:
            values = {"software": software, "data": offer, "last_seen": self._clock()}
            db.execute(update(silos).where(silos.c.name == name).values(**values))

    def seen(self, name: str) -> None:
        """Record that a silo was connected until now."""
        with self._db.write() as db:
            db.execute(update(silos).where(silos.c.name == name).values(last_seen=self._clock()))

    # ---- invitations and certificates ------------------------------------------------------------------------------

    def invite(self, invitation: InvitationRow) -> None:
        """Record an invitation; an older open one for the same name is withdrawn."""
        with self._db.write() as db:
            older = (
                invitations.c.name == invitation.name,
                invitations.c.used.is_(None),
                invitations.c.withdrawn.is_(None),
            )
            db.execute(update(invitations).where(*older).values(withdrawn=self._clock()))
            values = {c: getattr(invitation, c) for c in invitations.c.keys()}  # noqa: SIM118
            db.execute(insert(invitations).values(**values))

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
        sign: Callable[[], Certificate],
        proofs: tuple[tuple[str, str], ...] = (),
    ) -> Certificate:
        """Use up an invitation for a key and return the certificate that `sign` makes for it.

        proofs: the chain by which the other silos can follow a member that joins again to this key.
        Guarantees: for the same key the same certificate comes back until it is first used; of two keys that race for
        one invitation one gets a certificate.
        Raises RefusedError: E-ID-24 when the invitation was used up, E-ID-13 when it is unknown, withdrawn or expired.
        """
        now = self._clock()
        with self._db.write() as db:
            row = db.execute(select(invitations).where(invitations.c.serial == invitation)).first()
            if row is None or row.name != name or row.withdrawn is not None or row.expires <= now:
                raise RefusedError(
                    "E-ID-13", f"expected an invitation for {name!r} in force, found none: ask the lead for a new one"
                )
            if row.used is not None:
                held = db.execute(select(certificates).where(certificates.c.serial == row.certificate)).first()
                if row.fingerprint == fingerprint and held is not None and held.first_used is None:
                    return Certificate(**held._mapping)
                raise RefusedError(
                    "E-ID-24",
                    f"the invitation for {name!r} was used already: if that was not this hospital, tell the lead at "
                    "once (coordinator revoke); otherwise ask for a new one",
                )
            made = sign()
            used = {"used": now, "fingerprint": fingerprint, "certificate": made.serial}
            db.execute(update(invitations).where(invitations.c.serial == invitation).values(**used))
            _certify(db, made, proofs, now)
            return made

    def renew(self, made: Certificate, proofs: tuple[tuple[str, str], ...]) -> None:
        """Record a renewed certificate; older ones of the silo stay valid until they expire."""
        with self._db.write() as db:
            _certify(db, made, proofs, self._clock())

    def certificate_of_key(self, name: str, fingerprint: str) -> Certificate | None:
        """Return the newest certificate that a silo holds for a key."""
        mine = (certificates.c.name == name, certificates.c.fingerprint == fingerprint)
        with self._db.read() as db:
            row = db.execute(select(certificates).where(*mine).order_by(certificates.c.issued.desc())).first()
            return None if row is None else Certificate(**row._mapping)

    def revoke(self, name: str, reason: str) -> bool:
        """Revoke a silo with all its certificates and withdraw its open invitations, at once.

        Returns False when there is neither a silo nor an open invitation of this name.
        """
        now = self._clock()
        still_open = (invitations.c.name == name, invitations.c.used.is_(None), invitations.c.withdrawn.is_(None))
        with self._db.write() as db:
            withdrawn = db.execute(update(invitations).where(*still_open).values(withdrawn=now)).rowcount
            if _silo(db, name) is None:
                return withdrawn > 0
            for serial in db.scalars(select(certificates.c.serial).where(certificates.c.name == name)).all():
                _revoke_certificate(db, serial, name, reason, now)
            db.execute(update(silos).where(silos.c.name == name).values(state="revoked"))
            _bump(db)
            return True

    def adopt(self, roster: Roster, signed: SignedRoster, held: Sequence[Certificate]) -> None:
        """Take over a roster that was signed on another machine. held: the certificates of its members.

        A member whose certificate was revoked here stays revoked, and who is not in the roster is revoked.
        Raises RefusedError (E-ID-14) when a later roster, or another of this version, is known.
        """
        with self._db.write() as db:
            newest = db.execute(select(rosters).order_by(rosters.c.version.desc())).first()
            if newest is not None and (
                newest.version > roster.version
                or (newest.version == roster.version and newest.document != signed.document)
            ):
                raise RefusedError(
                    "E-ID-14",
                    f"expected a roster after version {newest.version}, found another one of version {roster.version}: "
                    "take the newest (coordinator ca roster); the one in force stays",
                )
            for gone in roster.revoked:
                _revoke_certificate(
                    db, gone.serial, gone.name, gone.reason, datetime.fromisoformat(gone.at).timestamp()
                )
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
            row = upsert(counters).values(name=_VERSION_COUNTER, value=roster.version)
            latest = func.max(counters.c.value, roster.version)
            db.execute(row.on_conflict_do_update(index_elements=["name"], set_={"value": latest}))

    # ---- the roster ------------------------------------------------------------------------------------------------

    def membership(self) -> tuple[int, list[Silo], list[Revocation]]:
        """Return the version of the membership, the silos in force and everything revoked, as of one moment."""
        with self._db.read() as db:
            found = [_to_silo(row._mapping) for row in db.execute(_SILOS.order_by(silos.c.name))]
            gone = [Revocation(r.name, r.serial, r.reason, _iso(r.at)) for r in db.execute(select(revocations))]
            return _version(db), [s for s in found if not s.revoked], gone

    def roster(self) -> tuple[int, SignedRoster] | None:
        """Return the newest roster that was signed, with its version."""
        with self._db.read() as db:
            row = db.execute(select(rosters).order_by(rosters.c.version.desc())).first()
            return None if row is None else (row.version, SignedRoster(row.document, row.signature))

    def keep_roster(self, version: int, signed: SignedRoster) -> SignedRoster:
        """Store a signed roster and return the one that counts: of two documents of one version, the first."""
        with self._db.write() as db:
            values = {"version": version, "document": signed.document, "signature": signed.signature}
            db.execute(upsert(rosters).values(**values).on_conflict_do_nothing())
            row = db.execute(select(rosters).where(rosters.c.version == version)).one()
            return SignedRoster(row.document, row.signature)

    def version(self) -> int:
        """Return the version of the membership: it grows with every change."""
        with self._db.read() as db:
            return _version(db)


_SILOS = select(silos, *(c.label(f"certificate_{c.name}") for c in certificates.c)).join(
    certificates, certificates.c.serial == silos.c.serial
)


def _why_revoked(db: Connection, serial: str) -> str | None:
    return db.scalar(select(revocations.c.reason).where(revocations.c.serial == serial))


def _revoke_certificate(db: Connection, serial: str, name: str, reason: str, now: float) -> bool:
    """Record a revocation; False when it was recorded before."""
    row = upsert(revocations).values(serial=serial, name=name, reason=reason, at=now)
    return bool(db.execute(row.on_conflict_do_nothing()).rowcount)


def _silo(db: Connection, name: str) -> Silo | None:
    row = db.execute(_SILOS.where(silos.c.name == name)).first()
    return None if row is None else _to_silo(row._mapping)


def _to_silo(row: RowMapping) -> Silo:
    raw = row["data"]
    data = (
        DataOffer()
        if raw is None
        else DataOffer(raw["name"], tuple(raw["shape"]), tuple(raw["classes"]), raw["nominal_size"])
    )
    held = Certificate(**{c: row[f"certificate_{c}"] for c in certificates.c.keys()})  # noqa: SIM118
    proofs = tuple((previous, signature) for previous, signature in row["proofs"])
    return Silo(
        row["name"], row["state"] == "revoked", held, row["since"], proofs, row["software"], data, row["last_seen"]
    )


def _certify(db: Connection, made: Certificate, proofs: tuple[tuple[str, str], ...], now: float) -> None:
    db.execute(insert(certificates).values(**{c: getattr(made, c) for c in certificates.c.keys()}))  # noqa: SIM118
    fresh = {"state": "member", "serial": made.serial, "proofs": proofs}
    row = upsert(silos).values(name=made.name, since=now, software="", last_seen=0.0, **fresh)
    db.execute(row.on_conflict_do_update(index_elements=["name"], set_=fresh))
    _bump(db)


def _version(db: Connection) -> int:
    return int(
        db.scalar(select(func.coalesce(func.max(counters.c.value), 0)).where(counters.c.name == _VERSION_COUNTER)) or 0
    )


def _bump(db: Connection) -> None:
    row = upsert(counters).values(name=_VERSION_COUNTER, value=1)
    db.execute(row.on_conflict_do_update(index_elements=["name"], set_={"value": counters.c.value + 1}))


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(at))
