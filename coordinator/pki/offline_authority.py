"""An authority whose key is on another machine than the service: the files that are carried between them.

The authority's home keeps the list of members and signs; the service can revoke a member, not add or renew one.
"""

from __future__ import annotations

from pathlib import Path

from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership
from coordinator.storage.records import Certificate
from coordinator.storage.store import Store
from fl_core.errors import RefusedError
from service_core.pki.identity import certificate_fingerprint, colons, identity_of
from service_core.pki.offline_signing import Admission, SigningRequest
from service_core.pki.roster import Member, Roster, SignedRoster


def sign(authority: Authority, members: Membership, name: str, request: SigningRequest) -> Admission:
    """Certify the key of a request as silo `name`; see `Membership.certify`."""
    made = members.certify(name, request.csr_pem, request.proof)
    return export_roster(authority, members, made.pem.encode())


def export_roster(authority: Authority, members: Membership, certificate_pem: bytes = b"") -> Admission:
    return Admission(authority.addresses, authority.ca_pem, SignedRoster.unpack(members.roster()), certificate_pem)


def import_roster(home: Path, store: Store, answer: Admission) -> Roster:
    """Store the members and the roster of an admission in the service's home, and return the roster.

    Raises RefusedError: E-ID-10 when another authority signed it, E-ID-14 on an unsound roster or one older than the
    service's. Guarantees: a silo that was revoked here stays out until it has another certificate.
    """
    ours = Authority.open(home)
    theirs = certificate_fingerprint(answer.ca_pem)
    if theirs != ours.fingerprint():
        raise RefusedError(
            "E-ID-10",
            f"expected an admission of the authority {colons(ours.fingerprint())}, found one of {colons(theirs)}: "
            "it is for another consortium, or somebody put another authority in its place",
        )
    roster = answer.roster.verify(ours.ca_pem, ours.consortium)
    store.members.adopt(roster, answer.roster, [_certificate(member) for member in roster.members])
    return roster


def _certificate(member: Member) -> Certificate:
    peer = identity_of(member.certificate.encode())
    issued, until = peer.not_before.timestamp(), peer.not_after.timestamp()
    return Certificate(peer.serial, member.name, peer.fingerprint, member.certificate, issued, until, enrolled=False)
