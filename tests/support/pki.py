"""A consortium in a folder, a clock that tests turn, a silo that has joined, and calls with its credentials."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent import futures
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from coordinator.pki.authority import Authority
from service_core.pki.invitation import InvitationToken
from service_core.pki.roster import RosterMember, SignedRoster
from silo.connection.channel import channel_credentials
from silo.identity.identity import SiloIdentity


@dataclass
class Clock:
    """The time that a test decides."""

    now: datetime

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **span: float) -> None:
        self.now += timedelta(**span)


def today() -> Clock:
    return Clock(datetime.now(UTC).replace(microsecond=0))


def authority(home: Path, clock: Clock, consortium: str = "demo", **lifetimes) -> Authority:
    from coordinator.pki.authority import Lifetimes

    return Authority.create(home, consortium, ["fl.example.org:8443", "10.1.2.3:8443"], Lifetimes(**lifetimes), clock)


def member(ca: Authority, cert: bytes, links=()) -> RosterMember:
    return RosterMember.of(cert, ca.clock().isoformat(), tuple(links))


def join(ca: Authority, home: Path, name: str, others: tuple[RosterMember, ...] = (), version: int = 1) -> SiloIdentity:
    """Go through the enrolment of `name`, without a network."""
    silo = SiloIdentity(home, ca.clock)
    token = InvitationToken.decode(ca.invite(name).token, ca.clock())
    material = silo.join_material(token)
    cert = ca.sign_silo(material.csr_pem, name)
    silo.install(cert, token.ca_pem, roster(ca, [member(ca, cert), *others], version))
    return silo


def roster(ca: Authority, members, version: int, revoked=()) -> SignedRoster:
    return ca.roster(list(members), list(revoked), version)


def certified(ca: Authority, name: str) -> bytes:
    """Make a silo's certificate whose key nobody keeps."""
    from service_core.pki import certificates

    return ca.sign_silo(certificates.make_request(certificates.new_key()), name)


HOST = "127.0.0.1"


def call(port, credentials, method="/x/silo", name=None):
    named = [] if name is None else [("grpc.ssl_target_name_override", name)]
    options = [*named, ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"{HOST}:{port}", channel_credentials(credentials), options=options) as channel:
        return channel.unary_unary(method)(b"", timeout=10)


def refused_call(port, credentials, method="/x/silo", name=None) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(port, credentials, method, name)
    return caught.value


PROGRAM = """
from service_core.tls.connect import require_tls13

require_tls13()
from tests.support.pki import main

main()
"""


class Server:
    """A coordinator in a process of its own that says as JSON whom it admits; end of input stops it."""

    def __init__(self, home: Path) -> None:
        drop = {"GRPC_TRACE", "GRPC_VERBOSITY", "GRPC_SSL_CIPHER_SUITES"}
        env = {k: v for k, v in os.environ.items() if k not in drop and "proxy" not in k.lower()}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(home)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env | {"OMP_NUM_THREADS": "1"},
        )
        self._events: queue.Queue[dict] = queue.Queue()
        self.stderr: list[str] = []
        for target in (self._read_events, self._read_stderr):
            threading.Thread(target=target, daemon=True).start()
        self.port = self.expect("port")["port"]

    def _read_events(self) -> None:
        for line in self._process.stdout:
            self._events.put(json.loads(line))

    def _read_stderr(self) -> None:
        self.stderr.extend(self._process.stderr)

    def expect(self, kind: str, **wanted) -> dict:
        """Wait for the next event of a kind (others before it are dropped)."""
        deadline = time.monotonic() + 20
        seen = []
        while time.monotonic() < deadline:
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                if self._process.poll() is not None:
                    break
                continue
            seen.append(event)
            if event["kind"] == kind and all(event[key] == value for key, value in wanted.items()):
                return event
        raise AssertionError(f"expected {kind} {wanted}, saw {seen}; stderr: {''.join(self.stderr)[-3000:]}")

    def forget(self) -> None:
        while not self._events.empty():
            self._events.get_nowait()

    def stop(self) -> str:
        if self._process.poll() is None:
            self._process.stdin.close()
            self._process.wait(20)
        return "".join(self.stderr)


def main() -> None:
    home = Path(sys.argv[1])
    from coordinator.api.authorization import authorize
    from coordinator.pki.server_certificate import server_credentials
    from coordinator.storage.records import MembershipStatus
    from fl_core.errors import RefusedError
    from service_core.pki.identity import CertificateRole, peer_of

    lock = threading.Lock()

    def emit(**event) -> None:
        with lock:
            print(json.dumps(event), flush=True)

    def listed(name: str) -> set[str]:
        path = home / name
        return set(path.read_text().split()) if path.exists() else set()

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            kinds = {"/x/enrol": {CertificateRole.INVITE}, "/x/silo": {CertificateRole.SILO}}[details.method]

            def call(request, context):
                try:
                    peer = peer_of(context.auth_context())
                    error = authorize(
                        peer,
                        kinds,
                        "demo",
                        lambda p: MembershipStatus(
                            "left" if p.serial in listed("revoked") else None, p.fingerprint in listed("members")
                        ),
                    )
                except RefusedError as refused:
                    error = refused
                if error is not None:
                    emit(kind="denied", code=error.code, message=error.message)
                    context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
                emit(kind="call", who=str(peer.identity))
                return b"ok"

            return grpc.unary_unary_rpc_method_handler(call)

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Handler()])
    port = server.add_secure_port("127.0.0.1:0", server_credentials(home))
    server.start()
    emit(kind="port", port=port)
    sys.stdin.read()
    server.stop(0).wait()
