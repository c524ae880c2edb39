"""The foreground of `silo serve`: events and progress on the screen, and an orderly end on a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

from rich.status import Status

from fl_core.rounds.silo_round import run_silo_round
from protos.consilium.v1 import federation_pb2 as pb
from protos.console import local_time, print_json
from silo.cli.console import OUT
from silo.events import Event
from silo.identity.identity import SiloIdentity
from silo.service.service import Service, SiloSettings
from silo.training.trainer import RunRound

POLL_S = 0.2
_DOING = {
    pb.IDLE: "waiting for a task",
    pb.FETCHING: "fetching",
    pb.TRAINING: "training",
    pb.UPLOADING: "sending",
    pb.WAITING: "waiting for the round to close",
}


class Printer:
    """Shows events: JSON lines, plain lines, or lines above a live one on a terminal."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._console = OUT
        self._lock = threading.Lock()
        self._status: Status | None = None
        if not as_json and self._console.is_terminal:
            self._status = self._console.status("starting")

    def show_event(self, event: Event) -> None:
        """Print one event."""
        with self._lock:
            if self._json:
                print_json({"event": event.event, "at": time.time(), "text": event.text} | dict(event.facts))
            else:
                self._console.print(f"{local_time(time.time())}  {event.text}")
                sys.stdout.flush()

    def progress(self, pulse: pb.Pulse) -> None:
        """Show what is being done now; on a terminal alone."""
        if self._status is None:
            return
        text = _DOING.get(pulse.activity, "")
        if pulse.run_id:
            text += f": {pulse.run_id} round {pulse.round + 1}"
        if pulse.total:
            text += f", {100 * pulse.done / pulse.total:.0f} %"
        self._status.update(text)
        self._status.start()

    def close(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()


class ShutdownSignals:
    """Notes SIGTERM and SIGINT; the second one ends the process at once."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> ShutdownSignals:
        """Listen."""
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no more."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        # Nothing here may wait for a lock: the handler runs between any two steps of the main thread.
        self.received.append(number)
        if len(self.received) > 1:
            os._exit(128 + number)


def serve(settings: SiloSettings, as_json: bool, run_round: RunRound = run_silo_round) -> None:
    """Serve until told to stop; raises what ended the service otherwise. run_round: see `Service`.

    On the first SIGTERM or SIGINT an upload under way is finished, training is given up (the coordinator offers it
    again), and what is staged stays on disk.
    """
    SiloIdentity(settings.home.path).load()  # before anything is made in a home that is none
    with settings.home.make().locked():
        printer = Printer(as_json)
        service = Service(settings, printer.show_event, run_round=run_round)
        try:
            with ShutdownSignals() as signals:
                service.start()
                while not signals.received and not service.wait(POLL_S):
                    printer.progress(service.doing())
                service.leave("the silo is shutting down")
                while not service.settled(POLL_S):
                    printer.progress(service.doing())
                service.stop("the silo was stopped")
        finally:
            printer.close()
    if service.error is not None:
        raise service.error
