"""The demo's processes, and how all of them end with it, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from fl_core.errors import UnavailableError

BIN = Path(sys.executable).parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_S = 10.0
_Output = IO[bytes] | int


class Signals:
    """Turns a request to end into a KeyboardInterrupt, inside `raising` and outside `held` alone.

    Guarantees: what is cleaned up outside `raising` is cleaned up to its end, however often somebody presses Ctrl-C.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._raise = False

    def __enter__(self) -> Signals:
        """Listen."""
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no more."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        first, self.received = self.received is None, self.received or number
        if first and self._raise:
            self._raise = False
            raise KeyboardInterrupt

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let the first signal interrupt the block."""
        self._raise = True
        try:
            self.check()
            yield
        finally:
            self._raise = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put the interrupt off until the block has been left."""
        before, self._raise = self._raise, False
        try:
            yield
        finally:
            self._raise = before
        if before:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt when a signal has come, also one whose interrupt got lost in a library."""
        if self.received is not None:
            raise KeyboardInterrupt


@dataclass(slots=True)
class Processes:
    """The processes of the demo; `stop` ends them."""

    log: Path
    signals: Signals
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *words: str) -> None:
        """Start a command of ours that runs until `stop`; what it prints is appended to the log."""
        with self.log.open("ab") as log:
            self._spawn(words, stdout=log, stderr=log)

    def call(self, *words: str) -> Mapping[str, Any]:
        """Run a command of ours with --json to its end and read its answer; an interrupt leaves it to `stop`."""
        process = self._spawn((*words, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        printed, complaint = process.communicate()
        self.running.remove(process)
        if process.returncode:
            raise UnavailableError("E-RUN-99", f"{' '.join(words[:2])} failed: {complaint.decode().strip()}")
        answer: Mapping[str, Any] = json.loads(printed.splitlines()[-1])
        return answer

    def _spawn(self, words: Sequence[str], *, stdout: _Output, stderr: _Output) -> subprocess.Popen[bytes]:
        """Start and note a process: in a session of its own, so that a Ctrl-C reaches the demo alone."""
        with self.signals.held():  # held: no process is started and not noted
            process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env=_env(),
                start_new_session=True,
            )
            self.running.append(process)
        return process

    def check(self) -> None:
        """Raise UnavailableError (E-RUN-99) when one of them has ended by itself, KeyboardInterrupt after a signal."""
        self.signals.check()
        for process in self.running:
            if process.poll() is not None:
                tail = b"\n".join(self.log.read_bytes().splitlines()[-15:]).decode(errors="replace")
                name = " ".join(str(word) for word in process.args) if isinstance(process.args, list) else ""
                raise UnavailableError("E-RUN-99", f"a process of the demo ended: {name}\n{tail}")

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
        """Wait for a condition with a deadline; a process that ends meanwhile ends the wait."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise UnavailableError("E-RUN-99", f"the demo waited {seconds:.0f} s for {what}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ask every process to end, silos first, and end those that have not after 10 seconds in all."""
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE_S
        for process in reversed(self.running):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


def free_port() -> int:
    """Let the system choose a port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _env() -> dict[str, str]:
    """Give each process one thread: seven of them share the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
