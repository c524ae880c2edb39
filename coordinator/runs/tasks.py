"""Tasks and preflights of one silo, and waiting for their outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fl_core.errors import FederationError, UnavailableError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TO_WIRE, contribution_id


class RunInterrupted(Exception):  # noqa: N818 - no error: the run was aborted, or the service stops
    """Ends a run's loop where it is; unlike an error it is no silo's fault and closes no round."""


class SiloTaskKey(NamedTuple):
    """Names one update of one silo."""

    run_id: str
    round: int
    kind: TaskKind
    silo: str


@dataclass(frozen=True, slots=True)
class Task:
    """One silo's part of a round.

    due: time.monotonic() of the round's deadline, as the offer names it; who is given up when, `RoundCloser` decides
    attempt: how often the run was resumed
    incarnation, included_before, secagg_keys_digest, secagg_census_digest: as in the message `Offer`.
    """

    key: SiloTaskKey
    manifest_digest: str
    base_digest: str
    base_size: int
    cohort: int
    due: float
    attempt: int = 0
    incarnation: str = ""
    included_before: int = 0
    secagg_keys_digest: str = ""
    secagg_census_digest: str = ""

    @property
    def contribution_id(self) -> str:
        k = self.key
        return contribution_id(k.run_id, k.round, k.kind, k.silo, self.base_digest)

    def offer(self) -> pb.CoordinatorMessage:
        return pb.CoordinatorMessage(
            offer=pb.Offer(
                run_id=self.key.run_id,
                round=self.key.round,
                kind=TO_WIRE[self.key.kind],
                manifest_digest=self.manifest_digest,
                base_digest=self.base_digest,
                base_size=self.base_size,
                cohort=self.cohort,
                attempt=self.attempt,
                deadline_unix=time.time() + max(0.0, self.due - time.monotonic()),
                incarnation=self.incarnation,
                included_before=self.included_before,
                secagg_keys_digest=self.secagg_keys_digest,
                secagg_census_digest=self.secagg_census_digest,
            )
        )


class PreflightKey(NamedTuple):
    """Names the preflight of one silo for one run."""

    run_id: str
    silo: str

    @property
    def round(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Preflight:
    """Asks whether one silo can do its part of a whole run.

    due: time.monotonic() of its deadline   signed_roster: as in the message.
    """

    key: PreflightKey
    manifest_digest: str
    due: float
    signed_roster: bytes = b""

    def offer(self) -> pb.CoordinatorMessage:
        return pb.CoordinatorMessage(
            preflight=pb.Preflight(
                run_id=self.key.run_id,
                manifest_digest=self.manifest_digest,
                deadline_unix=time.time() + max(0.0, self.due - time.monotonic()),
                signed_roster=self.signed_roster,
            )
        )


def no_answer() -> FederationError:
    return UnavailableError("E-RUN-37", "no answer to the preflight")


@dataclass(slots=True)
class PendingTask:
    """A task or preflight that waits for its outcome: a delivery, an answer, an error or an interruption, once.

    offered: its silo is asked for it, now and in each new session
    entry, trains: the keys and classes that came with a preflight's answer.
    """

    task: Task | Preflight
    offered: bool = False
    accepted: bool = False
    noted: bool = False
    entry: pb.SecaggEntry | None = None
    trains: Sequence[int] = ()
    _outcome: str | FederationError | RunInterrupted | None = None
    _settled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def settled(self) -> bool:
        return self._settled.is_set()

    def settle(self, outcome: str | FederationError | RunInterrupted) -> None:
        """Set the outcome (a digest: delivered, or ready for this manifest); later calls change nothing."""
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
                self._settled.set()

    def wait(self) -> str:
        """Return the digest that the task is settled with; raises its error, a preflight's deadline E-RUN-37."""
        if isinstance(self.task, Preflight):
            self._settled.wait(max(0.0, self.task.due - time.monotonic()))
            self.settle(no_answer())
        else:
            self._settled.wait()
        if isinstance(self._outcome, str):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome
