"""P-256 keys, certificate requests and signatures, for both sides.

Every signature has a context, so one made for a renewal is not valid for anything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fl_core.errors import RefusedError, StateError
from service_core.pki.identity import Identity, parse_certificate, parse_request
from service_core.storage import private_files
from service_core.storage.private_files import Credentials

Clock = Callable[[], datetime]
RENEWAL = "consilium renewal v1"


def utc_now() -> datetime:
    return datetime.now(UTC)


def new_key() -> bytes:
    """Make a P-256 key from the operating system's entropy; unencrypted PKCS 8, PEM."""
    return key_to_pem(ec.generate_private_key(ec.SECP256R1()))


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Convert a key to unencrypted PKCS 8, PEM, which gRPC needs; the mode of its file protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(pem: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """Read a P-256 key; raises StateError (E-STATE-43), which names `where` it came from, never its content."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise StateError("E-STATE-43", f"{where} does not contain an unencrypted P-256 key")
    return key


def load_certificate(pem: bytes, where: str) -> x509.Certificate:
    """Read the first certificate of a PEM text; raises StateError (E-STATE-43), which names `where` it came from."""
    try:
        return parse_certificate(pem)
    except ValueError:
        raise StateError("E-STATE-43", f"{where} does not contain a PEM certificate") from None


def to_pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def spki(public: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as DER SubjectPublicKeyInfo, which fingerprints hash and renewals sign."""
    return public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint_of(public: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key (SPKI), lower-case hex: the fingerprint in rosters, which silos pin."""
    return hashlib.sha256(spki(public)).hexdigest()


def public_key(holder: x509.Certificate | x509.CertificateSigningRequest) -> ec.EllipticCurvePublicKey:
    """Return the P-256 public key of a certificate or request; raises RefusedError (E-ID-31) on any other key."""
    public = holder.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise RefusedError(
            "E-ID-31", f"expected a P-256 key, found {type(public).__name__}: make the key with `silo join`"
        )
    return public


def read_bundle(path: Path, ca_pem: bytes) -> Credentials:
    """Read a key and its certificate from one file; raises StateError (E-STATE-42, E-STATE-43) unless they match."""
    bundle = private_files.read_private(path)
    key, cert = load_key(bundle, str(path)), load_certificate(bundle, str(path))
    if spki(public_key(cert)) != spki(key.public_key()):
        raise StateError("E-STATE-43", f"the key and the certificate in {path} do not belong together")
    return Credentials(key_to_pem(key), to_pem(cert), ca_pem)


def make_request(key_pem: bytes) -> bytes:
    """Make a certificate request (PEM) that proves possession of the key; the CA sets the names."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "consilium request")])
    key = load_key(key_pem, "the new key")
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def load_request(pem: bytes) -> x509.CertificateSigningRequest:
    """Read a request; raises RefusedError (E-ID-31) unless it is signed by its own P-256 key."""
    try:
        request = parse_request(pem)
    except ValueError as error:
        raise RefusedError("E-ID-31", f"this is not a P-256 certificate request ({error})") from None
    public_key(request)
    if not request.is_signature_valid:
        raise RefusedError("E-ID-31", "the certificate request is not signed by its own key")
    return request


def issued_by(cert: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def sign(key: ec.EllipticCurvePrivateKey, context: str, message: bytes) -> bytes:
    """Sign `message` for one purpose with ECDSA-SHA256; DER."""
    return key.sign(_framed(context, message), ec.ECDSA(hashes.SHA256()))


def verify(public: ec.EllipticCurvePublicKey, context: str, message: bytes, signature: bytes) -> bool:
    """Return whether `sign` made the signature with this key, context and message."""
    try:
        public.verify(signature, _framed(context, message), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def renewal_message(identity: Identity, new: ec.EllipticCurvePublicKey) -> bytes:
    """Return the bytes that the old key signs when a silo changes keys: its identity and the new key."""
    return identity.uri.encode() + b"\0" + spki(new)


def _framed(context: str, message: bytes) -> bytes:
    name = context.encode()
    return len(name).to_bytes(2, "big") + name + message
