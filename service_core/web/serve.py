"""A page's server: one address of this machine's loopback, from `start` to `stop`."""

from __future__ import annotations

import asyncio
import html
import ipaddress
import logging
import re
import secrets
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fl_core.errors import ConfigError, StateError
from service_core.storage import private_files
from service_core.web.guard import OPENING, RAW_HEADERS
from service_core.web.sessions import LINK_S, Sessions
from service_core.web.site import Application, Site

log = logging.getLogger(__name__)
_HEAD_BYTES = 16 << 10
_MOST_CONNECTIONS = 128
_RENEW_S = LINK_S / 2
_LOOK_S = 0.25
_BACKLOG = 64


class PageServer:
    """Serves a site. folder: a private one, for the file with the link   name: of that file.

    bind: an address of loopback and a port, 0 for any; default: on Linux an address that is drawn at random, since
    browsers send cookies to all ports of one address, elsewhere 127.0.0.1.

    The file holds a link that works, as long as the server runs: it is written anew, mode 0600, when its link was used
    or is five minutes old. Opening the file, not the link, keeps the link from other users of the machine, who see the
    arguments of every process.
    """

    def __init__(self, site: Site, folder: Path, name: str = "page.html", bind: str | None = None) -> None:
        self._site = site
        self._bind = bind
        self._sessions = Sessions()
        self._written = b""  # in the file, or about to be
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._error: BaseException | None = None
        self.file = folder / name
        self.host = ""
        self.link = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, and write the link's file; raises StateError (E-NET-20) where the address cannot be used."""
        listening = _listen(self._bind)
        address, port = listening.getsockname()[:2]
        self.host = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        try:
            private_files.write_private(self.file, self._new_link())
        except BaseException:
            listening.close()
            raise
        began = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listening, began), name="page", daemon=True)
        self._thread.start()
        began.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End: streams end, requests under way have a second, the link's file goes. May be called more than once."""
        if self._thread is None:
            return
        if self._loop is not None and self._stopped is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._thread = None
        with suppress(OSError):
            if self.file.read_bytes() == self._written:  # another page of this home may have written its own
                self.file.unlink()

    def _new_link(self) -> bytes:
        """Make a link, and return the file that leads to it."""
        secret = self._sessions.new_link()
        self.link = f"http://{self.host}{OPENING}{secret}"
        title = html.escape(self._site.title)
        self._written = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={self.link}"><title>{title}</title>'
            f'<p><a href="{self.link}">Open the page</a></p></html>\n'
        ).encode()
        return self._written

    def _run(self, listening: socket.socket, began: threading.Event) -> None:
        try:
            asyncio.run(self._serve(listening, began))
        except BaseException as error:
            log.exception("the page has ended")
            self._error = error
        finally:
            began.set()

    async def _serve(self, listening: socket.socket, began: threading.Event) -> None:
        app = Application(self._site, self.host, self._sessions)
        config = uvicorn.Config(
            app.guarded(),
            http=_Protocol,
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
            backlog=_BACKLOG,
        )
        server = uvicorn.Server(config)
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        began.set()
        while not self._stopped.is_set() and not serving.done():
            age = self._sessions.link_age
            if age is None or age >= _RENEW_S:
                try:
                    await asyncio.to_thread(private_files.write_private, self.file, self._new_link())
                except Exception as error:
                    log.error("the page's link cannot be renewed: %s", error)
                    await asyncio.sleep(_LOOK_S * 10)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._stopped.wait()
        app.stop.set()
        server.should_exit = True
        await serving


class _Protocol(H11Protocol):
    """Uvicorn's own, with the guard's headers also where a request is none, and the oldest connections ended first."""

    began = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.began = self.loop.time()
        if len(self.connections) > _MOST_CONNECTIONS:
            oldest = min((c for c in self.connections if isinstance(c, _Protocol)), key=lambda c: c.began)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; h11 itself finds that the Host header is missing or there twice: 421."""
        status = b"421 Misdirected Request" if "Host" in str(sys.exc_info()[1]) else b"400 Bad Request"
        head = b"".join(b"%b: %b\r\n" % header for header in RAW_HEADERS)
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            b"content-length: %d\r\n%b\r\n%b" % (status, len(msg), head, msg.encode("ascii"))
        )
        self.transport.close()


def _listen(bind: str | None) -> socket.socket:
    if bind is not None:
        host, port = _parse(bind)
    elif sys.platform == "linux":
        host, port = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}", 0
    else:
        host, port = "127.0.0.1", 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StateError(
            "E-NET-20",
            f"expected to show the page on {host}, port {port or 'any'}, found that this cannot be ({error.strerror}): "
            "choose another address of loopback or another port with --bind, or stop the other program",
        ) from error


def _parse(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`, an address of loopback; raises ConfigError (E-CFG-02) on any other."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):([0-9]{1,5})", text)
    try:
        if match is not None and int(match[3]) < 65536 and ipaddress.ip_address(match[1] or match[2]).is_loopback:
            return match[1] or match[2], int(match[3])
    except ValueError:
        pass
    raise ConfigError(
        "E-CFG-02",
        f"--bind: expected an address of this machine's loopback and a port, such as 127.0.0.1:8600, found "
        f"{text[:80]!r}: the page is for this machine alone; from another one, use ssh -L",
    )
