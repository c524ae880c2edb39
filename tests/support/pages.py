"""Pages and metrics on loopback, the lead's page, and what stands behind it.

Tests send requests byte by byte, where a client library would tidy them, or by Chromium. The lead's page is in front of
a service, or of answers as they could be.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from prometheus_client.parser import text_string_to_metric_families

from consilium.pages.lead.exports import Exporter
from consilium.pages.lead.overview import OwnCertificates
from consilium.pages.lead.service_watch import ServiceWatch
from consilium.pages.lead.site import LeadPage, own_certificates
from consilium.web.guard import OPENING, cookie_name
from consilium.web.serve import PageServer
from coordinator.lead.client import LeadClient, credentials_of
from service_core.loopback import LoopbackAddress
from tests.support import until
from tests.support.made_up_service import MadeUpService


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def header(self, name: str) -> str | None:
        found = [value for key, value in self.headers if key == name.lower()]
        assert len(found) < 2, found
        return found[0] if found else None


def address_of(server: PageServer) -> tuple[str, int]:
    host, _, port = server.host.rpartition(":")
    return host.strip("[]"), int(port)


def send(server: PageServer, raw: bytes) -> Answer:
    """Send bytes as they are and read until the server closes; requests say `Connection: close`."""
    with socket.create_connection(address_of(server), timeout=20) as s:
        s.sendall(raw)
        found = b""
        while part := s.recv(1 << 16):
            found += part
    return parsed(found)


def parsed(found: bytes) -> Answer:
    head, _, body = found.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    return Answer(int(first.split()[1]), [(k.lower(), v.strip()) for k, _, v in pairs], body)


def request(method: str, target: str, headers: list[tuple[str, str]], body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in headers), "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


@dataclass
class Browser:
    """One session of a page: sends what a browser that showed it would send."""

    server: PageServer
    cookie: str = ""

    def open(self) -> Browser:
        """Use the link; one that was used a moment ago is replaced soon."""
        answers: list[Answer] = []

        def opened() -> bool:
            answers.append(send(self.server, request("GET", self.secret_path(), [("Host", self.server.host)])))
            return answers[-1].status == 200

        until(opened)
        answer = answers[-1]
        self.cookie = re.match(r"([^;]+)", answer.header("set-cookie") or "")[1]  # type: ignore[index]
        return self

    def secret_path(self) -> str:
        return OPENING + self.server.link.rpartition("/")[2]

    def headers(self, **other: str | None) -> list[tuple[str, str]]:
        found = {"Host": self.server.host, "Cookie": self.cookie, "Sec-Fetch-Site": "same-origin"}
        return [(k, v) for k, v in {**found, **{k.replace("_", "-"): v for k, v in other.items()}}.items() if v]

    def get(self, target: str = "/", method: str = "GET", **other: str | None) -> Answer:
        return send(self.server, request(method, target, self.headers(**other)))

    def post(self, target: str, form: dict[str, str] | list[tuple[str, str]] | bytes, **other: str | None) -> Answer:
        body = form if isinstance(form, bytes) else urlencode(form).encode()
        usual = {
            "Origin": f"http://{self.server.host}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Content-Length": str(len(body)),
        }
        return send(self.server, request("POST", target, self.headers(**{**usual, **other}), body))

    def fields(self, action: str, path: str = "/") -> list[dict[str, str]]:
        """Return the hidden fields of each form of a page that goes to `action`."""
        page = self.get(path).text
        forms = re.findall(rf'<form method="post" action="{action}">(.*?)</form>', page, re.DOTALL)
        return [dict(re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', form)) for form in forms]


def cookie_of(server: PageServer) -> str:
    return cookie_name(server.host)


def ask(at: LoopbackAddress, raw: bytes, seconds: float = 10.0) -> tuple[int, str]:
    """Send bytes and read until the end; return status and body, status 0 where nothing came."""
    with socket.create_connection((at.host, at.port), seconds) as line:
        line.sendall(raw)
        found = b""
        while piece := line.recv(1 << 16):
            found += piece
    head, _, body = found.decode().partition("\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def get(at: LoopbackAddress, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    return ask(at, f"{method} {path} HTTP/1.1\r\nHost: {host or at}\r\nConnection: close\r\n\r\n".encode())


class Scrape(dict[str, float]):
    """The samples of one answer, by name and sorted labels: `name` or `name{label=value,...}`."""

    @classmethod
    def of(cls, at: LoopbackAddress) -> Scrape:
        status, body = get(at, "/metrics")
        assert status == 200, body
        found = cls()
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                key = f"{sample.name}{{{labels}}}" if labels else sample.name
                assert key not in found, f"{key} twice"
                found[key] = sample.value
        return found

    def labels(self, name: str) -> list[str]:
        """List the labels with which a metric is there."""
        return sorted(key.removeprefix(name).strip("{}") for key in self if key.partition("{")[0] == name)


def until_scraped(at: LoopbackAddress, holds: Callable[[Scrape], Any], seconds: float = 20.0) -> Scrape:
    """Scrape until a condition holds: an answer may be a second old."""
    seen: list[Scrape] = []

    def look() -> bool:
        seen.append(Scrape.of(at))
        return bool(holds(seen[-1]))

    until(look, f"in {seen[-1:]}", seconds, every=0.1)
    return seen[-1]


CHROMIUM = Path("/usr/bin/chromium")
PATIENCE_MS = 20_000


@contextmanager
def chromium() -> Iterator[Any]:
    """Give a browser, or skip."""
    if not CHROMIUM.exists():
        pytest.skip(f"no browser: install Debian's chromium ({CHROMIUM})")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A tab that was opened through the link's file, and what it asked for and complained about meanwhile."""

    def __init__(self, browser: Any, server: PageServer, **how: Any) -> None:
        self.server = server
        self.context = browser.new_context(**how)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.set_default_timeout(60_000)
        until(self._opened)
        self.complaints.clear()  # of a link that was used before

    def _opened(self) -> bool:
        """Open the file; where its link was used a moment ago, the next one is there soon."""
        from playwright.sync_api import TimeoutError

        self.page.goto(self.server.file.as_uri())
        try:
            self.page.wait_for_url(f"http://{self.server.host}/", timeout=PATIENCE_MS)
        except TimeoutError:
            return False
        return True

    @property
    def elsewhere(self) -> list[str]:
        """Addresses that were asked for and are neither this page's nor the link's file."""
        own = (f"http://{self.server.host}/", self.server.file.as_uri())
        return [url for url in self.asked if not url.startswith(own)]


@contextmanager
def shown(
    connect: Callable[[], LeadClient | MadeUpService],
    folder: Path,
    own: OwnCertificates | None = None,
    home: Path = Path(),
    exporter: Exporter | None = None,
) -> Iterator[tuple[PageServer, ServiceWatch]]:
    """Serve the page of a lead. connect: makes the client that it asks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    watch = ServiceWatch(connect)  # type: ignore[arg-type]
    exporter = exporter or Exporter(home, connect)  # type: ignore[arg-type]
    own = own or OwnCertificates("anna", 2e9, 3e9)
    page = LeadPage(watch, connect, exporter, own, "skin-study")  # type: ignore[arg-type]
    watch.start()
    try:
        with PageServer(page.site(), folder) as server:
            yield server, watch
    finally:
        watch.stop()
        exporter.close()


@contextmanager
def shown_for(home: Path, folder: Path) -> Iterator[PageServer]:
    """Serve the page of the lead of a real service's home."""
    own, _ = own_certificates(credentials_of(home))
    connect = partial(LeadClient.open, home, own.lead)
    with shown(connect, folder, own, home) as (server, _):
        yield server


def opened(server: PageServer) -> Browser:
    return Browser(server).open()
