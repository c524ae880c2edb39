from __future__ import annotations

import stat
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store

from coordinator.pki.authority import Authority
from fl_core.errors import ConfigError, RefusedError, StateError
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, identity_of
from service_core.storage import private_files
from tests.support.pki import authority, certified, today


@pytest.fixture
def clock():
    return today()


@pytest.fixture
def ca(tmp_path, clock):
    return authority(tmp_path / "home", clock)


def request_of(key):
    return certificates.make_request(key)


def test_create_open_and_refuse_to_overwrite(ca, tmp_path, clock):
    again = Authority.open(tmp_path / "home", clock)
    assert again == ca
    before = ca.ca_pem, (ca.folder / "ca.key").read_bytes()
    with pytest.raises(StateError) as caught:
        authority(tmp_path / "home", clock)
    assert caught.value.code == "E-STATE-44"
    assert (ca.ca_pem, (ca.folder / "ca.key").read_bytes()) == before


def test_modes_and_no_key_in_repr(ca):
    assert stat.S_IMODE(ca.folder.stat().st_mode) == 0o700
    ca.issue_lead("anna")
    secret = [p for p in ca.folder.iterdir() if b"PRIVATE KEY" in p.read_bytes()]
    assert sorted(p.name for p in secret) == ["ca.key", "lead-anna.pem", "server.pem"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in secret)
    assert "PRIVATE" not in repr(ca) + repr(ca.server_credentials()) + repr(ca.invite("a"))


def test_a_ca_key_that_others_read_is_not_used(ca):
    (ca.folder / "ca.key").chmod(0o644)
    with pytest.raises(StateError, match="chmod 600") as caught:
        ca.invite("a")
    assert caught.value.code == "E-STATE-42"


def test_missing_and_damaged_homes(ca, tmp_path):
    with pytest.raises(StateError) as caught:
        Authority.open(tmp_path / "nothing")
    assert caught.value.code == "E-STATE-43"
    (ca.folder / "authority.json").write_text("[]")
    with pytest.raises(StateError) as caught:
        Authority.open(ca.home)
    assert caught.value.code == "E-STATE-43"


@pytest.mark.parametrize("after", range(1, 5))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_interrupted_creation_can_be_repeated(tmp_path, clock, monkeypatch, after, moment):
    real, count = private_files._replace, 0

    def cut(*args):
        nonlocal count
        count += 1
        if count == after and moment == "before":
            raise KeyboardInterrupt
        real(*args)
        if count == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(private_files, "_replace", cut)
    with pytest.raises(KeyboardInterrupt):
        authority(tmp_path, clock)
    monkeypatch.undo()
    with pytest.raises(StateError):
        Authority.open(tmp_path)
    made = authority(tmp_path, clock)
    assert Authority.open(tmp_path, clock) == made
    assert made.server_credentials().ca_pem == made.ca_pem


def usage(pem):
    cert = x509.load_pem_x509_certificate(pem)
    return list(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_certificates_verify_independently(ca, clock):
    """A library that did not make them accepts the chains, for the right use and names alone."""
    store = Store([x509.load_pem_x509_certificate(ca.ca_pem)])
    builder = PolicyBuilder().store(store).time(clock())
    server = x509.load_pem_x509_certificate(ca.server_credentials().cert_pem)
    builder.build_server_verifier(x509.DNSName("fl.example.org")).verify(server, [])
    with pytest.raises(x509.verification.VerificationError):
        builder.build_server_verifier(x509.DNSName("elsewhere.org")).verify(server, [])
    with pytest.raises(x509.verification.VerificationError):
        builder.build_client_verifier().verify(server, [])
    for pem, uri in [
        (certified(ca, "a"), "silo://demo/a"),
        (ca.issue_lead("anna").cert_pem, "lead://demo/anna"),
    ]:
        verified = builder.build_client_verifier().verify(x509.load_pem_x509_certificate(pem), [])
        assert [str(n.value) for n in verified.subjects] == [uri]


def test_lifetimes_and_the_hour_against_clock_skew(ca, clock):
    for pem, days in [(certified(ca, "a"), 90), (ca.issue_lead("l").cert_pem, 365), (ca.issue_server().cert_pem, 90)]:
        peer = identity_of(pem)
        assert peer.not_before == clock() - timedelta(hours=1)
        assert peer.not_after == clock() + timedelta(days=days)


def test_a_leaf_never_outlives_its_ca(ca, clock):
    end = x509.load_pem_x509_certificate(ca.ca_pem).not_valid_after_utc
    assert end == clock() + timedelta(days=3650)
    clock.advance(days=3650 - 10)
    assert identity_of(certified(ca, "a")).not_after == end
    clock.advance(days=10)
    with pytest.raises(StateError) as caught:
        certified(ca, "a")
    assert caught.value.code == "E-STATE-43"


def test_serials_are_random(ca):
    serials = [int(identity_of(certified(ca, "a")).serial, 16) for _ in range(8)]
    assert len(set(serials)) == 8
    assert all(s.bit_length() > 100 for s in serials)


def test_of_the_request_only_the_key_counts(ca):
    key = certificates.load_key(certificates.new_key(), "test")
    greedy = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator")]))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier("coordinator://demo"), x509.DNSName("fl.example.org")]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = ca.sign_silo(greedy.public_bytes(Encoding.PEM), "center3")
    cert = x509.load_pem_x509_certificate(pem)
    assert identity_of(pem).identity == Identity(CertificateRole.SILO, "demo", "center3")
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == []
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert usage(pem) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    common = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    assert " " in common  # no library can take it for a host name
    assert certificates.spki(cert.public_key()) == certificates.spki(key.public_key())


def raw_request(key, algorithm):
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    return x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, algorithm).public_bytes(Encoding.PEM)


def test_unsound_requests_are_refused(ca):
    good = x509.load_pem_x509_csr(request_of(certificates.new_key())).public_bytes(Encoding.DER)
    forged = good[:-1] + bytes([good[-1] ^ 1])
    armoured = x509.load_der_x509_csr(forged).public_bytes(Encoding.PEM)
    for csr in [
        b"",
        b"nonsense",
        armoured,
        raw_request(rsa.generate_private_key(65537, 2048), hashes.SHA256()),
        raw_request(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()),
        raw_request(ed25519.Ed25519PrivateKey.generate(), None),
    ]:
        with pytest.raises(RefusedError) as caught:
            ca.sign_silo(csr, "a")
        assert caught.value.code == "E-ID-31"


def test_bad_names_are_refused(ca):
    for attempt in (lambda: ca.invite("Center 3"), lambda: ca.sign_silo(request_of(certificates.new_key()), "../x")):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert caught.value.code == "E-CFG-02"


def test_renewal_needs_the_old_key(ca, clock, tmp_path):
    old_key, new_key = certificates.new_key(), certificates.new_key()
    old = ca.sign_silo(request_of(old_key), "a")
    identity = identity_of(old).identity
    public = certificates.load_key(new_key, "test").public_key()
    message = certificates.renewal_message(identity, public)
    proof = certificates.sign(certificates.load_key(old_key, "test"), certificates.RENEWAL, message)
    renewed = identity_of(ca.renew(request_of(new_key), old, proof))
    assert renewed.identity == identity
    assert renewed.fingerprint == certificates.fingerprint_of(public)

    stranger = certificates.load_key(certificates.new_key(), "test")
    other = authority(tmp_path / "other", clock)
    for csr, cert, sig in [
        (request_of(new_key), old, certificates.sign(stranger, certificates.RENEWAL, message)),
        (request_of(new_key), old, b"not a signature"),
        (request_of(new_key), old, certificates.sign(certificates.load_key(old_key, "t"), "other use", message)),
        (request_of(certificates.new_key()), old, proof),
        (request_of(new_key), other.sign_silo(request_of(old_key), "a"), proof),
        (request_of(new_key), ca.issue_lead("a").cert_pem, proof),
    ]:
        with pytest.raises(RefusedError) as caught:
            ca.renew(csr, cert, sig)
        assert caught.value.code == "E-ID-13"
    clock.advance(days=91)
    with pytest.raises(RefusedError, match="expired") as caught:
        ca.renew(request_of(new_key), old, proof)
    assert caught.value.code == "E-ID-13"
