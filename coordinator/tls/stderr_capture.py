"""Listen to what gRPC's C core writes to stderr, and pass everything else on.

The core decides about handshakes and tells Python nothing: its only voice is file descriptor 2. While a `CoreLog` is
running, that descriptor is a pipe; each line goes to a reader, which returns what is to be written on.

Python's own `sys.stderr` is moved to the real stderr meanwhile, so our log lines and progress bars take no detour. The
pipe's writing end does not block: when lines come faster than they can be read, lines are lost, never the service.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import select
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_STDERR = 2
_PIPE_BYTES = 1 << 20
_IDLE_SECONDS = 0.2


class CoreLog:
    """A context in which each line on stderr passes through `on_line`; `on_idle` runs when nothing has come for 0.2 s.

    on_line: (line without its end) -> True to pass it on unchanged, False to keep it back. Both run on one thread.
    Guarantees: lines that are passed on are unchanged and in order; afterwards stderr is what it was.
    """

    def __init__(self, on_line: Callable[[str], bool], on_idle: Callable[[], None]) -> None:
        self._on_line, self._on_idle = on_line, on_idle
        self._real = self._read = -1
        self._python: TextIO | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="core-log", daemon=True)

    def __enter__(self) -> CoreLog:
        if sys.stderr is not None:
            sys.stderr.flush()
        self._real = os.dup(_STDERR)
        self._read, write = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # a bigger pipe is a comfort, not a need; Linux only
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(write, False)
        os.dup2(write, _STDERR)
        os.close(write)
        if sys.stderr is sys.__stderr__ and sys.stderr is not None:
            self._python = sys.stderr
            sys.stderr = os.fdopen(
                os.dup(self._real), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace"
            )
        if faulthandler.is_enabled():  # what it writes while the process dies must not wait in a pipe
            faulthandler.enable(self._real)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.dup2(self._real, _STDERR)
        self._stopping.set()
        self._thread.join()
        if self._python is not None:
            moved, sys.stderr = sys.stderr, self._python
            moved.close()
        if faulthandler.is_enabled():
            faulthandler.enable(_STDERR)
        os.close(self._read)
        os.close(self._real)

    def _run(self) -> None:
        rest = b""
        while True:
            stopping = self._stopping.is_set()
            ready, _, _ = select.select([self._read], [], [], 0 if stopping else _IDLE_SECONDS)
            data = os.read(self._read, 1 << 16) if ready else b""
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._pass(line, b"\n")
            if data:
                continue
            if rest:  # half a line that does not go on, such as a question
                self._pass(rest, b"")
                rest = b""
            self._on_idle()
            if stopping or ready:  # told to stop and drained, or every writer is gone
                return

    def _pass(self, line: bytes, end: bytes) -> None:
        if not self._on_line(line.decode("utf-8", "replace")):
            return
        data = line + end
        while data:
            data = data[os.write(self._real, data) :]
