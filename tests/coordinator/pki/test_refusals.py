"""Every refusal of a caller, by a real coordinator in a process of its own, explained on both sides."""

from __future__ import annotations

import socket
import ssl
import time

import grpc
import pytest

from coordinator.pki.authority import Authority
from fl_core.errors import RefusedError, UnavailableError
from service_core.pki.identity import Address
from service_core.pki.invitation import InvitationToken
from service_core.storage.private_files import Credentials
from service_core.tls.connect import diagnose
from silo.connection.channel import channel_credentials, diagnose_channel
from tests.support.pki import HOST, Server, authority, call, join, refused_call, today

pytestmark = pytest.mark.usefixtures("no_proxy")


@pytest.fixture(scope="module")
def ca(tmp_path_factory, clock):
    return authority(tmp_path_factory.mktemp("coordinator"), clock)


@pytest.fixture(scope="module")
def silo(ca, tmp_path_factory):
    return join(ca, tmp_path_factory.mktemp("silo"), "a")


@pytest.fixture(scope="module")
def running(ca):
    server = Server(ca.home)
    yield server
    server.stop()


@pytest.fixture
def server(running, ca, silo):
    (ca.home / "members").write_text(silo.fingerprint())
    (ca.home / "revoked").write_text("")
    running.forget()
    return running


def test_a_member_is_let_in(server, silo):
    assert call(server.port, silo.current_credentials()) == b"ok"
    assert server.expect("call")["who"] == "silo://demo/a"
    finding = diagnose_channel(Address(HOST, server.port), silo.current_credentials())
    assert finding.ok
    assert not finding.worth_retrying


@pytest.mark.fault("a stranger", "calls without a certificate", "the handshake fails")
def test_no_certificate(server, ca):
    finding = diagnose(HOST, server.port, ca.ca_pem)
    assert finding.code == "E-TLS-09"
    assert "silo join" in finding.remedy


def expired(ca, tmp_path):
    past = today()
    past.advance(days=-200)
    return join(Authority.open(ca.home, past), tmp_path / "old", "old")


def test_expired_certificate(server, ca, tmp_path):
    old = expired(ca, tmp_path)
    credentials = old.current_credentials()
    finding = diagnose_channel(Address(HOST, server.port), credentials)
    assert finding.code == "E-TLS-08"
    assert f"{old.load().not_after:%Y-%m-%d}" in finding.explanation  # since when
    assert "silo join" in finding.remedy
    assert refused_call(server.port, credentials).code() == grpc.StatusCode.UNAVAILABLE


def test_expired_by_the_coordinators_clock_alone(server, ca, tmp_path):
    """A silo whose clock stands still cannot know the reason; it says so, and the coordinator's log has it."""
    old = expired(ca, tmp_path)
    credentials = old.current_credentials()
    far = today()
    far.advance(days=-150)
    key, cert, pem = credentials
    finding = diagnose(HOST, server.port, pem, cert, key, clock=far)
    assert finding.code == "E-TLS-12"
    assert "clock" in finding.explanation
    assert "log" in finding.remedy
    deadline = time.monotonic() + 20
    while "certificate has expired" not in "".join(server.stderr) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "certificate has expired" in "".join(server.stderr)


def test_certificate_not_valid_yet(server, ca, tmp_path):
    ahead = today()
    ahead.advance(days=2)
    early = join(Authority.open(ca.home, ahead), tmp_path / "early", "early")
    finding = diagnose_channel(Address(HOST, server.port), early.current_credentials())
    assert finding.code == "E-TLS-08"
    assert "clock" in finding.remedy
    refused_call(server.port, early.current_credentials())


@pytest.mark.parametrize("consortium", ["demo", "other"])
@pytest.mark.fault("a stranger", "shows a certificate of its own authority", "the handshake fails")
def test_certificate_of_another_authority(server, ca, tmp_path, clock, consortium):
    other = authority(tmp_path / "other", clock, consortium)
    key, cert, theirs = join(other, tmp_path / "s", "a").current_credentials()
    finding = diagnose(HOST, server.port, ca.ca_pem, cert, key)  # the right CA pinned, another one's certificate
    assert finding.code == "E-TLS-09"
    refused_call(server.port, Credentials(key, cert, ca.ca_pem))
    finding = diagnose(HOST, server.port, theirs, cert, key)  # at home in the other consortium altogether
    assert finding.code == "E-TLS-05"
    assert "Consilium authority of demo" in finding.explanation or "another key" in finding.explanation
    refused_call(server.port, Credentials(key, cert, theirs))


def test_wrong_host_name(server, ca, silo):
    key, cert, pem = silo.current_credentials()
    finding = diagnose(HOST, server.port, pem, cert, key, server_name="elsewhere.example.org")
    assert finding.code == "E-TLS-07"
    for name in ("elsewhere.example.org", "fl.example.org", "10.1.2.3", "localhost"):
        assert name in finding.explanation
    error = refused_call(server.port, silo.current_credentials(), name="elsewhere.example.org")
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert call(server.port, silo.current_credentials(), name="fl.example.org") == b"ok"


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_plaintext_client(server, first):
    with socket.create_connection((HOST, server.port), 10) as plain:
        plain.sendall(first)
        assert plain.recv(100) == b""


def test_plaintext_grpc_client(server):
    with (
        grpc.insecure_channel(f"{HOST}:{server.port}", options=[("grpc.enable_http_proxy", 0)]) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary("/x/silo")(b"", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def tls_client(ca, silo, tmp_path, version):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = version
    context.load_verify_locations(cadata=ca.ca_pem.decode())
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(silo.folder / "silo.pem")
    return context


@pytest.mark.fault("a stranger", "offers TLS 1.2", "the handshake fails")
def test_a_client_of_tls_12_is_refused(server, ca, silo, tmp_path):
    """require_tls13 works: the same client is let in with TLS 1.3 and refused with 1.2."""
    with socket.create_connection((HOST, server.port), 10) as raw:
        context = tls_client(ca, silo, tmp_path, ssl.TLSVersion.TLSv1_3)
        with context.wrap_socket(raw, server_hostname=HOST) as tls:
            assert tls.version() == "TLSv1.3"
            assert tls.recv(9)
    with socket.create_connection((HOST, server.port), 10) as raw:
        context = tls_client(ca, silo, tmp_path, ssl.TLSVersion.TLSv1_2)
        with pytest.raises(OSError, match=r"EOF|ALERT|reset|HANDSHAKE"):
            context.wrap_socket(raw, server_hostname=HOST)


@pytest.mark.fault("a revoked hospital", "calls", "refused with E-ID-12")
def test_revoked(server, ca, silo):
    (ca.home / "revoked").write_text(silo.load().serial)
    error = refused_call(server.port, silo.current_credentials())
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "E-ID-12" in error.details()
    assert server.expect("denied")["code"] == "E-ID-12"


def test_no_member(server, ca, tmp_path):
    stranger = join(ca, tmp_path / "s", "stranger")
    error = refused_call(server.port, stranger.current_credentials())
    assert "E-ID-13" in error.details()
    assert "silo://demo/stranger" in error.details()
    assert server.expect("denied")["code"] == "E-ID-13"


@pytest.mark.fault("the holder of an invitation", "makes any call except enrolment", "refused")
def test_an_invitation_opens_enrolment_alone(server, ca):
    token = InvitationToken.decode(ca.invite("new").token)
    (ca.home / "members").write_text(token.certificate.fingerprint)
    assert call(server.port, token.credentials, "/x/enrol") == b"ok"
    error = refused_call(server.port, token.credentials, "/x/silo")
    assert "E-ID-11" in error.details()
    assert server.expect("denied")["code"] == "E-ID-11"


def test_a_silo_cannot_enrol_as_an_invitation(server, silo):
    error = refused_call(server.port, silo.current_credentials(), "/x/enrol")
    assert "E-ID-11" in error.details()
    assert server.expect("denied")["code"] == "E-ID-11"


@pytest.mark.fault("a lead", "calls as a hospital", "refused")
def test_a_lead_is_no_silo(server, ca):
    error = refused_call(server.port, ca.issue_lead("anna"))
    assert "E-ID-11" in error.details()


def test_the_coordinators_certificate_is_no_clients(server, ca):
    assert refused_call(server.port, ca.server_credentials()).code() == grpc.StatusCode.UNAVAILABLE


def test_findings_become_errors_by_what_the_reader_can_do(server, ca, silo):
    finding = diagnose(HOST, server.port, ca.ca_pem)
    assert isinstance(finding.error(), RefusedError)
    with socket.create_server((HOST, 0)) as unused:
        free = unused.getsockname()[1]
    down = diagnose_channel(Address(HOST, free), silo.current_credentials())
    assert down.code == "E-TLS-01"
    assert down.worth_retrying
    assert isinstance(down.error(), UnavailableError)
    assert down.error().code == "E-TLS-01"


def test_credentials_of_a_silo(server, silo):
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(
        f"{HOST}:{server.port}", channel_credentials(silo.current_credentials()), options=options
    ) as channel:
        assert channel.unary_unary("/x/silo")(b"", timeout=10) == b"ok"
