"""A port on loopback that answers GET /metrics, /healthz and /readyz, and nothing else.

One thread serves all connections, and another computes the metrics, at most once a second however often they are asked
for: who floods the port, or holds it and says nothing, costs the service nothing else.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from service_core.loopback import LoopbackAddress, is_loopback
from service_core.server_thread import ServerThread

EVERY_S = 1.0
"""The least seconds between two computations of the metrics."""
_WAIT_S = 10.0


class MetricsEndpoint:
    """Serves from `open` until `close`, which may come at any time and more than once.

    lives: whether the service runs   problems: words for what keeps it from its work; both are quick and thread-safe
    every_s: `EVERY_S`, another in tests.
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
        """Listen, and return the address with its port; raises StateError (E-NET-20) when it cannot be used."""
        listening = address.listen("metrics", "--metrics")
        self._server = ServerThread(self._application, listening, "metrics-endpoint")
        self._server.start()
        return LoopbackAddress(address.host, listening.getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(Request(scope))
        answer.headers.update({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if not is_loopback(_without_port(request.headers.get("host", ""))):
            # A page that a browser shows can give a name of its own the address 127.0.0.1; it cannot change this.
            return PlainTextResponse("expected a Host header that names this machine's loopback\n", 403)
        if request.method != "GET":
            return PlainTextResponse("expected GET\n", 405, {"Allow": "GET"})
        match request.scope["path"]:
            case "/metrics":
                return await self._metrics()
            case "/healthz":
                return PlainTextResponse("ok\n") if self._lives() else PlainTextResponse("service not running\n", 503)
            case "/readyz":
                found = self._problems()
                return PlainTextResponse(f"{' '.join(found)}\n", 503) if found else PlainTextResponse("ok\n")
        return PlainTextResponse("expected /metrics, /healthz or /readyz\n", 404)

    async def _metrics(self) -> Response:
        if self._page is None or (self._page.done() and time.monotonic() - self._page_at >= self._every_s):
            self._page_at = time.monotonic()
            self._page = asyncio.get_running_loop().run_in_executor(self._pool, generate_latest, self._registry)
        try:
            async with asyncio.timeout(_WAIT_S):
                return Response(await asyncio.shield(self._page), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
        except TimeoutError:
            return PlainTextResponse("the metrics are being computed\n", 503)


def _without_port(host: str) -> str:
    match = re.fullmatch(r"\[([^\]]*)\](?::[0-9]*)?|([^:]*)(?::[0-9]*)?", host.strip())
    return "" if match is None else match[1] or match[2] or ""
