"""A page's server, on one loopback address of this machine."""

from __future__ import annotations

import asyncio
import html
import logging
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from consilium.web.guard import LINK_S, OPENING, RAW_HEADERS, Sessions
from consilium.web.site import Application, Site
from fl_core.errors import ConfigError
from service_core.loopback import LoopbackAddress, is_loopback
from service_core.server_thread import ServerThread
from service_core.storage import private_files

log = logging.getLogger(__name__)
_RENEW_S = LINK_S / 2
_LOOK_S = 0.25


class PageServer:
    """Serves a site. folder: private folder for the file with the link   name: of that file.

    bind: a loopback address and a port, 0 for any; default: on Linux a random loopback address, because browsers send
    cookies to all ports of an address, elsewhere 127.0.0.1.

    While the server runs, the file contains a valid link. It is rewritten, with mode 0600, after its link was used or
    is five minutes old. Open the file, not the link: other users of the machine can see the arguments of every process.
    """

    def __init__(self, site: Site, folder: Path, name: str = "page.html", bind: str | None = None) -> None:
        self._site = site
        self._bind = bind
        self._sessions = Sessions()
        self._written = b""  # in the file, or about to be
        self._server: ServerThread | None = None
        self.file = folder / name
        self.host = ""
        self.link = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, and write the link's file; raises StateError (E-NET-20) if the address cannot be used."""
        listening = _address(self._bind).listen("the page", "--bind")
        self.host = str(LoopbackAddress(*listening.getsockname()[:2]))
        try:
            private_files.write_private(self.file, self._new_link())
        except BaseException:
            listening.close()
            raise
        app = Application(self._site, self.host, self._sessions)
        self._server = ServerThread(app.guarded(), listening, "page", RAW_HEADERS, lambda: self._renew_links(app.stop))
        self._server.start()

    def stop(self) -> None:
        """Stop: ends streams, gives open requests a second, removes the link's file. May be called more than once."""
        if self._server is None:
            return
        self._server.stop()
        self._server = None
        with suppress(OSError):
            if self.file.read_bytes() == self._written:  # another page of this home may have written its own
                self.file.unlink()

    def _new_link(self) -> bytes:
        """Create a link, and return the content of the file that opens it."""
        secret = self._sessions.new_link()
        self.link = f"http://{self.host}{OPENING}{secret}"
        title = html.escape(self._site.title)
        self._written = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={self.link}"><title>{title}</title>'
            f'<p><a href="{self.link}">Open the page</a></p></html>\n'
        ).encode()
        return self._written

    async def _renew_links(self, stop: asyncio.Event) -> None:
        """Keep the file's link valid; sets `stop` when cancelled."""
        try:
            while True:
                age = self._sessions.link_age
                if age is None or age >= _RENEW_S:
                    try:
                        await asyncio.to_thread(private_files.write_private, self.file, self._new_link())
                    except Exception as error:
                        log.error("could not renew the page's link: %s", error)
                        await asyncio.sleep(_LOOK_S * 10)
                await asyncio.sleep(_LOOK_S)
        finally:
            stop.set()


def _address(bind: str | None) -> LoopbackAddress:
    if bind is not None:
        return _parse(bind)
    if sys.platform == "linux":
        return LoopbackAddress(
            f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}", 0
        )
    return LoopbackAddress("127.0.0.1", 0)


def _parse(text: str) -> LoopbackAddress:
    """Parse `HOST:PORT` with a loopback address; raises ConfigError (E-CFG-02) on any other."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):([0-9]{1,5})", text)
    if match is not None and int(match[3]) < 65536 and is_loopback(match[1] or match[2]):
        return LoopbackAddress(match[1] or match[2], int(match[3]))
    raise ConfigError(
        "E-CFG-02",
        f"--bind: expected a loopback address of this machine and a port, such as 127.0.0.1:8600, found "
        f"{text[:80]!r}: correct it. The page serves only this machine; from another one, use ssh -L",
    )
