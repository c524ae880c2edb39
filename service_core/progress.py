"""Progress for people who wait: moving lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console

from service_core.console import ERR, printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SILENCE_S = 2.0
"""Maximum seconds without output."""
_ERASE = "\r\x1b[K"


def is_animated(console: Console) -> bool:
    """Return whether lines can be overwritten: on a real terminal, regardless of FORCE_COLOR."""
    return console.file.isatty() and console.is_terminal and not console.is_dumb_terminal


class _StillWorking:
    """Writes a line to standard error during a silence, and erases it before anything else is written.

    It watches both streams. After text without an end of line (a question, or a bar) it writes nothing.
    """

    active: ClassVar[_StillWorking | None] = None

    def __init__(self, what: str, after_s: float) -> None:
        self._what, self._after_s, self.again = what, after_s, True
        self._started = self._written = time.monotonic()
        self._shown, self._at_line_start = False, True
        self._ended, self._lock = threading.Event(), threading.RLock()
        self._streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "__dict__")]
        self._writes = [stream.write for stream in self._streams]
        self._terminal, self._write = sys.stderr, sys.stderr.write
        self._thread = threading.Thread(target=self._tick, name="still-working", daemon=True)

    def start(self) -> None:
        for stream, write in zip(self._streams, self._writes, strict=True):
            vars(stream)["write"] = partial(self._watched, write)
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._ended.set()
            self._erase()
            self.unhook()

    def unhook(self) -> None:
        for stream in self._streams:
            vars(stream).pop("write", None)

    def _watched(self, write: Callable[[str], int], text: str) -> int:
        with self._lock:
            self._erase()
            self._written, self._at_line_start = time.monotonic(), text.endswith("\n")
            if not self.again:
                self._ended.set()
            return write(text)

    def _erase(self) -> None:
        if self._shown:
            self._write(_ERASE)
            self._terminal.flush()
            self._shown = False

    def _tick(self) -> None:
        while not self._ended.wait(min(0.5, self._after_s)):
            with self._lock:
                now = time.monotonic()
                if self._at_line_start and not self._ended.is_set() and now - self._written >= self._after_s:
                    self._write(f"{_ERASE}{self._what}: at work, {now - self._started:.0f} s")
                    self._terminal.flush()
                    self._shown = True


def _forget() -> None:
    """Leave the streams of a forked process alone: it has no thread that writes the line."""
    if _StillWorking.active is not None:
        _StillWorking.active.unhook()
        _StillWorking.active = None


os.register_at_fork(after_in_child=_forget)


@contextmanager
def still_working(what: str, after_s: float = SILENCE_S / 2) -> Iterator[None]:
    """Show on a terminal that a command is at work whenever it has printed nothing for `after_s` seconds.

    The line is erased by the next output. Without a terminal nothing is written.
    """
    if _StillWorking.active is not None or not is_animated(ERR):
        yield
        return
    _StillWorking.active = working = _StillWorking(what, after_s)
    working.start()
    try:
        yield
    finally:
        working.stop()
        _StillWorking.active = None


def silent_from_now() -> None:
    """End the message of `still_working` with the command's next output, for commands that wait, such as a service."""
    if _StillWorking.active is not None:
        _StillWorking.active.again = False


class Steps:
    """Progress of a command in steps: a bar for each on a terminal; elsewhere lines without control codes.

    Guarantees: it is never silent for much longer than `silence_s`. In that time it prints at most one line, besides
    the first and the last line of a step and the lines of `say`. With `quiet` it prints nothing.
    """

    def __init__(self, console: Console = ERR, quiet: bool = False, silence_s: float = SILENCE_S) -> None:
        self._console, self._quiet, self._silence_s = console, quiet, silence_s
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun: set[str] = set()
        self._state, self._printed, self._started = "", time.monotonic(), time.monotonic()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)

    def __enter__(self) -> Steps:
        if self._quiet:
            return self
        if is_animated(self._console):
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(16),
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
        """Stop; later output is printed below."""
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
        """Show the progress of a step, which is finished when `done` is `total`."""
        if self._bars is not None:
            if step not in self._tasks:
                self._tasks[step] = self._bars.add_task(printable(step), note="", total=total)
            self._bars.update(self._tasks[step], completed=done, note=printable(note))
            return
        state = ", ".join(filter(None, (f"{step}: {done} of {total}", note)))
        new, self._state = state != self._state, state
        first = step not in self._begun
        self._begun.add(step)
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
