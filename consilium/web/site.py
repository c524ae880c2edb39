"""The parts of a page, and the application that serves it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar
from urllib.parse import unquote

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from consilium.web.guard import FORM, OPENING, SESSION, BrowserSession, PageGuard, Sessions, cookie_name
from consilium.web.rendering import iso, make_environment
from fl_core.errors import FederationError
from service_core.console import printable

T = TypeVar("T")
Parameters = Mapping[str, str]
POLL_S = 1.0
"""Seconds between two checks of the version, while a browser waits for changes."""
_MAX_STREAMS = 16
_QUIET_S = 15.0
_STATIC = Path(__file__).parent / "static"
_SHOWN_IN_PAGE = ("image/png", "image/jpeg")
_FILE_S, _NAME_CHARS = 300.0, 300
"""Longest time for a file to arrive, and maximum length of its name."""


class MissingError(Exception):
    """There is nothing to show: 404. The page shows the text."""


class ChangedError(Exception):
    """The data behind a form have changed since it was shown: 409. The page shows the text."""


@dataclass(frozen=True, slots=True)
class View:
    """A page. facts: returns the template's data, from the parameters of the path and the query."""

    template: str
    facts: Callable[[Parameters], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Action:
    """The action of a form.

    digest: returns the current digest of the data behind the form's fields, None if they no longer exist. Before the
    action it is compared with the form's field `digest`   do: executes the action, and returns a sentence; it gets all
    fields, including `digest`, and raises `ChangedError` if the data changed since the comparison   then: returns the
    quoted address of the view that shows the sentence.
    """

    digest: Callable[[Parameters], str | None]
    do: Callable[[Parameters], str]
    then: Callable[[Parameters], str] = lambda _: "/"


@dataclass(frozen=True, slots=True)
class Download:
    """A file to download. content: its bytes, or its path."""

    name: str
    media_type: str
    content: bytes | Path


@dataclass(frozen=True, slots=True)
class FileField:
    """A file upload. folder: private folder for the file while it is handled   limit: largest size in bytes.

    take: gets the name from the browser, and the file's path, which is valid until it returns; raises FederationError
    if the file cannot be used.
    """

    folder: Path
    limit: int
    take: Callable[[str, Path], None]


@dataclass(frozen=True, slots=True)
class Site:
    """A whole page. title: of the window   command: prints a new link   templates: their folder.

    version: returns a text that changes whenever the shown data change; called every second, so it must be cheap.
    """

    title: str
    command: str
    templates: Path
    views: Mapping[str, View]
    version: Callable[[], str]
    actions: Mapping[str, Action] = field(default_factory=dict)
    download: Callable[[str], Download | None] = lambda id: None  # noqa: ARG005
    uploads: Mapping[str, FileField] = field(default_factory=dict)


class Application:
    """The handlers of a site at one address. stop: set it to end open event streams."""

    def __init__(self, site: Site, host: str, sessions: Sessions) -> None:
        self._site = site
        self._host = host
        self._sessions = sessions
        self._templates = make_environment(site.templates)
        self._threads = anyio.CapacityLimiter(4)
        self._one_file = asyncio.Lock()
        self._streams = 0
        self.stop = asyncio.Event()

    def guarded(self) -> PageGuard:
        routes = [Route(path, partial(self._show, view)) for path, view in self._site.views.items()]
        routes += [
            Route(path, partial(self._act, action), methods=["POST"]) for path, action in self._site.actions.items()
        ]
        routes += [
            Route(path, partial(self._take, upload), methods=["POST"]) for path, upload in self._site.uploads.items()
        ]
        routes += [
            Route(OPENING + "{secret}", self._open),
            Route("/changed", self._changes),
            Route("/files/{id:path}", self._file),
        ]
        handlers: dict[Any, Any] = {HTTPException: self._failed, FederationError: self._refused}
        app = Starlette(
            routes=[*routes, Mount("/static", StaticFiles(directory=_STATIC))],
            exception_handlers=handlers | {MissingError: self._missing, ChangedError: self._changed},
        )
        app.router.redirect_slashes = False
        limits = {path: upload.limit for path, upload in self._site.uploads.items()}
        return PageGuard(app, self._host, self._sessions, self._site.command, limits)

    # ---- pages --------------------------------------------------------------------------------------------------

    async def _show(self, view: View, request: Request) -> Response:
        session: BrowserSession = request.scope[SESSION]
        version = await self._version()  # before the facts, so that a change in between gives another version
        parameters = {**request.query_params, **request.path_params}
        facts = await self._run(view.facts, parameters)
        notice = session.notice
        if request.method == "GET" and request.headers.get("sec-fetch-dest", "document") == "document":
            session.notice = ""  # a refresh in the background does not use up the notice
        return await self._page(request, view.template, 200, {**facts, "version": version, "notice": notice})

    async def _page(self, request: Request, template: str, status: int, facts: Mapping[str, object]) -> Response:
        session: BrowserSession | None = request.scope.get(SESSION)
        if session is None:  # an opening link's address, before there is a session
            return PlainTextResponse("there is nothing at this address\n", status)
        now = time.time()
        about = {"site": self._site, "token": session.token, "path": request.url.path, "now": now, "now_iso": iso(now)}
        text = await self._run(lambda: self._templates.get_template(template).render({**about, **facts}))
        return HTMLResponse(text, status)

    async def _problem(self, request: Request, status: int, title: str, text: str) -> Response:
        facts = {"version": "", "notice": "", "headline": title, "text": text}
        return await self._page(request, "problem.html", status, facts)

    async def _failed(self, request: Request, error: HTTPException) -> Response:
        return await self._problem(request, error.status_code, error.detail, "There is nothing at this address.")

    async def _missing(self, request: Request, error: MissingError) -> Response:
        return await self._problem(request, 404, "Not found", str(error))

    async def _changed(self, request: Request, error: ChangedError) -> Response:
        return await self._problem(request, 409, "Nothing was done: this has changed since you saw it", str(error))

    async def _refused(self, request: Request, error: FederationError) -> Response:
        return await self._problem(request, 409, "This cannot be done now", str(error))

    # ---- forms --------------------------------------------------------------------------------------------------

    async def _act(self, action: Action, request: Request) -> Response:
        form: dict[str, str] = request.scope[FORM]
        now = await self._run(action.digest, form)
        shown = form.get("digest", "")
        if now is None or not hmac.compare_digest(shown.encode("utf-8", "replace"), now.encode()):
            raise ChangedError("Check the current state, and decide again.")
        session: BrowserSession = request.scope[SESSION]
        session.notice = await self._run(action.do, form)
        return Response(status_code=303, headers={"Location": action.then(form)})

    # ---- files --------------------------------------------------------------------------------------------------

    async def _take(self, upload: FileField, request: Request) -> Response:
        """Store a file in the folder while it is handled, one at a time, and always delete it afterwards."""
        name = unquote(request.headers.get("x-name", ""), errors="replace")[:_NAME_CHARS] or "file"
        async with self._one_file:
            with NamedTemporaryFile(dir=upload.folder) as kept:
                try:
                    async with asyncio.timeout(_FILE_S):
                        async for part in request.stream():
                            await self._run(kept.write, part)
                except (TimeoutError, ClientDisconnect):
                    return PlainTextResponse(f"expected the whole file within {_FILE_S:g} seconds\n", 408)
                await self._run(kept.flush)
                try:
                    await self._run(upload.take, name, Path(kept.name))
                except FederationError as error:
                    return PlainTextResponse(f"{printable(error.message)}\n", 422)
        return Response(status_code=204)

    # ---- the rest -----------------------------------------------------------------------------------------------

    async def _open(self, request: Request) -> Response:
        """Open a session, and answer with a page that loads the next one.

        A redirect would lose the SameSite=Strict cookie if the link was opened from a file.
        """
        if request.method != "GET":
            return PlainTextResponse("expected GET\n", 405)
        cookie = self._sessions.enter(request.path_params["secret"])
        if cookie is None:
            text = f"This link was used before, or is older than ten minutes. For a new one: {self._site.command}\n"
            return PlainTextResponse(text, 410)
        answer = HTMLResponse(self._templates.get_template("opening.html").render(site=self._site))
        answer.set_cookie(cookie_name(self._host), cookie, httponly=True, samesite="strict", path="/")
        return answer

    async def _changes(self, _: Request) -> Response:
        if self._streams >= _MAX_STREAMS:
            return PlainTextResponse("too many pages are open: close some\n", 503)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        """Send the version now and whenever it changes, until the server stops."""
        self._streams += 1
        try:
            shown_version, quiet = "", 0.0
            while not self.stop.is_set():
                version = await self._version()
                if version != shown_version:
                    yield f"event: changed\ndata: {version}\n\n"
                    shown_version, quiet = version, 0.0
                elif quiet >= _QUIET_S:
                    yield ": still here\n\n"
                    quiet = 0.0
                quiet += POLL_S
                try:
                    async with asyncio.timeout(POLL_S):
                        await self.stop.wait()
                except TimeoutError:
                    continue
        finally:
            self._streams -= 1

    async def _version(self) -> str:
        """Return a digest of the site's version, so that its text does not reach the browser."""
        return hashlib.sha256((await self._run(self._site.version)).encode("utf-8", "replace")).hexdigest()[:16]

    async def _file(self, request: Request) -> Response:
        download = await self._run(self._site.download, request.path_params["id"])
        if download is None:
            raise MissingError("There is no such file.")
        inline = download.media_type in _SHOWN_IN_PAGE
        name = re.sub(r"[^A-Za-z0-9._-]", "_", download.name)[:100] or "file"
        how = {"Content-Disposition": f'{"inline" if inline else "attachment"}; filename="{name}"'}
        if isinstance(download.content, bytes):
            return Response(download.content, media_type=download.media_type, headers=how)
        return FileResponse(download.content, media_type=download.media_type, headers=how)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await anyio.to_thread.run_sync(partial(function, *arguments), limiter=self._threads)
