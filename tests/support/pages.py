"""Pages and metrics on loopback, the lead's page, and what stands behind it.

Tests send requests byte by byte, where a client library would tidy them, or by Chromium. The lead's page is in front of
a service, or of answers as they could be: seven hospitals, a run that waits for one of them, two that are over.
"""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.lead import accuracy
from coordinator.lead.client import LeadClient, credentials_of
from coordinator.lead.page.exports import Exporter
from coordinator.lead.page.overview import OwnCertificates
from coordinator.lead.page.service_watch import ServiceWatch
from coordinator.lead.page.site import LeadPage, own_certificates
from fl_core.types.clinical import CALIBRATION_BINS, ClinicalMetrics, Range, ReliabilityBin
from protos.consilium.v1 import federation_pb2 as pb
from service_core.web.guard import OPENING, cookie_name
from service_core.web.loopback import LoopbackAddress
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


@dataclass
class MadeUpService:
    """Answers of a service, as a lead's client gives them. error: raised instead, while it is set."""

    silo_list: pb.SiloList = field(default_factory=pb.SiloList)
    details: list[pb.RunDetail] = field(default_factory=list)
    happened: Sequence[pb.Event] = ()
    error: Exception | None = None
    asked: int = 0

    def __call__(self) -> MadeUpService:
        return self

    def silos(self) -> pb.SiloList:
        self.asked += 1
        self._fail()
        return self.silo_list

    def runs(self) -> list[pb.RunInfo]:
        self._fail()
        return [detail.info for detail in self.details]

    def show(self, run: str) -> pb.RunDetail:
        self._fail()
        return next(detail for detail in self.details if detail.info.run_id == run)

    def events(self, run: str, after: int = 0) -> list[pb.Event]:
        self._fail()
        return [event for event in self.happened if event.number > after]

    def close(self) -> None:
        pass

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


@contextmanager
def shown(
    connect: Callable[[], LeadClient | MadeUpService],
    folder: Path,
    own: OwnCertificates | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[tuple[PageServer, ServiceWatch]]:
    """Serve the page of a lead. connect: makes the client that it asks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    watch = ServiceWatch(connect)  # type: ignore[arg-type]
    exporter = Exporter(arguments)
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
    with shown(connect, folder, own, ["--home", str(home)]) as (server, _):
        yield server


def opened(server: PageServer) -> Browser:
    return Browser(server).open()


CLASSES = ("melanoma", "nevus", "keratosis", "basal cell carcinoma", "dermatofibroma", "vascular lesion")
HOSPITALS = ("aarhus", "basel", "cork", "delft", "evora", "freiburg", "ghent")
TESTED = (140, 420, 110, 160, 30, 40)
WAITS, FEDMR, FEDAVG = "fedmr-skin-1124-0812-7f3c", "fedmr-skin-1123-1640-19ab", "fedavg-skin-1123-1502-c0de"
DAY, SECONDS = 86400.0, 95.0


def clinical(share: tuple[float, ...]) -> ClinicalMetrics:
    """Make counts in which each class is recognised with this share, and taken for the next one else."""
    c = len(CLASSES)
    rows = []
    for k, n in enumerate(TESTED):
        row = [0] * c
        row[k] = round(n * share[k])
        row[(k + 1) % c] = n - row[k]
        rows.append(tuple(row))
    right, of = sum(row[k] for k, row in enumerate(rows)), sum(TESTED)
    bins = [ReliabilityBin(0, 0, 0.0)] * (CALIBRATION_BINS - 1) + [ReliabilityBin(of, right, 0.95 * of)]
    auc = tuple(Range(0.5 + s / 2 - 0.0003, 0.5 + s / 2) for s in share)
    return ClinicalMetrics(tuple(rows), auc, tuple(bins))


def share_right(method: str, behind: int) -> tuple[float, ...]:
    """Return by class what a model answers right after so many rounds."""
    slow = (0.86, 0.97, 0.78, 0.88, 0.7, 0.9) if method == "fedmr" else (0.7, 0.98, 0.32, 0.84, 0.15, 0.6)
    grown = (1 - math.exp(-behind / 6 * (1 + k % 3)) for k in range(len(slow)))
    return tuple(s * g for s, g in zip(slow, grown, strict=True))


def rounds(method: str, last: int, began: float, seconds: float, finished: bool) -> list[pb.RoundInfo]:
    found = []
    for number in range(last + finished):
        found_here = clinical(share_right(method, number))
        opened = began + number * seconds
        away = "ghent" if number % 7 == 4 else ""
        there = [name for name in HOSPITALS if name != away]
        kind = pb.EVALUATE if number == last else pb.TRAIN
        r = pb.RoundInfo(round=number, kind=kind, included=there, opened_unix=opened, closed_unix=opened + seconds - 2)
        r.correct.extend(float(found_here.confusion[k][k]) for k in range(len(CLASSES)))
        r.examples.extend(map(float, TESTED))
        r.clinical.CopyFrom(accuracy.clinical_message(found_here))
        if away:
            r.missing[away] = "E-RUN-13: no update (offline 12 min): the round closed without it"
        for k, name in enumerate(there):
            took = seconds * (0.35 + 0.08 * k + 0.05 * math.sin(number + k))
            r.arrivals.append(pb.Arrival(silo=name, bytes=4_200_000 + 1000 * k, at_unix=opened + took))
        r.base_bytes = 4_150_000
        found.append(r)
    return found


def run(run_id: str, method: str, state: str, last: int, began: float, **options: object) -> pb.RunDetail:
    finished = state == "finished"
    made = rounds(method, last, began, SECONDS, finished)
    manifest = {
        "schema": {"classes": list(CLASSES)},
        "members": [{"name": name} for name in HOSPITALS],
        "privacy": {"name": "none", "options": {}},
        "software": "consilium-fl 0.1.0",
    }
    spec = {
        "method": {"name": method, **options},
        "model": {"name": "resnet18"},
        "data": {"name": "folder", "image_size": 128},
        "rounds": 20,
        "seed": 0,
        "train": {"lr": 0.01, "epochs": 2, "batch_size": 64},
    }
    info = pb.RunInfo(
        run_id=run_id,
        name="skin-study",
        state=state,
        method=method,
        data="folder",
        rounds=20,
        closed=last,
        created_unix=began - 20,
        ended_unix=began + (last + 1) * SECONDS if finished else 0.0,
        bytes_up=sum(a.bytes for r in made for a in r.arrivals),
        bytes_down=sum(r.base_bytes * len(HOSPITALS) for r in made),
        manifest_digest="5cad08c6f5116f0ac28dc6587ba6c568f42d0cd7e6d814ec37248a1a5fdc1465",
        model_digest="9be1f7a6f6d1a5d0c2b2a1f0b3e4d5c6a7b8c9d0e1f2a3b4c5d6e7f809182736",
        model_object="a" * 64,
        accuracy=sum(made[-1].correct) / sum(TESTED),
        best_accuracy=max(sum(r.correct) / sum(TESTED) for r in made),
    )
    stated = [
        pb.Declaration(
            silo=name,
            round=last - 1,
            stated=pb.Attestation(policy_digest=f"{k + 11:02x}" * 32, ledger_seq=40 + k if k % 2 else 0),
        )
        for k, name in enumerate(HOSPITALS)
    ]
    return pb.RunDetail(
        info=info, manifest_json=json.dumps(manifest), spec_json=json.dumps(spec), rounds=made, declarations=stated
    )


def consortium(now: float | None = None) -> MadeUpService:
    """Make the service's answers as of a moment."""
    now = time.time() if now is None else now
    waits = run(WAITS, "fedmr", "running", 12, now - 12 * SECONDS - 71, mu1=0.01)
    waits.info.waiting.CopyFrom(pb.Waiting(round=12, there=4, needed=5, opened_unix=now - 71))
    for k, name in enumerate(HOSPITALS[:4]):
        waits.info.waiting.arrivals.append(pb.Arrival(silo=name, bytes=4_200_000 + 1000 * k, at_unix=now - 40 + 9 * k))
    waits.info.waiting.silos.extend(
        [
            pb.AwaitedSilo(name="evora", left_s=96, online=True),
            pb.AwaitedSilo(name="freiburg", left_s=110, online=True),
            pb.AwaitedSilo(name="ghent", left_s=540, offline_s=330, classes=["keratosis"]),
        ]
    )
    silos = []
    for k, name in enumerate(HOSPITALS):
        doing = {"evora": pb.TRAINING, "freiburg": pb.UPLOADING}.get(name, pb.WAITING)
        few = tuple(c for n, c in enumerate(CLASSES) if c != "keratosis" and (n + k) % 3)
        held = CLASSES if name == "ghent" else few
        silo = pb.SiloInfo(
            name=name,
            state="offline" if name == "ghent" else "online",
            fingerprint=f"{k + 3:02x}9b41{7 * k + 16:02x}770c5ed1" * 4,
            certificate_until_unix=now + (9 if name == "ghent" else 40 + 5 * k) * DAY,
            last_seen_unix=now - (330 if name == "ghent" else 2),
            activity=doing,
            run_id=WAITS,
            round=12,
            done=620 if name == "evora" else 0,
            total=800 if name == "evora" else 0,
            software="consilium-fl 0.1.0",
            policy_digest=f"{k + 11:02x}" * 32,
        )
        silo.data.CopyFrom(pb.DataOffer(name="folder", classes=CLASSES, holds=held, nominal_size=1200 + 310 * k))
        silos.append(silo)
    happened = [
        pb.Event(
            number=1,
            at_unix=now - 700,
            kind="refused",
            round=4,
            silo="ghent",
            text="E-RUN-13: no update (offline 12 min): the round closed without it",
        ),
        pb.Event(
            number=2,
            at_unix=now - 20,
            kind="waiting",
            round=12,
            text="4 of 5 updates that are needed; waits for ghent (offline 5 min; nobody else holds keratosis)",
        ),
    ]
    details = [
        waits,
        run(FEDMR, "fedmr", "finished", 20, now - 0.7 * DAY, mu1=0.01),
        run(FEDAVG, "fedavg", "finished", 20, now - 0.8 * DAY),
    ]
    invited = [pb.InvitationInfo(name="heidelberg", expires_unix=now + 2 * DAY)]
    return MadeUpService(pb.SiloList(silos=silos, invitations=invited), details, happened)
