"""What a silo says of a coordinator that is not as it should be: its certificate expired, or it is another silo."""

from __future__ import annotations

import grpc
import pytest

from coordinator.pki.authority import Authority
from service_core.pki.identity import Address, identity_of
from service_core.tls.connect import diagnose
from silo.connection.channel import diagnose_channel
from tests.support.pki import HOST, Server, authority, join, refused_call, today

pytestmark = pytest.mark.usefixtures("no_proxy")


def test_expired_server_certificate(tmp_path, clock):
    past = today()
    past.advance(days=-200)
    old = authority(tmp_path / "ca", past)
    silo = join(Authority.open(old.home, clock), tmp_path / "s", "a")
    (old.folder / "ca.key").rename(tmp_path / "ca.key")  # kept elsewhere: this service cannot renew by itself
    server = Server(old.home)
    try:
        finding = diagnose_channel(Address(HOST, server.port), silo.current_credentials())
        assert finding.code == "E-TLS-06"
        assert f"{identity_of(old.server_credentials().cert_pem).not_after:%Y-%m-%d}" in finding.explanation
        refused_call(server.port, silo.current_credentials())
    finally:
        said = server.stop()
    assert "E-TLS-06" in said  # the operator hears of it too


def test_a_silo_cannot_play_the_coordinator(tmp_path, clock):
    """Its certificate is of the right CA; neither its use nor its name lets it serve, even called localhost."""
    ca = authority(tmp_path / "ca", clock)
    impostor = join(ca, tmp_path / "impostor", "localhost")
    (ca.folder / "ca.key").rename(tmp_path / "ca.key")
    (ca.folder / "server.pem").write_bytes((impostor.folder / "silo.pem").read_bytes())
    (ca.folder / "server.pem").chmod(0o600)
    victim = impostor.current_credentials()
    (ca.home / "members").write_text(impostor.fingerprint())
    server = Server(ca.home)
    try:
        finding = diagnose(HOST, server.port, victim.ca_pem, victim.cert_pem, victim.key_pem, server_name="localhost")
        assert finding.code in {"E-TLS-07", "E-TLS-09"}
        error = refused_call(server.port, victim, name="localhost")
        assert error.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop()
