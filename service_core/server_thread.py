"""A web server in a thread, for pages and metrics."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from service_core.loopback import BACKLOG

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 128
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
_HEAD_BYTES = 16 << 10


async def _nothing() -> None:
    return


class ServerThread:
    """Serves an ASGI application on a listening socket from `start` to `stop`, which closes the socket.

    headers: of the server's own answers to malformed requests   alongside: runs on the server's event loop, and is
    cancelled before the server waits for open requests.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        listening: socket.socket,
        name: str,
        headers: Headers,
        alongside: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=type("Protocol", (_Protocol,), {"refusal_headers": headers}),
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            backlog=BACKLOG,
        )
        self._server = _Server(config, alongside)
        self._listening = listening
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop; open requests get one second. May be called more than once."""
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        try:
            self._server.run([self._listening])
        except BaseException:
            log.exception("%s: the server has ended", self._thread.name)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, alongside: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._alongside = alongside

    async def main_loop(self) -> None:
        task = asyncio.ensure_future(self._alongside())
        try:
            await super().main_loop()
        finally:
            task.cancel()


class _Protocol(H11Protocol):
    """Uvicorn's protocol, with our headers on malformed requests too. Beyond `MAX_CONNECTIONS` the oldest one ends."""

    refusal_headers: Headers = ()
    began = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.began = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            oldest = min((c for c in self.connections if isinstance(c, _Protocol)), key=lambda c: c.began)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request: 421 if h11 reports a missing or duplicate Host header, else 400."""
        status = b"421 Misdirected Request" if "Host" in str(sys.exc_info()[1]) else b"400 Bad Request"
        head = b"".join(b"%b: %b\r\n" % header for header in self.refusal_headers)
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            b"content-length: %d\r\n%b\r\n%b" % (status, len(msg), head, msg.encode("ascii"))
        )
        self.transport.close()
