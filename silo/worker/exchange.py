"""What the service and its worker ask of each other, and the lines in which they say it over a pair of pipes.

A line is one JSON object with one field; tensors go by file. The service sends `preflight`, `offer`, `cancel`, and
`fetched` or `failed` as the answer to `fetch`. The worker sends `began` at once, and `ready` or `failed` once it has
read where it is to work; of a task `fetch`, `accept`, `tell`, `begin`, `progress` and `event`, and at its end
`readiness`, or `staged` and then `entered`, or `failed`; at any time `computed` and `log`.
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


class PreflightReadiness(NamedTuple):
    """The hospital's yes to a whole run.

    masked: its keys are needed   trains: as in `PreflightAnswer`   lapsed: other runs were forgotten for this one.
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
