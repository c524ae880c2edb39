"""Exit statuses of both programs, shutdown signals, and sd_notify."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from fl_core.errors import ConfigError, DataError, FederationError, StateError
from service_core.console import error_text
from service_core.progress import silent_from_now
from service_core.startup import INTERRUPTED

DONE, FAILED, USAGE = 0, 1, 2


def status_of(command: Callable[[], object]) -> int:
    """Run a command line and return its exit status.

    | end                                                                     | status | on stderr             |
    |-------------------------------------------------------------------------|--------|-----------------------|
    | done; a service stopped by a signal                                     | 0      |                       |
    | refused, unavailable, damaged state; a problem found; broken pipe       | 1      | one line, with a code |
    | usage, configuration, data                                              | 2      | one line, with a code |
    | Ctrl-C (SIGINT); for a service: the second one                          | 130    |                       |
    | SIGTERM, if no service runs; for a service: the second one              | 143    |                       |

    Other exceptions are raised: the interpreter ends with a traceback and status 1.
    """
    try:
        command()
        sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE if end.code is None else FAILED
    except FederationError as error:
        sys.stderr.write(f"{error_text(error)}\n")
        return USAGE if isinstance(error, ConfigError | DataError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else the interpreter fails when it flushes at exit
        return FAILED
    except (OSError, sqlite3.OperationalError) as error:
        sys.stderr.write(f"{error_text(_file_system(error))}\n")
        return FAILED
    return DONE


def _file_system(error: OSError | sqlite3.OperationalError) -> StateError:
    errors = (errno.ENOSPC, errno.EDQUOT)
    full = (
        error.errno in errors
        if isinstance(error, OSError)
        else getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    )
    if not full:
        return StateError("E-STATE-63", f"the file system cannot be used: {error}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        with suppress(OSError):  # the rest of the output would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    of = f" of {os.fsdecode(error.filename)}" if isinstance(error, OSError) and error.filename else ""
    return StateError("E-STATE-63", f"the disk{of} is full: free some space, and run the command again")


HANGUP = "SIGHUP ignored: there is no configuration to reload. SIGTERM stops the service"


class ShutdownSignals:
    """Records SIGTERM and SIGINT; the second one ends the process at once, with status 143 or 130.

    service: also record SIGHUP, which then ends nothing, so the service outlives its terminal
    """

    def __init__(self, service: bool = False) -> None:
        self.received: list[int] = []
        self._handlers = {signal.SIGTERM: self._note, signal.SIGINT: self._note}
        if service:
            self._handlers[signal.SIGHUP] = self._note_hangup
        self._hangups = 0

    def __enter__(self) -> ShutdownSignals:
        silent_from_now()
        self._before = {number: signal.signal(number, handler) for number, handler in self._handlers.items()}
        return self

    def hung_up(self) -> bool:
        """Return whether SIGHUP arrived since the last call."""
        came, self._hangups = self._hangups > 0, 0
        return came

    def _note_hangup(self, number: int, _: FrameType | None) -> None:
        del number
        self._hangups += 1

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        # Never take a lock here: the handler runs between any two bytecodes of the main thread.
        self.received.append(number)
        if len(self.received) > 1:
            os._exit(128 + number)


READY, STOPPING = "READY=1", "STOPPING=1"


def notify(state: str) -> None:
    """Send a state to the socket that NOTIFY_SOCKET names (sd_notify), if any. Never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    place = f"\0{address[1:]}" if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
        line.setblocking(False)
        line.sendto(state.encode(), place)
