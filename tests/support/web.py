"""A page on loopback and what tests send to it, byte by byte: a client library would tidy the requests."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from urllib.parse import urlencode

from service_core.web.guard import OPENING, cookie_name
from service_core.web.serve import PageServer
from tests.support import until


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
