"""Ways to do rounds that need a process of their own, gated so that their rounds alternate with others.

Such a process prints READY, then does a round for each line that it reads, and prints DONE after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

READY, DONE = "consilium: ready", "consilium: done"
ROOT = Path(__file__).resolve().parents[2]


def wait_for_turn() -> None:
    """In the other process: wait until the next round may begin; ends the process where nobody asks any more."""
    if not sys.stdin.readline():
        os._exit(0)  # threads of Flower's and Ray's do not end by themselves


def say(line: str) -> None:
    print(line, flush=True)


class Other:
    """A process that does rounds when it is asked."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        self._until(READY)

    def __call__(self, t: int) -> None:  # noqa: ARG002
        """Do the next round."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._until(DONE)

    def cpu_seconds(self) -> float:
        """Return the processor seconds of the process and of all that it started and that live."""
        own = psutil.Process(self._process.pid)
        return sum(cpu_seconds(process) for process in (own, *own.children(recursive=True)))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        started = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for process in started:  # Ray's, which outlive it
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def _until(self, line: str) -> None:
        assert self._process.stdout is not None
        for found in self._process.stdout:
            if found.strip() == line:
                return
            self._said = [*self._said[-20:], found]
        raise RuntimeError(f"expected {line!r} of {self._process.args!r}, found its end: {''.join(self._said)}")


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor seconds of a process; 0 of one that has ended meanwhile."""
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return 0.0
