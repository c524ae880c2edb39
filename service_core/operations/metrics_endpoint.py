"""A loopback port that answers GET /metrics, /healthz and /readyz, and nothing else.

One thread serves all connections; another computes the metrics, at most once a second. So neither many nor idle
connections slow down the service.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from service_core.loopback import LoopbackAddress, is_loopback
from service_core.server_thread import ServerThread

EVERY_S = 1.0
"""Minimum seconds between two computations of the metrics."""
_WAIT_S = 10.0
_TEXT = "text/plain; charset=utf-8"
_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


class MetricsEndpoint:
    """Serves from `open` until `close`, which may be called at any time and more than once.

    lives: whether the service runs   problems: one word per problem of the service; both are fast and thread-safe
    every_s: `EVERY_S` unless a test sets another
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        lives: Callable[[], bool],
        problems: Callable[[], Collection[str]],
        every_s: float | None = None,
    ) -> None:
        self._registry = registry
        self._lives = lives
        self._problems = problems
        self._every_s = EVERY_S if every_s is None else every_s
        self._server: ServerThread | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._page: asyncio.Future[bytes] | None = None
        self._page_at = 0.0

    def open(self, address: LoopbackAddress) -> LoopbackAddress:
        """Listen and return the address with its port; raises StateError (E-NET-20) if it cannot be used."""
        listening = address.listen("metrics", "--metrics")
        self._server = ServerThread(self._application, listening, "metrics-endpoint", _HEADERS)
        self._server.start()
        return LoopbackAddress(address.host, listening.getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _application(
        self, scope: Mapping[str, Any], receive: object, send: Callable[..., Awaitable[None]]
    ) -> None:
        del receive
        if scope["type"] != "http":
            return
        answer = await self._answer(scope)
        headers = [(b"content-type", answer.kind.encode()), (b"content-length", b"%d" % len(answer.body)), *_HEADERS]
        headers += [(b"allow", b"GET")] if answer.status == 405 else []
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, scope: Mapping[str, Any]) -> _Answer:
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if not is_loopback(_without_port(host)):
            # DNS rebinding: a web page can point its own name to 127.0.0.1, but it cannot forge the Host header.
            return _Answer(403, b"expected a Host header that names this machine's loopback\n")
        if scope["method"] != "GET":
            return _Answer(405, b"expected GET\n")
        match scope["path"]:
            case "/metrics":
                return await self._metrics()
            case "/healthz":
                return _Answer(200, b"ok\n") if self._lives() else _Answer(503, b"service not running\n")
            case "/readyz":
                problems = self._problems()
                return _Answer(503, f"{' '.join(problems)}\n".encode()) if problems else _Answer(200, b"ok\n")
        return _Answer(404, b"expected /metrics, /healthz or /readyz\n")

    async def _metrics(self) -> _Answer:
        if self._page is None or (self._page.done() and time.monotonic() - self._page_at >= self._every_s):
            self._page_at = time.monotonic()
            self._page = asyncio.get_running_loop().run_in_executor(self._pool, generate_latest, self._registry)
        try:
            async with asyncio.timeout(_WAIT_S):
                return _Answer(200, await asyncio.shield(self._page), CONTENT_TYPE_PLAIN_0_0_4)
        except TimeoutError:
            return _Answer(503, b"the metrics are being computed\n")


class _Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = _TEXT


def _without_port(host: str) -> str:
    match = re.fullmatch(r"\[([^\]]*)\](?::[0-9]*)?|([^:]*)(?::[0-9]*)?", host.strip())
    return "" if match is None else match[1] or match[2] or ""
