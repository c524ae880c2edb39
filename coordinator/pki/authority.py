"""The consortium's certificate authority, in `<home>/pki`; members and invitations are in the store.

Files: `ca.key`, `ca.crt`, `authority.json`; `server.pem` and `lead-<name>.pem` hold a key and its certificate.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.pki import passphrase
from fl_core.errors import RefusedError, StateError
from service_core.pki import certificates
from service_core.pki.certificates import Clock, utc_now
from service_core.pki.identity import (
    Address,
    CertificateRole,
    Identity,
    certificate_fingerprint,
    check_name,
    identity_of,
    serial_of,
)
from service_core.pki.invitation import InvitationToken
from service_core.pki.roster import Revocation, Roster, RosterMember, SignedRoster
from service_core.storage import private_files
from service_core.storage.private_files import Credentials
from service_core.storage.unfinished import marker_of, require_finished

FOLDER = "pki"


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Validity of issued certificates in days, and of an invitation in hours."""

    ca_days: float = 3650
    server_days: float = 90
    silo_days: float = 90
    lead_days: float = 365
    invitation_hours: float = 72


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invitation; the store ensures that only one silo enrols with it."""

    name: str
    serial: str
    expires: datetime
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority on disk. Its key is read for each signature and never kept in memory."""

    home: Path
    consortium: str
    addresses: tuple[Address, ...]
    lifetimes: Lifetimes = Lifetimes()
    clock: Clock = utc_now

    @classmethod
    def create(
        cls,
        home: Path,
        consortium: str,
        addresses: Sequence[str],
        lifetimes: Lifetimes | None = None,
        clock: Clock = utc_now,
        secret: bytes | None = None,
    ) -> Authority:
        """Create the CA and the service's first certificate; raises StateError (E-STATE-44) if there is a CA.

        addresses: `host:port`, as silos dial them; the hosts become names in the service's certificate   secret:
        passphrase that encrypts the key; raises ConfigError (E-CFG-02) if it is too short.
        Guarantees: after a crash there is either no authority (create it again) or a complete one.
        """
        final, aside = home / FOLDER, home / f".{FOLDER}.new"
        cls.require_none(home)
        limits = lifetimes or Lifetimes()
        check_name(consortium, "consortium")
        where = tuple(Address.parse(a) for a in addresses)
        shutil.rmtree(aside, ignore_errors=True)  # an interrupted creation: nothing was signed with it
        private_files.private_folder(aside)
        key = certificates.load_key(key_pem := certificates.new_key(), "the new authority")
        ca = build_ca_certificate(key, consortium, clock(), timedelta(days=limits.ca_days))
        private_files.write_private(aside / "ca.key", key_pem if secret is None else passphrase.lock(key_pem, secret))
        private_files.write_public(aside / "ca.crt", certificates.to_pem(ca))
        building = cls(home, consortium, where, limits, clock)
        building._write_about(aside)
        building._write_server(aside, ca, key)
        aside.rename(final)
        return building

    @staticmethod
    def require_none(home: Path) -> None:
        """Raise StateError (E-STATE-44) if there is an authority, except one of an interrupted `init`."""
        if (home / FOLDER).exists() and marker_of(home) is None:
            raise StateError(
                "E-STATE-44",
                f"{home / FOLDER} already contains an authority, and a new one would lock every hospital out. Use "
                "the existing one, or choose another home",
            )

    @classmethod
    def open(cls, home: Path, clock: Clock = utc_now) -> Authority:
        """Open an existing authority.

        Raises StateError: E-STATE-43 if there is none, E-STATE-42 if others can enter its folder, E-STATE-26 in a home
        with an interrupted command.
        """
        require_finished(home)
        about = home / FOLDER / "authority.json"
        try:
            raw = json.loads(about.read_text())
            names = {f.name for f in fields(Lifetimes)}
            limits = Lifetimes(**{k: float(v) for k, v in raw["lifetimes"].items() if k in names})
            where = tuple(Address.parse(a) for a in raw["addresses"])
            authority = cls(home, check_name(raw["consortium"]), where, limits, clock)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StateError(
                "E-STATE-43",
                f"there is no readable authority in {home} ({type(error).__name__} at {about}): run `coordinator "
                "init` once, or name the authority's home",
            ) from None
        private_files.private_folder(about.parent)
        return authority

    @property
    def folder(self) -> Path:
        return self.home / FOLDER

    @property
    def ca_pem(self) -> bytes:
        return (self.folder / "ca.crt").read_bytes()

    def fingerprint(self) -> str:
        """Return the SHA-256 of the CA's certificate, lower-case hex."""
        return certificate_fingerprint(self.ca_pem)

    def issue_server(self) -> Credentials:
        """Replace the service's key and certificate."""
        self._write_server(self.folder, *self._ca())
        return self.server_credentials()

    def server_credentials(self) -> Credentials:
        return certificates.read_bundle(self.folder / "server.pem", self.ca_pem)

    def issue_lead(self, name: str) -> Credentials:
        """Issue a lead's certificate with a new key, and keep both; `coordinator.pki.leads` lists it."""
        made = self.make_lead(name)
        self.keep_lead(name, made)
        return made

    def make_lead(self, name: str) -> Credentials:
        identity = Identity(CertificateRole.LEAD, self.consortium, name)
        key = certificates.new_key()
        cert = self._issue(identity, certificates.load_key(key, "the new key").public_key(), self.lifetimes.lead_days)
        return Credentials(key, cert, self.ca_pem)

    def keep_lead(self, name: str, made: Credentials) -> None:
        """Write a lead's key and certificate to `lead-<name>.pem`, for commands on this machine."""
        private_files.write_private(self.lead_file(name), made.key_pem + made.cert_pem)

    def lead_file(self, name: str) -> Path:
        return self.folder / f"lead-{check_name(name)}.pem"

    def lead_credentials(self, name: str) -> Credentials:
        """Read a lead's key and certificate."""
        return certificates.read_bundle(self.lead_file(name), self.ca_pem)

    def invite(self, name: str, lifetime: timedelta | None = None) -> Invitation:
        """Issue an invitation: a certificate with its own key that can enrol as `name` until it expires."""
        identity = Identity(CertificateRole.INVITE, self.consortium, name)
        key = certificates.new_key()
        days = (lifetime or timedelta(hours=self.lifetimes.invitation_hours)) / timedelta(days=1)
        cert = self._issue(identity, certificates.load_key(key, "the new key").public_key(), days)
        peer = identity_of(cert)
        token = InvitationToken(self.consortium, name, self.addresses, self.ca_pem, cert, key)
        return Invitation(name, peer.serial, peer.not_after, token.encode())

    def sign_silo(self, csr_pem: bytes, name: str) -> bytes:
        """Certify only the key of a request, as silo `name`; raises RefusedError (E-ID-31)."""
        public = certificates.public_key(certificates.load_request(csr_pem))
        return self._issue(Identity(CertificateRole.SILO, self.consortium, name), public, self.lifetimes.silo_days)

    def renew(self, csr_pem: bytes, old_cert_pem: bytes, proof: bytes) -> bytes:
        """Certify a silo's next key; raises RefusedError (E-ID-13) unless the key in force signed the change.

        The caller has checked that `old_cert_pem` is not revoked, and adds `renewal_link(old, proof)` to the proofs.
        """
        ca, _ = self._ca()
        old = certificates.load_certificate(old_cert_pem, "the certificate to renew")
        peer = identity_of(old)
        new = certificates.public_key(certificates.load_request(csr_pem))
        if peer.identity.kind is not CertificateRole.SILO or peer.identity.consortium != self.consortium:
            raise _no_renewal(f"a certificate of {peer.identity}")
        if not certificates.issued_by(old, ca):
            raise _no_renewal("a certificate of another authority")
        if self.clock() > peer.not_after:
            raise _no_renewal(f"one that expired on {peer.not_after:%Y-%m-%d %H:%M} UTC (invite the hospital again)")
        message = certificates.renewal_message(peer.identity, new)
        if not certificates.verify(certificates.public_key(old), certificates.RENEWAL, message, proof):
            raise _no_renewal("no signature of the new key by the old one")
        return self._issue(peer.identity, new, self.lifetimes.silo_days)

    def roster(self, members: Sequence[RosterMember], revoked: Sequence[Revocation], version: int) -> SignedRoster:
        """Sign the list of members in force. version: higher than any before (silos refuse a lower one)."""
        _, key = self._ca()
        issued = self.clock().isoformat(timespec="seconds")
        return SignedRoster.issue(Roster(self.consortium, version, issued, tuple(members), tuple(revoked)), key)

    def revocation(self, cert_pem: bytes, reason: str) -> Revocation:
        cert = certificates.load_certificate(cert_pem, "the certificate to revoke")
        return Revocation(
            identity_of(cert).identity.name, serial_of(cert), reason, self.clock().isoformat(timespec="seconds")
        )

    def write_service(self, folder: Path) -> None:
        """Write the `pki` folder of a service on another machine: a new certificate, and no authority's key."""
        ca, key = self._ca()
        private_files.private_folder(folder)
        private_files.write_public(folder / "ca.crt", self.ca_pem)
        self._write_about(folder)
        for lead in self.folder.glob("lead-*.pem"):
            private_files.write_private(folder / lead.name, private_files.read_private(lead))
        self._write_server(folder, ca, key)

    def _ca(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        if not (self.folder / "ca.key").exists():
            raise StateError(
                "E-STATE-45",
                "the authority's key is not on this machine: have the request signed on the machine that has it "
                "(silo request, coordinator ca sign, coordinator ca admit)",
            )
        path = self.folder / "ca.key"
        key = passphrase.unlock(private_files.read_private(path), path)
        return certificates.load_certificate(self.ca_pem, str(self.folder / "ca.crt")), key

    def unlock(self) -> None:
        """Read the authority's key if it is on this machine, so that its passphrase is requested now and not later.

        Raises StateError (E-STATE-47) without the passphrase.
        """
        if (self.folder / "ca.key").exists():
            self._ca()

    def change_passphrase(self, new: bytes | None) -> None:
        """Encrypt the authority's key with another passphrase, in one step; None: without one.

        Raises StateError (E-STATE-47) without the present passphrase, ConfigError (E-CFG-02) on one that is too short.
        """
        pem = certificates.key_to_pem(self._ca()[1])
        private_files.write_private(self.folder / "ca.key", pem if new is None else passphrase.lock(pem, new))

    def _issue(self, identity: Identity, public: ec.EllipticCurvePublicKey, days: float) -> bytes:
        ca, key = self._ca()
        return certificates.to_pem(
            build_leaf_certificate(ca, key, identity, public, self.clock(), timedelta(days=days))
        )

    def _write_about(self, folder: Path) -> None:
        about = {
            "consortium": self.consortium,
            "addresses": list(map(str, self.addresses)),
            "lifetimes": asdict(self.lifetimes),
        }
        private_files.write_public(folder / "authority.json", json.dumps(about, indent=2).encode())

    def _write_server(self, folder: Path, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey) -> None:
        key = certificates.new_key()
        cert = build_leaf_certificate(
            ca,
            ca_key,
            Identity(CertificateRole.COORDINATOR, self.consortium),
            certificates.load_key(key, "the new key").public_key(),
            self.clock(),
            timedelta(days=self.lifetimes.server_days),
            self.addresses,
        )
        private_files.write_private(folder / "server.pem", key + certificates.to_pem(cert))


def _no_renewal(found: str) -> RefusedError:
    return RefusedError(
        "E-ID-13", f"expected a renewal signed with the current key of a silo of this consortium, found {found}"
    )


# ---- X.509 certificates: the names, uses and times that the authority puts in them -----------------------------------

SKEW = timedelta(hours=1)
_LOCAL = ("localhost:1", "127.0.0.1:1", "[::1]:1")


def build_ca_certificate(
    key: ec.EllipticCurvePrivateKey, consortium: str, now: datetime, lifetime: timedelta
) -> x509.Certificate:
    """Make the self-signed certificate of a CA that may sign leaves and nothing below it."""
    name = _name(consortium, f"Consilium authority of {consortium}")
    public = key.public_key()
    usage = _usage(key_cert_sign=True, crl_sign=True)
    return (
        _builder(name, name, public, now, now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def build_leaf_certificate(
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    identity: Identity,
    public: ec.EllipticCurvePublicKey,
    now: datetime,
    lifetime: timedelta,
    addresses: Sequence[Address] = (),
) -> x509.Certificate:
    """Certify `public` as `identity`; raises StateError (E-STATE-43) once the CA itself has expired.

    Guarantees: a leaf never outlives its CA; it starts an hour in the past, against clocks that differ; only the
    coordinator's carries host names and may serve, and it cannot be used as a client.
    """
    if now >= ca.not_valid_after_utc:
        raise StateError(
            "E-STATE-43",
            f"the authority expired on {ca.not_valid_after_utc:%Y-%m-%d}: create a new consortium and invite every "
            "hospital again",
        )
    serves = identity.kind is CertificateRole.COORDINATOR
    # The blank keeps libraries that still read common names from taking it for a host name.
    subject = _name(identity.consortium, f"{identity.kind.value} {identity.name}".strip() + (" service" * serves))
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    if serves:
        names += _hosts([*addresses, *map(Address.parse, _LOCAL)])
    use = ExtendedKeyUsageOID.SERVER_AUTH if serves else ExtendedKeyUsageOID.CLIENT_AUTH
    key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _builder(subject, ca.subject, public, now, min(now + lifetime, ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(key_id, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(end)
    )


def _name(consortium: str, common: str) -> x509.Name:
    # An X.520 common name holds 64 characters; the full name is in the SAN, which all checks use.
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, consortium),
            x509.NameAttribute(NameOID.COMMON_NAME, common[:64]),
        ]
    )


def _hosts(addresses: Sequence[Address]) -> list[x509.GeneralName]:
    hosts = dict.fromkeys(address.host for address in addresses)
    names: list[x509.GeneralName] = []
    for host in hosts:
        ip = Address(host, 1).ip
        names.append(x509.DNSName(host) if ip is None else x509.IPAddress(ip))
    return names


def _usage(digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
