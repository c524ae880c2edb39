"""The foreground of `silo serve`: events and progress on the screen, and an orderly end on a signal."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.status import Status

from fl_core.errors.extras import load
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import OUT, json_line, local_time, print_parts, printable
from service_core.operations import logs
from service_core.operations.exit_status import HANGUP, READY, STOPPING, ShutdownSignals, notify
from service_core.operations.logs import FIELDS, LogFormat
from silo.events import SiloEvent, event
from silo.identity.identity import SiloIdentity
from silo.operations.liveness import Liveness
from silo.service.service import POLL_S, Service
from silo.settings import SiloSettings
from silo.storage.home import ServeOptions

if TYPE_CHECKING:  # only a worker loads torch
    from silo.training.trainer import RunRound

_DOING = {
    pb.IDLE: "waiting for a task",
    pb.FETCHING: "fetching",
    pb.TRAINING: "training",
    pb.UPLOADING: "sending",
    pb.WAITING: "waiting for the round to close",
}


class Printer:
    """Shows events: JSON lines, plain lines, or lines above a live one on a terminal.

    Guarantees: if a line cannot be written (full disk, closed pipe), the service continues; the next line that can be
    written states how many are missing.
    """

    def __init__(self, as_json: bool, quiet: bool = False) -> None:
        self._json = as_json
        self._console = OUT
        self._lock = threading.Lock()
        self._missing = 0
        self._torn = False
        self._status: Status | None = None
        if not as_json and not quiet and self._console.is_terminal:
            self._status = self._console.status("starting")

    def show_event(self, event: SiloEvent) -> None:
        with self._lock:
            try:
                if self._missing:
                    text = f"{self._missing} lines before this one could not be written"
                    self._show("lines_missing", text, {"lines": self._missing})
                    self._missing = 0
                self._show(event.event, event.text, event.facts)
            except OSError:
                self._missing += 1

    def _show(self, name: str, text: str, facts: Mapping[str, object]) -> None:
        if self._json:
            self._write(json_line({"event": name, "at": time.time(), "text": text} | dict(facts)))
        elif self._console.is_terminal:
            print_parts(self._console, f"{local_time(time.time())}  {text}")
        else:
            self._write(printable(f"{local_time(time.time())}  {text}", keep="\t"))

    def _write(self, line: str) -> None:
        """Write a line unbuffered: a buffer would keep and grow by what cannot be written."""
        try:
            descriptor = sys.stdout.fileno()
        except (OSError, ValueError):  # standard output was replaced
            print(line, flush=True)
            return
        data = f"{line}\n".encode()
        left = b"\n" + data if self._torn else data
        while left:
            left = left[os.write(descriptor, left) :]
            self._torn = bool(left)

    def progress(self, pulse: pb.Pulse) -> None:
        if self._status is None:
            return
        text = _DOING.get(pulse.activity, "")
        if pulse.run_id:
            text += f": {printable(pulse.run_id)} round {pulse.round + 1}"
        if pulse.total:
            text += f", {100 * pulse.done / pulse.total:.0f} %"
        self._status.update(text)
        self._status.start()

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


def serve(
    settings: SiloSettings,
    as_json: bool,
    run_round: RunRound | None = None,
    log_format: LogFormat | None = None,
    page: bool = False,
) -> None:
    """Serve until stopped; raises the error that ended the service otherwise. run_round: see `Service`.

    page: also serve the hospital's page while the service runs.

    log_format: write events to the log on standard error in this format instead of to the screen.

    The first SIGTERM or SIGINT finishes a running upload and cancels training (the coordinator offers it again); staged
    updates stay on disk.
    """
    certificate = SiloIdentity(settings.home.path).load()  # before anything is created in a folder that is no home
    with settings.home.make().locked():
        printer, liveness = Printer(as_json, quiet=log_format is not None), Liveness(settings.home)
        show = printer.show_event
        if log_format is not None:
            logs.set_up(log_format, settings.home.path)
            show = partial(log_event, silo=certificate.identity.name)

        def emit(event: SiloEvent) -> None:
            liveness.note(event)
            show(event)

        service = Service(settings, emit, run_round=run_round)
        root = "" if settings.data_root is None else str(settings.data_root.absolute())
        settings.home.note_served(ServeOptions(settings.data, root, str(Path.cwd()), settings.launcher))
        try:
            with ShutdownSignals(service=True) as signals, ExitStack() as beside:
                if page:
                    file = load("consilium.pages.hospital.command:show_beside", "--page")(settings.home, beside)
                    show(event("page", f"open the page with the file {file}"))
                service.start(lambda: bool(signals.received))
                notify(READY)
                while not signals.received and not service.wait(POLL_S):
                    if signals.hung_up():
                        show(event("hangup", HANGUP))
                    liveness.beat()
                    printer.progress(service.doing())
                notify(STOPPING)
                service.leave("the silo is shutting down")
                while not service.settled(POLL_S):
                    liveness.beat()
                    printer.progress(service.doing())
                service.stop("the silo was stopped")
        finally:
            printer.close()
    if service.error is not None:
        raise service.error


# ---- events as lines of the log --------------------------------------------------------------------------------------

log = logging.getLogger("silo")
_WARNINGS = frozenset({"trouble", "refused", "disconnected", "held", "stopped", "charged"})
_MEASURED = {"staged": "the update is finished and waits to be sent"}
"""Events whose text contains measurements on the hospital's images: the log gets another text."""


def log_event(event: SiloEvent, silo: str) -> None:
    """Write an event to the log, without measurements of this hospital."""
    facts = {name: event.facts[name] for name in FIELDS if event.facts.get(name) is not None}
    extra = {"silo": silo} | facts | {"event": event.event}
    level = logging.WARNING if event.event in _WARNINGS else logging.INFO
    log.log(level, "%s", _MEASURED.get(event.event, event.text), extra=extra)
