"""The roster: the members of the consortium, signed by its CA, so that silos need not trust the service.

Canonical JSON (sorted keys, no blanks, ASCII) and an ECDSA-SHA256 signature over those bytes. A member with a new key
has a chain of renewals: each old key's signature over the next key. Silos that pinned an older key follow the chain,
which the service cannot forge.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_core.errors import FederationError, ProtocolError, RefusedError
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, identity_of, parse_certificate

FORMAT = "consilium.roster.v1"
_ENTRIES = {"format", "consortium", "version", "issued_at", "members", "revoked"}


class RenewalLink(NamedTuple):
    """One change of keys: the old key (SPKI, base64) and its signature (base64) over the key that followed."""

    previous: str
    signature: str


@dataclass(frozen=True, slots=True)
class RosterMember:
    """A current member. fingerprint: SHA-256 of the public key (SPKI), hex. since: ISO 8601, UTC."""

    name: str
    fingerprint: str
    certificate: str
    since: str
    renewal_proof: tuple[RenewalLink, ...] = ()

    @classmethod
    def of(cls, cert_pem: bytes, since: str, renewal_proof: tuple[RenewalLink, ...] = ()) -> RosterMember:
        peer = identity_of(cert_pem)
        return cls(peer.identity.name, peer.fingerprint, cert_pem.decode(), since, renewal_proof)


@dataclass(frozen=True, slots=True)
class Revocation:
    """A revoked certificate. serial: hex. at: ISO 8601, UTC."""

    name: str
    serial: str
    reason: str
    at: str


@dataclass(frozen=True, slots=True)
class Roster:
    """All current members and all revocations, at one version."""

    consortium: str
    version: int
    issued_at: str
    members: tuple[RosterMember, ...]
    revoked: tuple[Revocation, ...] = ()

    def canonical(self) -> bytes:
        """Return the bytes that are signed; they do not depend on the order of entries."""
        document = {
            "format": FORMAT,
            "consortium": self.consortium,
            "version": self.version,
            "issued_at": self.issued_at,
            "members": [
                asdict(m) | {"renewal_proof": [link._asdict() for link in m.renewal_proof]}
                for m in sorted(self.members, key=lambda m: m.name)
            ],
            "revoked": [asdict(r) for r in sorted(self.revoked, key=lambda r: (r.at, r.serial))],
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


class SignedRoster(NamedTuple):
    """A roster as it is sent: the canonical bytes and the CA's signature over them (DER)."""

    document: bytes
    signature: bytes

    @classmethod
    def issue(cls, roster: Roster, ca_key: ec.EllipticCurvePrivateKey) -> SignedRoster:
        document = roster.canonical()
        return cls(document, ca_key.sign(document, ec.ECDSA(hashes.SHA256())))

    def pack(self) -> bytes:
        """Serialize for messages and files: JSON with `document` and `signature` in base64."""
        raw = {name: base64.b64encode(part).decode() for name, part in self._asdict().items()}
        return json.dumps(raw, sort_keys=True).encode()

    @classmethod
    def unpack(cls, raw: bytes | str) -> SignedRoster:
        """Parse what `pack` returned; raises ProtocolError (E-WIRE-06). Nothing is verified."""
        try:
            fields = json.loads(raw)
            return cls(*(base64.b64decode(fields[name], validate=True) for name in cls._fields))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError("E-WIRE-06", f"this is not a signed roster: {error}") from error

    def verify(self, ca_pem: bytes, consortium: str) -> Roster:
        """Verify the signature and every entry; return the roster. Raises RefusedError (E-ID-14).

        Guarantees: the roster was signed by this CA for this consortium; each member's certificate was issued by this
        CA for that name, has that fingerprint and is not revoked; names are unique. Expiry is not checked: a member
        may be about to renew.
        """
        ca = certificates.load_certificate(ca_pem, "the pinned authority")
        try:
            certificates.public_key(ca).verify(self.signature, self.document, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise _invalid("its signature is not that of the pinned authority") from None
        roster = _parse(self.document)
        if roster.consortium != consortium:
            raise _invalid(f"it is for consortium {roster.consortium!r}, not {consortium!r}")
        if len({m.name for m in roster.members}) != len(roster.members):
            raise _invalid("it lists a name twice")
        revoked = {revocation.serial for revocation in roster.revoked}
        for member in roster.members:
            _check_member(member, consortium, ca, revoked)
        return roster


def _invalid(what: str) -> RefusedError:
    return RefusedError("E-ID-14", f"expected a roster signed by the consortium's authority, but {what}; ask the lead")


def _parse(document: bytes) -> Roster:
    try:
        raw = json.loads(document)
        members = tuple(
            RosterMember(**{**m, "renewal_proof": tuple(RenewalLink(**link) for link in m["renewal_proof"])})
            for m in raw["members"]
        )
        revoked = tuple(Revocation(**r) for r in raw["revoked"])
        roster = Roster(raw["consortium"], int(raw["version"]), raw["issued_at"], members, revoked)
        sound = set(raw) == _ENTRIES and roster.canonical() == document
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise _invalid("it is not a roster of version 1") from None
    if not sound:
        raise _invalid("it is not in canonical form")
    return roster


def _check_member(member: RosterMember, consortium: str, ca: x509.Certificate, revoked: set[str]) -> None:
    try:
        cert = parse_certificate(member.certificate.encode())
        peer = identity_of(cert)
    except (ValueError, FederationError):
        raise _invalid(f"the certificate of {member.name!r} cannot be read") from None
    if not certificates.issued_by(cert, ca):
        raise _invalid(f"the certificate of {member.name!r} was issued by another authority")
    if peer.serial in revoked:
        raise _invalid(f"it lists {member.name!r} as a member and its certificate as revoked")
    if (
        peer.identity != Identity(CertificateRole.SILO, consortium, member.name)
        or peer.fingerprint != member.fingerprint
    ):
        raise _invalid(f"the certificate of {member.name!r} is for {peer.identity}, or has another key")


def renewed_from(member: RosterMember, consortium: str, pinned: str) -> bool:
    """Return whether the chain of renewals leads from the `pinned` fingerprint to the member's present key."""
    identity = Identity(CertificateRole.SILO, consortium, member.name)
    final = certificates.public_key(parse_certificate(member.certificate.encode()))
    try:
        keys = [serialization.load_der_public_key(base64.b64decode(link.previous)) for link in member.renewal_proof]
        proofs = [base64.b64decode(link.signature) for link in member.renewal_proof]
    except (ValueError, UnsupportedAlgorithm):
        return False
    chain = [key for key in keys if isinstance(key, ec.EllipticCurvePublicKey)]
    if len(chain) != len(keys):
        return False
    followers = [*chain, final][1:]
    reached = False
    for key, follower, proof in zip(chain, followers, proofs, strict=True):
        reached = reached or certificates.fingerprint_of(key) == pinned
        message = certificates.renewal_message(identity, follower)
        if reached and not certificates.verify(key, certificates.RENEWAL, message, proof):
            return False
    return reached


def renewal_link(old: x509.Certificate, proof: bytes) -> RenewalLink:
    return RenewalLink(
        base64.b64encode(certificates.spki(certificates.public_key(old))).decode(), base64.b64encode(proof).decode()
    )
