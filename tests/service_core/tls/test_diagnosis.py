"""What the dialling side finds out, against small servers that misbehave in one way each."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from service_core.pki import certificates
from service_core.storage import private_files
from service_core.tls.causes import Diagnosis
from service_core.tls.connect import diagnose
from service_core.tls.proxy import proxy_for
from tests.support.pki import authority, join, today

HOST = "127.0.0.1"
pytestmark = pytest.mark.usefixtures("no_proxy")


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"), today())


@pytest.fixture(scope="module")
def own(ca, tmp_path_factory):
    return join(ca, tmp_path_factory.mktemp("silo"), "a").current_credentials()


@contextmanager
def serving(handle):
    """Accept connections and let `handle` misbehave with each, on a thread."""
    listener = socket.create_server((HOST, 0))

    def loop():
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(5)
                try:
                    handle(peer)
                except OSError:
                    continue

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def look(port, ca, own, host=HOST, timeout=5.0, **more):
    return diagnose(host, port, ca.ca_pem, own.cert_pem, own.key_pem, timeout=timeout, **more)


def tls_server(bundle, alpn="h2", version=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(bundle)
    context.set_alpn_protocols([alpn])
    if version is not None:
        context.maximum_version = version
    return context


def test_nothing_listens(ca, own):
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    finding = look(port, ca, own)
    assert finding.code == "E-TLS-01"
    assert f"{HOST}:{port}" in finding.explanation


def test_no_such_host(ca, own, monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    finding = look(8443, ca, own, host="no-such-host.invalid")
    assert finding.code == "E-TLS-01"
    assert "no-such-host.invalid" in finding.explanation


def test_firewall_that_drops(ca, own, monkeypatch):
    def drop(*args, **kwargs):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", drop)
    finding = look(8443, ca, own)
    assert finding.code == "E-TLS-01"
    assert "firewall" in finding.remedy


def test_network_without_a_route(ca, own, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    finding = look(8443, ca, own)
    assert finding.code == "E-TLS-01"
    assert "Network is unreachable" in finding.explanation


def test_silent_port(ca, own):
    with serving(lambda peer: [peer.recv(4096) for _ in range(2)]) as port:
        finding = look(port, ca, own, timeout=0.3)
    assert finding.code == "E-TLS-01"
    assert "sends nothing" in finding.explanation


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\0\0\x12\4" * 9])
def test_plaintext_port(ca, own, answer):
    def handle(peer):
        peer.recv(4096)
        peer.sendall(answer)

    with serving(handle) as port:
        finding = look(port, ca, own)
    assert finding.code == "E-TLS-15"


def test_connection_cut_in_the_handshake(ca, own):
    with serving(lambda peer: peer.recv(4096)) as port:
        finding = look(port, ca, own)
    assert finding.code == "E-TLS-13"
    assert finding.worth_retrying


def test_intercepting_proxy_is_named(ca, own, tmp_path):
    proxy = authority(tmp_path, today(), "hospital-inspection")
    context = tls_server(proxy.folder / "server.pem")
    with serving(lambda peer: context.wrap_socket(peer, server_side=True).recv(1)) as port:
        finding = look(port, ca, own)
    assert finding.code == "E-TLS-05"
    assert "Consilium authority of hospital-inspection" in finding.explanation
    assert "Consilium authority of demo" in finding.explanation
    assert "proxy" in finding.remedy
    assert not finding.worth_retrying


def test_old_tls(ca, own):
    context = tls_server(ca.folder / "server.pem", version=ssl.TLSVersion.TLSv1_2)
    with serving(lambda peer: context.wrap_socket(peer, server_side=True).recv(1)) as port:
        finding = look(port, ca, own)
    assert finding.code == "E-TLS-15"


@pytest.mark.integration
def test_tls_that_is_no_coordinator(ca, own):
    other = tls_server(ca.folder / "server.pem", alpn="http/1.1")
    with serving(lambda peer: other.wrap_socket(peer, server_side=True).recv(1)) as port:
        assert look(port, ca, own).code == "E-TLS-15"
    silent = tls_server(ca.folder / "server.pem")
    with serving(lambda peer: silent.wrap_socket(peer, server_side=True).recv(1)) as port:
        assert look(port, ca, own, timeout=4.0).code == "E-TLS-15"


@pytest.mark.parametrize(
    ("prepare", "code"),
    [("nothing", "E-TLS-09"), ("other authority", "E-TLS-09"), ("expired", "E-TLS-08")],
)
def test_alerts_of_servers_that_give_a_reason(ca, own, tmp_path, prepare, code):
    """A TLS-terminating front that checks client certificates says why, unlike gRPC."""
    context = tls_server(ca.folder / "server.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    trusted, clock, cert, key = ca.ca_pem, None, own.cert_pem, own.key_pem
    if prepare == "nothing":
        cert = key = None
    if prepare == "other authority":
        trusted = authority(tmp_path, today(), "other").ca_pem
    if prepare == "expired":
        past = today()
        past.advance(days=-200)
        from coordinator.pki.authority import Authority

        key, cert, _ = join(Authority.open(ca.home, past), tmp_path / "old", "old").current_credentials()
        clock = past
    context.load_verify_locations(cadata=trusted.decode())
    with serving(lambda peer: context.wrap_socket(peer, server_side=True).recv(1)) as port:
        # our own check comes first, so the expired one needs the clock at which it was still in force
        finding = diagnose(HOST, port, ca.ca_pem, cert, key, timeout=5, **({"clock": clock} if clock else {}))
    assert finding.code == code


def test_own_certificate_is_checked_before_dialling(ca, own, tmp_path):
    later = today()
    later.advance(days=91)
    finding = diagnose(HOST, 1, ca.ca_pem, own.cert_pem, own.key_pem, clock=later)
    assert finding.code == "E-TLS-08"
    assert "1 days ago" in finding.explanation or "0 days ago" in finding.explanation
    assert diagnose(HOST, 1, ca.ca_pem, own.cert_pem, certificates.new_key()).code == "E-TLS-09"
    other = authority(tmp_path, today(), "other")
    assert diagnose(HOST, 1, other.ca_pem, own.cert_pem, own.key_pem).code == "E-TLS-09"


def test_the_key_does_not_stay_behind(ca, own, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    written = []
    real = private_files.write_private
    monkeypatch.setattr(private_files, "write_private", lambda path, data: (written.append(path), real(path, data)))
    with serving(lambda peer: peer.recv(4096)) as port:
        finding = look(port, ca, own)
    assert written
    assert list(tmp_path.iterdir()) == []
    assert "PRIVATE" not in str(finding) + repr(finding)


def test_http_proxy(ca, own, monkeypatch):
    """gRPC goes through the environment's proxy, so the diagnosis does."""
    asked = []
    context = tls_server(ca.folder / "server.pem")

    def tunnel(peer):
        asked.append(peer.recv(4096))
        peer.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        context.wrap_socket(peer, server_side=True).sendall(b"\0\0\x12\4\0\0\0\0\0")

    def refuse(peer):
        peer.recv(4096)
        peer.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    with serving(tunnel) as port:
        monkeypatch.setenv("https_proxy", f"http://{HOST}:{port}")
        finding = look(8443, ca, own, host="fl.example.org")
    assert finding.ok, finding
    assert asked[0].startswith(b"CONNECT fl.example.org:8443 HTTP/1.1\r\n")
    with serving(refuse) as port:
        monkeypatch.setenv("https_proxy", f"http://{HOST}:{port}")
        finding = look(8443, ca, own, host="fl.example.org")
    assert finding.code == "E-TLS-13"
    assert "403 Forbidden" in finding.explanation
    assert "https_proxy" in finding.explanation


def test_which_proxy(monkeypatch):
    assert proxy_for("a.example.org") is None
    monkeypatch.setenv("http_proxy", "http://p1:3128")
    assert proxy_for("a.example.org") == ("p1", 3128, "http_proxy")
    monkeypatch.setenv("grpc_proxy", "p2:8080")
    assert proxy_for("a.example.org") == ("p2", 8080, "grpc_proxy")
    monkeypatch.setenv("no_proxy", "other.org, .example.org")
    assert proxy_for("a.example.org") is None
    assert proxy_for("example.net") == ("p2", 8080, "grpc_proxy")


def test_a_connection_that_works_is_no_error():
    with pytest.raises(ValueError, match="works"):
        Diagnosis(None, "fine", "nothing").error()


def run(code):
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    return done.stdout.strip()


def test_require_tls13_must_come_before_grpc():
    assert (
        run("from service_core.tls.connect import require_tls13 as r; r(); r(); import grpc; r(); print('fine')")
        == "fine"
    )
    late = (
        "import grpc\nfrom service_core.tls.connect import require_tls13 as r\nfrom fl_core.errors import StateError\n"
        "try:\n r()\nexcept StateError as e:\n print(e.code)"
    )
    assert run(late) == "E-RUN-99"


def test_certificates_and_tls_do_not_import_grpc():
    pki = ["identity", "certificates", "invitation", "roster", "offline_signing"]
    modules = [f"pki.{m}" for m in pki] + [f"tls.{m}" for m in ("connect", "causes", "proxy")]
    modules.append("storage.private_files")
    code = f"import sys\nfor m in {modules}: __import__('service_core.' + m)\nprint('grpc' in sys.modules)"
    assert run(code) == "False"
