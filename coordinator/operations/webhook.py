"""A message to programs of the operator's when a run ends, fails or pauses: JSON over HTTPS, signed by a shared key.

Each receiver has a thread of its own, which reads the runs' events and sends one message after the other; rounds and
other receivers never wait for it. Redirects are not followed, answers are not read beyond their status, and proxies are
those of the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordinator.storage.records import EndedEvent
from coordinator.storage.runs import RunStore
from fl_core.errors import ConfigError, FederationError
from protos.storage import private_files

log = logging.getLogger(__name__)
STATE_FILE = "webhook.json"
"""In the home: the last event that each receiver got, so that a restart neither loses one nor begins with old ones."""
MOST_RECEIVERS = 8
SIGNATURE = "X-Consilium-Signature"
LEAST_KEY_BYTES = 32
TIMEOUT_S = 10.0
WAITS_S = (1.0, 5.0, 30.0, 120.0, 600.0)
"""Before another try of a message; after the last it is given up, and the log says so.

So is one that another message kept waiting for as long as all of them together, after one try: a receiver that is gone
for hours delays the messages after that by no more than one time-out each.
"""
_LOOK_S = 2.0
_CODE = re.compile(r"E-[A-Z]+-\d\d")


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where messages go, and the key that signs them: HMAC-SHA256 over the body, in hex, after `sha256=`."""

    url: str
    key: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """Name the receiver in a file: its address may itself be a secret."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:16]

    @classmethod
    def of(cls, url: str, key_file: Path | None) -> Webhook:
        """Check a URL and read the key; raises ConfigError (E-CFG-02), StateError (E-STATE-42) on a key open to others.

        Plain http is taken for this machine alone.
        """
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigError("E-CFG-02", f"expected --webhook https://..., found {error}: correct it") from error
        if not url.isascii() or not url.isprintable() or " " in url or parts.username or parts.password:
            raise ConfigError("E-CFG-02", "expected --webhook of plain characters and without a password: correct it")
        if not host or not (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))):
            raise ConfigError(
                "E-CFG-02",
                f"expected --webhook https://..., or http:// here, found {url[:200]!r}: correct it",
            )
        if key_file is None:
            raise ConfigError("E-CFG-02", "expected --webhook-key FILE beside --webhook, found none: give a key")
        key = private_files.read_private(key_file).strip()
        if len(key) < LEAST_KEY_BYTES:
            raise ConfigError(
                "E-CFG-02",
                f"expected a key of {LEAST_KEY_BYTES} bytes in {key_file}, found {len(key)}: make a longer one",
            )
        return cls(url, key)

    def post(self, body: bytes) -> None:
        """Send a body once; raises OSError or HTTPException unless it is answered with a status of 2xx."""
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "consilium",
            SIGNATURE: "sha256=" + hmac.new(self.key, body, hashlib.sha256).hexdigest(),
        }
        request = urllib.request.Request(self.url, body, headers, method="POST")  # noqa: S310 - of() checked the scheme
        here = [urllib.request.ProxyHandler({})] if self.url.startswith("http:") else []  # no proxy leads to loopback
        opener = urllib.request.build_opener(_NoRedirects(), *here)
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            if not 200 <= answer.status < 300:
                raise urllib.error.URLError(f"status {answer.status}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def message(found: EndedEvent, consortium: str) -> bytes:
    """Write what is sent: which run, its state, and the code of the reason. No measurement, and no hospital's name."""
    code = _CODE.search(found.text)
    return json.dumps(
        {
            "version": 1,
            "delivery": f"{found.run}/{found.number}",
            "event": f"run.{found.text.partition(':')[0]}",
            "consortium": consortium,
            "run": found.run,
            "name": found.name,
            "method": found.method,
            "rounds": found.rounds,
            "closed": found.closed,
            "code": code[0] if code else None,
            "at": found.at,
            "manifest_digest": found.manifest_digest,
            "model_digest": found.model_digest or None,
        },
        sort_keys=True,
    ).encode()


class WebhookSender:
    """Sends messages to all receivers from `start` to `stop`, to each in the order of the events."""

    def __init__(
        self,
        webhooks: Sequence[Webhook],
        runs: RunStore,
        home: Path,
        consortium: str,
        waits: Sequence[float] = WAITS_S,
        timeout: float = TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raise ConfigError (E-CFG-02) on one receiver that is named twice, and on more than `MOST_RECEIVERS`."""
        if len({webhook.id for webhook in webhooks}) != len(webhooks) or len(webhooks) > MOST_RECEIVERS:
            raise ConfigError(
                "E-CFG-02",
                f"expected at most {MOST_RECEIVERS} receivers, each once, found {len(webhooks)}: give fewer",
            )
        self._webhooks, self._runs, self._consortium = webhooks, runs, consortium
        self._waits, self._timeout, self._clock = waits, timeout, clock
        self._sent = _Sent(home / STATE_FILE)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(webhook,), name="webhook", daemon=True) for webhook in webhooks
        ]

    def start(self) -> None:
        if self._webhooks:
            self._sent.begin([webhook.id for webhook in self._webhooks], self._runs.last_ended())
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; a message that is under way is sent again by the next service."""
        self._stopping.set()
        until = time.monotonic() + self._timeout + 1
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, webhook: Webhook) -> None:
        delivery = _Delivery(webhook, self._waits, self._timeout, self._stopping, self._clock)
        while not self._stopping.is_set():
            try:
                for found in self._runs.ended_events(self._sent.last(webhook.id)):
                    if not delivery.deliver(message(found, self._consortium), found):
                        return
                    self._sent.note(webhook.id, found.row)
            except Exception:  # a disk or a database that does not answer now: looked at again
                log.exception("the webhook met an unexpected error")
            self._stopping.wait(_LOOK_S)


class _Sent:
    """The row of the last event that each receiver was sent, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, receivers: Sequence[str], newest: int) -> None:
        """Read the file. A receiver that is new, and one of a database that was put back, begin at the newest event.

        Before there were several receivers, the file named the last event of the only one.
        """
        try:
            found = json.loads(private_files.read_private(self._file))
            old, rows = found.get("sent"), found.get("receivers")
        except (OSError, ValueError, AttributeError, TypeError, RecursionError, FederationError):
            old, rows = None, None
        known = rows if isinstance(rows, dict) else dict.fromkeys(receivers, old)
        with self._lock:
            for receiver in receivers:
                row = known.get(receiver)
                self._rows[receiver] = min(row, newest) if type(row) is int else newest
            try:
                self._write()
            except FederationError:  # written with the first message that is sent
                log.exception("the webhook could not note where it begins")

    def last(self, receiver: str) -> int:
        with self._lock:
            return self._rows[receiver]

    def note(self, receiver: str, row: int) -> None:
        with self._lock:
            self._rows[receiver] = row
            self._write()

    def _write(self) -> None:
        noted = {"sent": min(self._rows.values()), "receivers": self._rows}
        private_files.write_private(self._file, json.dumps(noted).encode())


class _Delivery:
    """Brings messages to one receiver, one after the other. Used by one thread."""

    def __init__(
        self,
        webhook: Webhook,
        waits: Sequence[float],
        timeout: float,
        stopping: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._webhook, self._waits, self._timeout = webhook, waits, timeout
        self._stopping, self._clock, self._began = stopping, clock, clock()
        self._under_way: Future[None] | None = None

    def deliver(self, body: bytes, found: EndedEvent) -> bool:
        """Try until it is taken or given up; return False when the service stops."""
        overdue = max(found.at, self._began) + _LOOK_S + sum(self._waits)
        for wait in (*self._waits, None):
            try:
                self._post(body)
                log.info("the webhook was told of %s", found.run)
                return True
            except (OSError, HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
                last = wait is None or self._clock() > overdue
                cause = type(error).__name__ + (": it is given up" if last else "")
                log.warning("the webhook was not told of %s: %s", found.run, cause)
            if last:
                return True
            if self._stopping.wait(wait):
                return False
        return True

    def _post(self, body: bytes) -> None:
        """Send a body once; raises as `Webhook.post`, and TimeoutError when there is no answer in time.

        The time-out of a socket is for each piece of an answer: a receiver that sends a byte now and then would hold
        this thread for good. So the try has its own, of which a receiver has one at a time.
        """
        if self._under_way is not None and not self._under_way.done():
            raise TimeoutError
        attempt = self._under_way = Future[None]()
        threading.Thread(target=_settle, args=(attempt, self._webhook.post, body), name="webhook", daemon=True).start()
        attempt.result(self._timeout)


def _settle(outcome: Future[None], post: Callable[[bytes], None], body: bytes) -> None:
    try:
        post(body)
    except Exception as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(None)
