"""The same bytes over the same kind of channel, and nothing else: no disk, no hash, no message format.

The server and each client are processes of their own, with the certificates of the consortium that is measured. One
round: every client reads `down` bytes as a stream and then sends `up` bytes as a stream, in messages of a chunk's size.
"""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import argparse  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from functools import cache  # noqa: E402
from pathlib import Path  # noqa: E402

import grpc  # noqa: E402

from benchmarks.round_trip.processes import Processes, cpu_seconds  # noqa: E402
from coordinator.pki.server_certificate import server_credentials  # noqa: E402
from protos.wire.channel_options import server_options, window_bytes  # noqa: E402
from protos.wire.chunks import CHUNK_BYTES  # noqa: E402
from service_core.pki.identity import Address  # noqa: E402
from silo.connection.channel import connect_with  # noqa: E402
from silo.identity.identity import SiloIdentity  # noqa: E402

SERVICE = "benchmarks.Bare"


def stream(size: int) -> Iterator[bytes]:
    """Give `size` bytes in messages of a chunk's size, made once."""
    message = _message()
    for _ in range(size // CHUNK_BYTES):
        yield message
    if rest := size % CHUNK_BYTES:
        yield message[:rest]


@cache
def _message() -> bytes:
    return os.urandom(CHUNK_BYTES)


class _Handlers:
    """Down: a request that names a size gives that many bytes. Up: the answer is how many bytes came."""

    def down(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        del context
        return stream(int(request))

    def up(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        del context
        return str(sum(len(m) for m in messages)).encode()


def serve(home: Path, window: int) -> None:
    """Serve until standard input ends, with this window; the first line on standard output is the port."""
    handlers = _Handlers()
    server = grpc.server(ThreadPoolExecutor(32), options=server_options(window))
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Down": grpc.unary_stream_rpc_method_handler(handlers.down),
        "Up": grpc.stream_unary_rpc_method_handler(handlers.up),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    port = server.add_secure_port("127.0.0.1:0", server_credentials(home))
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(0).wait()


def call(home: Path, address: str) -> None:
    """Move bytes for every line `DOWN UP` on standard input and answer the counts; ends with it."""
    channel = connect_with(SiloIdentity(home).current_credentials)(Address.parse(address))
    grpc.channel_ready_future(channel).result(60)
    get: Callable[..., Iterator[bytes]] = channel.unary_stream(f"/{SERVICE}/Down")
    put: Callable[..., bytes] = channel.stream_unary(f"/{SERVICE}/Up")
    print("ready", flush=True)
    for line in sys.stdin:
        down, up = (int(word) for word in line.split())
        received = sum(len(m) for m in get(str(down).encode()))
        print(received, int(put(stream(up))), flush=True)
    channel.close()


class Bare:
    """The driver's side: one server and the clients, ready."""

    def __init__(self, started: Processes, coordinator: Path, silos: Sequence[Path], delay_ms: float) -> None:
        self._started = started
        first, window = len(started.running), window_bytes(delay_ms)
        server = started.start(["benchmarks.round_trip.bare", "serve", str(coordinator), str(window)], talks=True)
        address = f"127.0.0.1:{started.dialled(int(self._answer(server)), delay_ms)}"
        self._clients = [
            started.start(["benchmarks.round_trip.bare", "call", str(home), address], talks=True) for home in silos
        ]
        for client in self._clients:
            self._answer(client)
        self._pids = [process.pid for process in started.running[first:]]

    def cpu_seconds(self) -> float:
        """Return the processor time of the server and all clients so far."""
        return sum(cpu_seconds(pid) for pid in self._pids)

    def round(self, down: int, up: int) -> float:
        """Let all clients move their bytes at once; return the seconds until the last has."""
        begin = time.perf_counter()
        for client in self._clients:
            assert client.stdin is not None
            client.stdin.write(f"{down} {up}\n")
            client.stdin.flush()
        for client in self._clients:
            if (found := self._answer(client)) != f"{down} {up}":
                raise self._started.failure(f"expected {down} {up} bytes to be moved, found {found}")
        return time.perf_counter() - begin

    def _answer(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise self._started.failure("a process of the bare stream ended")
        return line.strip()


def main() -> None:
    """Be the server or a client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("serve", "call"))
    parser.add_argument("home", type=Path)
    parser.add_argument("place", help="serve: bytes of a window; call: the address of the service")
    words = parser.parse_args()
    if words.part == "serve":
        serve(words.home, int(words.place))
    else:
        call(words.home, words.place)


if __name__ == "__main__":
    main()
