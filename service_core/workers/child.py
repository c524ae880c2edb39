"""A process that a service starts to compute, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from service_core.workers.lines import Line

END_S = 1.0
"""Seconds that a process has to end by itself; then it is killed."""
Launch = Callable[[], "subprocess.Popen[bytes]"]
"""Starts a process that reads and writes lines, as the leader of its process group; raises OSError."""
Kill = Callable[["subprocess.Popen[bytes]"], None]
"""Kills such a process and all that it started; also called after the process has ended. Raises nothing."""


def worker_words(module: str) -> list[str]:
    """Return the command line of a worker."""
    return [sys.executable, "-P", "-m", module]


def launch(words: Sequence[str], surroundings: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command, without a shell. surroundings: its environment; None: that of this process."""
    return subprocess.Popen(  # noqa: S603 - words of this program or of a hospital's settings
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=surroundings
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


class ChildProcess:
    """A process and its line. It is launched without waiting until it is ready. All methods are thread-safe.

    Guarantees: `end` kills the process after `END_S` if it has not ended by itself, and then waits, without a limit,
    until the system has ended it. No process of its group is left.
    """

    def __init__(self, launch: Launch, kill: Kill = kill_group) -> None:
        """Launch it; raises OSError."""
        self._process, self._kill = launch(), kill
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.line = Line(self._process.stdout, self._process.stdin)
        self._lock = threading.Lock()
        self._over, self._why = False, ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether the process runs, and `end` was not called."""
        return not self._has_ended() and not self.line.outgoing.closed

    @contextmanager
    def within(self, seconds: float, why: str = "") -> Iterator[None]:
        """Kill it if the block takes longer than this. why: as in `kill`."""
        timer = threading.Timer(seconds, self.kill, [why])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def kill(self, why: str = "") -> None:
        """Kill it, unless it has ended. why: the text that `ending` then returns."""
        if not self._has_ended():
            self._why = self._why or why
            self._kill(self._process)

    def end(self) -> None:
        """Close the process's input, so that it ends; kill it after `END_S`. The reader of `line` closes its output."""
        with self.within(END_S):
            with suppress(OSError, ValueError):
                self.line.outgoing.close()
            self._process.wait()
        self._has_ended()

    def ending(self) -> str:
        """End it and describe how it ended, as in "it was killed by SIGKILL"."""
        self.end()
        status = self._process.returncode
        name = next((number.name for number in signal.Signals if number == -status), f"signal {-status}")
        return self._why or (f"it was killed by {name}" if status < 0 else f"it ended with status {status}")

    def _has_ended(self) -> bool:
        with self._lock:
            if not self._over and self._process.poll() is not None:
                self._over = True
                self._kill(self._process)  # the processes that it started and left behind
            return self._over
