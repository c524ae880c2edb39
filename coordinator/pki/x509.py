"""X.509 certificates: the names, uses and times that the authority puts in them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_core.errors import StateError
from protos.pki.identity import Address, Identity, Kind

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
            f"expected an authority in force, found one that expired on {ca.not_valid_after_utc:%Y-%m-%d}: "
            "a new consortium must be created and every silo invited anew",
        )
    serves = identity.kind is Kind.COORDINATOR
    # A common name with a blank in it can never be taken for a host name by a library that still looks there.
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
    # An X.520 common name holds 64 characters; the whole name is in the SAN, which is what anybody decides by.
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
