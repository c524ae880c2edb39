"""Whether the service can work, as its health answers report it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.api.authorization import Context
from service_core.operations.health import HealthAnswer, health_metadata
from service_core.storage import disk

PROBLEMS = ("database", "disk", "scheduler", "maintenance", "stopping")
"""Names of problems that keep the service from working."""
_BUSY_S = 2.0
_MIN_PATIENCE_S = 15.0
_ASK_S = 10.0
_LOOK_S = 0.25


class Readiness:
    """Problems that keep the service from working. One thread checks; any thread may read the result.

    Guarantees: a check that is overdue counts as a problem, so a service that hangs is not ready.
    """

    def __init__(
        self,
        database: Path,
        scheduler_lives: Callable[[], bool],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._scheduler_lives = scheduler_lives
        self._patience_s = max(_MIN_PATIENCE_S, 3 * every_s)
        self._clock = clock
        self._problems: tuple[str, ...] = ()
        self._looked = clock()
        self._stopping = threading.Event()

    def look(self) -> tuple[str, ...]:
        """Check now; blocks for a few seconds at most. Returns the problems by name."""
        checks: dict[str, Callable[[], bool]] = {
            "database": lambda: _is_writable(self._database),
            "disk": lambda: disk.available(self._database.parent) > 0,
            "scheduler": self._scheduler_lives,
        }
        self._problems = tuple(word for word, check in checks.items() if not _holds(check))
        self._looked = self._clock()
        return self.problems()

    def stop(self) -> None:
        """Report not ready from now on."""
        self._stopping.set()

    def lives(self) -> bool:
        """Tell whether the checks still run, regardless of their results."""
        return not self._stopping.is_set() and "maintenance" not in self.problems()

    def problems(self) -> tuple[str, ...]:
        if self._stopping.is_set():
            return ("stopping",)
        if self._clock() - self._looked > self._patience_s:
            return (*self._problems, "maintenance")
        return self._problems


class HealthService(health_pb2_grpc.HealthServicer):
    """The standard health service; its answers are current."""

    def __init__(self, names: Collection[str], readiness: Readiness, software: str) -> None:
        self._names = ("", *names)
        self._readiness = readiness
        self._software = software

    async def Check(  # noqa: N802 - gRPC names the method
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Answer, with time, version and problems in the trailing metadata."""
        context.set_trailing_metadata(health_metadata(self._software, self._readiness.problems()))
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802 - gRPC names the method
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> None:
        """Report each change within a second."""
        last = None
        while True:
            if (status := self._status(request.service)) != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await asyncio.sleep(_LOOK_S)

    def _status(self, name: str) -> int:
        statuses = health_pb2.HealthCheckResponse
        if name not in self._names:
            return statuses.SERVICE_UNKNOWN
        return statuses.NOT_SERVING if self._readiness.problems() else statuses.SERVING


def ask(channel: grpc.Channel) -> HealthAnswer:
    """Query a coordinator's health; raises grpc.RpcError if it does not answer."""
    stub, begun = health_pb2_grpc.HealthStub(channel), time.time()
    check = stub.Check  # type: ignore[attr-defined]  # set in __init__, which the stub does not show
    answer, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=_ASK_S)
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return HealthAnswer.of(serving, call.trailing_metadata() or (), begun, time.time())


def _holds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except (OSError, sqlite3.Error):
        return False


def _is_writable(database: Path) -> bool:
    """Rewrite existing data; raises sqlite3.Error if that fails."""
    # A separate connection: the service's own would wait half a minute for a lock.
    uri = f"{database.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)) as db:
        db.execute("PRAGMA wal_autocheckpoint = 0")  # `Database.shorten_log` logs its actions
        db.execute("BEGIN IMMEDIATE")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute(f"PRAGMA user_version = {int(version)}")
        db.execute("COMMIT")
    return True
