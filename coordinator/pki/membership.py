"""Invitations, enrolment, renewal, revocation and the signed roster; several processes may use it at once.

If the authority's key is on another machine, that machine keeps the list of members and signs; the service can revoke a
member, but not add or renew one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.pki.authority import Authority, Invitation
from coordinator.storage.members import CLOCK_SKEW_S
from coordinator.storage.records import InvitationRow, IssuedCertificate, Silo
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ConfigError, RefusedError, StateError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki import certificates
from service_core.pki.certificates import Clock, utc_now
from service_core.pki.identity import (
    PeerCertificate,
    certificate_fingerprint,
    check_name,
    format_fingerprint,
    identity_of,
)
from service_core.pki.offline_signing import Admission, SigningRequest
from service_core.pki.roster import RenewalLink, Roster, RosterMember, SignedRoster, renewal_link

log = logging.getLogger(__name__)
_KEPT_PROOFS = 32
"""Renewals per silo that the roster proves, five years' worth; frequent renewals do not make it longer."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The consortium's members. The authority's key is read only to sign."""

    home: Path
    store: CoordinatorStore
    clock: Clock = utc_now

    def invite(self, name: str, lifetime: timedelta | None = None, validation_only: bool = False) -> Invitation:
        """Issue an invitation for a silo; an older open one for that name is withdrawn.

        validation_only: the invited silo evaluates models and is never asked to train.

        Raises ConfigError (E-ID-30) for the name of a lead.
        """
        self._require_no_lead(name)
        made = self._authority().invite(name, lifetime)
        now = self.clock().timestamp()
        self.store.members.invite(
            InvitationRow(made.serial, name, now, made.expires.timestamp(), validation_only=validation_only)
        )
        return made

    def _require_no_lead(self, name: str) -> None:
        if self.store.members.leads.is_lead(name):
            raise ConfigError("E-ID-30", f"{name!r} is the name of a lead: choose another")

    def revoke(self, name: str, reason: str) -> None:
        """Revoke a silo or withdraw an invitation, from the next call on; raises ConfigError (E-RUN-10).

        The silo's open streams end within seconds.
        """
        if not self.store.members.revoke(name, reason):
            names = ", ".join(s.name for s in self.store.members.silos()) or "none"
            raise ConfigError("E-RUN-10", f"no hospital {name!r} is enrolled. Enrolled: {names}")

    def join(self, peer: PeerCertificate, csr_pem: bytes, proof: bytes = b"") -> pb.Membership:
        """Certify the key of an invited silo's request; see `MemberStore.enrol`.

        proof: the signature of a member's newest key over the next one, if it joins again. The roster contains it, so
        that other silos accept the new key; without it they ask for consent. A revoked key proves nothing.
        Raises RefusedError (E-ID-13) if the proof is not by the newest key of this member.
        """
        authority, name = self._authority(), peer.identity.name
        public = certificates.public_key(certificates.load_request(csr_pem))
        made = self.store.members.enrol(
            peer.serial,
            name,
            certificates.fingerprint_of(public),
            lambda: self._record(authority.sign_silo(csr_pem, name), enrolled=True),
            self._succession(name, public, proof),
        )
        answer, silo = self._membership(authority, made), self.store.members.silo(name)
        answer.validation_only = silo is not None and silo.validation_only
        return answer

    def _succession(self, name: str, public: ec.EllipticCurvePublicKey, proof: bytes) -> tuple[tuple[str, str], ...]:
        """Return the chain of proofs to a member's next key; empty if its key was compromised."""
        silo = self.store.members.silo(name)
        if silo is None or silo.revoked:
            return ()
        if silo.certificate.fingerprint == certificates.fingerprint_of(public):
            return silo.proofs  # certified before, but the answer was lost
        if not proof:
            return ()
        old = certificates.load_certificate(silo.certificate.pem.encode(), "the store")
        message = certificates.renewal_message(identity_of(old).identity, public)
        if not certificates.verify(certificates.public_key(old), certificates.RENEWAL, message, proof):
            if any(_signed_by(certificate, message, proof) for certificate in self.store.members.certificates_of(name)):
                log.warning(
                    "%s enrols with an older key: its newest one is not trusted, so the other silos will ask "
                    "for consent",
                    name,
                )
                return ()
            raise RefusedError(
                "E-ID-13",
                f"the proof is not signed with the newest key of {name!r}, {silo.certificate.fingerprint[:16]}...: "
                "join in an empty home, as if the key were lost. The other silos then ask for consent",
            )
        return (*silo.proofs, renewal_link(old, proof))[-_KEPT_PROOFS:]

    def renew(self, peer: PeerCertificate, csr_pem: bytes, proof: bytes) -> pb.Membership:
        """Certify a silo's next key; a key that was certified before gets the same certificate.

        A certificate dated in the future by a wrong clock is made again for the same key. Raises RefusedError: E-ID-13
        without the old key's proof, E-ID-28 if another key was certified as the successor.
        """
        authority, name = self._authority(), peer.identity.name
        key = certificates.fingerprint_of(certificates.public_key(certificates.load_request(csr_pem)))
        silo = self.store.members.silo(name)
        if silo is None:
            raise RefusedError("E-ID-13", f"expected a member of the consortium, found {peer.identity}")
        newest = silo.certificate
        if newest.fingerprint == key and newest.serial != peer.serial:
            if newest.issued > self.clock().timestamp() + CLOCK_SKEW_S:
                newest = self._record(authority.sign_silo(csr_pem, name), enrolled=False)
                self.store.members.renew(newest, silo.proofs)
            return self._membership(authority, newest)
        if newest.fingerprint != peer.fingerprint:
            error = RefusedError(
                "E-ID-28",
                f"only the newest key of {name!r} can be renewed, and this is an older one: somebody renewed this "
                f"identity on {datetime.fromtimestamp(newest.issued, UTC):%Y-%m-%d %H:%M} UTC. If that was not this "
                f"hospital, somebody else has its key: tell the lead at once; `coordinator invite {name} --again` "
                "and `silo join --again` lock the other one out",
            )
            self.store.members.raise_alarm(name, str(error))
            raise error
        pem = authority.renew(csr_pem, silo.certificate.pem.encode(), proof)
        old = certificates.load_certificate(silo.certificate.pem.encode(), "the store")
        made = self._record(pem, enrolled=False)
        self.store.members.renew(made, (*silo.proofs, renewal_link(old, proof))[-_KEPT_PROOFS:])
        return self._membership(authority, made)

    def certify(self, name: str, csr_pem: bytes, proof: bytes) -> IssuedCertificate:
        """Certify a silo whose request came as a file; the same key gets the same certificate.

        Raises ConfigError (E-ID-30) for another key of a member without the proof of the one in force, RefusedError
        (E-ID-13) for a proof by another key.
        """
        authority, silo = self._authority(), self.store.members.silo(check_name(name))
        self._require_no_lead(name)
        public = certificates.public_key(certificates.load_request(csr_pem))
        if silo is not None and not silo.revoked:
            if silo.certificate.fingerprint == certificates.fingerprint_of(public):
                return silo.certificate
            if not proof:
                raise ConfigError(
                    "E-ID-30",
                    f"{name!r} is a member already, and the request has a new key without a proof from the current "
                    f"key: make the request in that silo's home. If that home is lost: coordinator revoke {name}",
                )
        proofs = self._succession(name, public, proof)
        made = self._record(authority.sign_silo(csr_pem, name), enrolled=False)
        self.store.members.renew(made, proofs)
        return made

    def roster(self, seen: int = 0) -> bytes:
        """Return the newest signed roster, packed; empty if the other side has this version."""
        version = self.store.members.version()
        if version <= seen:
            return b""
        signed = self._signed(version)
        return b"" if signed is None else signed.pack()

    def _signed(self, version: int) -> SignedRoster | None:
        kept = self.store.members.roster()
        if kept is not None and kept[0] >= version:
            return kept[1]
        now, silos, revoked = self.store.members.membership()
        try:
            signed = self._authority().roster([roster_member(s) for s in silos], revoked, now)
        except StateError:
            if kept is None:
                raise
            return kept[1]  # the authority is on another machine: its newest roster stays in force
        return self.store.members.keep_roster(now, signed)

    def _membership(self, authority: Authority, made: IssuedCertificate) -> pb.Membership:
        return pb.Membership(
            certificate_pem=made.pem.encode(), authority_pem=authority.ca_pem, signed_roster=self.roster()
        )

    def _record(self, pem: bytes, enrolled: bool) -> IssuedCertificate:
        peer = identity_of(pem)
        now, until = self.clock().timestamp(), peer.not_after.timestamp()
        return IssuedCertificate(peer.serial, peer.identity.name, peer.fingerprint, pem.decode(), now, until, enrolled)

    def _authority(self) -> Authority:
        return Authority.open(self.home, self.clock)


def _signed_by(certificate: IssuedCertificate, message: bytes, proof: bytes) -> bool:
    public = certificates.public_key(certificates.load_certificate(certificate.pem.encode(), "the store"))
    return certificates.verify(public, certificates.RENEWAL, message, proof)


def roster_member(silo: Silo) -> RosterMember:
    since = datetime.fromtimestamp(silo.since, UTC).isoformat(timespec="seconds")
    return RosterMember.of(silo.certificate.pem.encode(), since, tuple(RenewalLink(*link) for link in silo.proofs))


# ---- an authority whose key is on another machine: the files that are carried between them ---------------------------


def sign_request(authority: Authority, members: Membership, name: str, request: SigningRequest) -> Admission:
    """Certify the key of a request as silo `name`; see `Membership.certify`."""
    made = members.certify(name, request.csr_pem, request.proof)
    return export_roster(authority, members, made.pem.encode())


def export_roster(authority: Authority, members: Membership, certificate_pem: bytes = b"") -> Admission:
    return Admission(authority.addresses, authority.ca_pem, SignedRoster.unpack(members.roster()), certificate_pem)


def import_roster(home: Path, store: CoordinatorStore, answer: Admission) -> Roster:
    """Store the members and the roster of an admission in the service's home, and return the roster.

    Raises RefusedError: E-ID-10 if another authority signed it, E-ID-14 on an invalid roster or one older than the
    service's. Guarantees: a silo that was revoked here stays revoked until it has another certificate.
    """
    ours = Authority.open(home)
    theirs = certificate_fingerprint(answer.ca_pem)
    if theirs != ours.fingerprint():
        raise RefusedError(
            "E-ID-10",
            f"the admission was signed by the authority {format_fingerprint(theirs)}, but this consortium has "
            f"{format_fingerprint(ours.fingerprint())}: it is for another consortium, or somebody replaced the "
            "authority",
        )
    roster = answer.roster.verify(ours.ca_pem, ours.consortium)
    store.members.adopt(roster, answer.roster, [_certificate(member) for member in roster.members])
    return roster


def _certificate(member: RosterMember) -> IssuedCertificate:
    peer = identity_of(member.certificate.encode())
    issued, until = peer.not_before.timestamp(), peer.not_after.timestamp()
    return IssuedCertificate(
        peer.serial, member.name, peer.fingerprint, member.certificate, issued, until, enrolled=False
    )
