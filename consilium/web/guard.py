"""Check every request to a page on loopback before the page handles it, and set security headers on every answer.

Other users of the machine can reach the port, and so can every web page in a browser on it. Checks, in this order:

| required                                                            | else |
|---------------------------------------------------------------------|------|
| exactly one Host header, equal to address:port                      | 421  |
| GET, HEAD or POST, and no other protocol                            | 405, 400 |
| Sec-Fetch-Site, if sent: same-origin or none                        | 403  |
| the cookie of an open session                                       | 401  |
| POST: exactly one Origin, this one                                  | 403  |
| POST: a form of at most 4 KB, no name in it twice                   | 415, 413, 400, 408 |
| POST: the session's token in the form, compared in constant time    | 403  |
| POST of a file, if the path takes one: a declared, allowed length; the token in a header | 415, 411, 413, 403 |

The opening link needs neither cookie nor Sec-Fetch-Site. It opens the page once and sets the cookie.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPENING = "/open/"
SESSION, FORM = "consilium.web.session", "consilium.web.form"
"""Keys of the session and the form in the scope of an accepted request."""
BODY_BYTES = 4096
BODY_S = 10.0
TOKEN = b"x-token"
"""The header with the session's token in a file upload. A page of another origin cannot set it without permission."""
_FIELDS = 32
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers send forms with "Origin: null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "",
    "Cache-Control": "no-store",
}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
LINK_S = 600.0
"""How long an opening link works."""
SESSION_S = 12 * 3600.0
"""How long a session lasts after its last request."""
MAX_SESSIONS = 16
"""Maximum number of sessions; a new one replaces the least recently used."""


@dataclass(slots=True)
class BrowserSession:
    """One browser's session. token: part of each form   notice: result of its last form, shown once."""

    token: str
    used: float
    notice: str = ""


@dataclass(slots=True)
class Sessions:
    """The current link and the open sessions. Used only by the server's event loop."""

    clock: Callable[[], float] = time.monotonic
    _link: tuple[bytes, float] | None = None
    _open: dict[str, BrowserSession] = field(default_factory=dict)

    def new_link(self) -> str:
        """Create a secret of 256 bits that opens one session within `LINK_S`, and invalidate earlier ones."""
        secret = secrets.token_urlsafe(32)
        self._link = (secret.encode(), self.clock())
        return secret

    @property
    def link_age(self) -> float | None:
        """Age of the current link in seconds; None if it was used."""
        return None if self._link is None else self.clock() - self._link[1]

    def enter(self, secret: str) -> str | None:
        """Use up the link and return a new session's cookie; None for an invalid or expired secret."""
        if self._link is None or not hmac.compare_digest(secret.encode("utf-8", "replace"), self._link[0]):
            return None
        age, self._link = self.clock() - self._link[1], None
        if age > LINK_S:
            return None
        while len(self._open) >= MAX_SESSIONS:
            del self._open[min(self._open, key=lambda name: self._open[name].used)]
        cookie = secrets.token_urlsafe(32)
        self._open[cookie] = BrowserSession(secrets.token_urlsafe(32), self.clock())
        return cookie

    def find(self, cookie: str) -> BrowserSession | None:
        """Return an open session and renew it; None if there is none or it has expired."""
        session = self._open.get(cookie)  # the cookie has 256 random bits, so look-up times reveal nothing useful
        if session is None:
            return None
        if self.clock() - session.used > SESSION_S:
            del self._open[cookie]
            return None
        session.used = self.clock()
        return session


class PageGuard:
    """Wraps a page's application. host: address:port   command: prints a new link.

    uploads: paths that take a file, with the largest size in bytes.
    """

    def __init__(
        self, app: ASGIApp, host: str, sessions: Sessions, command: str, uploads: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._uploads = uploads or {}
        self._host = host.encode()
        self._origin = f"http://{host}".encode()
        self._cookie = cookie_name(host)
        self._sessions = sessions
        self._command = command

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = {name for name, _ in RAW_HEADERS} | {b"server"}
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in ours]
                message = {**message, "headers": [*kept, *RAW_HEADERS]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None and scope["method"] == "POST":
            limit = self._uploads.get(scope["path"])
            refusal = await self._form(scope, receive) if limit is None else _upload(scope, limit)
        if refusal is not None:
            await refusal(scope, receive, guarded)
        else:
            await self._app(scope, _no_body if FORM in scope else receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        if _values(scope, b"host") != [self._host]:
            return _text(421, f"expected the Host header {self._host.decode()}")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return _text(405, "expected GET, HEAD or POST", {"Allow": "GET, HEAD, POST"})
        if _values(scope, b"upgrade"):
            return _text(400, "expected HTTP/1.1, found a request for another protocol")
        opening = scope["path"].startswith(OPENING) and scope["method"] != "POST"
        if opening:
            return None
        if not {*_values(scope, b"sec-fetch-site")} <= {b"same-origin", b"none"}:
            return _text(403, "the request came from another site: open the page itself")
        session = self._session(scope)
        if session is None:
            return _text(401, f"This page opens by its link, which works once. For a new link: {self._command}")
        scope[SESSION] = session
        if scope["method"] == "POST" and _values(scope, b"origin") != [self._origin]:
            return _text(403, "the form was sent from another origin: open the page itself")
        return None

    def _session(self, scope: Scope) -> BrowserSession | None:
        """Find the session by this port's cookie. Browsers also send cookies of other ports."""
        for header in _values(scope, b"cookie"):
            for pair in header.decode("latin-1").split(";"):
                name, _, value = pair.strip().partition("=")
                if name == self._cookie and (session := self._sessions.find(value)) is not None:
                    return session
        return None

    async def _form(self, scope: Scope, receive: Receive) -> Response | None:
        """Read the form into the scope, or return a refusal, which closes the connection if the form was not read."""
        kinds = [value.partition(b";")[0].strip().lower() for value in _values(scope, b"content-type")]
        if kinds != [b"application/x-www-form-urlencoded"]:
            return _text(415, "expected a form (application/x-www-form-urlencoded)", _CLOSE)
        try:
            async with asyncio.timeout(BODY_S):
                body = await _body(receive)
        except TimeoutError:
            return _text(408, f"expected the whole form within {BODY_S:g} seconds", _CLOSE)
        if body is None:
            return _text(413, f"expected a form of at most {BODY_BYTES} bytes", _CLOSE)
        try:
            text = body.decode("ascii")
            pairs = parse_qsl(
                text, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=_FIELDS
            )
        except ValueError:
            return _text(400, "expected a URL-encoded form, found other content")
        form = dict(pairs)
        if len(form) != len(pairs):
            return _text(400, "a field of the form occurs twice")
        token = form.pop("token", "").encode("utf-8", "replace")
        if not hmac.compare_digest(token, scope[SESSION].token.encode()):
            return _text(403, "expected a form of this session: reload the page")
        scope[FORM] = form
        return None


def _upload(scope: Scope, limit: int) -> Response | None:
    """Return a refusal of a file before reading it, or None. HTTP then limits the file to its declared length."""
    if _values(scope, b"content-type") != [b"application/octet-stream"]:
        return _text(415, "expected a file (application/octet-stream)", _CLOSE)
    (length, *more) = _values(scope, b"content-length") or [b""]
    if more or not length.isdigit() or _values(scope, b"transfer-encoding"):
        return _text(411, "expected a file with one Content-Length header", _CLOSE)
    if len(length) > 15 or int(length) > limit:
        return _text(413, f"expected a file of at most {limit} bytes", _CLOSE)
    tokens, expected = _values(scope, TOKEN), scope[SESSION].token.encode()
    if len(tokens) != 1 or not hmac.compare_digest(tokens[0], expected):
        return _text(403, "expected a file of this session: reload the page", _CLOSE)
    return None


def cookie_name(host: str) -> str:
    return f"consilium-{host.rpartition(':')[2]}"


_CLOSE: Mapping[str, str] = {"Connection": "close"}


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _text(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{text}\n", status, headers)


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if it is longer than `BODY_BYTES` or the client disconnects."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return body


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
