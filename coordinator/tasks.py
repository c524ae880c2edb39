"""A task for one silo, and the wait for what comes of it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from fl_core.errors import FederationError, UnavailableError
from fl_core.kinds import TaskKind
from protos import codec
from protos.consilium.v1 import federation_pb2 as pb

WIRE = {TaskKind.TRAIN: pb.TRAIN, TaskKind.EVALUATE: pb.EVALUATE}
KINDS = {number: kind for kind, number in WIRE.items()}


class Interrupted(Exception):  # noqa: N818 - no error: the run was aborted, or the service stops
    """Ends a run's loop where it is; unlike an error it is no silo's fault and closes no round."""


class TaskKey(NamedTuple):
    """Which update, of whom."""

    run_id: str
    round: int
    kind: TaskKind
    silo: str


@dataclass(frozen=True, slots=True)
class Task:
    """What one silo is asked for. due: time.monotonic() of the round's deadline."""

    key: TaskKey
    manifest_digest: str
    base_digest: str
    base_size: int
    cohort: int
    due: float

    @property
    def contribution_id(self) -> str:
        """Name the one update that may be sent for this task."""
        k = self.key
        return codec.contribution_id(k.run_id, k.round, k.kind.value, k.silo, self.base_digest)

    def offer(self) -> pb.CoordinatorMessage:
        """Write the offer."""
        return pb.CoordinatorMessage(
            offer=pb.Offer(
                run_id=self.key.run_id,
                round=self.key.round,
                kind=WIRE[self.key.kind],
                manifest_digest=self.manifest_digest,
                base_digest=self.base_digest,
                base_size=self.base_size,
                cohort=self.cohort,
                deadline_unix=time.time() + max(0.0, self.due - time.monotonic()),
            )
        )


@dataclass(slots=True)
class Pending:
    """A task that was offered. It is settled once: by a delivery, a failure or an interruption."""

    task: Task
    accepted: bool = False
    _outcome: str | FederationError | Interrupted | None = None
    _settled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, outcome: str | FederationError | Interrupted) -> None:
        """Say what came of it (a digest: delivered); later words do not count."""
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
                self._settled.set()

    def wait(self) -> str:
        """Wait for the digest of the delivered object.

        Raises what the task was settled with, and UnavailableError (E-RUN-13) when the round's deadline passes.
        """
        self._settled.wait(max(0.0, self.task.due - time.monotonic()))
        self.settle(UnavailableError("E-RUN-13", "no update before the round's deadline"))
        if isinstance(self._outcome, str):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome
