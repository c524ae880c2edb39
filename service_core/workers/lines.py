"""Lines over a pair of pipes between a service and its worker, and errors in them.

A line is one JSON object; tensors are passed as files.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from fl_core import errors
from fl_core.errors import FederationError, StateError

_MAX_LINE = 1 << 24
_MAX_TEXT = 1 << 20
"""Maximum characters of an error: a hospital chooses names in it, and JSON needs up to 12 bytes per character."""
_CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type)]
_KINDS: dict[str, type[FederationError]] = {
    kind.__name__: kind for kind in _CLASSES if issubclass(kind, FederationError)
}


class UnforeseenError(Exception):
    """An unexpected error of the other side, whose log has the traceback."""


def encoded(**message: object) -> bytes:
    """Encode a message as a line; raises ValueError if it is longer than the other side reads."""
    data = json.dumps(message).encode() + b"\n"
    if len(data) > _MAX_LINE:
        raise ValueError(f"expected a message of at most {_MAX_LINE} bytes, found {len(data)}")
    return data


def own_streams() -> Line:
    """Return a worker's line over its standard streams; output of other code goes to standard error from now on.

    The worker ignores SIGTERM from now on: systemd sends it to all processes of a service, which ends its workers.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    line = Line(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return line


@dataclass(frozen=True, slots=True)
class Line:
    """One end of the two pipes. `send` may be called from every thread, `read` from one."""

    incoming: IO[bytes]
    outgoing: IO[bytes]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, **message: object) -> None:
        """Send a message; raises as `encoded` and `write`."""
        self.write(encoded(**message))

    def write(self, data: bytes) -> None:
        """Write an encoded line; raises OSError or ValueError if the pipe is closed at either end."""
        with self._lock:
            self.outgoing.write(data)
            self.outgoing.flush()

    def read(self) -> Mapping[str, Any] | None:
        """Return the next message; None if the other side has ended. Raises ValueError on an invalid line."""
        data = self.incoming.readline(_MAX_LINE)
        if len(data) < _MAX_LINE and not data.endswith(b"\n"):  # it may have ended in the middle of a line
            return None
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError("a line that is not JSON") from error
        if not isinstance(message, dict):
            raise ValueError("a line that is not a JSON object")
        return message


@dataclass(frozen=True, slots=True)
class ErrorLines:
    """Writes errors for the other side, and reads them.

    plain: errors made of one text, by name   code, what: of the StateError that stands for an unexpected error;
    without a code it becomes an UnforeseenError.
    """

    plain: Mapping[str, type[Exception]] = field(default_factory=dict)
    code: str = ""
    what: str = ""

    def write(self, error: BaseException) -> dict[str, str]:
        """Convert an error. One of ours keeps its nearest class of `fl_core.errors`."""
        name = type(error).__name__
        if name in self.plain:
            return {"kind": name, "message": str(getattr(error, "reason", error))[:_MAX_TEXT]}
        if isinstance(error, FederationError):
            kind = next(kind.__name__ for kind in type(error).__mro__ if kind in _KINDS.values())
            return {"kind": kind, "code": error.code, "message": error.message[:_MAX_TEXT]}
        text = f"{name}: {error}"[:_MAX_TEXT]
        if not self.code:
            return {"kind": UnforeseenError.__name__, "message": text}
        return {"kind": StateError.__name__, "code": self.code, "message": f"{self.what}: {text}"}

    def read(self, raw: Mapping[str, str]) -> Exception:
        """Return the error that the other side wrote; raises TypeError or LookupError on anything else."""
        if not all(isinstance(text, str) for text in raw.values()):
            raise TypeError("an error whose fields are not text")
        raw = {name: text.encode(errors="replace").decode() for name, text in raw.items()}  # no protobuf has surrogates
        kind, message = raw["kind"], raw["message"]
        if kind == UnforeseenError.__name__:
            return UnforeseenError(message)
        if (plain := self.plain.get(kind)) is not None:
            return plain(message)
        return _KINDS[kind](raw["code"], message)
