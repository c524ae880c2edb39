"""Start and stop the demo's processes."""

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
    """Turns the first signal into a KeyboardInterrupt, but only inside `raising` and not inside `held`.

    Guarantees: code outside `raising`, such as a clean-up, is never interrupted.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._raise = False

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        first, self.received = self.received is None, self.received or number
        if first and self._raise:
            self._raise = False
            raise KeyboardInterrupt

    @contextmanager
    def raising(self) -> Iterator[None]:
        self._raise = True
        try:
            self.check()
            yield
        finally:
            self._raise = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay the interrupt until the end of the block."""
        before, self._raise = self._raise, False
        try:
            yield
        finally:
            self._raise = before
        if before:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was received, in case a library swallowed the first one."""
        if self.received is not None:
            raise KeyboardInterrupt


@dataclass(slots=True)
class Processes:
    """The processes of the demo; `stop` ends them."""

    log: Path
    signals: Signals
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *words: str) -> int:
        """Start a command that runs until `stop`, with output to the log; return its process id."""
        with self.log.open("ab") as log:
            return self._spawn(words, stdout=log, stderr=log).pid

    def call(self, *words: str) -> Mapping[str, Any]:
        """Run a command with --json to its end and return its answer; after an interrupt, `stop` ends it.

        Raises UnavailableError (E-RUN-99) if the command fails.
        """
        process = self._spawn((*words, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        stdout, stderr = process.communicate()
        self.running.remove(process)
        if process.returncode:
            raise UnavailableError(
                "E-RUN-99",
                f"{' '.join(words[:2])} failed: {stderr.decode().strip()}",
            )
        answer: Mapping[str, Any] = json.loads(stdout.splitlines()[-1])
        return answer

    def _spawn(self, words: Sequence[str], *, stdout: _Output, stderr: _Output) -> subprocess.Popen[bytes]:
        """Start a process in its own session, so that Ctrl-C reaches only the demo."""
        with self.signals.held():  # so that every started process is listed
            process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},  # seven processes share the cores
                start_new_session=True,
            )
            self.running.append(process)
        return process

    def check(self) -> None:
        """Raise UnavailableError (E-RUN-99) if a process has ended, KeyboardInterrupt after a signal."""
        self.signals.check()
        for process in self.running:
            if process.poll() is not None:
                tail = b"\n".join(self.log.read_bytes().splitlines()[-15:]).decode(errors="replace")
                name = " ".join(str(word) for word in process.args) if isinstance(process.args, list) else ""
                raise UnavailableError(
                    "E-RUN-99",
                    f"a process of the demo ended unexpectedly: {name}\n{tail}",
                )

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
        """Wait for a condition; raises UnavailableError (E-RUN-99) after `seconds`, or if a process ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise UnavailableError("E-RUN-99", f"no {what} within {seconds:.0f} s: see {self.log}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Terminate all processes, silos first; kill those still running after 10 seconds in total."""
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
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
