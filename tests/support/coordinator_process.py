"""A coordinator in a process of its own: real TLS, a handler that authorises, calls and denials as JSON on stdout.

Run as a program: python -m tests.support.coordinator_process HOME; end of input stops it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path


class Server:
    """The process, and what it has said."""

    def __init__(self, home: Path) -> None:
        drop = {"GRPC_TRACE", "GRPC_VERBOSITY", "GRPC_SSL_CIPHER_SUITES"}
        env = {k: v for k, v in os.environ.items() if k not in drop and "proxy" not in k.lower()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(home)],
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
    from service_core.tls.connect import require_tls13

    require_tls13()

    import logging
    from concurrent import futures

    import grpc

    from coordinator.api.authorization import authorize
    from coordinator.pki.server_certificate import server_credentials
    from coordinator.storage.records import MembershipStatus
    from fl_core.errors import RefusedError
    from service_core.pki.identity import Kind, peer_of

    lock = threading.Lock()

    def emit(**event) -> None:
        with lock:
            print(json.dumps(event), flush=True)

    def listed(name: str) -> set[str]:
        path = home / name
        return set(path.read_text().split()) if path.exists() else set()

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            kinds = {"/x/enrol": {Kind.INVITE}, "/x/silo": {Kind.SILO}}[details.method]

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


if __name__ == "__main__":
    main()
