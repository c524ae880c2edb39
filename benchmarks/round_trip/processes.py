"""Processes that end with the benchmark, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from fl_core.errors import UnavailableError

ROOT = Path(__file__).resolve().parents[2]
END_S = 20.0


@dataclass(slots=True)
class Processes:
    """What was started, the file that everything of it is logged to, and a folder for compiled modules.

    Twelve silos that compile the same modules at once would take minutes to start where Python may not keep them.
    """

    log: Path
    compiled: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, words: Sequence[str], talks: bool = False) -> subprocess.Popen[str]:
        """Start `python -m WORDS`, one thread of torch and two arenas of malloc each unless the environment says more.

        talks: it is given lines on its standard input and answers on its standard output.
        """
        pipe = subprocess.PIPE if talks else None
        settings = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}  # the second as in the unit file of a service
        env = {**settings, **os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPYCACHEPREFIX": str(self.compiled)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                env=env,
                cwd=ROOT,
                text=True,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def dialled(self, port: int, round_trip_ms: float) -> int:
        """Return the port at which a port is reached over a line of this length: its own where that is 0."""
        if not round_trip_ms:
            return port
        line = self.start(["benchmarks.round_trip.line", str(port), str(round_trip_ms)], talks=True)
        assert line.stdout is not None
        return int(line.stdout.readline())

    def until(self, condition: Callable[[], object], what: str, seconds: float, look_s: float = 0.05) -> None:
        """Wait for a condition; raises UnavailableError (E-RUN-99) when it is late or a process has ended."""
        deadline = time.monotonic() + seconds
        while not condition():
            if ended := [p for p in self.running if p.poll() is not None]:
                raise self.failure(f"{ended[0].args!r} ended with {ended[0].returncode}")
            if time.monotonic() > deadline:
                raise self.failure(f"waited {seconds:.0f} s for {what}")
            time.sleep(look_s)

    def failure(self, what: str) -> UnavailableError:
        """Make an error with the end of the log."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        return UnavailableError("E-RUN-99", f"the benchmark could not be measured: {what}\n{tail}")

    def stop(self) -> None:
        """Ask every process to end, the newest first, and end those that do not."""
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(self.running):
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self.running.clear()


@contextmanager
def processes(log: Path) -> Iterator[Processes]:
    """Make room for processes and end all of them at the end, also on SIGTERM."""

    def told(*_: object) -> None:
        raise KeyboardInterrupt

    log.touch()
    with TemporaryDirectory(prefix="consilium-bench-modules-") as compiled:
        made = Processes(log, Path(compiled))
        before = signal.signal(signal.SIGTERM, told)
        try:
            yield made
        finally:
            made.stop()
            signal.signal(signal.SIGTERM, before)


def family(pid: int) -> list[int]:
    """Return a process and those that it has started and that still run."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for task in tasks for child in task.read_text().split())]


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, its own and the system's for it."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """Return the most memory that a process has had resident (VmHWM), in MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise UnavailableError("E-RUN-99", "expected VmHWM in /proc: the benchmark needs Linux")
    return int(found[1]) / 1024


def forget_peak(pid: int) -> None:
    """Begin the peak of `peak_mib` anew, at what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
