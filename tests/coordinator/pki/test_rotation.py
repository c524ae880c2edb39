"""The service's certificate changes while it runs: new connections see the new one, old ones do not notice."""

from __future__ import annotations

import socket
import ssl

import grpc
import pytest
from cryptography import x509

from coordinator.pki.authority import Authority
from coordinator.pki.server_certificate import Looks, ServerCertificate
from fl_core.errors import StateError
from service_core.pki.identity import identity_of, serial_of
from silo.connection.channel import channel_credentials
from tests.support import until
from tests.support.pki import Server, authority, join, today

HOST = "127.0.0.1"


def presented(port, ca, silo):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca.ca_pem.decode())
    context.load_cert_chain(silo.folder / "silo.pem")
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((HOST, port), 10) as raw, context.wrap_socket(raw, server_hostname=HOST) as tls:
        return serial_of(x509.load_der_x509_certificate(tls.getpeercert(binary_form=True)))


@pytest.mark.integration
def test_a_renewed_certificate_counts_without_a_restart(tmp_path):
    ca = authority(tmp_path / "ca", today())
    silo = join(ca, tmp_path / "s", "a")
    (ca.home / "members").write_text(silo.fingerprint())
    server = Server(ca.home)
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    try:
        first = presented(server.port, ca, silo)
        assert first == identity_of(ca.server_credentials().cert_pem).serial
        with grpc.secure_channel(
            f"{HOST}:{server.port}", channel_credentials(silo.current_credentials()), options=options
        ) as old:
            assert old.unary_unary("/x/silo")(b"", timeout=10) == b"ok"
            second = identity_of(ca.issue_server().cert_pem).serial
            assert second != first
            until(lambda: presented(server.port, ca, silo) == second, "the renewed certificate", 20)
            assert old.unary_unary("/x/silo")(b"", timeout=10) == b"ok"  # the old connection goes on
        with grpc.secure_channel(
            f"{HOST}:{server.port}", channel_credentials(silo.current_credentials()), options=options
        ) as new:
            assert new.unary_unary("/x/silo")(b"", timeout=10) == b"ok"
        (ca.folder / "server.pem").write_bytes(b"damaged")  # the last good one stays in use, and the log says why

        def said() -> bool:
            assert presented(server.port, ca, silo) == second
            return any("E-STATE-43" in line for line in server.stderr)

        until(said, "the damaged certificate is noticed", 20)
    finally:
        server.stop()


def test_connections_that_come_at_once_are_one_look_at_the_certificate(tmp_path):
    """A stranger's connection costs the service no file that is read: 2,000 of them would keep members waiting."""
    ca = authority(tmp_path / "ca", today())
    now, certificate = [100.0], ServerCertificate(ca.home)
    certificate.configuration()
    asked = []
    looks = Looks(lambda: asked.append(now[0]) or certificate.changed(), lambda: now[0])
    ca.issue_server()
    assert looks() is not None  # the first connection after a renewal is answered with it
    assert [looks() for _ in range(1000)] == [None] * 1000
    now[0] += 1.0
    assert looks() is None
    assert asked == [100.0, 101.0]


def test_a_look_that_takes_long_keeps_no_other_connection_waiting():
    """One connection renews the certificate; those that come meanwhile are answered with the one in use."""
    renewed, meanwhile = grpc.ServerCertificateConfiguration(None), []
    looks = Looks(lambda: meanwhile.append(looks()) or renewed)
    assert looks() is renewed
    assert meanwhile == [None]


def test_it_renews_itself_when_two_thirds_are_over(tmp_path):
    """The service was made 61 days ago: its first handshake today is with a certificate made today."""
    past = today()
    past.advance(days=-61)
    ca = authority(tmp_path / "ca", past)
    made = identity_of(ca.server_credentials().cert_pem).serial
    silo = join(Authority.open(ca.home, today()), tmp_path / "s", "a")
    server = Server(ca.home)
    try:
        now = presented(server.port, ca, silo)
    finally:
        server.stop()
    assert now != made
    assert now == identity_of(ca.server_credentials().cert_pem).serial


def test_when_it_is_due(tmp_path):
    clock = today()
    ca = authority(tmp_path / "ca", clock)
    certificate = ServerCertificate(ca.home, clock)
    assert certificate.configuration() is not None
    assert certificate.changed() is None
    clock.advance(days=59)
    assert not certificate.renew_if_due()
    assert certificate.changed() is None
    clock.advance(days=2)
    assert certificate.changed() is not None
    assert certificate.changed() is None
    assert not certificate.renew_if_due()


def test_without_the_authoritys_key_it_says_so_once(tmp_path, caplog):
    clock = today()
    ca = authority(tmp_path / "ca", clock)
    (ca.folder / "ca.key").unlink()
    certificate = ServerCertificate(ca.home, clock)
    certificate.configuration()
    clock.advance(days=70)
    for _ in range(3):
        assert certificate.changed() is None
    assert [r.getMessage()[:8] for r in caplog.records] == ["E-TLS-06"]


def test_a_service_does_not_start_with_a_key_that_others_read(tmp_path):
    ca = authority(tmp_path / "ca", today())
    (ca.folder / "server.pem").chmod(0o644)
    with pytest.raises(StateError, match="chmod 600"):
        ServerCertificate(ca.home).configuration()
