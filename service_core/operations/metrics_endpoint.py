"""A port on loopback that answers GET /metrics, /healthz and /readyz, and nothing else.

One thread serves all connections, and another computes the metrics, at most once a second however often they are asked
for: who floods the port, or holds it and says nothing, costs the service nothing else.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from fl_core.errors import ConfigError, StateError

log = logging.getLogger(__name__)
EVERY_S = 1.0
"""The least seconds between two computations of the metrics."""
_HEAD_BYTES = 8192
_MOST_CONNECTIONS = 256
_PLAIN = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class LoopbackAddress:
    """Where metrics are served: an address of this machine's loopback, and a port; 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> LoopbackAddress:
        """Read `PORT`, `HOST:PORT` or `[V6]:PORT`; raises ConfigError (E-CFG-02) on any other and beyond loopback."""
        match = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+)):)?([0-9]{1,5})", text)
        if match is None or int(match[3]) > 65535:
            raise ConfigError(
                "E-CFG-02",
                f"--metrics: expected a port or an address such as 127.0.0.1:9464, found {text[:80]!r}: correct it",
            )
        host = match[1] or match[2] or "127.0.0.1"
        if not is_loopback(host):
            raise ConfigError(
                "E-CFG-02",
                f"--metrics: expected an address of this machine's loopback, found {host[:80]!r}: whoever reaches that "
                "port reads the metrics, because they ask for no certificate. Use 127.0.0.1 and put a proxy with "
                "authentication, or the agent of your monitoring, in front",
            )
        return cls("127.0.0.1" if host.lower() == "localhost" else host, int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Tell whether a host, as it is written, is this machine's loopback; no name is looked up."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    content_type: str = _PLAIN

    def encode(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
            + ("Allow: GET\r\n" if self.status == 405 else "")
            + "Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + self.body


class MetricsEndpoint:
    """Serves from `open` until `close`, which may come at any time and more than once.

    lives: whether the service runs   problems: words for what keeps it from its work; both are quick and thread-safe
    idle_s: seconds for a whole request, and for the reading of the answer   every_s: `EVERY_S`, another
    in tests.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        lives: Callable[[], bool],
        problems: Callable[[], Collection[str]],
        idle_s: float = 5.0,
        every_s: float | None = None,
    ) -> None:
        self._registry = registry
        self._lives = lives
        self._problems = problems
        self._idle_s = idle_s
        self._every_s = EVERY_S if every_s is None else every_s
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._page: Future[bytes] | None = None
        self._page_at = 0.0
        self._open: dict[asyncio.StreamWriter, None] = {}

    def open(self, address: LoopbackAddress) -> LoopbackAddress:
        """Listen, and return the address with its port; raises StateError (E-NET-20) when it cannot be used."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            listening = socket.create_server((address.host, address.port), family=family, backlog=_MOST_CONNECTIONS)
        except OSError as error:
            raise StateError(
                "E-NET-20",
                f"expected to serve metrics on {address}, found that this cannot be ({error.strerror}): choose another "
                "port with --metrics, or stop the other program",
            ) from error
        began = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(listening, began)), name="metrics-endpoint", daemon=True
        )
        self._thread.start()
        began.wait()
        return LoopbackAddress(address.host, listening.getsockname()[1])

    def close(self) -> None:
        if self._thread is None or self._stop is None:
            return
        loop, stop = self._stop
        with suppress(RuntimeError):  # closed before
            loop.call_soon_threadsafe(stop.set)
        self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, listening: socket.socket, began: threading.Event) -> None:
        stop = asyncio.Event()
        self._stop = asyncio.get_running_loop(), stop
        try:
            server = await asyncio.start_server(
                self._serve, sock=listening, limit=_HEAD_BYTES, backlog=_MOST_CONNECTIONS
            )
        finally:
            began.set()
        await stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MOST_CONNECTIONS:  # the oldest has had its time
            next(iter(self._open)).transport.abort()
        try:
            answer = await self._read(reader)
            if answer is not None:
                async with asyncio.timeout(self._idle_s):
                    writer.write(answer.encode())
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # the other side has gone, or reads nothing
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> _Answer | None:
        """Read a request and answer it; None where none comes in time."""
        try:
            async with asyncio.timeout(self._idle_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except (TimeoutError, asyncio.IncompleteReadError):
            return None
        except asyncio.LimitOverrunError:
            return _Answer(431, b"the request is too long\n")
        line, _, rest = head.partition(b"\r\n")
        words = line.split(b" ")
        try:
            hosts = http.client.parse_headers(io.BytesIO(rest)).get_all("Host", [])
        except http.client.HTTPException:
            return _Answer(400, b"expected headers of HTTP\n")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _Answer(400, b"expected a request of HTTP/1.1\n")
        if len(hosts) != 1 or not is_loopback(_without_port(hosts[0])):
            # A page that a browser shows can give a name of its own the address 127.0.0.1; it cannot change this.
            return _Answer(403, b"expected a Host header that names this machine's loopback\n")
        if words[0] != b"GET":
            return _Answer(405, b"expected GET\n")
        return await self._answer(words[1].partition(b"?")[0])

    async def _answer(self, path: bytes) -> _Answer:
        if path == b"/metrics":
            return await self._metrics()
        if path == b"/healthz":
            return _Answer(200, b"ok\n") if self._lives() else _Answer(503, b"it does nothing\n")
        if path == b"/readyz":
            found = self._problems()
            return _Answer(503, f"{' '.join(found)}\n".encode()) if found else _Answer(200, b"ok\n")
        return _Answer(404, b"expected /metrics, /healthz or /readyz\n")

    async def _metrics(self) -> _Answer:
        loop = asyncio.get_running_loop()
        if self._page is None or (self._page.done() and loop.time() - self._page_at >= self._every_s):
            self._page_at = loop.time()
            self._page = self._pool.submit(generate_latest, self._registry)
        try:
            async with asyncio.timeout(2 * self._idle_s):
                return _Answer(200, await asyncio.shield(asyncio.wrap_future(self._page)), CONTENT_TYPE_PLAIN_0_0_4)
        except TimeoutError:
            return _Answer(503, b"the metrics are being computed\n")
        except Exception:
            log.exception("the metrics cannot be computed")
            return _Answer(500, b"the metrics cannot be computed; the log says why\n")


def _without_port(host: str) -> str:
    match = re.fullmatch(r"\[([^\]]*)\](?::[0-9]*)?|([^:]*)(?::[0-9]*)?", host.strip())
    return "" if match is None else match[1] or match[2] or ""
