"""Lines over a pair of pipes between a service and its worker, and errors in them.

A line is one JSON object; tensors go by file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from fl_core import errors
from fl_core.errors import FederationError

_MAX_LINE = 1 << 24
_KINDS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}


def launch(module: str) -> subprocess.Popen[bytes]:
    """Start a worker: a module that reads and writes lines, as the leader of a process group."""
    words = [sys.executable, "-P", "-m", module]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)  # noqa: S603


@dataclass(frozen=True, slots=True)
class Line:
    """One end of the two pipes. `send` may be called from every thread, `read` from one."""

    incoming: IO[bytes]
    outgoing: IO[bytes]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, **message: object) -> None:
        """Send a message; raises OSError or ValueError where nobody reads any more."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self.outgoing.write(data)
            self.outgoing.flush()

    def read(self) -> Mapping[str, Any] | None:
        """Return the next message; None where the other side has ended or sends what is none."""
        data = self.incoming.readline(_MAX_LINE)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None


@dataclass(frozen=True, slots=True)
class ErrorLines:
    """Writes errors for the other side, and reads them.

    plain: errors made of one text, by name   code, what: for an error that nobody foresaw.
    """

    plain: Mapping[str, type[Exception]] = field(default_factory=dict)
    code: str = "E-RUN-99"
    what: str = "unexpected error"

    def write(self, error: BaseException) -> dict[str, str]:
        """Write an error by the class that says what its reader can do."""
        if (name := type(error).__name__) in self.plain:
            return {"kind": name, "message": getattr(error, "reason", str(error))}
        if not isinstance(error, FederationError):
            return {"kind": "StateError", "code": self.code, "message": f"{self.what}: {name}: {error}"}
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind in _KINDS.values())
        return {"kind": kind, "code": error.code, "message": error.message}

    def read(self, raw: Mapping[str, str]) -> Exception:
        """Return the error that the other side wrote."""
        if (plain := self.plain.get(raw["kind"])) is not None:
            return plain(raw["message"])
        error: Exception = _KINDS[raw["kind"]](raw["code"], raw["message"])
        return error
