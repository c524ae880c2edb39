from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from hypothesis import given
from hypothesis import strategies as st

from fl_core.errors import ConfigError, RefusedError
from service_core.pki import certificates
from service_core.pki.identity import (
    Address,
    CertificateRole,
    Identity,
    certificate_fingerprint,
    format_fingerprint,
    identity_of,
    peer_of,
)
from tests.support.pki import authority, certified, today

names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)
identities = st.one_of(
    st.builds(
        Identity, st.sampled_from([CertificateRole.SILO, CertificateRole.LEAD, CertificateRole.INVITE]), names, names
    ),
    st.builds(Identity, st.just(CertificateRole.COORDINATOR), names),
)


@given(identities)
def test_uri_round_trip(identity):
    assert Identity.parse(identity.uri) == identity


@given(st.text(max_size=40) | st.from_regex(r"(silo|lead|coordinator|invite)://[a-zA-Z0-9./-]{0,20}\n?"))
def test_only_one_uri_per_identity(text):
    code = uri = None
    try:
        uri = Identity.parse(text).uri
    except RefusedError as error:
        code = error.code
    assert uri == text or code == "E-ID-31"


@pytest.mark.parametrize(
    "uri",
    [
        "silo://demo/",
        "silo://demo",
        "silo://demo/a/b",
        "silo://demo/A",
        "coordinator://demo/",
        "coordinator://demo/x",
        "https://demo/a",
        "silo://demo/a\n",
        "silo:///a",
        "SILO://demo/a",
        "silo://demo/a?x",
        "silo://demo/-a",
    ],
)
def test_foreign_uris_are_refused(uri):
    with pytest.raises(RefusedError):
        Identity.parse(uri)


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a.b", "a" * 64, "é", "a\n"])
def test_names(name):
    with pytest.raises(ConfigError) as caught:
        Identity(CertificateRole.SILO, "demo", name)
    assert caught.value.code == "E-CFG-02"


def test_identity_of_a_silos_certificate(tmp_path):
    clock = today()
    ca = authority(tmp_path, clock)
    pem = certified(ca, "center3")
    cert = x509.load_pem_x509_certificate(pem)
    peer = identity_of(pem)
    assert peer.identity == Identity(CertificateRole.SILO, "demo", "center3")
    assert int(peer.serial, 16) == cert.serial_number
    spki = cert.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(spki)
    assert peer.fingerprint == digest.finalize().hex()
    assert peer.not_before == clock() - timedelta(hours=1)
    assert peer.not_after == clock() + timedelta(days=90)
    assert certificate_fingerprint(pem) == cert.fingerprint(hashes.SHA256()).hex()
    assert format_fingerprint("abcd01") == "AB:CD:01"


def certificate_with(names):
    key = certificates.load_key(certificates.new_key(), "test")
    name = x509.Name([])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return certificates.to_pem(builder.sign(key, hashes.SHA256()))


@pytest.mark.parametrize(
    "names",
    [
        None,
        [x509.DNSName("silo")],
        [x509.UniformResourceIdentifier("silo://demo/a"), x509.UniformResourceIdentifier("silo://demo/b")],
        [x509.UniformResourceIdentifier("https://demo/a")],
    ],
)
def test_certificate_with_two_identities_is_refused(names):
    with pytest.raises(RefusedError) as caught:
        identity_of(certificate_with(names))
    assert caught.value.code == "E-ID-31"


def test_bytes_that_are_no_certificate():
    with pytest.raises(RefusedError) as caught:
        identity_of(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert caught.value.code == "E-ID-31"


def test_peer_of_an_auth_context(tmp_path):
    pem = certified(authority(tmp_path, today()), "a")
    assert peer_of({"x509_pem_cert": [pem], "ssl_tls_version": [b"TLSv1.3"]}).identity.name == "a"
    for context, code in [
        ({}, "E-TLS-09"),
        ({"x509_pem_cert": [pem]}, "E-TLS-15"),
        ({"x509_pem_cert": [pem], "ssl_tls_version": [b"TLSv1.2"]}, "E-TLS-15"),
    ]:
        with pytest.raises(RefusedError) as caught:
            peer_of(context)
        assert caught.value.code == code


@pytest.mark.parametrize("text", ["fl.example.org:8443", "10.0.0.1:1", "[2001:db8::1]:65535", "localhost:80"])
def test_address_round_trip(text):
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:0", "host:65536", "2001:db8::1:80", "a b:1", "https://a:1"]
)
def test_addresses_that_are_none(text):
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert caught.value.code == "E-CFG-02"
