"""Protocol between the service and its worker: JSON lines over a pair of pipes.

After the setup, a line is one JSON object with one field; tensors go by file. The service sends `preflight`, `offer`,
`cancel`, and `fetched` or `failed` as the answer to `fetch`. The worker sends `began` at once, and `ready` or `failed`
after it has read its setup. During a task it sends `fetch`, `accept`, `tell`, `begin`, `progress` and `event`. A task
ends with `readiness`, with `staged` and then `entered`, or with `failed`. `computed` and `log` may come at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from fl_core.errors import FederationError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.size_limits import MANIFEST_BYTES
from service_core.workers.lines import ErrorLines
from silo.cancellation import CancelledError, CancelToken
from silo.events import SiloEvent
from silo.storage.approvals import AwaitingDecisionError


class ServiceSide(Protocol):
    """Calls that a task makes to the service."""

    @property
    def stop(self) -> CancelToken:
        """Return the token that is cancelled with the task."""

    def fetch(self, digest: str, size: int = 0, most: int = MANIFEST_BYTES) -> Path:
        """Return the file of an object, as `Transfer.fetch`."""

    def progress(self, done: int, total: int) -> None:
        """Report training progress."""

    def accept(self) -> None:
        """Tell the coordinator that the task is accepted."""

    def tell(self, error: FederationError) -> None:
        """Report an error in an accepted task to the coordinator."""

    def training_begins(self, private: bool) -> None:
        """Report that reading records begins. private: the answer's time must not reveal how long training took."""

    def emit(self, event: SiloEvent) -> None:
        """Emit an event. Callable from any thread."""


class Description(NamedTuple):
    """A worker's data and device. data: as the session declares it   cache: where decoded images are kept, as text."""

    data: pb.DataOffer
    device: str
    cache: str


class PreflightReadiness(NamedTuple):
    """The hospital can do the whole run.

    masked: its keys are needed   trains: as in `PreflightAnswer`   lapsed: other runs were dropped for this one.
    """

    name: str
    masked: bool
    trains: Sequence[int]
    lapsed: bool


ERRORS = ErrorLines(
    {kind.__name__: kind for kind in (CancelledError, AwaitingDecisionError)},
    "E-RUN-31",
    "the task failed at this silo",
)
