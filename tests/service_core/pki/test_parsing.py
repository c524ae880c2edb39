"""Certificates and requests that no honest software makes: at every door they are a refusal, never another error."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from fl_core.errors import FederationError, RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import receipts
from service_core.audit_log.heads import SignedHead
from service_core.pki import certificates
from service_core.pki.identity import certificate_fingerprint, identity_of, parse_certificate, parse_request
from service_core.pki.roster import RosterMember
from tests.support.pki import authority, join, today

_KEY_USAGE, _ALTERNATIVE_NAME = bytes.fromhex("0603551d0f"), bytes.fromhex("0603551d11")
_P256, _NO_CURVE = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d030109")
_VERSION_3, _VERSION_10 = bytes.fromhex("a003020102"), bytes.fromhex("a003020109")
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a version that does not exist": lambda der: der.replace(_VERSION_3, _VERSION_10, 1),
    "an extension twice": lambda der: der.replace(_KEY_USAGE, _ALTERNATIVE_NAME, 1),
    "a name of a kind that nobody uses": lambda der: der.replace(b"\x86\x11silo://", b"\xa3\x11silo://", 1),
    "a curve that nobody knows": lambda der: der.replace(_P256, _NO_CURVE, 1),
    "the half of it": lambda der: der[: len(der) // 2],
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A hospital's certificate, DER, and its authority's, PEM."""
    folder = tmp_path_factory.mktemp("pki")
    ca = authority(folder / "ca", today())
    own = join(ca, folder / "silo", "north").current_credentials()
    return x509.load_pem_x509_certificate(own.cert_pem).public_bytes(Encoding.DER), ca.ca_pem


def pem(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("change", CHANGES)
def test_a_certificate_that_cannot_be_read_is_refused_at_every_door(sound: tuple[bytes, bytes], change: str) -> None:
    der, ca_pem = sound
    odd = CHANGES[change](der)
    assert odd != der
    for data in (odd, pem(odd)):
        with pytest.raises(ValueError, match=r"\w"):
            parse_certificate(data)
    with pytest.raises(RefusedError, match="E-ID-31"):
        identity_of(pem(odd))
    with pytest.raises(FederationError, match="E-STATE-43"):
        certificates.load_certificate(pem(odd), "a test")
    with pytest.raises(ValueError, match=r"\w"):
        certificate_fingerprint(pem(odd))
    with pytest.raises(RefusedError, match="E-ID-14"):
        receipts.verify(pb.Receipt(signer_pem=pem(odd), signature=b"x"), ca_pem, "demo")
    with pytest.raises(RefusedError, match="E-ID-14"):
        SignedHead("silo://demo/north", 1, "0" * 64, b"x", pem(odd)).require_signed(ca_pem)


@pytest.mark.parametrize("change", CHANGES)
def test_a_roster_with_such_a_certificate_is_refused_although_the_authority_signed_it(
    tmp_path: Path, sound: tuple[bytes, bytes], change: str
) -> None:
    ca = authority(tmp_path / "ca", today())
    listed = RosterMember("north", "f" * 64, pem(CHANGES[change](sound[0])).decode(), "0")
    with pytest.raises(FederationError, match="cannot be read"):
        ca.roster([listed], [], 1).verify(ca.ca_pem, "demo")


def test_a_request_with_a_version_that_does_not_exist_is_refused() -> None:
    key = certificates.new_key()
    request = x509.load_pem_x509_csr(certificates.make_request(key)).public_bytes(Encoding.DER)
    odd = request.replace(b"\x02\x01\x00", b"\x02\x01\x0a", 1)
    assert odd != request
    text = pem(odd).replace(b"CERTIFICATE", b"CERTIFICATE REQUEST")
    with pytest.raises(ValueError, match="version"):
        parse_request(text)
    with pytest.raises(RefusedError, match=r"E-ID-31.*version"):
        certificates.load_request(text)


@pytest.mark.parametrize(
    "error", [UnsupportedAlgorithm("x"), x509.UnsupportedGeneralNameType("x", 3), x509.AttributeNotFound("x", None)]
)
def test_every_error_of_the_library_becomes_one(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(data: bytes) -> x509.Certificate:
        raise error

    monkeypatch.setattr(x509, "load_der_x509_certificate", fail)
    with pytest.raises(ValueError, match=type(error).__name__):
        parse_certificate(b"0")
