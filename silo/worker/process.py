"""Worker's main loop: turns lines from the service into tasks, and a task's calls to the service into lines."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_core.errors import FederationError, StateError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.size_limits import MANIFEST_BYTES
from service_core.storage.shared_folder import await_file, require_locks, use
from service_core.version import software
from service_core.workers.lines import Line
from silo.admission.controls import HospitalControls
from silo.cancellation import CancelToken
from silo.events import SiloEvent
from silo.identity.identity import SiloIdentity
from silo.settings import SiloSettings
from silo.storage.home import Home
from silo.storage.store import SiloStore
from silo.training.helpers import Helpers
from silo.worker.cage import Walls
from silo.worker.exchange import ERRORS
from silo.worker.tasks import TaskWork

PROGRESS_S = 0.1
"""Minimum seconds between two progress lines."""
log = logging.getLogger(__name__)


def serve(setup: Mapping[str, Any], walls: Walls, line: Line) -> None:
    """Run tasks until the service ends or closes its pipe. This process then exits at once, even during a task."""
    logging.basicConfig(level=setup["log_level"], handlers=[_LogLines(line)], force=True)
    try:
        settings = SiloSettings.of_json(setup["settings"])
        if setup["locks"]:
            _join_service(setup, settings.home)
        helpers = Helpers.fork(settings.processes, settings.device, (line.incoming, line.outgoing))
        store = SiloStore(settings.home.database)
        controls = HospitalControls(settings.home, store, SiloIdentity(settings.home.path).ca_fingerprint())
        work = TaskWork.of(
            settings, store, controls, lambda kind, s: line.send(computed=[kind.value, s]), helpers=helpers
        )
        about = work.describe()
    except Exception as error:
        line.send(failed=_logged(error))
        return
    line.send(ready={"walls": walls, "data": _hex(about.data), "device": about.device, "cache": about.cache})
    service = _PipedService(line)
    threading.Thread(target=service.listen, name="service", daemon=True).start()
    while True:
        message = service.tasks.get()
        try:
            if "preflight" in message:
                request = pb.Preflight.FromString(bytes.fromhex(message["preflight"]))
                line.send(readiness=work.preflight(request, service))
                continue
            offer = pb.Offer.FromString(bytes.fromhex(message["offer"]))
            pending = work.train(offer, service)
            entry = pending.entry
            line.send(staged=[entry.object_digest, entry.size, entry.state_digest, entry.mirrored, entry.attested])
            pending.finish()
            line.send(entered=True)
        except Exception as error:
            line.send(failed=_logged(error))


def _join_service(setup: Mapping[str, Any], home: Home) -> None:
    """Check software version and locks of a remote service before sharing its home; raises StateError (E-RUN-55)."""
    if setup["software"] != software():
        raise StateError(
            "E-RUN-55",
            (
                f"expected a worker of {setup['software']}, the version of the service, found {software()}: install "
                "the service's version"
            ),
        )
    require_locks(Path(setup["scratch"]), setup["locks"])
    use(home.worker_lock)


@dataclass(slots=True)
class _PipedService:
    """Client for the service at the other end of the pipes, for one task at a time."""

    line: Line
    stop: CancelToken = field(default_factory=CancelToken)
    tasks: queue.SimpleQueue[Mapping[str, Any]] = field(default_factory=queue.SimpleQueue)
    _answers: queue.SimpleQueue[Mapping[str, Any]] = field(default_factory=queue.SimpleQueue)
    _told: float = 0.0

    def listen(self) -> None:
        """Read the service's messages; ends this process when they end."""
        try:
            while (message := self.line.read()) is not None:
                if "cancel" in message:
                    self.stop.cancel(message["cancel"])
                elif "preflight" in message or "offer" in message:
                    self.stop = CancelToken()
                    self.tasks.put(message)
                else:
                    self._answers.put(message)
        finally:
            os._exit(0)

    def fetch(self, digest: str, size: int = 0, most: int = MANIFEST_BYTES) -> Path:
        self.line.send(fetch=[digest, size, most])
        answer = self._answers.get()
        if "failed" in answer:
            raise ERRORS.read(answer["failed"])
        await_file(path := Path(answer["fetched"]))
        return path

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._told >= PROGRESS_S:
            self._told = now
            self.line.send(progress=[done, total])

    def accept(self) -> None:
        self.line.send(accept=True)

    def tell(self, error: FederationError) -> None:
        self.line.send(tell=ERRORS.write(error))

    def training_begins(self, private: bool) -> None:
        self.line.send(begin=private)

    def emit(self, event: SiloEvent) -> None:
        self.line.send(event=[event.event, event.text, dict(event.facts)])


class _LogLines(logging.Handler):
    """Forwards log records to the service, which writes them to its own log."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._line.send(log=[record.name, record.levelno, self.format(record)])


def _logged(error: Exception) -> dict[str, str]:
    """Serialize an error for the service. Logs an unexpected one here, where its traceback is available."""
    written = ERRORS.write(error)
    if not isinstance(error, FederationError) and written["kind"] == "StateError":
        log.exception("the task failed")
    return written


def _hex(message: pb.DataOffer) -> str:
    return message.SerializeToString().hex()
