"""What people see while they wait: moving lines on a terminal, plain ones elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from service_core.console import ERR, printable

SILENCE_S = 2.0
"""Nobody waits longer without reading anything."""
_ERASE = "\r\x1b[K"


def is_animated(console: Console) -> bool:
    """Whether lines can be overwritten: on a real terminal, whatever FORCE_COLOR says."""
    return console.file.isatty() and console.is_terminal and not console.is_dumb_terminal


@contextmanager
def still_working(what: str, after_s: float = SILENCE_S / 2) -> Iterator[None]:
    """Say on a terminal that a command is at work, from `after_s` on, until it prints anything to either stream.

    The line is erased by the first output. Without a terminal nothing is written.
    """
    if not is_animated(ERR):
        yield
        return
    started, ended, lock = time.monotonic(), threading.Event(), threading.Lock()
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "__dict__")]
    write = sys.stderr.write

    def tick() -> None:
        delay, shown = after_s, False
        while not ended.wait(delay):
            with lock:
                if not ended.is_set():
                    write(f"{_ERASE}{what}: {time.monotonic() - started:.0f} s")
                    sys.stderr.flush()
            delay, shown = 0.5, True
        if shown:
            write(_ERASE)
            sys.stderr.flush()

    thread = threading.Thread(target=tick, name="still-working", daemon=True)

    def stop() -> None:
        with lock:
            ended.set()
            for stream in streams:
                vars(stream).pop("write", None)
        thread.join(1)  # it erases its line before anything else is written

    def watched(stream: TextIO) -> None:
        def first_write(text: str) -> int:
            stop()
            return stream.write(text)

        vars(stream)["write"] = first_write

    for stream in streams:
        watched(stream)
    thread.start()
    try:
        yield
    finally:
        stop()


class Steps:
    """Progress of a command in steps: a bar for each on a terminal; elsewhere lines without control codes.

    Guarantees: it is never silent for much longer than `silence_s`, and prints no more than a line in that time beside
    the first and the last of a step and what `say` prints; with `quiet` it prints nothing.
    """

    def __init__(self, console: Console = ERR, quiet: bool = False, silence_s: float = SILENCE_S) -> None:
        self._console, self._quiet, self._silence_s = console, quiet, silence_s
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._state, self._printed, self._started = "", time.monotonic(), time.monotonic()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)

    def __enter__(self) -> Steps:
        if self._quiet:
            return self
        if is_animated(self._console):
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bars.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop; what is printed afterwards stands below."""
        self._ended.set()
        if self._bars is not None:
            self._bars.stop()
        elif self._thread.is_alive():
            self._thread.join()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._bars is not None:
            self._bars.console.print(printable(line), soft_wrap=True)
        else:
            self._print(line)

    def show(self, step: str, done: int, total: int, note: str = "") -> None:
        """Show how far a step is. It is finished when `done` is `total`."""
        if self._bars is not None:
            if step not in self._tasks:
                self._tasks[step] = self._bars.add_task(printable(step), note="", total=total)
            self._bars.update(self._tasks[step], completed=done, note=printable(note))
            return
        state = ", ".join(filter(None, (f"{step}: {done} of {total}", note)))
        new, self._state = state != self._state, state
        first = step not in self._tasks
        self._tasks.setdefault(step, TaskID(0))
        if first or (new and done >= total) or time.monotonic() - self._printed >= self._silence_s:
            self._print(self._state)

    def _print(self, line: str) -> None:
        with self._lock:
            if not self._quiet:
                self._console.print(printable(line), soft_wrap=True)
            self._printed = time.monotonic()

    def _repeat(self) -> None:
        """Print the state again after a silence, with the time that has passed."""
        while not self._ended.wait(max(0.05, self._printed + self._silence_s - time.monotonic())):
            if self._state and time.monotonic() - self._printed >= self._silence_s:
                self._print(f"{self._state}, {time.monotonic() - self._started:.0f} s so far")
