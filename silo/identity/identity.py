"""A silo's identity on disk: its key (which never leaves), its certificate, the pinned CA and roster.

In `<home>/identity`: `silo.pem` (key and certificate), `silo.previous.pem` (the previous ones), `ca.crt`,
`roster.json`, and `key.next`, a key without a certificate yet. `silo.pem` is written last, by one rename: after a crash
either the old or the new identity is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fl_core.errors import FederationError, RefusedError, StateError
from service_core.pki import certificates
from service_core.pki.certificates import Clock, utc_now
from service_core.pki.identity import Address, CertificateRole, PeerCertificate, certificate_fingerprint, identity_of
from service_core.pki.invitation import InvitationToken
from service_core.pki.roster import SignedRoster
from service_core.storage import private_files
from service_core.storage.private_files import Credentials
from silo.identity.pinned_peers import PinnedPeers, RosterChange

FOLDER = "identity"
_RENEW_AFTER = 2 / 3


@dataclass(frozen=True, slots=True)
class JoinMaterial:
    """Input of the first connection. proof: signature of the present key over the new key; empty in a new home."""

    addresses: tuple[Address, ...]
    invitation: Credentials = field(repr=False)
    csr_pem: bytes
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class RenewalRequest:
    """Input of `coordinator.pki.authority.Authority.renew` besides the certificate in force."""

    csr_pem: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class SiloIdentity:
    """The identity in a silo's home. Every call reads from disk, so a renewal needs no restart."""

    home: Path
    clock: Clock = utc_now

    @property
    def folder(self) -> Path:
        return self.home / FOLDER

    @property
    def joined(self) -> bool:
        return (self.folder / "silo.pem").exists()

    def join_material(self, token: InvitationToken) -> JoinMaterial:
        """Create the silo's key and a certificate request.

        Raises StateError (E-STATE-44) if this home belongs to another silo or consortium. Guarantees: a repeated call,
        also after an interrupted join, uses the same key.
        """
        proof = b""
        key = self._next_key()
        if self.joined:
            certificate = self.load()
            mine = (
                certificate.identity.consortium,
                certificate.identity.name,
                certificate_fingerprint(self.authority_pem()),
            )
            if mine != (token.consortium, token.name, certificate_fingerprint(token.ca_pem)):
                raise StateError(
                    "E-STATE-44",
                    f"expected {self.home} to be new, or to belong to {token.name!r} of {token.consortium!r}, but "
                    f"it belongs to {certificate.identity} (of its own authority). Choose another home for another "
                    "membership, with the same ledger (silo ledger place)",
                )
            proof = self._proof(certificate, key)
        csr = certificates.make_request(certificates.key_to_pem(key))
        return JoinMaterial(token.addresses, token.credentials, csr, proof)

    def install(self, cert_pem: bytes, ca_pem: bytes, roster: SignedRoster | None = None) -> PeerCertificate:
        """Put a certificate in force, the first one or a renewed one. roster: pinned with the first one.

        Raises RefusedError: E-ID-31 if the certificate is not for the key in `key.next`, not from `ca_pem`, not a
        silo's, not in force, or not for this home's silo; E-ID-14 on an invalid roster. Guarantees: on an error nothing
        has changed; after a crash either the old or the new identity is complete.
        """
        cert = certificates.load_certificate(cert_pem, "the answer of the coordinator")
        peer = self._checked_certificate(cert, certificates.load_certificate(ca_pem, "the consortium's authority"))
        if self.joined and cert_pem == self.current_credentials().cert_pem:
            return peer  # a repeated answer: it was installed before a crash
        key = self._next_key()
        if certificates.spki(certificates.public_key(cert)) != certificates.spki(key.public_key()):
            raise _wrong_certificate("it is for another key than this home's")
        if not self.joined:
            pins = None if roster is None else self._pins(peer, ca_pem).first(roster)
            private_files.write_public(self.folder / "ca.crt", ca_pem)
            if pins is not None:
                pins.save()
        if self.joined and not self._is_early():
            private_files.write_private(self._previous, private_files.read_private(self.folder / "silo.pem"))
        private_files.write_private(self.folder / "silo.pem", certificates.key_to_pem(key) + certificates.to_pem(cert))
        private_files.remove(self.folder / "key.next")
        return peer

    def load(self) -> PeerCertificate:
        """Read and check this silo's own certificate.

        Raises StateError: E-STATE-44 before `silo join`, E-STATE-42 on loose modes, E-STATE-43 on damaged files.
        """
        return identity_of(self.current_credentials().cert_pem)

    def current_credentials(self) -> Credentials:
        """Read (key_pem, cert_pem, ca_pem); raises as `load`.

        If the newest certificate is not valid yet, because a clock was ahead when it was made, returns the previous
        key and certificate.
        """
        if not self.joined:
            raise StateError("E-STATE-44", f"there is no silo's identity in {self.home}: run `silo join TOKEN`")
        private_files.private_folder(self.folder)
        return self._read(self._previous if self._is_early() else self.folder / "silo.pem")

    @property
    def _previous(self) -> Path:
        return self.folder / "silo.previous.pem"

    def _read(self, path: Path) -> Credentials:
        return certificates.read_bundle(path, self.authority_pem())

    def _is_early(self) -> bool:
        """Return whether the newest certificate is not valid yet and the previous one is."""
        now = self.clock()
        if now >= identity_of(self._read(self.folder / "silo.pem").cert_pem).not_before or not self._previous.exists():
            return False
        before = identity_of(self._read(self._previous).cert_pem)
        return before.not_before <= now <= before.not_after

    def fingerprint(self) -> str:
        """Return the SHA-256 of this silo's public key, lower-case hex; hospitals compare it by voice and pin it."""
        return self.load().fingerprint

    def ca_fingerprint(self) -> str:
        """Return the SHA-256 of the pinned CA certificate, lower-case hex, for comparison with the lead's."""
        return certificate_fingerprint(self.authority_pem())

    def renewal_due(self, now: datetime | None = None) -> bool:
        certificate = self.load()
        return self._is_early() or (now or self.clock()) >= certificate.not_before + _RENEW_AFTER * (
            certificate.not_after - certificate.not_before
        )

    def renewal_request(self) -> RenewalRequest:
        """Create the next key (kept in `key.next` until `install`) and a request for it, signed by the key in force.

        Guarantees: a second call returns the same key.
        """
        self.load()
        return self.signing_request()

    def signing_request(self) -> RenewalRequest:
        key = self._next_key()
        csr = certificates.make_request(certificates.key_to_pem(key))
        return RenewalRequest(csr, self._proof(self.load(), key) if self.joined else b"")

    def sign(self, context: str, message: bytes) -> bytes:
        """Sign with the key of the certificate in force (`service_core.pki.certificates.verify` checks it)."""
        return certificates.sign(self._current_key(), context, message)

    def update_roster(
        self, signed: SignedRoster, accept_additions: bool = True, asked_at: int | None = None
    ) -> RosterChange:
        return self.pins().update(signed, accept_additions, asked_at)

    def peers(self) -> dict[str, bytes]:
        """Return the certificates (PEM) of the members that this silo accepts, itself included, by name."""
        return self.pins().accepted()

    def pins(self) -> PinnedPeers:
        return self._pins(self.load(), self.authority_pem())

    def _pins(self, certificate: PeerCertificate, ca_pem: bytes) -> PinnedPeers:
        return PinnedPeers(self.folder / "roster.json", ca_pem, certificate.identity.consortium)

    def authority_pem(self) -> bytes:
        """Read the pinned CA certificate; raises StateError (E-STATE-43) if it is missing."""
        path = self.folder / "ca.crt"
        if not path.exists():
            raise StateError("E-STATE-43", f"the file of the consortium's authority, {path}, is missing: join again")
        return path.read_bytes()

    def _current_key(self) -> ec.EllipticCurvePrivateKey:
        return certificates.load_key(self.current_credentials().key_pem, str(self.folder / "silo.pem"))

    def _proof(self, certificate: PeerCertificate, key: ec.EllipticCurvePrivateKey) -> bytes:
        message = certificates.renewal_message(certificate.identity, key.public_key())
        return self.sign(certificates.RENEWAL, message)

    def _next_key(self) -> ec.EllipticCurvePrivateKey:
        path = self.folder / "key.next"
        if self.joined and self._is_early():  # keep its key: other silos would have to accept a new one
            newest = self.folder / "silo.pem"
            return certificates.load_key(private_files.read_private(newest), str(newest))
        if path.exists():
            key = certificates.load_key(private_files.read_private(path), str(path))
            if not self.joined or certificates.spki(key.public_key()) != certificates.spki(
                self._current_key().public_key()
            ):
                return key
            # After a crash between writing `silo.pem` and removing `key.next`, that key is in force already.
        pem = certificates.new_key()
        private_files.write_private(path, pem)
        return certificates.load_key(pem, str(path))

    def _checked_certificate(self, cert: x509.Certificate, ca: x509.Certificate) -> PeerCertificate:
        try:
            peer = identity_of(cert)
        except FederationError as error:
            raise _wrong_certificate(error.message) from None
        if peer.identity.kind is not CertificateRole.SILO:
            raise _wrong_certificate(f"it is a certificate of {peer.identity}")
        if not certificates.issued_by(cert, ca):
            raise _wrong_certificate("another authority signed it")
        if not peer.not_before <= self.clock() <= peer.not_after:
            raise _wrong_certificate(
                f"it is valid from {peer.not_before:%Y-%m-%d %H:%M} to {peer.not_after:%Y-%m-%d %H:%M} UTC and this "
                f"machine's clock says {self.clock():%Y-%m-%d %H:%M} UTC; set the clock"
            )
        if self.joined:
            current = self.load()
            pinned = certificates.to_pem(certificates.load_certificate(self.authority_pem(), "ca.crt"))
            if peer.identity != current.identity or certificates.to_pem(ca) != pinned:
                raise _wrong_certificate(f"it is for {peer.identity}, and this home belongs to {current.identity}")
        return peer


def _wrong_certificate(what: str) -> RefusedError:
    return RefusedError("E-ID-31", f"expected the requested certificate, but {what}; nothing was changed")
