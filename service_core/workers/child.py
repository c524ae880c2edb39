"""A process that a service starts to compute: launched, awaited, and ended with all that it started."""

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
"""Seconds that a process has to end by itself, or to give up what it does; then it is killed."""
Launch = Callable[[], "subprocess.Popen[bytes]"]
"""Starts a process that reads and writes lines, as the leader of its process group; raises OSError."""
Kill = Callable[["subprocess.Popen[bytes]"], None]
"""Ends such a process and all that it started, whatever it does; is called also once it has ended. Raises nothing."""


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
    """A process and its line, from the launch on: what it loads then, and how long that takes, is not awaited.

    Guarantees: `end` takes no longer than `END_S`, whatever the process does, and leaves nothing of its group. Every
    method may be called by any thread.
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
        """Whether it runs, and nobody has begun to end it."""
        return not self._has_ended() and not self.line.outgoing.closed

    @contextmanager
    def within(self, seconds: float, why: str = "") -> Iterator[None]:
        """Kill it where the block takes longer. why: as in `kill`."""
        timer = threading.Timer(seconds, self.kill, [why])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def kill(self, why: str = "") -> None:
        """Kill it, unless it has ended. why: what `ending` says then."""
        if not self._has_ended():
            self._why = self._why or why
            self._kill(self._process)

    def end(self) -> None:
        """Close its pipe, with which it ends by itself, or kill it; whoever reads `line` closes that end."""
        with self.within(END_S):
            with suppress(OSError, ValueError):
                self.line.outgoing.close()
            self._process.wait()
        self._has_ended()

    def ending(self) -> str:
        """End it, and say how it ended: "it was killed by SIGKILL"."""
        self.end()
        status = self._process.returncode
        name = next((number.name for number in signal.Signals if number == -status), f"signal {-status}")
        return self._why or (f"it was killed by {name}" if status < 0 else f"it ended with status {status}")

    def _has_ended(self) -> bool:
        with self._lock:
            if not self._over and self._process.poll() is not None:
                self._over = True
                self._kill(self._process)  # what it started and left behind
            return self._over
