"""Identities: names, SAN URIs, certificates of peers.

silo://<consortium>/<name>      a hospital            lead://<consortium>/<name>    a person who starts runs
coordinator://<consortium>      the service           invite://<consortium>/<name>  may only enrol as <name>

Certificates and requests come from the other side. Parsing raises only ValueError, for any bytes; the library itself
raises half a dozen kinds of errors, some of them only when a field is read.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from fl_core.errors import ConfigError, RefusedError

_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.AttributeNotFound,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


def parse_certificate(data: bytes) -> x509.Certificate:
    """Read a certificate, the first of a PEM text or DER; raises ValueError.

    Guarantees: its key, extensions and dates can be read.
    """
    try:
        is_pem = b"-----BEGIN" in data
        cert = x509.load_pem_x509_certificate(data) if is_pem else x509.load_der_x509_certificate(data)
        _ = cert.public_key(), cert.extensions, cert.not_valid_before_utc, cert.not_valid_after_utc
    except _UNREADABLE as error:
        raise ValueError(_said(error)) from None
    return cert


def parse_request(pem: bytes) -> x509.CertificateSigningRequest:
    """Read a certificate request; raises ValueError.

    Guarantees: its key, extensions and signature can be read. The signature is not verified.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        _ = request.public_key(), request.extensions, request.is_signature_valid
    except _UNREADABLE as error:
        raise ValueError(_said(error)) from None
    return request


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_REMEMBERED = 1024
_URI = re.compile(r"(silo|lead|coordinator|invite)://([^/]*)(?:/([^/]*))?")


class CertificateRole(Enum):
    """Roles of certificate holders."""

    SILO = "silo"
    LEAD = "lead"
    COORDINATOR = "coordinator"
    INVITE = "invite"


def check_name(name: str, what: str = "name") -> str:
    """Return `name`; raises ConfigError (E-CFG-02) unless it is 1 to 63 of a-z, 0-9 and -, not starting with -."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            "E-CFG-02",
            f"expected a {what} of 1 to 63 lower-case letters, digits and hyphens that starts with a letter or digit, "
            f"found {name[:80]!r}; choose for instance 'center3'",
        )
    return name


@dataclass(frozen=True, slots=True)
class Identity:
    """A role, a consortium and a name within it; the coordinator's name is empty."""

    kind: CertificateRole
    consortium: str
    name: str = ""

    def __post_init__(self) -> None:
        check_name(self.consortium, "consortium")
        if self.kind is not CertificateRole.COORDINATOR:
            check_name(self.name, f"{self.kind.value}'s name")
        elif self.name:
            raise ConfigError("E-CFG-02", f"expected no name for the coordinator, found {self.name!r}; leave it out")

    @property
    def uri(self) -> str:
        tail = "" if self.kind is CertificateRole.COORDINATOR else f"/{self.name}"
        return f"{self.kind.value}://{self.consortium}{tail}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Parse a SAN URI; raises RefusedError (E-ID-31) on any other.

        Guarantees: parse(identity.uri) == identity, and no second URI gives the same identity.
        """
        match = _URI.fullmatch(uri)
        if match is not None:
            try:
                identity = cls(CertificateRole(match[1]), match[2], match[3] or "")
            except ConfigError:
                identity = None
            if identity is not None and identity.uri == uri:
                return identity
        raise RefusedError("E-ID-31", f"expected an identity such as silo://consortium/name, found {uri[:120]!r}")

    def __str__(self) -> str:
        return self.uri


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """The holder of a certificate that TLS has verified.

    serial: lower-case hex   fingerprint: SHA-256 of the public key (SPKI), lower-case hex; a renewal with the same key
    keeps it   not_before, not_after: UTC
    """

    identity: Identity
    serial: str
    fingerprint: str
    not_before: datetime
    not_after: datetime


@lru_cache(_REMEMBERED)
def identity_of(certificate: bytes | x509.Certificate) -> PeerCertificate:
    """Read a peer's certificate (PEM, or parsed); raises RefusedError (E-ID-31) unless it has exactly one identity.

    TLS checks the signature, not this function. Results are cached.
    """
    try:
        cert = parse_certificate(certificate) if isinstance(certificate, bytes) else certificate
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        fingerprint, times = key_fingerprint(cert), (cert.not_valid_before_utc, cert.not_valid_after_utc)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise RefusedError("E-ID-31", f"the certificate does not name its holder ({error}): enrol again") from None
    if len(uris) != 1:
        raise RefusedError("E-ID-31", f"expected exactly one identity in a certificate, found {uris[:4]}; enrol again")
    return PeerCertificate(
        Identity.parse(uris[0]),
        serial_of(cert),
        fingerprint,
        *times,
    )


def peer_of(auth_context: Mapping[str, Iterable[bytes]]) -> PeerCertificate:
    """Read the peer of a call from the gRPC server's auth context (`context.auth_context()`).

    Raises RefusedError: E-TLS-09 without a certificate, E-TLS-15 on a connection older than TLS 1.3 (in addition to
    `service_core.tls.connect.require_tls13`), E-ID-31 as `identity_of`.
    """
    chain = list(auth_context.get("x509_pem_cert", ()))
    if not chain:
        raise RefusedError("E-TLS-09", "the client sent no certificate: enrol with `silo join TOKEN`")
    versions = list(auth_context.get("ssl_tls_version", ()))
    if versions != [b"TLSv1.3"]:
        raise RefusedError("E-TLS-15", f"expected a TLS 1.3 connection, found {versions}; upgrade the client")
    return identity_of(chain[0])


def serial_of(cert: x509.Certificate) -> str:
    """Return a certificate's serial number in lower-case hex, as revocation lists have it."""
    return f"{cert.serial_number:x}"


def key_fingerprint(holder: x509.Certificate | x509.CertificateSigningRequest) -> str:
    spki = holder.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def certificate_fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate (DER), lower-case hex, by which people compare the consortium's CA."""
    der = parse_certificate(pem).public_bytes(serialization.Encoding.DER)
    return hashlib.sha256(der).hexdigest()


def format_fingerprint(fingerprint: str) -> str:
    """Format a hex fingerprint for reading aloud: AB:CD:..."""
    return ":".join(fingerprint[i : i + 2] for i in range(0, len(fingerprint), 2)).upper()


@dataclass(frozen=True, slots=True)
class Address:
    """The coordinator's address: host name or IP address, and port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port` or `[v6]:port`; raises ConfigError (E-CFG-02) otherwise."""
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", text)
        if match is None or not 0 < int(match[3]) < 65536:
            raise ConfigError(
                "E-CFG-02",
                f"expected an address with a port, such as fl.example.org:8443 or [2001:db8::1]:8443, found {text!r}"
                ": correct it",
            )
        return cls(match[1] or match[2], int(match[3]))

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
