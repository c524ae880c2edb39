"""What both programs do before they import anything else, and last."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130


def begin() -> None:
    """Make every file for its owner alone, and let Ctrl-C end the program at once, without a traceback."""
    os.umask(0o077)
    end_on_interrupt()


def end_on_interrupt() -> None:
    """End on Ctrl-C at once: nothing was begun, or what was begun survives a crash.

    An exception could arise in the middle of any library's import, where nobody knows what becomes of it.
    """
    signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, for commands that say or tidy up something then."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_process(status: int) -> NoReturn:
    """End the program."""
    gc.freeze()  # else the interpreter looks at all that torch has made before it ends: most of a second
    sys.exit(status)


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    os._exit(INTERRUPTED)
