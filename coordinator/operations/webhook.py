"""A message to a program of the operator's when a run ends, fails or pauses: JSON over HTTPS, signed by a shared key.

A thread reads the runs' events and sends one message after the other; rounds never wait for it. Redirects are not
followed, answers are not read beyond their status, and proxies are those of the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordinator.storage.records import EndedEvent
from coordinator.storage.runs import RunStore
from fl_core.errors import ConfigError, FederationError
from service_core.storage import private_files
from service_core.web.loopback import is_loopback

log = logging.getLogger(__name__)
STATE_FILE = "webhook.json"
"""In the home: the last event that was sent, so that a restart neither loses one nor begins with old ones."""
SIGNATURE = "X-Consilium-Signature"
MIN_KEY_BYTES = 32
TIMEOUT_S = 10.0
RETRY_WAITS_S = (1.0, 5.0, 30.0, 120.0)
"""Before another try of a message; after the last it is given up, and the log says so."""
_LOOK_S = 2.0
_CODE = re.compile(r"E-[A-Z]+-\d\d")


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where messages go, and the key that signs them: HMAC-SHA256 over the body, in hex, after `sha256=`."""

    url: str
    key: bytes = field(repr=False)
    timeout_s: float = TIMEOUT_S

    @classmethod
    def of(cls, url: str, key_file: Path | None, timeout_s: float = TIMEOUT_S) -> Webhook:
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
        if not host or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))):
            raise ConfigError(
                "E-CFG-02",
                f"expected --webhook https://..., or http:// here, found {url[:200]!r}: correct it",
            )
        if key_file is None:
            raise ConfigError("E-CFG-02", "expected --webhook-key FILE beside --webhook, found none: give a key")
        key = private_files.read_private(key_file).strip()
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                "E-CFG-02",
                f"expected a key of {MIN_KEY_BYTES} bytes in {key_file}, found {len(key)}: make a longer one",
            )
        return cls(url, key, timeout_s)

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
        with opener.open(request, timeout=self.timeout_s) as answer:
            if not 200 <= answer.status < 300:
                raise urllib.error.URLError(f"status {answer.status}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        return None


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
    """Sends messages from `start` to `stop`, in the order of the events."""

    def __init__(
        self, webhook: Webhook, runs: RunStore, home: Path, consortium: str, waits: Sequence[float] = RETRY_WAITS_S
    ) -> None:
        self._webhook, self._runs, self._consortium, self._waits = webhook, runs, consortium, waits
        self._file = home / STATE_FILE
        self._sent = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def start(self) -> None:
        """Go on after the last message that was sent; a new receiver begins at the newest event."""
        newest = self._runs.last_ended()
        self._sent = min(self._noted(newest), newest)  # a database that was put back has fewer
        try:
            self._note(self._sent)
        except FederationError:  # written with the first message that is sent
            log.exception("the webhook could not note where it begins")
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a message that is under way is sent again by the next service."""
        self._stopping.set()
        self._thread.join(self._webhook.timeout_s + 1)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                for found in self._runs.ended_events(self._sent):
                    if not self._deliver(found):
                        return
                    self._note(found.row)
            except Exception:  # a disk or a database that does not answer now: looked at again
                log.exception("the webhook met an unexpected error")
            self._stopping.wait(_LOOK_S)

    def _deliver(self, found: EndedEvent) -> bool:
        """Try until the message is taken or given up; return False when the service stops."""
        body = message(found, self._consortium)
        for wait in (*self._waits, None):
            try:
                self._webhook.post(body)
            except (OSError, HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
                cause = type(error).__name__ + (": it is given up" if wait is None else "")
                log.warning("the webhook was not told of %s: %s", found.run, cause)
            else:
                log.info("the webhook was told of %s", found.run)
                return True
            if wait is not None and self._stopping.wait(wait):
                return False
        return True

    def _noted(self, default: int) -> int:
        """Return the row that the file names; `default` without a file, and on one that is none, which is logged."""
        if not self._file.exists():
            return default
        try:
            sent = json.loads(private_files.read_private(self._file))["sent"]
            if type(sent) is not int:
                raise TypeError
        except (OSError, ValueError, TypeError, KeyError, RecursionError, FederationError):
            log.warning("%s does not say what was sent: messages begin with the next end of a run", self._file)
            return default
        return sent

    def _note(self, row: int) -> None:
        self._sent = row
        private_files.write_private(self._file, json.dumps({"sent": row}).encode())
