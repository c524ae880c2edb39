"""The reader of the core's lines and the pipe that they come through, without a server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from datetime import timedelta

import pytest
from helpers_pki import today

from coordinator.tls.handshake_log import CoreLineReader, Refusal, RefusalLog

CLOCK = today()
HEAD = "I1121 03:06:08.{:06d}    3893 "
ARGS = (
    " shutdown=false index=2, args={{endpoint=0x7f, args={{grpc.internal.endpoint_local_address=ipv4:127.0.0.1:1, "
    "grpc.internal.endpoint_peer_address={peer}, {side}=0x1, grpc.internal.use_v3_stack=0}}, exit_early=0}}"
)


def failure(words, peer="ipv4:10.0.0.7:32782", side="grpc.internal.server_credentials"):
    """The lines that grpcio 1.85 writes for one failed handshake with the trace."""
    text = f"Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:{words}: OK"
    return [
        HEAD.format(1) + f"ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: {words}",
        HEAD.format(2) + f"handshaker.cc:155] CallNextHandshakerLocked: error=UNKNOWN: {text}",
        "=== Source Location Trace: === ",
        "src/core/util/status_helper.cc:68",
        ARGS.format(peer=peer, side=side),
        HEAD.format(3) + f"channel_trace.h:396] handshake manager 0x7f: Failed with error: UNKNOWN: {text}",
        "=== Source Location Trace: === ",
        "src/core/util/status_helper.cc:68",
        "",
    ]


def read(lines, **options):
    found: list[Refusal] = []
    reader = CoreLineReader(found.append, clock=CLOCK, **options)
    passed = [line for line in lines if reader.line(line)]
    reader.idle()
    return found, passed


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "E-TLS-08"),
        ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "E-TLS-08"),
        ("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", "E-TLS-09"),
        ("BAD_SIGNATURE: certificate signature failure", "E-TLS-09"),
        ("CERTIFICATE_VERIFY_FAILED: self-signed certificate", "E-TLS-09"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate verification context", "E-TLS-10"),
        ("HTTP_REQUEST: Invalid certificate verification context", "E-TLS-04"),
        ("WRONG_VERSION_NUMBER: Invalid certificate verification context", "E-TLS-04"),
        ("NO_SHARED_CIPHER: Invalid certificate verification context", "E-TLS-11"),
        ("CERTIFICATE_VERIFY_FAILED: unsupported certificate purpose", "E-TLS-14"),
        ("TLSV1_ALERT_UNKNOWN_CA: Invalid certificate verification context", "E-TLS-13"),
        ("SOMETHING_NEW: nobody knows", "E-TLS-12"),
    ],
)
def test_reasons(words, code):
    found, passed = read(failure(words))
    assert [(r.code, r.peer, r.at) for r in found] == [(code, "10.0.0.7:32782", CLOCK())]
    assert passed == []
    if code == "E-TLS-12":
        assert "nobody knows" in found[0].reason


def test_ipv6_peer():
    found, _ = read(failure("HTTP_REQUEST", "ipv6:%5B2001:db8::7%5D:4711"))
    assert found[0].peer == "[2001:db8::7]:4711"


def test_handshakes_that_this_process_dials_are_not_refusals():
    found, passed = read(failure("certificate has expired", side="grpc.internal.channel_credentials"))
    assert found == []
    assert passed == []


def test_without_the_trace():
    found, passed = read([failure("certificate has expired")[0], "something else"], tracing=False)
    assert [(r.code, r.peer) for r in found] == [("E-TLS-08", None)]
    assert passed == ["something else"]


def test_a_core_whose_trace_says_nothing_more_still_gives_the_reason():
    found, _ = read(failure("certificate has expired")[:1])
    assert [(r.code, r.peer) for r in found] == [("E-TLS-08", None)]


def test_successful_handshakes_are_neither_shown_nor_reported():
    lines = [
        HEAD.format(1) + "handshaker.cc:80] handshake_manager 0x7f: adding handshaker security [0x7f] at index 1",
        HEAD.format(2) + "handshaker.cc:155] CallNextHandshakerLocked: error=OK shutdown=false index=2, args={peer=1}",
        HEAD.format(3) + "channel_trace.h:396] handshake manager 0x7f:  calling handshaker security at index 1",
        HEAD.format(4) + "trace.cc:91] gRPC Tracers: handshaker",
    ]
    assert read(lines) == ([], [])


def test_other_lines_pass():
    lines = ["plain", "", "Traceback (most recent call last):", HEAD.format(1) + "other.cc:1] hello", " indented"]
    assert read(lines) == ([], lines)
    lines = [HEAD.format(1) + "handshaker.cc:80] adding", "a line of ours", "src/core/ is a folder", ""]
    assert read(lines)[1] == lines[1:]


def test_a_line_of_ours_that_comes_between_two_messages_of_a_trace_passes():
    lines = failure("certificate has expired")
    for i in (0, 1, 5, len(lines)):  # the core writes each of its messages, however many lines, at once
        found, passed = read([*lines[:i], "src/core/x", *lines[i:]])
        assert (passed, len(found)) == (["src/core/x"], 1)


def test_with_debug_everything_passes():
    lines = failure("certificate has expired")
    found, passed = read(lines, keep_all=True)
    assert len(found) == 1
    assert passed == lines


def test_the_end_of_the_service_is_no_refusal():
    lines = [HEAD.format(1) + "handshaker.cc:155] CallNextHandshakerLocked: error=UNKNOWN: Server shutdown",
             ARGS.format(peer="ipv4:1.2.3.4:5", side="grpc.internal.server_credentials")]  # fmt: skip
    assert read(lines) == ([], [])


def test_the_log_says_it_once_a_minute_and_counts(caplog):
    caplog.set_level(logging.INFO)
    write, clock = RefusalLog(), today()
    for _ in range(5):
        write(Refusal("E-TLS-08", "its certificate has expired", "10.0.0.7:1", clock()))
    write(Refusal("E-TLS-08", "its certificate has expired", "10.0.0.8:1", clock()))
    write(Refusal("E-TLS-09", "another authority's", None, clock()))
    assert len(caplog.records) == 3
    clock.now += timedelta(minutes=2)
    write(Refusal("E-TLS-08", "its certificate has expired", "10.0.0.7:2", clock()))
    assert "E-TLS-08: refused a connection from 10.0.0.7:2" in caplog.records[-1].getMessage()
    assert "4 more" in caplog.records[-1].getMessage()
    write(Refusal("E-TLS-13", "a probe", "10.0.0.9:2", clock()))
    assert caplog.records[-1].levelno == logging.INFO


SCRIPT = """
import os, sys, time, threading
from coordinator.tls.stderr_capture import CoreLog
seen = []
slow = threading.Event()
def line(text):
    seen.append(text)
    if text == 'wait': slow.wait(20)
    return not text.startswith('drop')
with CoreLog(line, lambda: None):
    os.write(2, b'one\\ndrop this\\ntwo\\n')
    sys.stderr.write('python\\n')
    if {flood}:
        os.write(2, b'wait\\n')
        full = 0
        for _ in range(100000):
            try: os.write(2, b'x' * 99 + b'\\n')
            except BlockingIOError: full += 1
        slow.set()
        print(full > 0)
    os.write(2, b'a question? ')
print(2 if not {flood} else len(seen) > 1000, sys.stderr is sys.__stderr__)
os.write(2, b'after\\n')
"""


def run(flood):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(flood=flood)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split(), done.stderr


def test_the_pipe_passes_on_and_gives_stderr_back():
    out, err = run(False)
    assert out == ["2", "True"]
    assert err.replace("python\n", "", 1) == "one\ntwo\na question? after\n"
    assert "python\n" in err


def test_a_flood_loses_lines_and_never_blocks():
    out, _ = run(True)
    assert out == ["True", "True", "True"]


@pytest.mark.parametrize("write", ["sys.__stderr__.write('x\\n')", "os.system('echo x >&2')"])
def test_writers_that_hold_the_old_stderr_are_heard(write):
    code = "import os, sys\nfrom coordinator.tls.stderr_capture import CoreLog\n"
    code += "with CoreLog(lambda t: True, lambda: None):\n "
    code += write
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "x\n"
    assert os.fstat(2)
