"""The first and last steps of both programs."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130


def begin() -> None:
    """Set umask 077, and let Ctrl-C end the process at once, without a traceback."""
    os.umask(0o077)
    end_on_interrupt()


def end_on_interrupt() -> None:
    """End the process at once on Ctrl-C. Use it only if the work survives a crash.

    A KeyboardInterrupt in the middle of a library's import could be swallowed.
    """
    signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, for commands that clean up or report."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_process(status: int) -> NoReturn:
    """Exit without a last garbage collection, which takes long once torch is loaded."""
    gc.freeze()  # otherwise the last garbage collection visits all of torch's objects: most of a second
    sys.exit(status)


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    os._exit(INTERRUPTED)
