"""The trace of handshakes: it gives a refusal its peer, and its own lines never reach the log."""

from __future__ import annotations

import pytest
from helpers_pki import authority
from helpers_pki_calls import HOST
from helpers_pki_server import Server

from protos.tls.connect import diagnose

pytestmark = pytest.mark.usefixtures("no_proxy")


def test_other_lines_pass_unchanged_and_trace_lines_do_not(tmp_path, clock):
    ca = authority(tmp_path / "ca", clock)
    server = Server(ca.home)
    for line in ("hello from C", "I1121 03:04:05.123456    77 other.cc:1] not about handshakes", "src/core/x", "é ö"):
        server.say(line)
    diagnose(HOST, server.port, ca.ca_pem)
    server.expect("refused")
    said = server.stop()
    assert "hello from C\nI1121 03:04:05.123456    77 other.cc:1] not about handshakes\nsrc/core/x\né ö\n" in said
    for sign in ("handshaker", "CallNext", "Source Location", "ssl_transport_security"):
        assert sign not in said
    assert said.count("E-TLS-10: refused a connection from 127.0.0.1:") == 1  # the line for a person
    assert "PRIVATE" not in said


def test_without_the_trace_the_reason_comes_without_the_peer(tmp_path, clock):
    ca = authority(tmp_path / "ca", clock)
    server = Server(ca.home, trace=False)
    try:
        assert diagnose(HOST, server.port, ca.ca_pem).code == "E-TLS-10"
        event = server.expect("refused")
        assert (event["code"], event["peer"]) == ("E-TLS-10", None)
    finally:
        server.stop()
