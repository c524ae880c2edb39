"""What the service and its worker ask of each other, and the lines in which they say it over a pair of pipes.

A line is one JSON object with one field; tensors go by file. The service sends `preflight`, `offer`, `cancel`, and
`fetched` or `failed` as the answer to `fetch`. The worker sends `ready` or `failed` once; of a task `fetch`, `accept`,
`tell`, `begin`, `progress` and `event`, and at its end `readiness`, or `staged` and then `entered`, or `failed`; at any
time `computed` and `log`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from fl_core import errors
from fl_core.errors import FederationError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.size_limits import MANIFEST_BYTES
from silo.cancellation import CancelledError, CancelToken
from silo.events import SiloEvent
from silo.storage.approvals import AwaitingDecisionError


class ServiceSide(Protocol):
    """What one task asks of the service."""

    @property
    def stop(self) -> CancelToken:
        """Return what is cancelled when the task is given up."""

    def fetch(self, digest: str, size: int = 0, most: int = MANIFEST_BYTES) -> Path:
        """Return the file of an object, as `Transfer.fetch`."""

    def progress(self, done: int, total: int) -> None:
        """Note how far training is."""

    def accept(self) -> None:
        """Tell the coordinator that the task is accepted."""

    def tell(self, error: FederationError) -> None:
        """Tell the coordinator of an accepted task what is not as it should be."""

    def training_begins(self, private: bool) -> None:
        """Note that records are read from now on; private: when the answer leaves must not tell how long it took."""

    def emit(self, event: SiloEvent) -> None:
        """Tell of what happens, from any thread."""


class Description(NamedTuple):
    """What the worker has. data: as the session declares it   cache: where decoded images are kept, in words."""

    data: pb.DataOffer
    device: str
    cache: str


class Readiness(NamedTuple):
    """The hospital's yes to a whole run.

    masked: its keys are needed   trains: as in `PreflightAnswer`   lapsed: other runs were forgotten for this one.
    """

    name: str
    masked: bool
    trains: Sequence[int]
    lapsed: bool


# ---- lines -----------------------------------------------------------------------------------------------------------

_MAX_LINE = 1 << 22
_KINDS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}


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


def error_as_json(error: BaseException) -> dict[str, str]:
    """Write an error by the class that says what its reader can do."""
    if isinstance(error, CancelledError):
        return {"kind": "CancelledError", "message": error.reason}
    if isinstance(error, AwaitingDecisionError):
        return {"kind": "AwaitingDecisionError", "message": str(error)}
    if not isinstance(error, FederationError):
        text = f"the task failed at this silo: {type(error).__name__}: {error}"
        return {"kind": "StateError", "code": "E-RUN-31", "message": text}
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind in _KINDS.values())
    return {"kind": kind, "code": error.code, "message": error.message}


def error_of_json(raw: Mapping[str, str]) -> Exception:
    """Return the error that the other side wrote."""
    if raw["kind"] == "CancelledError":
        return CancelledError(raw["message"])
    if raw["kind"] == "AwaitingDecisionError":
        return AwaitingDecisionError(raw["message"])
    error: Exception = _KINDS[raw["kind"]](raw["code"], raw["message"])
    return error
